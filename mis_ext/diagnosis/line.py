"""Lines through differences of log-probs, from sums."""

from __future__ import annotations

from typing import NamedTuple


class Fit(NamedTuple):
    """A straight line: its slope, and the share of the variance that it explains."""

    slope: float
    explained: float


class Line(NamedTuple):
    """Sums over tokens, for the regression of the difference on either log-prob."""

    num_tokens: float
    difference: float
    behavior: float
    proximal: float
    squared_difference: float
    squared_behavior: float
    squared_proximal: float
    behavior_difference: float
    proximal_difference: float

    def on(self, side: str) -> Fit:
        """The difference as a line in the log-prob of a side."""
        sums = self._asdict()
        count = max(self.num_tokens, 1.0)
        spread = sums[f"squared_{side}"] - sums[side] ** 2 / count
        spread_difference = self.squared_difference - self.difference**2 / count
        together = sums[f"{side}_difference"] - sums[side] * self.difference / count
        if spread <= 0.0 or spread_difference <= 0.0:
            return Fit(0.0, 0.0)
        return Fit(together / spread, together**2 / (spread * spread_difference))


LINE_SUMS = Line._fields
