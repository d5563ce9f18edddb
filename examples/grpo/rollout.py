# SPDX-License-Identifier: Apache-2.0
"""Samples of one rollout: draw and grade them, and store one data-parallel rank's share like slime and Miles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from torch import Tensor

from .engine import Completion
from .questions import Question, QuestionTask
from .task import CountingTask, Problem
from .transfer import moved


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A graded response.

    Attributes:
        problem: The problem.
        response_ids: The response.
        rollout_log_probs: Log-probs reported by the engine; None for a supervised response.
        weight_versions: Weight versions of the engine, named as in slime and Miles; empty for a supervised response.
        advantage: Advantage of every token of the response.
    """

    problem: Problem | Question
    response_ids: list[int]
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = field(default_factory=list)
    advantage: float = 1.0


def grade_groups(
    problems: Sequence[Problem | Question],
    completions: list[Completion],
    *,
    num_samples: int,
    divided: bool = True,
) -> tuple[list[Sample], Tensor]:
    """Grade completions, and compare each with the other completions of the same problem.

    The advantage is the reward minus the group's mean, divided by the group's standard deviation ("DeepSeekMath:
    Pushing the Limits of Mathematical Reasoning in Open Language Models", arXiv 2402.03300), or without the division if
    not ``divided`` ("Understanding R1-Zero-Like Training: A Critical Perspective", arXiv 2503.20783).

    Returns:
        The samples, and their rewards ``[problems, num_samples]``.
    """
    asked = [problem for problem in problems for _ in range(num_samples)]
    rewards = [problem.grade(answer.token_ids) for problem, answer in zip(asked, completions, strict=True)]
    rewards_GN = torch.tensor(rewards).view(len(problems), num_samples)
    deviation_GN = rewards_GN - rewards_GN.mean(dim=1, keepdim=True)
    if divided:
        deviation_GN = deviation_GN / (rewards_GN.std(dim=1, keepdim=True) + 1e-4)
    samples = [
        Sample(
            problem=problem,
            response_ids=answer.token_ids,
            rollout_log_probs=answer.log_probs,
            weight_versions=[str(answer.weight_version)],
            advantage=advantage,
        )
        for problem, answer, advantage in zip(asked, completions, deviation_GN.flatten().tolist(), strict=True)
    ]
    return samples, rewards_GN


def supervised_samples(task: CountingTask, rng: Random, count: int) -> list[Sample]:
    """Draw problems together with their right responses."""
    problems = [task.sample(rng) for _ in range(count)]
    return [Sample(problem=problem, response_ids=problem.solve(task.response_length)) for problem in problems]


def own_share(
    task: CountingTask | QuestionTask,
    samples: list[Sample],
    *,
    dp_rank: int,
    dp_size: int,
    padded: bool,
    device: torch.device,
) -> dict[str, Any]:
    """Store one data-parallel rank's samples in the format of slime's hooks: lists with one entry per sample.

    Args:
        task: Task that decides which tokens have a loss.
        samples: The whole rollout.
        dp_rank: The rank.
        dp_size: Number of data-parallel ranks; sample ``i`` goes to rank ``i % dp_size``.
        padded: Whether the model pads samples to the longest of the rollout (bshd) instead of packing them (thd).
        device: Device of the masks.
    """
    tokens = [torch.tensor(sample.problem.prompt_ids + sample.response_ids) for sample in samples]
    own = slice(dp_rank, None, dp_size)
    masks = [
        torch.tensor(task.loss_mask(sample.problem, len(sample.response_ids)), dtype=torch.int)
        for sample in samples[own]
    ]
    data = {
        "tokens": tokens[own],
        "total_lengths": [len(sample_tokens) for sample_tokens in tokens[own]],
        "response_lengths": [len(sample.response_ids) for sample in samples[own]],
        "loss_masks": moved(masks, device),
        "advantages": [sample.advantage for sample in samples[own]],
        "sample_indices": [*range(len(samples))][own],
        "engine_log_probs": [sample.rollout_log_probs for sample in samples[own]],
        "weight_versions": [sample.weight_versions for sample in samples[own]],
    }
    if padded:
        data["max_seq_lens"] = [max(map(len, tokens))] * len(masks)
    return data
