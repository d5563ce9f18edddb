# SPDX-License-Identifier: Apache-2.0
"""The only module that communicates.

The correction gathers small rows and reduces them locally in rank order, so results are bitwise equal on all ranks and
in all runs. Its callers are in :mod:`mis_ext.correction.correct`. The backend reduces the large tensors of scoring, in
any order. A group is a ``torch.distributed`` process group, a fault-tolerant wrapper around one (Miles), or None for a
single rank. A wrapper must be called through its own methods, and cannot gather objects.

A rank with a local error joins the remaining collectives of the call, sends its status in them, and then raises: see
:class:`Due`. A status is one float. The ranks take the maximum:

- ``rank + 1``: this rank failed. If several ranks fail, the other ranks report the highest.
- ``-inf``: it did not fail.
- ``-(rank + 1)``, only in the first call: it did not fail, but cannot compile its graphs.
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
    """The number of ranks of a group; 1 for None."""
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
            raise RuntimeError("a collective over a fault-tolerant group failed: a peer is unavailable")
    else:
        # slime checks the free memory before all_gather and all_reduce, but not before this function. The check waits
        # for the driver, and clears all caches if memory is low (issues 1717 and 2268 of THUDM/slime). gloo: 1-D.
        gather = _function(group, name="all_gather_into_tensor", renamed="all_gather_single")
        gather(rows.view(-1), row.view(-1), group=group)
    return rows


def sum_of_states(states: Tensor, group: Group | None) -> Tensor:
    """The sum of large tensors over all ranks, in place. The backend sums them, so not in rank order."""
    if group is None:
        return states
    if is_fault_tolerant(group):
        return gather_rows(states, group).sum(0)
    dist.all_reduce(states, group=group)
    return states


def scatter_sum(states: Tensor, group: Group, *, rank: int) -> Tensor:
    """This rank's share of the rows of the sum over all ranks; all shares have the same number of rows."""
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
        raise TypeError(f"gathering objects needs a torch.distributed process group, got a {type(group).__name__}")
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


class Message(NamedTuple):
    """The tensor that a rank sends in a collective of a correction."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    group: Group | None


_BITS, _STATUS_BYTES = 8, 4
"""Bits per byte; bytes of a status, a float32 at the end of a message of bytes."""


def bits_message(num_tokens: int, group: Group | None) -> Message:
    """The message of :meth:`Due.gather_bits`: 8 tokens per byte, then the status."""
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
        """``[F, ...]`` over all ranks: sums in the first ``num_sums`` rows, maxima in the rest."""
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

    def report_failure(self) -> None:
        """Join all remaining collectives with only the status of this failed rank, so that no rank waits for it."""
        due, self._due = self._due, []
        status = torch.tensor([global_rank() + 1.0], device=self._device)
        for shape, dtype, group in due:
            row = torch.zeros(shape, dtype=dtype, device=self._device)
            # Segment values have no place for the status. A later message of the call has one.
            end = status.view(torch.uint8) if dtype == torch.uint8 else status
            row[-len(end) :] = end
            gather_rows(row, group)

    @contextlib.contextmanager
    def reporting_errors(self) -> Iterator[None]:
        """An error in this block is raised after this rank has sent its status to the other ranks."""
        try:
            yield
        except Exception:
            # Raise the first error, even if the group itself fails.
            with contextlib.suppress(Exception):
                self.report_failure()
            raise


def _function(group: Group, *, name: str, renamed: str) -> Callable[..., Any]:
    """Return a collective, renamed in torch 2.13. Only the old name supports process groups of slime and Miles."""
    new = getattr(dist, renamed, None) if type(group) is dist.ProcessGroup else None
    return new or getattr(dist, name)  # type: ignore[no-any-return]


def is_fault_tolerant(group: Group) -> bool:
    """True if replicas can leave and join the group while it is in use, as in Miles."""
    return hasattr(group, "_replica_id")
