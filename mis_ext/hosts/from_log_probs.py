"""The whole loss from log-probs, padded or packed, for trainers that have no logits at hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.metric_row import Mean
from mis_ext.hosts.groups import ALONE, Groups
from mis_ext.hosts.runs import run_of
from mis_ext.hosts.whole_loss import GivenTokens, Missing, loss_of_tokens, loss_tokens
from mis_ext.loss.denominators import num_tokens

_MISSING = Missing("behavior_logprobs are missing", "reference_logprobs are missing", "state_values are missing")


class TotalLoss(NamedTuple):
    """The part of a batch's loss that one call gives. Totals and counts of all calls and ranks are added.

    ``total``: 0-dim with gradient: the sum over sequences of per-sequence means, or with ``calculate_per_token_loss``
    over tokens. ``num_terms``: 0-dim, this call's sequences with a response token, or its response tokens; on a
    context-parallel rank its share of them. ``metrics``: each a mean over the same terms, those of the correction over
    the terms that were measured.
    """

    total: Tensor
    num_terms: Tensor
    metrics: dict[str, Mean]

    @property
    def mean(self) -> Tensor:
        """0-dim, with gradient: ``total / num_terms``, the loss where one rank makes one call a step; 0 of nothing."""
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
) -> TotalLoss:
    """The whole policy loss of a micro-batch, with its correction and metrics, from log-probs.

    Without ``layout`` the tensors are padded, ``[B, L]``; values under the mask are ignored. With ``layout`` they are
    packed: tensors are ``[T]``, the mask ``[R]`` (the same without context parallelism).

    Args:
        args: A mapping or a namespace with the keys of docs/policy_loss.md; the same object for all calls of a run.
        current_logprobs: Log-probs of the policy that is trained, nats, with gradient.
        advantages: One for each token, or one for each padded row ``[B]``.
        response_mask: Nonzero on tokens that the policy generated.
        behavior_logprobs: Log-probs of the policy that sampled, nats. None if the loss does not use them.
        proximal_logprobs: The trainer's scoring before the update, nats. None: ``current_logprobs``, detached.
        reference_logprobs: Log-probs of the reference policy, nats. None if the loss does not use them.
        entropy: Nats, with gradient if ``entropy_coef`` is not 0. None if the loss does not use it.
        state_values: The mean advantage in each token's state. None if the method does not use it.
        divisors: ``[S]``, each sequence's sum is divided by its own; by default by its number of response tokens.
        layout: Where the packed tokens lie.
        groups: Ranks that share the sequences or the batch.

    Raises:
        ValueError: A key, a shape or the data of the first calls is wrong, or something is missing that the loss needs.
        TypeError: A key has the wrong type.
        RuntimeError: Another rank failed; it is named, and its own error says why.
    """
    run = run_of(args, whole_loss=True)
    loss = run.config.whole_loss
    assert loss is not None
    settings = loss.settings
    if loss.reducer_path is not None:
        raise ValueError(
            "custom_pg_loss_reducer_function_path: no effect on a loss from log-probs; write mis_loss_denominator"
        )
    if loss.scoring.said is not None or loss.scoring.inplace:
        raise ValueError("mis_loss_scoring, mis_loss_inplace: no effect on a loss from log-probs; remove them")
    lengths = () if layout is None else layout.response_lengths
    with run.session.local_work(lengths, groups=groups, device=response_mask.device):
        whole = _padded_layout(current_logprobs, response_mask) if layout is None else layout
        tensors = {
            "current_logprobs": current_logprobs,
            "advantages": _of_tokens(advantages, current_logprobs, is_padded=layout is None),
            "behavior_logprobs": behavior_logprobs,
            "proximal_logprobs": proximal_logprobs,
            "reference_logprobs": reference_logprobs,
            "entropy": entropy,
            "state_values": state_values,
        }
        flat = {name: _flat(name, each, current_logprobs.shape, whole) for name, each in tensors.items()}
        mask_R = response_mask.reshape(-1)
        if len(mask_R) != whole.num_whole_tokens:
            raise ValueError(f"response_mask has {len(mask_R)} tokens, the layout {whole.num_whole_tokens}")
        run.session.check_mask(mask_R)
        if divisors is not None and divisors.shape != (whole.num_sequences,):
            raise ValueError(f"divisors has shape {list(divisors.shape)}, there are {whole.num_sequences} sequences")
        current_T, advantages_T = flat["current_logprobs"], flat["advantages"]
        assert current_T is not None
        assert advantages_T is not None
        given = GivenTokens(
            current_T=current_T,
            advantages_T=advantages_T,
            response_mask_R=mask_R,
            behavior_T=flat["behavior_logprobs"],
            proximal_T=flat["proximal_logprobs"],
            reference_T=flat["reference_logprobs"],
            entropy_T=flat["entropy"],
            state_values_T=flat["state_values"],
            divisor_S=divisors,
        )
        tokens = loss_tokens(settings, given, whole, groups, missing=_MISSING)
        if loss.has_correction and behavior_logprobs is None and not run.config.correction.metrics_only:
            raise ValueError("behavior_logprobs are missing: the correction needs them")
    session = run.session if loss.has_correction else None
    found = loss_of_tokens(settings, tokens, session=session, groups=groups)
    num_terms = _num_terms(found.response_T, mask_R, whole, per_token=settings.per_token_loss, cp_size=groups.cp_size)
    # slime and Miles log a 0 where nobody gave the entropy; here it is not among the metrics.
    given_names = [name for name in found.metrics if name != "entropy_loss" or entropy is not None]
    metrics = {name: Mean(found.metrics[name], num_terms) for name in given_names}
    # What the correction could not measure in a sequence is no term of its mean.
    measured = {name: Mean(*pair.unbind()) for name, pair in found.measured().items()}
    return TotalLoss(found.loss, num_terms, metrics | measured)


def _padded_layout(current: Tensor, mask: Tensor) -> PackedLayout:
    if current.dim() != 2 or mask.shape != current.shape:
        raise ValueError(
            f"current_logprobs has shape {list(current.shape)}, response_mask {list(mask.shape)}: both must be [B, L]; "
            "packed ones need a layout"
        )
    # A padded row is a response whose other tokens are masked.
    return PackedLayout.whole([current.shape[1]] * len(current), device=current.device)


def _of_tokens(advantages: Tensor, current: Tensor, *, is_padded: bool) -> Tensor:
    is_of_rows = is_padded and advantages.shape == current.shape[:1]
    return advantages.unsqueeze(-1).expand_as(current) if is_of_rows else advantages


def _flat(name: str, values: Tensor | None, shape: torch.Size, layout: PackedLayout) -> Tensor | None:
    if values is None:
        return None
    if values.shape != shape or values.numel() != layout.num_local_tokens:
        raise ValueError(
            f"{name} has shape {list(values.shape)}, current_logprobs {list(shape)}, and the layout "
            f"{layout.num_local_tokens} tokens: they must agree"
        )
    return values.reshape(-1)


def _num_terms(response_T: Tensor, mask_R: Tensor, layout: PackedLayout, *, per_token: bool, cp_size: int) -> Tensor:
    if per_token:
        return response_T.sum().float()
    # Every context-parallel rank has a part of each sequence.
    return (num_tokens(mask_R, layout) > 0.0).sum().float() / cp_size
