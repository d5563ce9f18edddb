# SPDX-License-Identifier: Apache-2.0
"""Tiny runs of a pretrained model for the tests of its studies, which are skipped without the example's packages."""

# The imports after the skip need packages that only the example's environment has.

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

import pytest
import torch

MISSING = [
    name for name in ("megatron", "transformers", "matplotlib", "rich") if importlib.util.find_spec(name) is None
]
if MISSING:
    pytest.skip(f"{', '.join(MISSING)} not installed (requirements/example.txt)", allow_module_level=True)

with warnings.catch_warnings():
    # Megatron-Core reports at import what is not installed.
    warnings.simplefilter("ignore")
    from evidence.engines import EngineSpec
    from evidence.pretrained.group import PretrainedGroup
    from evidence.pretrained.training import PretrainedTraining
    from evidence.study import NONE

# Megatron-Core warns of its own choices.
MARKS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:full scope is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "num_steps": 2,
    "num_prompts": 2,
    "response_length": 4,
    "num_evaluated": 4,
    "micro_batch_size": 8,
    "max_prompt": 96,
    "learning_rate": 1e-3,
}
GROUP = PretrainedGroup(name="tiny", engine=EngineSpec(), methods=(NONE,), seeds=(1,), **TINY)


def steps(training: PretrainedTraining, count: int) -> list[dict[str, Any]]:
    rows = [row for _ in range(count) for row in training.step(lambda name, arrays: None)]
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]
