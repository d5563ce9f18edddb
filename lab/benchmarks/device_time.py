# SPDX-License-Identifier: Apache-2.0
"""Times of a call on a GPU without the host."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

CALLS, REPEATS = 10, 7
# About 10 ms: the host hands over all calls meanwhile, unless one of them waits for the device.
HEAD_START_CYCLES = 20_000_000


def device_milliseconds(call: Callable[[], object]) -> float:
    """Of one of ``CALLS`` calls in a row, which the device starts when the host has handed them all over."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / CALLS


def median_milliseconds(call: Callable[[], object]) -> float:
    """The median of ``REPEATS`` such times, after a first call, which compiles."""
    call()
    return statistics.median(device_milliseconds(call) for _ in range(REPEATS))
