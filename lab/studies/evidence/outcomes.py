# SPDX-License-Identifier: Apache-2.0
"""Paired differences, and tests that are corrected for their number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import stats


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
        """Verdict of the interval; no difference if within the margin (equivalence test at 2.5 % on each side).

        Args:
            margin: Of no difference. A claim needs a mean beyond it.
            p_value: Adjusted for the other comparisons of a table; replaces its own p-value.
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
