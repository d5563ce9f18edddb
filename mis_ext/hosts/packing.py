"""Lists of per-sample tensors, as the hosts hold them, to packed tensors and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mis_ext.layout import PackedLayout
from mis_ext.metrics import GroupMetric, Metric, TokenMetric
from mis_ext.statistics import SequenceStatistics


def pack(name: str, tensors: Sequence[Tensor], lengths: Sequence[int], *, device: torch.device) -> Tensor:
    """``[sum of lengths]``: the samples one after the other, on ``device``.

    Raises:
        ValueError: A sample has more or fewer tokens than ``lengths`` says, or there are more or fewer samples.
    """
    found = list(map(Tensor.numel, tensors))
    if found != list(lengths):
        raise ValueError(f"{name} has samples of {found} tokens on this rank, the lengths say {list(lengths)}")
    return torch.cat([*tensors]).to(device, non_blocking=True) if tensors else torch.empty(0, device=device)


def unpack(values_R: Tensor, layout: PackedLayout) -> list[Tensor]:
    """One tensor per sample of whole responses."""
    return list(torch.split(values_R, list(layout.response_lengths)))


def spread_metric(metric: Metric, layout: PackedLayout, stats: SequenceStatistics, response_mask_T: Tensor) -> Tensor:
    """``[T]`` values that come out as the metric's mean under the host's reduction.

    The host multiplies by the original mask, averages over each sample's response tokens, and then over samples (or,
    with per-token loss, over response tokens). Tokens or samples that were not measured add nothing to the numerator
    but count in that denominator, so the measured ones are scaled up for them; with nothing left out the scale is
    exactly 1, with nothing measured the values are NaN.
    """
    if isinstance(metric, GroupMetric):
        return torch.where(response_mask_T, metric.total, 0.0)
    num_response_S = stats.num_response_S
    measured_S = metric.population.count_S > 0 if isinstance(metric, TokenMetric) else metric.measured_S
    of_samples = (num_response_S > 0).sum() / measured_S.sum()
    if isinstance(metric, TokenMetric):
        of_tokens_S = num_response_S / metric.population.count_S.clamp_min(1.0)
        values_T = torch.where(metric.population.mask_T, metric.values_T, 0.0)
        values_T = values_T * layout.to_tokens(of_tokens_S * of_samples)
    else:
        values_T = layout.to_tokens(torch.where(measured_S, metric.values_S, 0.0) * of_samples)
    return torch.where(response_mask_T, values_T, 0.0)
