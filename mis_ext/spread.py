"""Metrics as the hosts want them: one number per token, whose mean under the host's reduction is the metric."""

from __future__ import annotations

import torch
from torch import Tensor

from mis_ext.log_ratio import mask_as_float, zero_outside
from mis_ext.metrics import GroupMetric, Metric, SequenceMetric
from mis_ext.statistics import SequenceStatistics
from mis_ext.token_index import TokenIndex


def spread_metrics(
    metrics: dict[str, Metric], index: TokenIndex, stats: SequenceStatistics, response_mask_T: Tensor
) -> dict[str, Tensor]:
    """``[T]`` values per metric that come out as its mean under the host's reduction.

    The host multiplies by the original mask, averages over each sample's response tokens, and then over samples (or,
    with per-token loss, over response tokens). Tokens or samples that were not measured add nothing to the numerator
    but count in that denominator, so the measured ones are scaled up for them; with nothing left out the scale is
    exactly 1, with nothing measured the values are NaN.
    """
    response_T = mask_as_float(response_mask_T)
    num_samples = (stats.num_response_S > 0).sum()
    # Per population, what the value of each token counts; the host's mean is one over response tokens as it is.
    factors = {"response": response_T}

    def to_response(values_S: Tensor, measured_S: Tensor) -> Tensor:
        return zero_outside(response_T, index.to_tokens(values_S * (num_samples / measured_S.sum())))

    def spread(metric: Metric) -> Tensor:
        if isinstance(metric, GroupMetric):
            return zero_outside(response_T, metric.total)
        if isinstance(metric, SequenceMetric):
            return to_response(torch.where(metric.measured_S, metric.values_S, 0.0), metric.measured_S)
        name, mask_T, count_S = metric.population
        if name not in factors:
            of_tokens_S = stats.num_response_S / count_S.clamp_min(1.0)
            factors[name] = to_response(of_tokens_S, count_S > 0) * mask_as_float(mask_T)
        return metric.values_T * factors[name]

    return {name: spread(metric) for name, metric in metrics.items()}
