# SPDX-License-Identifier: Apache-2.0
"""The noise floor: how far runs lie apart that repeat one setting, method and seed."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from scipy import stats

from .group import Group
from .results import Results, settings
from .studies import Study

# What may differ between two runs that are the same: names, which runs trained beside them, and what was kept of them.
NOT_OF_A_RUN = ("name", "seeds", "methods", "dump_steps")


@dataclass(frozen=True)
class Floor:
    """Differences of the mean reward within pairs of equal runs (A/A).

    Sampling on a GPU does not repeat itself bit by bit, so equal runs part, and training amplifies it.

    Attributes:
        differences: All that count.
        by_setting: Those of the settings that have some, by name.
        is_own: They are of one setting, not of all together.
    """

    differences: tuple[float, ...]
    by_setting: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    is_own: bool = False

    @classmethod
    def of_results(cls, studies: Iterable[Study], results: Results) -> Floor:
        """Of all finished runs that repeat another one."""
        runs: dict[str, list[tuple[str, float]]] = {}
        for group in (group for study in studies for group in study.groups):
            if not results.is_done(group):
                continue
            for (method, seed), rewards in _rewards(group, results).items():
                runs.setdefault(_identity(group, method, seed), []).append((group.condition, float(np.mean(rewards))))
        differences: list[float] = []
        by_setting: dict[str, tuple[float, ...]] = {}
        for of_run in runs.values():
            for (name, reward), (other, again) in itertools.combinations(of_run, 2):
                differences.append(reward - again)
                for setting in {name, other}:
                    by_setting[setting] = (*by_setting.get(setting, ()), reward - again)
        return cls(tuple(differences), by_setting)

    def of(self, setting: str) -> Floor:
        """From its own repeated runs, or from those of all settings where it has none."""
        own = self.by_setting.get(setting)
        return self if own is None else Floor(own, is_own=True)

    @property
    def spread(self) -> float:
        """Root mean square; NaN where no run repeats another."""
        return math.sqrt(float(np.mean(np.square(self.differences)))) if self.differences else math.nan

    def half_width(self, num_seeds: int) -> float:
        """Of the 95 % interval of a difference between equal arms with so many seeds; NaN where none repeats."""
        if not self.differences:
            return math.nan
        return float(stats.t.ppf(0.975, len(self.differences))) * self.spread / math.sqrt(num_seeds)

    def margin(self, num_seeds: int, least: float) -> float:
        """Within it a difference is none: the floor, and at least ``least``."""
        half_width = self.half_width(num_seeds)
        return least if math.isnan(half_width) else max(least, half_width)

    def sentence(self, num_seeds: int) -> str:
        """For the head of a table."""
        if not self.differences:
            return "Noise floor: not measured, no run repeats another."
        of_all = "pooled, as no run of this setting was repeated"
        return (
            f"Noise floor, {'of this setting' if self.is_own else of_all}: an arm against itself has "
            f"±{self.half_width(num_seeds):.3f} with {num_seeds} seeds, from {len(self.differences)} pairs of equal "
            f"runs (root mean square {self.spread:.3f}, {max(map(abs, self.differences)):.3f} at most)."
        )


def _rewards(group: Group, results: Results) -> dict[tuple[str, int], list[float]]:
    found: dict[tuple[str, int], list[float]] = {}
    for row in results.rows(group):
        found.setdefault((row["method"], row["seed"]), []).append(row["reward"])
    return found


def _identity(group: Group, method: str, seed: int) -> str:
    """Equal for runs that differ in nothing."""
    shared = {name: value for name, value in settings(group).items() if name not in NOT_OF_A_RUN}
    keys = next(each for each in group.methods if each.name == method)
    # A random control depends on the method that it imitates.
    what = [method, keys.like] if keys.like else dict(keys.keys)
    return json.dumps([shared, what, seed], sort_keys=True)
