"""How heavy the tail of importance weights is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mis_ext.methods.pareto import smooth_weights

MIN_WEIGHTS = 25


def k_hat(log_weights: Tensor) -> float:
    """See :class:`mis_ext.methods.pareto.Smoothed`; NaN for fewer than 25 weights, 0 where the largest are equal.

    Args:
        log_weights: ``[S]``, finite.
    """
    if len(log_weights) < MIN_WEIGHTS:
        return math.nan
    # The scale of the weights does not matter, and would leave float64.
    weights = (log_weights.double() - log_weights.max()).exp()
    num_tail = math.ceil(min(len(weights) / 5, 3.0 * math.sqrt(len(weights))))
    if float(weights.topk(num_tail + 1).values[-1]) == 1.0:
        return 0.0
    return float(smooth_weights(weights, torch.ones_like(weights, dtype=torch.bool)).k_hat)
