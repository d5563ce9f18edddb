# SPDX-License-Identifier: Apache-2.0
"""The full policy loss of packed tokens, from log-probs and from hidden states, for custom trainers.

:func:`tokens_for` selects the inputs of a loss. :func:`packed_loss` corrects them and computes the loss.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.correct import Correction
from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.correction.metrics import Mean
from mis_ext.hosts.groups import ALONE, Groups, device_of
from mis_ext.hosts.packing import DIVISORS, MASK
from mis_ext.hosts.session import Run, all_arguments, read_argument, shared_run
from mis_ext.keys.loss_keys import WholeLoss
from mis_ext.keys.reading import GROUPS_ELSEWHERE, without_effect
from mis_ext.loss.objective import LossTokens
from mis_ext.loss.policy import PolicyLoss, Reducer, compute_policy_loss, groups_of_sums, num_tokens
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.batch import Policy
from mis_ext.scoring.hidden import score_hidden
from mis_ext.validation import Errors, check_tensors

_MISSING = {
    "behavior": "behavior_logprobs are missing",
    "reference": "reference_logprobs are missing",
    "state_values": "state_values are missing",
}


class TotalLoss(NamedTuple):
    """The part of a batch's loss from one call. Add the totals and counts of all calls and ranks.

    ``total``: 0-dim with gradient: the sum over sequences of per-sequence means, or the sum over tokens with
    ``calculate_per_token_loss``. ``num_terms``: 0-dim, this call's sequences with a response token, or its response
    tokens; on a context-parallel rank its share of them. ``metrics``: each a mean over the same terms; metrics of the
    correction are over the measured terms.
    """

    total: Tensor
    num_terms: Tensor
    metrics: dict[str, Mean]

    @property
    def mean(self) -> Tensor:
        """0-dim, with gradient: ``total / num_terms``, the loss if one rank makes one call per step; 0 if empty."""
        return self.total / torch.where(self.num_terms > 0.0, self.num_terms, 1.0)


def policy_loss_from_log_probs(
    args: Any,
    *,
    current_logprobs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    behavior_logprobs: Tensor | None = None,
    proximal_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    state_values: Tensor | None = None,
    divisors: Tensor | None = None,
    layout: PackedLayout | None = None,
    groups: Groups = ALONE,
    lag: Tensor | None = None,
) -> TotalLoss:
    """Compute the full policy loss of a micro-batch, its correction, and its metrics from log-probs.

    Without ``layout`` the tensors are padded, ``[B, L]``; values under the mask are ignored. With ``layout`` they are
    packed: tensors are ``[T]``, the mask ``[R]`` (the same without context parallelism).

    Args:
        args: A mapping or a namespace with the keys of docs/reference/policy_loss_keys.md. A namespace must be the same
            object in all calls of a run.
        current_logprobs: Log-probs of the policy that is trained, nats, with gradient.
        advantages: One per token, or one per padded row ``[B]``.
        response_mask: Nonzero on tokens that the policy generated.
        behavior_logprobs: Log-probs of the policy that sampled, nats. None if the loss does not use them.
        proximal_logprobs: The trainer's scoring before the update, nats. None: ``current_logprobs``, detached.
        reference_logprobs: Log-probs of the reference policy, nats. None if the loss does not use them.
        entropy: Nats, with gradient if ``entropy_coef`` is not 0. None if the loss does not use it.
        state_values: The mean advantage in each token's state. None if the method does not use it.
        divisors: ``[S]``, each above 0: the divisor of each sequence's sum, without ``calculate_per_token_loss``. By
            default the sum of its mask, at least 1. The divisor of a sequence without a response token is ignored.
        layout: Where the packed tokens lie.
        groups: Ranks that share the sequences or the batch.
        lag: Weight updates since the weights that sampled each token, NaN if unknown; for a correction with
            ``mis_staleness``.

    Raises:
        ValueError: A key, a shape or the data of the first calls is wrong, or an input of the loss is missing.
        TypeError: A key has the wrong type.
        RuntimeError: Another rank failed. The message names it; see its own error.
    """
    device = device_of(response_mask, current_logprobs)
    run = shared_run(args, groups, device=device, whole_loss=True)
    loss, settings = run.config.loss, run.config.loss.settings
    with loss_work(run, getattr(layout, "response_lengths", None), groups=groups, device=device):
        _refuse_keys_without_effect(run, args)
        check_tensors({"current_logprobs": current_logprobs, "advantages": advantages, "response_mask": response_mask})
        whole = _padded_layout(current_logprobs, response_mask) if layout is None else layout
        if layout is None and advantages.shape == current_logprobs.shape[:1]:
            advantages = advantages.unsqueeze(-1).expand_as(current_logprobs)

        def packed(name: str, values: Tensor) -> Tensor:
            check_tensors({name: values})
            if values.shape != current_logprobs.shape or values.numel() != whole.num_local_tokens:
                raise ValueError(
                    f"{name} has shape {list(values.shape)}, current_logprobs {list(current_logprobs.shape)}, and the "
                    f"layout {whole.num_local_tokens} tokens: they must agree"
                )
            return values.reshape(-1)

        def optional(name: str, values: Tensor | None) -> Tensor | None:
            return None if values is None else packed(name, values)

        mask_R = response_mask.reshape(-1)
        if len(mask_R) != whole.num_whole_tokens:
            raise ValueError(f"response_mask has {len(mask_R)} tokens, but the layout has {whole.num_whole_tokens}")
        given = LossTokens(
            log_probs=present(
                {
                    "current": packed("current_logprobs", current_logprobs),
                    "behavior": optional("behavior_logprobs", behavior_logprobs),
                    "proximal": optional("proximal_logprobs", proximal_logprobs),
                    "reference": optional("reference_logprobs", reference_logprobs),
                }
            ),
            advantages_T=packed("advantages", advantages),
            response_mask_R=mask_R,
            divisor_S=_divisors(run, divisors, mask_R, whole),
            layout=whole,
            entropy_T=optional("entropy", entropy),
            state_values_T=optional("state_values", state_values),
            lag_T=optional("lag", lag),
        )
        run.session.check_range(mask_R, MASK)
        tokens = tokens_for(settings, given, groups, missing=_MISSING)
        if loss.has_correction and behavior_logprobs is None and not run.config.correction.metrics_only:
            raise ValueError("behavior_logprobs are missing: the correction needs them")
    found = packed_loss(run, tokens, groups=groups)
    if settings.per_token_loss:
        num_terms = found.response_T.sum().float()
    else:
        # Every context-parallel rank holds a part of each sequence.
        num_terms = (num_tokens(mask_R, whole) > 0.0).sum().float() / groups.cp_size
    # slime and Miles log 0 without an entropy; here the metric is omitted.
    given_names = [name for name in found.metrics if name != "entropy_loss" or entropy is not None]
    metrics = {name: Mean(found.metrics[name], num_terms) for name in given_names}
    # Sequences that the correction could not measure do not count in the mean.
    measured = {name: Mean(*pair.unbind()) for name, pair in found.measured().items()}
    return TotalLoss(found.loss, num_terms, metrics | measured)


def _refuse_keys_without_effect(run: Run, args: Any) -> None:
    """Raise an error for keys that need slime, Miles, or a batch with logits."""
    loss, group = run.config.loss, run.config.group
    if group.of_rewards or group.prompt_mean:
        Errors().refuse(without_effect([GROUPS_ELSEWHERE], all_arguments(args))).raise_all()
    if loss.reducer_path is not None:
        raise ValueError(
            "custom_pg_loss_reducer_function_path: no effect on a loss from log-probs; use mis_loss_denominator"
        )
    if loss.asked_scoring is not None or loss.inplace:
        raise ValueError("mis_loss_scoring, mis_loss_inplace: no effect on a loss from log-probs; remove them")


def _divisors(run: Run, divisors: Tensor | None, mask_R: Tensor, layout: PackedLayout) -> Tensor:
    """``[S]``: the divisor of each sequence's sum; by default the number of its tokens."""
    tokens_S = num_tokens(mask_R, layout)
    if divisors is None:
        return tokens_S.clamp_min(1.0)
    check_tensors({"divisors": divisors})
    if divisors.shape != (layout.num_sequences,):
        raise ValueError(f"divisors has shape {list(divisors.shape)}, but there are {layout.num_sequences} sequences")
    divisor_S = torch.where(tokens_S > 0.0, divisors.to(mask_R.device, non_blocking=True), 1.0)
    run.session.check_range(divisor_S, DIVISORS)
    # Between two checks on a GPU, a NaN loss shows a wrong divisor.
    return torch.where((divisor_S > 0.0) & (divisor_S < torch.inf), divisor_S, torch.nan)


def policy_loss_from_hidden(
    args: Any,
    *,
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    response_mask: Tensor,
    layout: PackedLayout | None = None,
    groups: Groups = ALONE,
    temperature: float | None = None,
    head: Mapping[str, Any] | None = None,
    **given: Any,
) -> TotalLoss:
    """Compute the full policy loss of a micro-batch from hidden states, without logits.

    The head is applied only to the response tokens, twice: first for the log-probs, which determine all coefficients of
    the loss, and again in the backward pass for the gradient. The entropy is reported, and is part of the loss if
    ``entropy_coef`` is not 0.

    Args:
        args: As for :func:`policy_loss_from_log_probs`.
        hidden: ``[B, L, H]``, with ``layout`` ``[T, H]``: at each position the state that predicts its token, which in
            a causal model is the state of the previous position.
        weight: ``[V, H]``, the weight of the head; on a tensor-parallel rank its part.
        token_ids: ``[B, L]``, with ``layout`` ``[T]``: the tokens.
        response_mask: Nonzero on tokens that the policy generated. Other tokens are neither scored nor read. The
            number of generated tokens is read once from a GPU.
        layout: Where the packed tokens lie.
        groups: Ranks that share the sequences or the batch.
        temperature: Sampling temperature, which divides the logits. None: ``rollout_temperature`` of ``args``, by
            default 1.
        head: Further arguments of :func:`~mis_ext.score_hidden`: ``bias``, ``soft_cap``, ``logit_scale``,
            ``vocab_size``, ``tp_group`` and ``tp_rank``, ``gradient_accumulation_fusion``.
        given: ``advantages`` and all other arguments of :func:`policy_loss_from_log_probs` except the current
            log-probs.

    Raises:
        ValueError: As in :func:`policy_loss_from_log_probs` and :func:`~mis_ext.score_hidden`.
        TypeError: As in these functions, or an argument is unknown to both.
        RuntimeError: Another rank failed. The message names it; see its own error. Tensor-parallel ranks are notified
            only of errors in :func:`~mis_ext.score_hidden`. After an earlier error they wait, because the size of the
            message is not known yet.
    """
    device = device_of(hidden, weight)
    run = shared_run(args, groups, device=device, whole_loss=True)
    loss = run.config.loss
    with loss_work(run, getattr(layout, "response_lengths", None), groups=groups, device=device):
        check_tensors({"hidden": hidden, "token_ids": token_ids, "response_mask": response_mask})
        if hidden.shape[:-1] != token_ids.shape:
            raise ValueError(
                f"hidden has shape {list(hidden.shape)}, and token_ids has {list(token_ids.shape)}: each token needs "
                "one state"
            )
        mask = response_mask if layout is None else layout.local_part(response_mask)
        if mask.numel() != token_ids.numel():
            raise ValueError(
                f"response_mask has {mask.numel()} tokens on this rank, but token_ids has {token_ids.numel()}"
            )
        (row_T,) = mask.reshape(-1).nonzero(as_tuple=True)
        scores = score_hidden(
            hidden,
            weight,
            token_ids.reshape(-1)[row_T],
            row_T=row_T,
            temperature=_temperature(temperature, args, loss),
            entropy="value" if loss.settings.entropy_coef == 0.0 else "gradient",
            **(head or {}),
        )

        def placed(values_T: Tensor) -> Tensor:
            return values_T.new_zeros(mask.numel()).index_copy(0, row_T, values_T).view(token_ids.shape)

        assert scores.entropy_T is not None
        # bind() refuses missing and unknown arguments.
        call = inspect.signature(policy_loss_from_log_probs).bind(
            args,
            current_logprobs=placed(scores.log_prob_T),
            entropy=placed(scores.entropy_T),
            response_mask=response_mask,
            layout=layout,
            groups=groups,
            **given,
        )
    return policy_loss_from_log_probs(*call.args, **call.kwargs)


def _temperature(given: float | None, args: Any, loss: WholeLoss) -> float:
    said = read_argument(args, "rollout_temperature")
    if given is not None and said is not None and given != said:
        raise ValueError(f"temperature={given:g}, rollout_temperature={said:g}: they must be equal; pass only one")
    return loss.temperature if given is None else given


def _padded_layout(current: Tensor, mask: Tensor) -> PackedLayout:
    if current.dim() != 2 or mask.shape != current.shape:
        raise ValueError(
            f"current_logprobs has shape {list(current.shape)}, and response_mask has {list(mask.shape)}: both must "
            "be [B, L]; packed tensors need a layout"
        )
    # A padded row is one response; its prompt and padding are masked.
    return PackedLayout.whole([current.shape[1]] * len(current), device=current.device)


def tokens_for(settings: LossSettings, given: LossTokens, groups: Groups, *, missing: Mapping[str, str]) -> LossTokens:
    """Check the given tokens, and select what the loss reads. Current log-probs replace missing proximal ones."""
    log_probs, mask_R = {**given.log_probs}, given.response_mask_R
    refuse_missing(settings, {*log_probs, *["state_values"] * (given.state_values_T is not None)}, missing)
    entropy_T = given.entropy_T
    if settings.entropy_coef == 0.0:
        entropy_T = None if entropy_T is None else entropy_T.detach()
    elif entropy_T is None:
        raise ValueError(f"entropy is missing: entropy_coef={settings.entropy_coef:g} needs it")
    if settings.needs_reference is None and settings.kl is None:
        log_probs.pop("reference", None)
    if "proximal" not in log_probs or settings.proximal == "current":
        log_probs["proximal"] = log_probs["current"].detach()
    dtype = torch.promote_types(log_probs["current"].dtype, torch.float32)
    return given._replace(
        log_probs=log_probs,
        entropy_T=entropy_T,
        divisor_S=given.divisor_S.to(mask_R.device, dtype, non_blocking=True),
        state_values_T=given.state_values_T if settings.needs_state_values else None,
        cp_group=groups.cp_group,
        cp_rank=groups.cp_rank,
        dp_group=groups.dp_group,
    )


def refuse_missing(settings: LossSettings, given: Collection[str], missing: Mapping[str, str]) -> None:
    """Raise an error if log-probs or state values that the loss reads are missing; ``missing``: the messages."""
    reference = settings.needs_reference or ("--use-kl-loss" if settings.kl is not None else None)
    needs = {
        "behavior": settings.needs_behavior and f"with which {settings.needs_behavior} compares",
        "reference": reference and f"with which {reference} compares",
        "state_values": settings.needs_state_values
        and f"by which {settings.chosen_by} weighs: the mean advantage in a state",
    }
    for name, why in needs.items():
        if why and name not in given:
            raise ValueError(f"{missing[name]}, {why}")


def present(streams: Mapping[Policy, Tensor | None]) -> dict[Policy, Tensor]:
    """The tensors that are not None."""
    return {policy: values_T for policy, values_T in streams.items() if values_T is not None}


def loss_work(
    run: Run,
    response_lengths: Sequence[int] | None,
    *,
    groups: Groups,
    device: torch.device,
    extra_metrics: frozenset[str] = frozenset(),
) -> AbstractContextManager[None]:
    """Do the local work of a loss, and report an error to the ranks that wait in its correction and its sums."""
    loss = run.config.loss
    return run.session.local_work(
        response_lengths,
        groups=groups,
        device=device,
        status_groups=groups_of_sums(
            loss.settings, cp_group=groups.cp_group, dp_group=groups.dp_group, extra_metrics=extra_metrics
        ),
        corrects=loss.has_correction,
        failed=run.failed,
    )


def packed_loss(
    run: Run,
    tokens: LossTokens,
    *,
    groups: Groups,
    make_reducer: Callable[[Correction | None], Reducer] | None = None,
    extra_metrics: frozenset[str] = frozenset(),
) -> PolicyLoss:
    """Correct the tokens if the run has a correction, and compute the loss; ``make_reducer`` runs code of the user.

    An error before the sums of the loss is sent to the ranks that wait in them, because a correction sends its errors
    only to the ranks in its own collectives.
    """
    correction: Correction | None = None
    token_metrics: Mapping[str, Tensor] | None = None
    reducer: Reducer | None = None
    session, settings, corrects = run.session, run.config.loss.settings, run.config.loss.has_correction
    layout, log_probs, mask_R = tokens.layout, tokens.log_probs, tokens.response_mask_R
    lengths, device = layout.response_lengths, mask_R.device
    waiting = groups_of_sums(settings, cp_group=groups.cp_group, dp_group=groups.dp_group, extra_metrics=extra_metrics)

    def reporting() -> AbstractContextManager[None]:
        return session.local_work(lengths, groups=groups, device=device, status_groups=waiting, corrects=False)

    with reporting():
        if corrects and "behavior" in log_probs:
            # Correct the policy whose ratio to the behavior policy is not in the loss yet.
            trainer: Policy = "proximal" if settings.uses_proximal else "current"
            streams = PackedStreams(log_probs[trainer].detach(), log_probs["behavior"], mask_R, layout, tokens.lag_T)
            correction = session.correct(streams, groups=groups, token_metrics=True)
            token_metrics = correction.token_metrics
        elif corrects:
            session.join_without_data(lengths, groups=groups, device=device)
            not_measured_T = torch.where(layout.local_part(mask_R) != 0, torch.nan, 0.0)
            token_metrics = dict.fromkeys(session.config.metric_names, not_measured_T)
        if make_reducer is not None:
            reducer = make_reducer(correction)
    failed = session.exchange_status(waiting, device=device)
    found = compute_policy_loss(
        settings,
        tokens,
        correction=correction,
        token_metrics=token_metrics,
        reducer=reducer,
        extra_metrics=extra_metrics,
        # Ranks that waited in the sums of the loss learn after them of an error between two sums.
        reporting=reporting(),
        failed=failed,
    )
    failed = session.exchange_status(waiting, device=device)
    if failed is not None:
        raise failed
    return found
