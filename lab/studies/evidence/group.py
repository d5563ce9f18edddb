# SPDX-License-Identifier: Apache-2.0
"""What is trained: runs, and how their engine and trainer are set."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import mis_ext

from .engines import EngineSpec
from .policy import Shape

Scoring = Literal["reported", "sampled", "kept"]


@dataclass(frozen=True, kw_only=True)
class Method:
    """What happens to the loss of a run.

    Attributes:
        name: In results and plots.
        keys: Of a configuration file; empty is no correction.
        like: Instead of ``keys``: reject as many sequences, and of the others as many tokens, as this method does in
            the run with the same seed, at random. The control for every filter.
        stream: Of random numbers to sample with, of a pretrained model: another one shows what chance alone does.
        bypasses: Of a pretrained model: PPO's ratio is that to the policy that sampled, and nothing is corrected.
        replays_routing: Of a pretrained model: the trainer scores and trains with the experts that the engine chose.
        slows_down: Of a pretrained model: the learning rate falls as k3 grows, see ``pretrained.rate``.
    """

    name: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    like: str | None = None
    stream: int = 0
    bypasses: bool = False
    replays_routing: bool = False
    slows_down: bool = False

    @cached_property
    def config(self) -> mis_ext.CorrectionConfig | None:
        """None: not corrected by mis_ext."""
        if not self.keys:
            return None
        return mis_ext.config_from_mapping({**self.keys, "mis_metrics": [], "mis_max_reject_fraction": 1.0})


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
        staleness: The engine has the weights of so many steps ago.
        learning_rate: Of Adam.
        warmup_steps: Supervised steps before the first rollout.
        num_prompts: Per rollout.
        samples_per_prompt: Compared with each other for the advantage.
        updates: Optimizer steps per rollout.
        temperature: Of sampling and scoring.
        eval_interval: Steps between evaluations of the trainer's own policy.
        dump_steps: Steps of which the first method's log-probs and log-ratios are kept: some sequences, in float16.
        shape: Of the decoder.
        replays_routing: The trainer uses the experts that the engine chose ("rollout routing replay", R3).
        top_p: Share of the mass that the engine samples from.
        scoring: With ``top_p`` below 1, of which distribution the log-probs are. ``reported``: the whole one on both
            sides, as SGLang reports it. ``sampled``: the engine's over the tokens that it kept, the trainer's over all.
            ``kept``: both over the tokens that the engine kept (its sampling mask).
        branch_step: Until this step the engine is not stale and no method corrects: the runs of a seed are equal, as if
            they went on from one checkpoint.
    """

    name: str
    engine: EngineSpec
    methods: tuple[Method, ...]
    seeds: tuple[int, ...]
    num_steps: int = 120
    response_length: int = 64
    staleness: int = 0
    learning_rate: float = 1e-3
    warmup_steps: int = 60
    num_prompts: int = 32
    samples_per_prompt: int = 8
    updates: int = 2
    temperature: float = 1.0
    eval_interval: int = 20
    dump_steps: tuple[int, ...] = ()
    shape: Shape = field(default_factory=Shape)
    replays_routing: bool = False
    top_p: float = 1.0
    scoring: Scoring = "reported"
    branch_step: int = 0

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
