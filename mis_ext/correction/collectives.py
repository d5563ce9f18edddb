# SPDX-License-Identifier: Apache-2.0
"""The only module that communicates.

Everything is an all-gather of small rows, reduced locally in rank order: the same bits on every rank and on every run.
A group is a ``torch.distributed`` process group, or a fault-tolerant wrapper around one as Miles uses, which has to be
called through its own methods; objects are gathered over the former only. None is a group of one.

A rank with a local error joins the collectives of the call that are still due, says so there, and raises then: see
:class:`Due`. Of several failed ranks the others name the highest that they hear of.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions

Group = Any


def group_size(group: Group | None) -> int:
    """The number of ranks of a group; 1 without one."""
    if group is None:
        return 1
    return int(group.size()) if _is_wrapped(group) else dist.get_world_size(group)


def global_rank() -> int:
    """The rank of this process among all processes, for messages; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_rows(row: Tensor, group: Group | None) -> Tensor:
    """``[W, *row.shape]``: the rows of all ``W`` ranks, in rank order."""
    if group is None:
        return row.unsqueeze(0)
    row = row.contiguous()
    rows = row.new_empty((group_size(group), *row.shape))
    if _is_wrapped(group):
        if not group.allgather([list(rows.unbind(0))], [row], AllgatherOptions()).wait():
            raise RuntimeError("a collective over a fault-tolerant group failed: a peer is gone")
    else:
        # Before all_gather and all_reduce slime looks how much memory is free, and before this it does not. That waits
        # for the driver, and clears all caches where it is little (issues 1717 and 2268 of THUDM/slime). gloo: 1-D.
        gather = _function(group, name="all_gather_into_tensor", renamed="all_gather_single")
        gather(rows.view(-1), row.view(-1), group=group)
    return rows


def sum_over_ranks(row: Tensor, group: Group | None) -> Tensor:
    """The sum of the rows of all ranks, in rank order: the same bits on every one."""
    return row if group is None else gather_rows(row, group).sum(0)


def sum_of_states(states: Tensor, group: Group | None) -> Tensor:
    """The sum of large tensors of all ranks, in place: not gathered first, so not in rank order."""
    if group is None or _is_wrapped(group):
        return sum_over_ranks(states, group)
    dist.all_reduce(states, group=group)
    return states


def scatter_sum(states: Tensor, group: Group, *, rank: int) -> Tensor:
    """Of the sum of large tensors of all ranks, this rank's equal part of the rows."""
    num_rows = len(states) // group_size(group)
    if _is_wrapped(group):
        return sum_over_ranks(states, group)[rank * num_rows : (rank + 1) * num_rows]
    part = states.new_empty(num_rows, *states.shape[1:])
    scatter = _function(group, name="reduce_scatter_tensor", renamed="reduce_scatter_single")
    scatter(part, states.contiguous(), group=group)
    return part


def min_over_ranks(row: Tensor, group: Group | None) -> Tensor:
    """The minimum of the rows of all ranks; NaN where one of them has it."""
    return row if group is None else gather_rows(row, group).amin(0)


def gather_objects(value: Any, group: Group | None) -> list[Any]:
    """The values of all ranks, in rank order; pickled, so for reports and not for training steps."""
    if group is None:
        return [value]
    if _is_wrapped(group):
        raise TypeError(f"objects are gathered over a torch.distributed process group, got a {type(group).__name__}")
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class Row(NamedTuple):
    """What a rank sends in a collective of a correction.

    ``has_status``: whether the last number says which rank failed: its number + 1, or less than 1 for none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: Group | None
    has_status: bool = True


STATUS_BYTES = 4
"""Of a status at the end of a row of bytes: a float32."""


class Due:
    """The collectives of one call that this rank has not joined yet, in their order."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self._rows = [row for row in rows if row.group is not None]
        self._device = device

    def gather(self, row: Tensor, group: Group | None) -> Tensor:
        """:func:`gather_rows`, of the next collective."""
        rows = gather_rows(row, group)
        if group is not None:
            del self._rows[0]
        return rows

    def tell(self, rank: int) -> None:
        """Join all that are left with nothing but the number of this rank, which failed: nobody waits for it."""
        status = torch.tensor([rank + 1.0], device=self._device)
        for shape, dtype, group, has_status in self._rows:
            row = torch.zeros(shape, dtype=dtype, device=self._device)
            if has_status and dtype == torch.uint8:
                row[-STATUS_BYTES:] = status.view(dtype)
            elif has_status:
                row[-1:] = status
            gather_rows(row, group)
        self._rows = []

    @contextlib.contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """An error in here is raised when those who wait for this rank know of it."""
        try:
            yield
        except Exception:
            # What was wrong first is raised, also where the group itself is broken.
            with contextlib.suppress(Exception):
                self.tell(global_rank())
            raise


def _function(group: Group, *, name: str, renamed: str) -> Callable[..., Any]:
    """Since torch 2.13 it has a new name. Of slime's and Miles' own groups only the function of the old name knows."""
    new = getattr(dist, renamed, None) if type(group) is dist.ProcessGroup else None
    return new or getattr(dist, name)  # type: ignore[no-any-return]


def _is_wrapped(group: Group) -> bool:
    return hasattr(group, "_replica_id")


def mark_failed(rows: Tensor, rank: int) -> Tensor:
    """``rows`` with a last row that says that ``rank`` failed; changed in place."""
    rows[-1:].clamp_(max=-(rank + 1.0))
    return rows


def failed_rank(status: float) -> int | None:
    """Which rank a status names, or None: no rank failed."""
    return None if math.isinf(status) else round(-status) - 1


_DIGITS = ((21, 11), (10, 11), (0, 10))
"""Place and width of the digits of 32 bits, from the leading one."""
_SIGN = 1 << 31

_SLACK = 1e-6
"""A share times a count is a whole number up to rounding, and must not become the next one."""


def covering_value(
    values_N: Tensor,
    counted_N: Tensor,
    *,
    share: Tensor,
    groups: Sequence[Group | None],
    gather: Callable[[Tensor, Group | None], Tensor] = gather_rows,
) -> Tensor:
    """0-dim: the smallest counted value, over all ranks, that at least ``share`` of the counted values do not exceed.

    A radix selection: numbers sort as their bits do, those of negative ones turned around. So counts are all that ranks
    exchange, at most 16 KiB a gather, and every rank finds the same bits, however many numbers there are and wherever
    they lie.

    Args:
        values_N: ``[N]`` float32; infinity is legal.
        counted_N: ``[N]`` bool, which of them count; elsewhere a value may be anything.
        share: 0-dim float64, in (0, 1].
        groups: The values lie on the ranks of all of these; None is a group of one.
        gather: What gathers rows of all ranks.

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
            counts = counts if group is None else gather(counts, group).sum(0)
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
