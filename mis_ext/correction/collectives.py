"""The only module that communicates.

Everything is an all-gather of small rows, reduced locally in rank order: the same bits on every rank and on every run.
A group is a ``torch.distributed`` process group, or a fault-tolerant wrapper around one as Miles uses, which has to be
called through its own methods; objects are gathered over the former only. None is a group of one.

A rank with a local error takes part in every collective, says so there, and raises then: its status rides in the last
row of the statistics, and in the last of the totals: infinity, or minus the number of the failed rank minus 1. Minima
travel through every merge, so that the highest failed rank arrives everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

# Not re-exported by torch.distributed, unlike the options of the other collectives.
from torch._C._distributed_c10d import AllgatherOptions

Group = Any


def group_size(group: Group | None) -> int:
    """The number of ranks of a group; 1 without one."""
    if group is None:
        return 1
    return int(group.size()) if _is_wrapped(group) else dist.get_world_size(group)


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
        _gather_function(group)(rows.view(-1), row.view(-1), group=group)
    return rows


def sum_over_ranks(row: Tensor, group: Group | None) -> Tensor:
    """The sum of the rows of all ranks, in rank order: the same bits on every one."""
    return row if group is None else gather_rows(row, group).sum(0)


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


def merge_bits(packed: Tensor, group: Group | None) -> Tensor:
    """Bitwise or of a uint8 tensor over the ranks, of which at most one sets each bit: a sum without carries."""
    return packed if group is None else gather_rows(packed, group).sum(0, dtype=packed.dtype)


def _gather_function(group: Group) -> Callable[..., Any]:
    """Since torch 2.13 it has a new name. Of slime's and Miles' own groups only the function of the old name knows."""
    renamed = getattr(dist, "all_gather_single", None) if type(group) is dist.ProcessGroup else None
    return renamed or dist.all_gather_into_tensor


def _is_wrapped(group: Group) -> bool:
    return hasattr(group, "_replica_id")


def mark_failed(rows: Tensor, rank: int) -> Tensor:
    """``rows`` with a last row that says that ``rank`` failed; changed in place."""
    rows[-1:].clamp_(max=-(rank + 1.0))
    return rows


def failed_rank(status: float) -> int | None:
    """Which rank a status names, or None: no rank failed."""
    return None if math.isinf(status) else round(-status) - 1
