"""How heavy the tail of importance weights is."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_PRIOR_WEIGHT, _PRIOR = 10.0, 0.5
MIN_WEIGHTS = 25


def k_hat(log_weights: Tensor) -> float:
    """Shape of the generalised Pareto distribution that fits the largest weights; NaN for fewer than 25.

    Below 0.5 their variance is finite, above 0.7 an average of them says little.

    Args:
        log_weights: ``[S]``, finite.

    References:
        Vehtari et al., Pareto Smoothed Importance Sampling, arXiv:1507.02646; the fit: Zhang and Stephens, A New and
        Efficient Estimation Method for the Generalized Pareto Distribution, 2009.
    """
    count = len(log_weights)
    if count < MIN_WEIGHTS:
        return math.nan
    num_tail = math.ceil(min(0.2 * count, 3.0 * math.sqrt(count)))
    largest = log_weights.double().topk(num_tail + 1).values
    # The scale of the weights does not matter, and would leave float64.
    weights = (largest - largest[0]).exp()
    excess = (weights[:-1] - weights[-1]).flip(0)
    if float(excess[-1]) <= 0.0:
        # Equal weights have no tail.
        return 0.0
    shape = _fitted_shape(excess[excess > 0.0])
    return (shape * num_tail + _PRIOR_WEIGHT * _PRIOR) / (num_tail + _PRIOR_WEIGHT)


def _fitted_shape(excess: Tensor) -> float:
    """Shape of positive numbers in ascending order: a mean over a grid of candidates, weighted by their likelihood."""
    count = len(excess)
    grid = 30 + int(math.sqrt(count))
    quarter = float(excess[max(0, int(count / 4 + 0.5) - 1)])
    steps = torch.arange(1, grid + 1, dtype=torch.float64) - 0.5
    candidates = 1.0 / excess[-1] + (1.0 - (grid / steps).sqrt()) / (3.0 * quarter)
    shapes = torch.log1p(-candidates[:, None] * excess[None, :]).mean(1)
    likelihood = count * ((-candidates / shapes).log() - shapes - 1.0)
    weights = torch.softmax(torch.nan_to_num(likelihood, nan=-torch.inf), 0)
    candidate = (torch.nan_to_num(candidates * weights)).sum()
    return float(torch.log1p(-candidate * excess).mean())
