# SPDX-License-Identifier: Apache-2.0
"""Training groups: runs, and the settings of their engine and trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .engines import EngineSpec


@dataclass(frozen=True, kw_only=True)
class Method:
    """Changes of the loss of a run.

    Attributes:
        name: In results and plots.
        keys: Of a configuration file; empty is no correction.
    """

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Runs that train together: every method with every seed, otherwise equal.

    Attributes:
        name: Unique; results carry it.
        engine: Samples the responses.
        methods: One run each per seed. The first one is the base of comparisons.
        seeds: Of weights, problems and noise. Runs of one seed share all of them.
        num_steps: Rollouts.
        response_length: Tokens.
        learning_rate: Of Adam.
        num_prompts: Per rollout.
        samples_per_prompt: Compared with each other for the advantage.
        updates: Optimizer steps per rollout.
        temperature: Of sampling and scoring.
        eval_interval: Steps between evaluations of the trainer policy.
        dump_steps: Steps for which log-probs and log-ratios of the first method are kept: some sequences, in float16.
    """

    name: str
    engine: EngineSpec
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    num_steps: int = 120
    response_length: int = 64
    learning_rate: float = 1e-3
    num_prompts: int = 32
    samples_per_prompt: int = 8
    updates: int = 2
    temperature: float = 1.0
    eval_interval: int = 20
    dump_steps: tuple[int, ...] = ()
    replays_routing: bool = False

    @property
    def runs(self) -> list[tuple[Method, int]]:
        """Method and seed of each run."""
        return [(method, seed) for seed in self.seeds for method in self.methods]

    @property
    def condition(self) -> str:
        """The engine setting that groups of several seeds share."""
        return self.name.partition("-seed")[0]

    def with_seeds(self, seeds: tuple[int, ...]) -> Group:
        """The same with other seeds."""
        return dataclasses.replace(self, seeds=seeds, name=f"{self.condition}-seed{'_'.join(map(str, seeds))}")
