# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: the full state to continue a run as if it had not stopped."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch

from .trainer import Trainer


def save_checkpoint(path: Path, *, trainer: Trainer, rng: Random, next_step: int) -> None:
    """Write a checkpoint atomically: an interruption keeps the previous one.

    Every rank has the full state (only data and context parallelism), so one rank writes it. The transformers engine of
    this process samples from the default generators.
    """
    state = {
        "trainer": trainer.state_dict(),
        "task_rng": rng.getstate(),
        "torch_rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "next_step": next_step,
    }
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


def load_checkpoint(path: Path, *, trainer: Trainer, rng: Random) -> int:
    """Restore a checkpoint on this rank, and return the next step.

    Raises:
        FileNotFoundError: If there is no checkpoint at ``path``.
    """
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    trainer.load_state_dict(state["trainer"])
    rng.setstate(state["task_rng"])
    torch.set_rng_state(state["torch_rng"])
    if state["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"])
    return state["next_step"]
