# SPDX-License-Identifier: Apache-2.0
"""What is trained: one run of a pretrained model."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass

from evidence.group import Group, Method


@dataclass(frozen=True, kw_only=True)
class PretrainedGroup(Group):
    """One method with one seed, from the weights of a checkpoint on.

    Attributes:
        model: The checkpoint's name, for the record; the folder is said at run time.
        task: Of ``grpo.questions``; the file of a prepared one lies among the results.
        max_prompt: Tokens that the engine has room for before the response.
        updates: Optimizer steps per rollout. 0: rollouts are scored, and nothing is trained or evaluated.
        num_evaluated: Held-out questions of an evaluation, one response each.
        micro_batch_size: Responses in one pass of the trainer.
        max_tokens: Of one pass instead, padding included: responses of similar length, padded to the longest of them,
            and logits of their own tokens alone. 0: ``micro_batch_size`` responses as they come.
        divides_advantages: By the standard deviation of their question.
        per_token_loss: The mean over all tokens of a step, in which long responses weigh more; else over responses.
        evaluates_in_engine: The engine samples from the trainer's weights in its own dtype, without rounding them, or
            keys and values.
        evaluates_greedily: Evaluations sample a second time, at a temperature of 0.001.
        steps_after_alert: The run ends so many steps after its alert. A run that forks from no other keeps its state at
            the alert beside the results, and goes on.
        forks_from: The name of the run from whose state at the alert this one begins.
        stops_collapsed: A run in which rollouts and trainer policy have collapsed goes no further.
        last_fall: Falls that begin later do not count: a run that stands at this step goes no further. 0: all count.
        num_dumped: Responses of a rollout whose log-probs are kept.
        dtype: Of the trainer's weights: bfloat16 or float16, beside which it updates a copy in float32, or float32.

    Raises:
        ValueError: Passes of so many tokens, or evaluations in the engine, do not fit the other settings.
    """

    model: str = "SmolLM2-135M-Instruct"
    task: str = "arithmetic"
    num_steps: int = 60
    response_length: int = 32
    max_prompt: int = 96
    learning_rate: float = 1e-5
    num_prompts: int = 64
    updates: int = 1
    eval_interval: int = 10
    num_evaluated: int = 256
    micro_batch_size: int = 64
    max_tokens: int = 0
    divides_advantages: bool = True
    per_token_loss: bool = False
    evaluates_in_engine: bool = False
    evaluates_greedily: bool = False
    steps_after_alert: int = 0
    forks_from: str = ""
    stops_collapsed: bool = False
    last_fall: int = 0
    num_dumped: int = 64
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.max_tokens and self.updates > 1:
            raise ValueError(f"{self.name}: max_tokens is for one update of a rollout, got updates={self.updates}")
        if self.evaluates_in_engine and (
            self.engine.kind != "sglang"
            or (self.engine.started.weights, self.engine.cache_scale, self.engine.dtype) != ("auto", 1.0, self.dtype)
            or self.num_evaluated != self.num_prompts * self.samples_per_prompt
        ):
            raise ValueError(
                f"{self.name}: evaluates_in_engine needs SGLang in the trainer's dtype, {self.dtype}, that multiplies "
                "in it and scales no cache, and as many evaluated questions as a rollout has responses"
            )

    @property
    def run(self) -> tuple[Method, int]:
        """Its method and seed."""
        ((method, seed),) = self.runs
        return method, seed

    def with_seeds(self, seeds: tuple[int, ...]) -> PretrainedGroup:
        """The same method with another seed."""
        ((method,), (seed,)) = self.methods, seeds
        name = f"{self.condition}-seed{seed}-{_slug(method.name)}"
        return dataclasses.replace(self, name=name, seeds=seeds)


def runs_of(conditions: Sequence[PretrainedGroup]) -> tuple[PretrainedGroup, ...]:
    """The runs of conditions, each a group: all of the first seed first, so that what ran can be compared."""
    seeds = dict.fromkeys(seed for condition in conditions for seed in condition.seeds)
    return tuple(
        dataclasses.replace(condition, methods=(method,)).with_seeds((seed,))
        for seed in seeds
        for condition in conditions
        if seed in condition.seeds
        for method in condition.methods
    )


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "_", name).strip("_")
