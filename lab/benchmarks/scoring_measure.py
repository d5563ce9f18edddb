# SPDX-License-Identifier: Apache-2.0
"""The cost of a forward and a backward pass from logits, as a row of a table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import measuring
import reporting
import torch
from torch import Tensor
from workload import World

GIB = 2.0**30
ROWS_AT_ONCE = 1024
COLUMNS = ["median ms", "min", "max", "GiB above the logits", "launches + copies", "host syncs"]

Row = dict[str, Any]
T = TypeVar("T")


def say(*words: object) -> None:
    """Progress, with the time of day."""
    print(time.strftime("%H:%M:%S"), *words, file=sys.stderr, flush=True)


def cost(call: measuring.Call, next_item: measuring.NextItem, *, world: World, repeats: int, budget: float) -> Row:
    """Time until the device is idle, peak memory above what was there before the call, launches, synchronizations.

    The peak holds everything that the call allocates: copies, softmaxes, the gradient of the logits. The logits and the
    micro-batch were there before.
    """

    def discarded(item: Any) -> None:
        # A gradient may be as large as the logits: it is not kept until the profiler has stopped.
        call(item)

    for _ in range(measuring.WARM_UP_CALLS):
        start = time.perf_counter()
        discarded(next_item())
        world.synchronize()
        # All ranks make the same number of calls, because a call may wait for other ranks.
        (seconds,) = world.maximum([time.perf_counter() - start])
        if seconds > measuring.SLOW_SECONDS:
            break
    row: Row = {"peak_bytes": _peak(discarded, next_item(), world)}
    times = measuring.time_calls(discarded, next_item, world=world, repeats=repeats, budget=budget)
    row |= {"median_s": times.median, "min_s": min(times.total), "max_s": max(times.total), "calls": len(times.total)}
    if world.device.type == "cuda":
        work = measuring.profile_device(discarded, next_item, world=world, seconds_per_call=times.median)
        row |= {"device_s": work.seconds, "launches": work.kernels, "copies": work.copies}
        row["host_syncs"] = work.synchronizations
    else:
        counted = measuring.count_dispatched(discarded, next_item(), world)
        row |= {"operations": counted.operations, "host_syncs": counted.reads}
    return row


def _peak(call: measuring.Call, item: Any, world: World) -> int | None:
    world.synchronize()
    if world.device.type != "cuda":
        call(item)
        return None
    torch.cuda.reset_peak_memory_stats(world.device)
    before = torch.cuda.memory_allocated(world.device)
    call(item)
    world.synchronize()
    return torch.cuda.max_memory_allocated(world.device) - before


def guarded(work: Callable[[], T]) -> T | Row:
    """Return its row, or a row with the error: a failed contender does not stop the other ones."""
    try:
        return work()
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
    # The memory of the failed call is free only here.
    torch.cuda.empty_cache()
    say("missing:", reason)
    return {"missing": reason}


def cells(row: Row) -> list[str]:
    """``COLUMNS`` of a row; a dash for what was not measured."""
    if "missing" in row:
        return [f"missing: {row['missing']}", *["-"] * (len(COLUMNS) - 1)]

    def number(key: str, scale: float = 1.0, digits: int = 2) -> str:
        return "-" if row.get(key) is None else f"{row[key] * scale:,.{digits}f}"

    launches = f"{number('launches', digits=0)} + {number('copies', digits=0)}"
    launches = f"{row['operations']} ops" if "operations" in row else launches
    times = [number(key, 1e3) for key in ("median_s", "min_s", "max_s")]
    return [*times, number("peak_bytes", 1.0 / GIB), launches, number("host_syncs", digits=0)]


def table(names: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return reporting.table(names, rows)


def largest(x: Tensor) -> float:
    """The largest magnitude; a few rows at a time, so that it fits beside large tensors."""
    return max((float(part.abs().max()) for part in _rows(x)), default=0.0)


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Likewise of a difference."""
    pairs = zip(_rows(a), _rows(b), strict=True)
    return max((float((x.float() - y.float()).abs().max()) for x, y in pairs), default=0.0)


def _rows(x: Tensor) -> list[Tensor]:
    return [part for part in x.reshape(-1, x.shape[-1]).split(ROWS_AT_ONCE) if part.numel() > 0]
