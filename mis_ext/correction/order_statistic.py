"""An exact order statistic of numbers that lie on many ranks, in three small gathers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group, sum_over_ranks

_DIGITS = ((21, 11), (10, 11), (0, 10))
"""Place and width of the digits of 32 bits, from the leading one."""
_SIGN = 1 << 31

_SLACK = 1e-6
"""A share times a count is a whole number up to rounding, and must not become the next one."""


def covering_value(
    values_N: Tensor, counted_N: Tensor, *, share: float | Tensor, groups: Sequence[Group | None]
) -> Tensor:
    """0-dim: the smallest counted value, over all ranks, that at least ``share`` of the counted values do not exceed.

    A radix selection: numbers sort as their bits do, those of negative ones turned around. So counts are all that ranks
    exchange, at most 16 KiB a gather, and every rank finds the same bits, however many numbers there are and wherever
    they lie.

    Args:
        values_N: ``[N]`` float32; infinity is legal.
        counted_N: ``[N]`` bool, which of them count; elsewhere a value may be anything.
        share: In (0, 1]; a tensor is 0-dim, float64.
        groups: The values lie on the ranks of all of these; None is a group of one.

    Returns:
        NaN where nothing counts.
    """
    bits_N = _ordered(torch.where(counted_N, values_N, 0.0))
    matches_N = counted_N
    found = bits_N.new_zeros(())
    rank = num_counted = None
    for place, width in _DIGITS:
        digit_N = (bits_N >> place) & ((1 << width) - 1)
        counts = torch.zeros(1 << width, dtype=torch.int64, device=bits_N.device)
        # Integers, whose sum does not depend on the order.
        counts = counts.index_add(0, digit_N, matches_N.long())
        for group in groups:
            counts = sum_over_ranks(counts, group)
        if rank is None:
            num_counted = counts.sum()
            rank = (num_counted.double() * share - _SLACK).ceil().long().clamp_min(1)
        running = counts.cumsum(0)
        digit = (running < rank).sum().clamp_max((1 << width) - 1)
        rank = rank - (running - counts).index_select(0, digit.view(1)).squeeze(0)
        matches_N = matches_N & (digit_N == digit)
        found = (found << width) | digit
    assert num_counted is not None
    return torch.where(num_counted > 0, _number(found), torch.nan)


def _ordered(values_N: Tensor) -> Tensor:
    """32 bits of each float32, as int64, that sort as the numbers do; -0 is 0."""
    bits_N = torch.where(values_N == 0.0, 0.0, values_N).view(torch.int32).long()
    return torch.where(bits_N < 0, -1 - bits_N, bits_N + _SIGN)


def _number(bits: Tensor) -> Tensor:
    """The float32 of such bits."""
    return torch.where(bits < _SIGN, -1 - bits, bits - _SIGN).to(torch.int32).view(torch.float32)
