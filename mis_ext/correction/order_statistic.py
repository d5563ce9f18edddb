"""An exact order statistic of numbers that lie on many ranks, in three small gathers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group, sum_over_ranks

_DIGITS = ((20, 11), (10, 10), (0, 10))
"""Place and width of the digits of a float32 without its sign, from the leading one."""

_SLACK = 1e-6
"""A share times a count is a whole number up to rounding, and must not become the next one."""


def covering_value(values_N: Tensor, counted_N: Tensor, *, share: float, groups: Sequence[Group | None]) -> Tensor:
    """0-dim: the smallest counted value, over all ranks, that at least ``share`` of the counted values do not exceed.

    A radix selection: numbers that are not negative sort as their bits do. So counts are all that ranks exchange, at
    most 16 KiB a gather, and every rank finds the same bits, however many numbers there are and wherever they lie.

    Args:
        values_N: ``[N]`` float32, none negative; infinity is legal.
        counted_N: ``[N]`` bool, which of them count; elsewhere a value may be anything.
        share: In (0, 1].
        groups: The values lie on the ranks of all of these; None is a group of one.

    Returns:
        NaN where nothing counts.
    """
    # No digit has the sign, so -0 is 0.
    bits_N = torch.where(counted_N, values_N, 0.0).view(torch.int32)
    matches_N = counted_N
    found = bits_N.new_zeros((), dtype=torch.int64)
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
    return torch.where(num_counted > 0, found.to(torch.int32).view(torch.float32), torch.nan)
