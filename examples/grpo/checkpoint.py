# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: everything that a run needs to go on as if it had not stopped."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import torch

from .trainer import Trainer


def save_checkpoint(path: Path, *, trainer: Trainer, rng: Random, next_step: int) -> None:
    """Write a checkpoint so that an interruption leaves the previous one whole.

    Every rank holds all of the state (only data and context parallelism), so one rank writes for all. The default
    generators are the ones that the transformers engine of this process samples from.
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
    """Restore a checkpoint on this rank and return the step to go on with.

    Raises:
        FileNotFoundError: There is no checkpoint at ``path``.
    """
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    trainer.load_state_dict(state["trainer"])
    rng.setstate(state["task_rng"])
    torch.set_rng_state(state["torch_rng"])
    if state["cuda_rng"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda_rng"])
    return state["next_step"]
