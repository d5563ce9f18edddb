# SPDX-License-Identifier: Apache-2.0
"""Log the peak GPU memory of each pass of slime over a rollout.

slime calls these with ``--custom-megatron-before-log-prob-hook-path slime_gpu.memory.before_scoring`` and
``--custom-megatron-before-train-step-hook-path slime_gpu.memory.before_step``, with one step per rollout. The peak of a
pass is said when the next one begins, so the last has none.
"""

import os
from typing import Any

import torch

from . import in_turn

GIB = 1 << 30
_pass: tuple[int, str] | None = None
"""The rollout and the type of the pass."""


def before_scoring(*_: Any) -> None:
    """Begin the pass that scores the next rollout."""
    _begin(0 if _pass is None else _pass[0] + 1, "scoring")


def before_step(_: Any, rollout_id: int, *others: Any) -> None:
    """Begin a training step; with ``IN_TURN=1`` when it is this run's turn."""
    if os.environ.get("IN_TURN"):
        in_turn.wait()
    _begin(rollout_id, "training")


def _begin(rollout_id: int, name: str) -> None:
    global _pass
    if _pass is not None:
        rollout, ended = _pass
        peak, taken = (found() / GIB for found in (torch.cuda.max_memory_allocated, torch.cuda.max_memory_reserved))
        print(f"memory {rollout}: {{'{ended}': {peak:.4f}, '{ended}_taken': {taken:.4f}}}", flush=True)
    torch.cuda.reset_peak_memory_stats()
    _pass = (rollout_id, name)
