# SPDX-License-Identifier: Apache-2.0
"""What came out of a study's runs, and how sure that is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from .ensemble import Row

Curve = NDArray[np.float64]


@dataclass(frozen=True)
class Condition:
    """The runs of one engine setting: per method and seed, a curve of each number over the steps."""

    name: str
    curves: dict[str, dict[int, dict[str, Curve]]]

    @classmethod
    def of_rows(cls, name: str, rows: Sequence[Row]) -> Condition:
        """Sort the rows of all groups of one setting."""
        runs: dict[str, dict[int, list[Row]]] = {}
        for row in rows:
            runs.setdefault(row["method"], {}).setdefault(row["seed"], []).append(row)
        return cls(
            name,
            {method: {seed: _curves(of_seed) for seed, of_seed in seeds.items()} for method, seeds in runs.items()},
        )

    @property
    def base(self) -> str:
        """The method without correction."""
        return next(iter(self.curves))

    def mean(self, method: str, number: str, part: slice = slice(None)) -> float:
        """Over seeds and steps."""
        return float(np.nanmean([curves[number][part] for curves in self.curves[method].values()]))

    def fell(self, method: str) -> float:
        """Share of seeds that end more than 0.2 below their best: in ten steps of rollouts, or in an evaluation."""
        window, fell = np.ones(10) / 10, []
        for curves in self.curves[method].values():
            own = curves["own_reward"][~np.isnan(curves["own_reward"])]
            both = np.convolve(curves["reward"], window, "valid"), own
            fell.append(any(curve.max() - curve[-1] > 0.2 for curve in both))
        return float(np.mean(fell))

    def difference(self, method: str, other: str, number: str, part: slice = slice(None)) -> Difference:
        """Of the mean over steps, paired by seed."""
        return self._paired(self.curves[method], self.curves[other], number, part)

    def verdicts(self, margin: float) -> dict[str, str]:
        """Of each method against none, with Holm's correction for all of them; random controls are not among them."""
        others = [method for method in self.curves if method != self.base and not method.endswith(", random")]
        differences = [self.difference(method, self.base, "reward") for method in others]
        adjusted = holm([difference.p_value for difference in differences])
        verdicts = [each.verdict(margin, p_value) for each, p_value in zip(differences, adjusted, strict=True)]
        return dict(zip(others, verdicts, strict=True))

    def difference_to(self, method: str, reference: Condition, number: str, part: slice | None) -> Difference:
        """The same to another setting's runs without correction; None is the last quarter."""
        others = reference.curves[reference.base]
        end = last_quarter(len(next(iter(others.values()))["reward"]))
        return self._paired(self.curves[method], others, number, end if part is None else part)

    @staticmethod
    def _paired(
        ours: dict[int, dict[str, Curve]], others: dict[int, dict[str, Curve]], number: str, part: slice
    ) -> Difference:
        pairs = [
            float(np.nanmean(ours[seed][number][part]) - np.nanmean(others[seed][number][part]))
            for seed in ours
            if seed in others
        ]
        return Difference.of_pairs(pairs)


class Difference(NamedTuple):
    """A paired difference, its 95 % confidence interval and the p-value of none (Student's t over seeds)."""

    mean: float
    low: float
    high: float
    num_pairs: int
    p_value: float

    @classmethod
    def of_pairs(cls, pairs: Sequence[float]) -> Difference:
        """One number per seed; with a single seed the interval is unbounded."""
        count, mean = len(pairs), float(np.mean(pairs))
        if count < 2:
            return cls(mean, -math.inf, math.inf, count, 1.0)
        error = float(np.std(pairs, ddof=1)) / math.sqrt(count)
        half = float(stats.t.ppf(0.975, count - 1)) * error
        # Pairs that are all equal differ for certain, or not at all.
        p_value = 2 * float(stats.t.sf(abs(mean) / error, count - 1)) if error else float(mean == 0)
        return cls(mean, mean - half, mean + half, count, p_value)

    def verdict(self, margin: float, p_value: float | None = None) -> str:
        """What the interval says; a difference within the margin is none (equivalence test at 2.5 % on each side).

        Args:
            margin: Of no difference. A claim needs a mean beyond it.
            p_value: Adjusted for the other comparisons of a table, in the place of its own.
        """
        if -margin < self.low and self.high < margin:
            return "no difference"
        is_sure = (self.p_value if p_value is None else p_value) < 0.05
        if not is_sure or abs(self.mean) <= margin:
            return "not resolved"
        return "better" if self.mean > 0 else "worse"

    def __str__(self) -> str:
        return f"{self.mean:+.3f} [{self.low:+.3f}, {self.high:+.3f}]"


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted for all of them (Holm, A simple sequentially rejective multiple test procedure, 1979)."""
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def benjamini_hochberg(p_values: Sequence[float]) -> list[float]:
    """Adjusted so that of what is below 0.05 a twentieth is false ("Controlling the False Discovery Rate", 1995)."""
    count, adjusted, smallest = len(p_values), [1.0] * len(p_values), 1.0
    descending = sorted(range(count), key=p_values.__getitem__, reverse=True)
    for place, index in enumerate(descending):
        smallest = min(smallest, count / (count - place) * p_values[index])
        adjusted[index] = smallest
    return adjusted


def last_quarter(num_steps: int) -> slice:
    """The steps at the end of a run."""
    return slice(num_steps - max(num_steps // 4, 1), None)


def pareto_k(ratios: NDArray[np.float64]) -> float:
    """Shape of the generalised Pareto distribution of the largest ratios.

    Above 0.7, means of importance-weighted samples cannot be trusted ("Pareto Smoothed Importance Sampling",
    arXiv 1507.02646). NaN where there are too few different ratios.
    """
    ordered = np.sort(ratios)
    num_tail = int(min(0.2 * len(ordered), 3 * math.sqrt(len(ordered))))
    excess = ordered[-num_tail:] - ordered[-num_tail - 1]
    excess = excess[excess > 0]
    if len(excess) < 5:
        return math.nan
    return float(stats.genpareto.fit(excess, floc=0)[0])


def _curves(rows: list[Row]) -> dict[str, Curve]:
    names = {name for row in rows for name, value in row.items() if isinstance(value, float)}
    ordered = sorted(rows, key=lambda row: row["step"])
    return {name: np.array([row.get(name, math.nan) for row in ordered]) for name in names}
