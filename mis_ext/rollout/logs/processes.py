"""Conversations of a log checked in several processes."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

from mis_ext.rollout.logs.files import Place, RolloutLog
from mis_ext.rollout.logs.lines import LoggedCall

Result = TypeVar("Result")
Check = Callable[[str, Iterator[LoggedCall]], Result]
CheckAll = Callable[[Mapping[str, Sequence[Place]]], Iterator[Result]]

# So many conversations are given to each process ahead.
_AHEAD = 4


def count_processes() -> int:
    """How many processes help here: one for each CPU that this one may use, where a process can be forked."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1


@contextmanager
def checking(log: RolloutLog, check: Check[Result], *, processes: int) -> Iterator[CheckAll[Result]]:
    """A function that checks conversations, in their order.

    The processes begin here, as copies of this one: nothing that ``check`` needs is sent. Begin no thread before.

    Args:
        log: Its files are read by all processes.
        check: Takes the name and the calls of a conversation; what it returns is sent back.
        processes: One checks in this process.

    Raises:
        OSError: A process died.
    """
    if processes == 1:
        yield lambda places: (check(name, log.calls(places[name])) for name in places)
        return
    _State.log, _State.check = log, check
    fork = multiprocessing.get_context("fork")
    # What is here already, as a tokenizer's modules, would be looked at by each collection of the lists that are read.
    with ProcessPoolExecutor(processes, mp_context=fork, initializer=gc.freeze) as pool:
        try:
            # The first task makes all processes.
            pool.submit(os.getpid).result()
            yield lambda places: _run(pool, places, ahead=_AHEAD * processes)
        except BrokenProcessPool as error:
            raise OSError("a process that checks conversations died, perhaps for want of memory: use fewer") from error


def _run(pool: ProcessPoolExecutor, places: Mapping[str, Sequence[Place]], *, ahead: int) -> Iterator[Result]:
    waiting = deque[Future[Result]]()
    for item in places.items():
        waiting.append(pool.submit(_check, *item))
        if len(waiting) > ahead:
            yield waiting.popleft().result()
    for future in waiting:
        yield future.result()


class _State:
    """What a process has from its parent."""

    log: RolloutLog
    check: Check[Any]


def _check(name: str, places: Sequence[Place]) -> Any:
    return _State.check(name, _State.log.calls(places))
