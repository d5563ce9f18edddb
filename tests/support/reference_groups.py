# SPDX-License-Identifier: Apache-2.0
"""Baselines of prompts, and their weights, one sample after the other: imports nothing from the package."""

import statistics
from typing import NamedTuple


class GradedSample(NamedTuple):
    """A sample with its prompt, its trajectory, and its reward."""

    prompt: int
    trajectory: int
    reward: float
    counts: bool = True
    step: int = 0
    kept: int = 1
    tokens: int = 1


def advantages(samples: list[GradedSample], *, leave_one_out: bool, with_deviation: bool) -> list[float]:
    """The reward of each sample, compared with those of the counted trajectories of its prompt."""
    found = []
    for mine in samples:
        rewards = {each.trajectory: each.reward for each in samples if each.prompt == mine.prompt and each.counts}
        others = [reward for name, reward in rewards.items() if name != mine.trajectory]
        if mine.trajectory not in rewards or not others:
            found.append(0.0)
            continue
        compared = others if leave_one_out else [*rewards.values()]
        difference = mine.reward - statistics.fmean(compared)
        found.append(difference / (statistics.stdev(rewards.values()) + 1e-6) if with_deviation else difference)
    return found


def loss_of_prompts(samples: list[GradedSample], losses: list[float], *, step: int) -> float:
    """The mean over the prompts of a step of the mean over their kept tokens; ``losses`` are sums over kept tokens."""
    here = [(each, loss) for each, loss in zip(samples, losses, strict=True) if each.step == step]
    means = []
    for prompt in {each.prompt for each, _ in here}:
        kept = sum(each.kept for each, _ in here if each.prompt == prompt)
        if kept:
            means.append(sum(loss for each, loss in here if each.prompt == prompt) / kept)
    return statistics.fmean(means)
