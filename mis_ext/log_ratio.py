"""Per-token log-ratio of the two engines."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Exponents are clamped to +-20 before ``exp``: a ratio of 4.9e8 is as absurd as any larger one, and finite."""


class TokenRatios(NamedTuple):
    """Local tokens; every field is finite everywhere, 0 where ``valid_mask_T`` is False."""

    log_ratio_T: Tensor
    proximal_T: Tensor
    behavior_T: Tensor
    response_mask_T: Tensor
    valid_mask_T: Tensor


def compute_log_ratio(
    *, proximal_logprobs_T: Tensor, behavior_logprobs_T: Tensor, response_mask_T: Tensor
) -> TokenRatios:
    """Per-token ``log(pi_prox / mu)`` in float32, and the mask of the tokens that have one.

    A token with a non-finite log-probability has no ratio. It leaves the mask; it is never given ratio 1, which would
    train it as if it were on-policy.

    Args:
        proximal_logprobs_T: ``[T]``, nats, scored by the training engine before the update.
        behavior_logprobs_T: ``[T]``, nats, reported by the inference engine that sampled the tokens.
        response_mask_T: ``[T]`` bool, the tokens that the policy generated.

    References:
        Hilton et al., Batch size-invariance for policy optimization, arXiv:2110.00641.
    """
    proximal_T = proximal_logprobs_T.detach().float()
    behavior_T = behavior_logprobs_T.detach().float()
    log_ratio_T = proximal_T - behavior_T
    # The difference of two finite numbers is finite at any log-prob a model can produce.
    valid_mask_T = response_mask_T & log_ratio_T.isfinite()
    return TokenRatios(
        log_ratio_T=torch.where(valid_mask_T, log_ratio_T, 0.0),
        proximal_T=torch.where(valid_mask_T, proximal_T, 0.0),
        behavior_T=torch.where(valid_mask_T, behavior_T, 0.0),
        response_mask_T=response_mask_T,
        valid_mask_T=valid_mask_T,
    )


def bounded_exp(log_value: Tensor) -> Tensor:
    """``exp(clamp(log_value, -20, 20))``, finite for every input but NaN."""
    return log_value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded_expm1(log_value: Tensor, *, scale: float = 1.0) -> Tensor:
    """``exp(scale * clamp(log_value, -20, 20)) - 1``, exact near 0."""
    return (scale * log_value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).expm1()


def clipped_exp(log_value: Tensor, *, log_low: float, log_high: float) -> Tensor:
    """``exp`` of ``log_value``, clipped in log space to the edges and to +-20."""
    return log_value.clamp(max(log_low, -MAX_LOG_RATIO), min(log_high, MAX_LOG_RATIO)).exp()
