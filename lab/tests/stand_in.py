# SPDX-License-Identifier: Apache-2.0
"""A training that counts, for the tests of what runs trainings: states, results, and processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from evidence.engines import EngineSpec
from evidence.pretrained.group import PretrainedGroup
from evidence.study import NONE

TINY = PretrainedGroup(name="tiny", engine=EngineSpec(), methods=(NONE,), seeds=(1,), num_steps=3, dump_steps=(1,))


@dataclasses.dataclass
class Counting:
    """Rewards are one, one and a half, ...: what is drawn in a step depends on all steps before."""

    group: PretrainedGroup
    device: torch.device = dataclasses.field(default_factory=lambda: torch.device("cpu"))
    num_steps_done: int = 0
    sampling_seconds: float = 0.0
    record: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def has_begun(self) -> bool:
        return self.num_steps_done > 0

    def step(self, keep: Callable[..., None]) -> list[dict[str, Any]]:
        step = self.num_steps_done
        if step in self.group.dump_steps:
            keep(f"step{step}", {"mask": np.ones((1, 2, 3), bool)})
        self.num_steps_done += 1
        self.sampling_seconds += 0.5
        return [{"group": self.group.name, "method": "none", "seed": 1, "step": step, "reward": 1 + step / 2}]

    def state(self) -> dict[str, Any]:
        return {"done": self.num_steps_done, "seconds": self.sampling_seconds}

    def restore(self, state: dict[str, Any]) -> None:
        self.num_steps_done, self.sampling_seconds = state["done"], state["seconds"]
