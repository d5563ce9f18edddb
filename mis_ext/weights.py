"""Importance weights: a token-level part times a sequence-level part, one of which is 1."""

from __future__ import annotations

import torch
from torch import Tensor

from mis_ext.config import WeightFactor
from mis_ext.log_ratio import clipped_exp
from mis_ext.statistics import SequenceStatistics


def token_weights(log_ratio_T: Tensor, weight: WeightFactor | None) -> Tensor:
    """``[T]`` weight of each token from its own ratio; 1 for weights of other levels.

    Truncated importance sampling caps it: Ionides, Truncated Importance Sampling, 2008; Yao et al., Your Efficient RL
    Framework Secretly Brings You Off-Policy RL Training, 2025.
    """
    if weight is None or weight.level != "token":
        return torch.ones_like(log_ratio_T)
    return _bounded(log_ratio_T, weight)


def sequence_weights(stats: SequenceStatistics, weight: WeightFactor | None) -> Tensor:
    """``[S]`` weight of each sequence from the product or the geometric mean of its ratios; 1 for other levels.

    The product is the unbiased weight of a sequence, with variance exponential in its length; the geometric mean is
    biased and has no such trap: Liu, Li et al., When Speed Kills Stability, 2025; Zheng et al., Group Sequence Policy
    Optimization, arXiv:2507.18071.
    """
    if weight is None or weight.level == "token":
        return torch.ones_like(stats.log_ratio_sum_S)
    return _bounded(sequence_log_ratio(stats, weight.level), weight)


def sequence_log_ratio(stats: SequenceStatistics, level: str) -> Tensor:
    """``[S]`` log-ratio at ``level``: the sum over valid tokens (product of ratios) or their mean (geometric)."""
    return stats.log_ratio_sum_S if level == "sequence" else stats.log_ratio_mean_S


def _bounded(log_ratio: Tensor, weight: WeightFactor) -> Tensor:
    return clipped_exp(log_ratio, log_low=weight.clip_band.log_low, log_high=weight.clip_band.log_high)
