# SPDX-License-Identifier: Apache-2.0
"""Tiny groups of runs for the tests of the evidence harness."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from evidence import ensemble, policy
from evidence.engines import EngineSpec
from evidence.ensemble import Training
from evidence.group import Group, Method
from evidence.policy import Shape

CPU = torch.device("cpu")
SHAPE = Shape(hidden_size=32, ffn_size=48, num_heads=4, head_dim=8)
EXPERTS = dataclasses.replace(SHAPE, num_experts=4, experts_per_token=2, expert_ffn_size=24)
NONE = Method(name="none")
BAND = {"rs_lower_bound": 0.9995, "rs_upper_bound": 1.0005}
GATE = Method(
    name="gate",
    keys={"use_tis": True, "tis_level": "none", "use_rs": True, "rs_level": "geometric"} | BAND,
)
TINY = Group(
    name="tiny",
    engine=EngineSpec(dtype="bfloat16", cache="fp8_e5m2"),
    methods=(NONE, GATE, Method(name="gate, random", like="gate")),
    seeds=(1, 2),
    num_steps=3,
    response_length=10,
    num_prompts=4,
    warmup_steps=2,
    eval_interval=2,
    dump_steps=(1,),
    shape=SHAPE,
)

# In all tests: an evaluation takes longer than the tiny step before it.
ensemble.EVALUATED_PROBLEMS = 32


def training_of(group: Group) -> Training:
    engine = group.engine.create(group.shape, batch=0, length=0, device=CPU)
    return Training(group, engine, CPU)


def uneven(weights: policy.Weights) -> policy.Weights:
    """Larger matrices, for distributions that are far from uniform."""
    return {name: weight * 5 if weight.dim() == 3 else weight for name, weight in weights.items()}


def rows_of(training: Training) -> list[dict[str, Any]]:
    rows = []
    while training.num_steps_done < training.group.num_steps:
        rows += training.step(lambda name, arrays: None)
    return rows
