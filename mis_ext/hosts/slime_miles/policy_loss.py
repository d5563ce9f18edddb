"""The whole policy loss, which slime and Miles call in place of their own."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.pipeline import Correction
from mis_ext.hosts.packing import pack, unpack
from mis_ext.hosts.runs import Run, run_of
from mis_ext.hosts.slime_miles.host import Host, find_host
from mis_ext.hosts.slime_miles.micro_batch import is_absent, layout_of, report_missing
from mis_ext.hosts.whole_loss import GivenTokens, Missing, loss_of_tokens, loss_tokens
from mis_ext.keys.run_config import WholeLoss
from mis_ext.loss.policy import PolicyLoss, Reducer
from mis_ext.scoring import Scores


def policy_loss(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor] | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch and its metrics.

    For ``--loss-type custom_loss --custom-loss-function-path mis_ext.policy_loss``. The hosts' own flags, the keys of
    the correction and the keys ``mis_loss_*`` select the loss, see docs/policy_loss.md.

    Args:
        args: The host's arguments, with the keys of mis_ext among them.
        batch: The micro-batch as the host has it; lists per sample, under context parallelism this rank's parts.
        logits: ``[1, T, V / TP]`` packed, or padded ``[B, L, V / TP]``. With ``mis_loss_inplace`` the backward pass
            writes their gradient over them.
        sum_of_sample_mean: The host's reducer. Not called: all its sums are taken together, with the same denominators.

    Returns:
        The loss, with gradient: this rank's sum over samples of per-sample means (or the sum over tokens), which the
        host scales. And metrics of the same kind under the host's names, 0-dim and on the CPU: one copy for all.

    Raises:
        ValueError: A flag, a key, a length or the data of the first calls is wrong; the message says what to change.
        TypeError: A key or a sample has the wrong type.
        RuntimeError: Another rank failed; it is named, and its own error says why.
    """
    run = run_of(args, whole_loss=True)
    found = policy_loss_of(run, find_host(args, run.config), batch, logits)
    return found.loss, on_host(found.metrics)


def on_host(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same numbers as elements of one tensor on the CPU."""
    values = torch.stack([*metrics.values()]).cpu()
    return dict(zip(metrics, values.unbind(), strict=True))


def policy_loss_of(run: Run, host: Host, batch: Mapping[str, Any], logits: Tensor) -> PolicyLoss:
    """The loss and its metrics, where the logits are."""
    config, loss, groups = run.config, run.config.whole_loss, host.groups
    assert loss is not None
    settings = loss.settings
    if not (settings.reads_stored or loss.is_told_to_skip or is_absent(batch.get("log_probs"))):
        reason = "mis_loss_proximal: current" if settings.uses_proximal else settings.chosen_by
        warnings.warn(
            f"{reason} does not use the trainer's own pass over the rollout: --use-rollout-logprobs makes the host "
            "skip it",
            stacklevel=4,
        )
    with run.session.local_work(batch["response_lengths"], groups=groups, device=logits.device):
        layout = layout_of(
            is_padded=config.is_padded,
            groups=groups,
            total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"],
            max_seq_lens=batch.get("max_seq_lens"),
            device=logits.device,
        )
        scores = host.score(config, batch, logits, layout, groups)
        given = _packed(loss, batch, scores, layout)
        run.session.check_mask(given.response_mask_R)
        tokens = loss_tokens(settings, given, layout, groups, missing=_MISSING)
        if loss.has_correction and "behavior" not in tokens.log_probs:
            report_missing(run.session, is_rollout_missing=True)
    found = loss_of_tokens(
        settings,
        tokens,
        session=run.session if loss.has_correction else None,
        groups=groups,
        make_reducer=partial(_reducer, loss, batch, layout),
        extra_metrics=host.metrics,
    )
    if layout.num_local_tokens > 0 or scores.log_prob_T.requires_grad:
        return found
    # The backward pass of context parallelism has collectives, in which a rank without tokens must take part. Log-probs
    # of no tokens need not come from the logits.
    return found._replace(loss=found.loss + logits.reshape(-1)[:0].sum())


_MISSING = Missing(
    behavior="rollout_log_probs are missing (the rollout function must store the inference engine's log-probs)",
    reference="ref_log_probs are missing (--use-kl-loss with --ref-load makes the host score them; a method with a "
    "penalty of its own takes --kl-loss-coef 0)",
    state_values="state_values are missing in the batch (no flag of slime or Miles gives them; a batch of "
    "make_loss_func may have them)",
)


def _packed(loss: WholeLoss, batch: Mapping[str, Any], scores: Scores, layout: PackedLayout) -> GivenTokens:
    device = scores.log_prob_T.device

    def packed(key: str) -> Tensor:
        return pack(key, batch[key], layout.local_lengths, device=device)

    def optional(key: str) -> Tensor | None:
        if layout.num_sequences == 0:
            return scores.log_prob_T.detach()
        return None if is_absent(batch.get(key)) else packed(key)

    return GivenTokens(
        current_T=scores.log_prob_T,
        advantages_T=packed("advantages"),
        response_mask_R=pack("loss_masks", batch["loss_masks"], layout.response_lengths, device=device),
        behavior_T=optional("rollout_log_probs"),
        proximal_T=None if loss.skips_scoring else optional("log_probs"),
        reference_T=optional("ref_log_probs"),
        entropy_T=scores.entropy_T,
        state_values_T=optional("state_values"),
        reverse_kl_T=None if is_absent(batch.get("opd_reverse_kl")) else packed("opd_reverse_kl"),
        divisor_S=_divisor(batch.get("rollout_mask_sums"), layout),
    )


def _divisor(given: Any, layout: PackedLayout) -> Tensor | None:
    """``[S]``: the tokens of each sample's rollout, where the host knows them."""
    if given is None:
        return None
    is_list = isinstance(given, Sequence) and any(isinstance(each, Tensor) for each in given)
    divisor_S = torch.stack([*given]) if is_list else torch.as_tensor(given)
    if divisor_S.shape != (layout.num_sequences,):
        raise ValueError(
            f"rollout_mask_sums has shape {list(divisor_S.shape)}, there are {layout.num_sequences} samples"
        )
    return divisor_S


def _reducer(
    loss: WholeLoss, batch: Mapping[str, Any], layout: PackedLayout, correction: Correction | None
) -> Reducer | None:
    """The user's own, made from the returned masks as the hosts do."""
    if loss.reducer_path is None:
        return None
    module, _, name = loss.reducer_path.rpartition(".")
    make = getattr(import_module(module), name)
    masks = batch["loss_masks"]
    if correction is not None and not correction.plan.config.metrics_only:
        masks = unpack(correction.loss_mask_R, layout)
    reducer: Reducer = make(batch["total_lengths"], batch["response_lengths"], masks, loss.settings.per_token_loss)
    return reducer
