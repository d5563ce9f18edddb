# SPDX-License-Identifier: Apache-2.0
"""Keys of what responses to one prompt share: their baseline and their weight, in slime and Miles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mis_ext.keys.loss_refusals import ESTIMATORS, against_groups
from mis_ext.keys.refusals import refuse_first
from mis_ext.keys.rows import GROUP_ROWS, Baseline, BaselineOver, read_rows
from mis_ext.validation import Errors


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupConfig:
    """Keys that the responses to one prompt share.

    Attributes:
        baseline: ``mis_group_baseline``: what a reward is compared with.
        over: ``mis_group_over``: which trajectories count in it: ``all``, those that are ``trained``, or those of
            which the correction has ``kept`` a token.
        prompt_mean: ``mis_prompt_mean``: every prompt weighs the same.
        with_deviation: The difference is divided by the standard deviation (``grpo_std_normalization``).
        num_answers: ``n_samples_per_prompt``, or None.
        per_token_loss: The framework divides by all tokens of a step.
        said: The keys that were given.
    """

    baseline: Baseline
    over: BaselineOver
    prompt_mean: bool
    with_deviation: bool
    num_answers: int | None
    per_token_loss: bool
    said: tuple[str, ...]

    @property
    def of_rewards(self) -> str:
        """The keys of the baseline that were given, with their values."""
        values = {"mis_group_baseline": self.baseline, "mis_group_over": self.over}
        return ", ".join(f"{key}: {value}" for key, value in values.items() if key in self.said)

    @property
    def needs_rollout(self) -> str | None:
        """The key that needs the whole scored rollout, or None."""
        if self.over == "kept":
            return "mis_group_over: kept"
        return "mis_prompt_mean: true" if self.prompt_mean else None


def read_group(given: Mapping[str, Any]) -> GroupConfig:
    """Read the keys of responses to one prompt.

    Raises:
        ValueError: A key is wrong with a flag of the framework, or needs a flag that is not set.
    """
    wrong = Errors()
    keys = read_rows(GROUP_ROWS, given, wrong)
    wrong.raise_all()
    group = GroupConfig(
        baseline=keys.get("mis_group_baseline", "mean"),
        over=keys.get("mis_group_over", "trained"),
        prompt_mean=keys.get("mis_prompt_mean", False),
        with_deviation=given.get("grpo_std_normalization") is not False
        and given.get("advantage_estimator") in (None, *ESTIMATORS),
        num_answers=given.get("n_samples_per_prompt"),
        per_token_loss=bool(given.get("calculate_per_token_loss")),
        said=tuple(keys),
    )
    refuse_first(against_groups(given, group))
    return group
