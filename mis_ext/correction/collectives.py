# SPDX-License-Identifier: Apache-2.0
"""The only module that communicates.

The correction gathers small rows, and reduces them locally in rank order: the same bits on every rank and on every run.
Its callers are in :mod:`mis_ext.correction.correct`. Large tensors of scoring are reduced by the backend, in any order.
A group is a ``torch.distributed`` process group, or a fault-tolerant wrapper around one as Miles uses, which has to be
called through its own methods; objects are gathered over the former only. None is a group of one.

A rank with a local error joins the collectives of the call that are still due, sends its status there, and raises
then: see :class:`Due`. A status is one float, and the maximum over ranks counts:

- ``rank + 1``: this rank failed. Of several, the others name the highest.
- ``-inf``: it did not fail.
- ``-(rank + 1)``, in the first call alone: it did not fail, and cannot compile its graphs.
"""

from __future__ import annotations

import contextlib
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
    return int(group.size()) if is_fault_tolerant(group) else dist.get_world_size(group)


def global_rank() -> int:
    """The rank of this process among all processes, for messages; 0 without torch.distributed."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def gather_rows(row: Tensor, group: Group | None) -> Tensor:
    """``[W, *row.shape]``: the rows of all ``W`` ranks, in rank order."""
    if group is None:
        return row.unsqueeze(0)
    row = row.contiguous()
    rows = row.new_empty((group_size(group), *row.shape))
    if is_fault_tolerant(group):
        if not group.allgather([list(rows.unbind(0))], [row], AllgatherOptions()).wait():
            raise RuntimeError("a collective over a fault-tolerant group failed: a peer is gone")
    else:
        # Before all_gather and all_reduce slime looks how much memory is free, and before this it does not. That waits
        # for the driver, and clears all caches where it is little (issues 1717 and 2268 of THUDM/slime). gloo: 1-D.
        gather = _function(group, name="all_gather_into_tensor", renamed="all_gather_single")
        gather(rows.view(-1), row.view(-1), group=group)
    return rows


def sum_of_states(states: Tensor, group: Group | None) -> Tensor:
    """The sum of large tensors of all ranks, in place: not gathered first, so not in rank order."""
    if group is None:
        return states
    if is_fault_tolerant(group):
        return gather_rows(states, group).sum(0)
    dist.all_reduce(states, group=group)
    return states


def scatter_sum(states: Tensor, group: Group, *, rank: int) -> Tensor:
    """Of the sum of large tensors of all ranks, this rank's equal part of the rows."""
    num_rows = len(states) // group_size(group)
    if is_fault_tolerant(group):
        return gather_rows(states, group).sum(0)[rank * num_rows : (rank + 1) * num_rows]
    part = states.new_empty(num_rows, *states.shape[1:])
    scatter = _function(group, name="reduce_scatter_tensor", renamed="reduce_scatter_single")
    scatter(part, states.contiguous(), group=group)
    return part


def gather_objects(value: Any, group: Group | None) -> list[Any]:
    """The values of all ranks, in rank order; pickled, so for reports and not for training steps."""
    if group is None:
        return [value]
    if is_fault_tolerant(group):
        raise TypeError(f"objects are gathered over a torch.distributed process group, got a {type(group).__name__}")
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class Message(NamedTuple):
    """The tensor that a rank sends in a collective of a correction."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: Group | None


_BITS, _STATUS_BYTES = 8, 4
"""Of a byte; and of a status, a float32, at the end of a message of bytes."""


def bits_message(num_tokens: int, group: Group | None) -> Message:
    """The message of :meth:`Due.gather_bits`: 8 tokens a byte, and the status."""
    return Message((-(-num_tokens // _BITS) + _STATUS_BYTES,), torch.uint8, group)


class Due:
    """The collectives of one call that this rank has not joined yet, in their order."""

    def __init__(self, messages: Sequence[Message], device: torch.device) -> None:
        self._due = [message for message in messages if message.group is not None]
        self._device = device

    def gather(self, row: Tensor) -> Tensor:
        """:func:`gather_rows` over the group of the next collective."""
        rows = gather_rows(row, self._due[0].group)
        del self._due[0]
        return rows

    def merge(self, own: Tensor, num_sums: int) -> Tensor:
        """``[F, ...]`` of all ranks: sums, and after ``num_sums`` rows maxima."""
        parts = self.gather(own)
        return torch.cat([parts[:, :num_sums].sum(0), parts[:, num_sums:].amax(0)])

    def gather_bits(self, flags_R: Tensor, status_1: Tensor) -> tuple[Tensor, Tensor]:
        """``[R]`` bool, the flags of all ranks, each True on at most one of them; and the status of all ranks."""
        places = torch.arange(_BITS, dtype=torch.uint8, device=flags_R.device)
        flags = torch.nn.functional.pad(flags_R.byte(), (0, -len(flags_R) % _BITS)).view(-1, _BITS)
        own = torch.cat([(flags << places).sum(1, dtype=torch.uint8), status_1.float().view(torch.uint8)])
        bytes_W, status_W = self.gather(own).tensor_split([-_STATUS_BYTES], dim=1)
        # At most one rank sets a bit: a sum has no carries.
        bits = (bytes_W.sum(0, dtype=torch.uint8)[:, None] >> places) & 1
        status_1 = status_W.contiguous().view(torch.float32).amax(0).double()
        return bits.flatten()[: len(flags_R)].bool(), status_1

    def tell(self) -> None:
        """Join all that are left with nothing but the status of this rank, which failed: no rank waits for it."""
        due, self._due = self._due, []
        status = torch.tensor([global_rank() + 1.0], device=self._device)
        for shape, dtype, group in due:
            row = torch.zeros(shape, dtype=dtype, device=self._device)
            # Values of segments have no place for it: a later message of the call has.
            end = status.view(torch.uint8) if dtype == torch.uint8 else status
            row[-len(end) :] = end
            gather_rows(row, group)

    @contextlib.contextmanager
    def told_of_errors(self) -> Iterator[None]:
        """An error in this block is raised after the other ranks know of it."""
        try:
            yield
        except Exception:
            # The first error is raised, also where the group itself is broken.
            with contextlib.suppress(Exception):
                self.tell()
            raise


def _function(group: Group, *, name: str, renamed: str) -> Callable[..., Any]:
    """Since torch 2.13 it has a new name. Of slime's and Miles' own groups only the function of the old name knows."""
    new = getattr(dist, renamed, None) if type(group) is dist.ProcessGroup else None
    return new or getattr(dist, name)  # type: ignore[no-any-return]


def is_fault_tolerant(group: Group) -> bool:
    """True if replicas can leave and join the group while it is in use, as in Miles."""
    return hasattr(group, "_replica_id")
