# SPDX-License-Identifier: Apache-2.0
"""Ranks as threads of one process: the results or errors of each, and whether one waited in vain.

Only one runs at a time, because Triton's interpreter does not support threads.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from mis_ext.hosts.groups import Groups

PATIENCE = 150.0
"""Seconds that a rank waits for other ranks, which may compile on a busy machine. A longer wait counts as a hang."""

_here = threading.local()


class Meeting:
    """A meeting at which the threads of one group exchange tensors of one shape and dtype, or other objects."""

    def __init__(self, size: int, baton: threading.Lock) -> None:
        self.size, self._baton = size, baton
        self._barrier = threading.Barrier(size, timeout=PATIENCE)
        self._given: dict[tuple[int, int], Any] = {}

    def exchange(self, rank: int, turn: int, given: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        self._given[turn, rank] = given
        self._baton.release()
        try:
            self._barrier.wait()
        finally:
            self._baton.acquire()
        return [self._given[turn, other] for other in range(self.size)]


class ThreadGroup:
    """One rank's end of a meeting, with the methods of Miles' fault-tolerant groups."""

    _replica_id = 0

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank, self.turn = meeting, rank, 0

    @property
    def place(self) -> tuple[int, int]:
        return self._rank, self._meeting.size

    def size(self) -> int:
        return self._meeting.size

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any) -> Any:
        tensors = self.exchange(inputs[0].clone())
        assert len({(each.shape, each.dtype) for each in tensors}) == 1, "a gather of different sizes would hang"
        for output, tensor in zip(outputs[0], tensors, strict=True):
            output.copy_(tensor)
        return SimpleNamespace(wait=lambda: True)

    def exchange(self, given: Any) -> list[Any]:
        """The values of the ranks of this group."""
        self.turn += 1
        return self._meeting.exchange(self._rank, self.turn, given)


@dataclass(frozen=True)
class Rank:
    """A thread's place."""

    number: int
    groups: Groups

    @property
    def dp_rank(self) -> int:
        return self.groups.dp_rank

    @property
    def cp_rank(self) -> int:
        return self.groups.cp_rank

    @property
    def parallel_state(self) -> SimpleNamespace:
        """In the format of Miles."""
        g = self.groups
        cp = SimpleNamespace(rank=g.cp_rank, size=g.cp_size, group=g.cp_group)
        return SimpleNamespace(cp=cp, intra_dp=SimpleNamespace(rank=g.dp_rank, size=g.dp_size, group=g.dp_group))

    @property
    def num_collectives(self) -> int:
        return sum(group.turn for group in (self.groups.cp_group, self.groups.dp_group) if group is not None)


def current_rank() -> int:
    """Of this thread."""
    number: int = _here.rank.number
    return number


def run_ranks(function: Callable[[Rank], Any], *, cp_size: int = 1, dp_size: int = 1) -> list[Any]:
    """The result or error of ``function`` on each rank; context-parallel ranks are neighbors."""
    baton = threading.Lock()
    of_dp = [Meeting(cp_size, baton) for _ in range(dp_size)]
    of_cp = [Meeting(dp_size, baton) for _ in range(cp_size)]

    def run(number: int) -> Any:
        dp, cp = divmod(number, cp_size)
        groups = (cp, cp_size, ThreadGroup(of_dp[dp], cp), dp, dp_size, ThreadGroup(of_cp[cp], dp))
        _here.rank = Rank(number, Groups.of_places(*groups))
        with baton:
            try:
                return function(_here.rank)
            except Exception as error:
                return error

    with _ranks_are_threads(), ThreadPoolExecutor(cp_size * dp_size) as pool:
        return list(pool.map(run, range(cp_size * dp_size)))


@contextmanager
def _ranks_are_threads() -> Iterator[None]:
    hosts = "mis_ext.hosts"
    with (
        # Imported first, while the collectives still have their own.
        mock.patch(f"{hosts}.session.global_rank", side_effect=current_rank),
        mock.patch("mis_ext.correction.collectives.global_rank", side_effect=current_rank),
        mock.patch(f"{hosts}.slime_miles.rollout.find_groups", side_effect=lambda: _here.rank.groups),
        mock.patch(f"{hosts}.groups.is_fault_tolerant", return_value=False),
        mock.patch(f"{hosts}.groups._place", side_effect=lambda group: (0, 1) if group is None else group.place),
    ):
        yield
