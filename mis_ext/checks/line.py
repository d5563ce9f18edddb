"""Lines through differences of log-probs, and powers of distributions, from sums."""

from __future__ import annotations

import math
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

    def through_zero(self, slope: float) -> float:
        """The share of the variance that a line through 0 with this slope explains: what all tokens share is none."""
        left = self.squared_difference - 2.0 * slope * self.behavior_difference + slope**2 * self.squared_behavior
        spread = self.squared_difference - self.difference**2 / max(self.num_tokens, 1.0)
        return 1.0 - left / spread if spread > 0.0 else 0.0


LINE_SUMS = Line._fields


class Moments(NamedTuple):
    """Sums over tokens of a weight times 1, s, o, s^2, s o and o^2, where s and o are log-probs of the two sides."""

    one: float
    s: float
    o: float
    ss: float
    so: float
    oo: float

    def swapped(self) -> Moments:
        """The same with the sides exchanged."""
        return Moments(self.one, self.o, self.s, self.oo, self.so, self.ss)

    def squares(self, slope: float, intercept: float) -> float:
        """The weighted sum of ``(o - slope s - intercept)^2``."""
        along = self.oo - 2.0 * slope * self.so + slope**2 * self.ss
        return along - 2.0 * intercept * (self.o - slope * self.s) + intercept**2 * self.one


class Power(NamedTuple):
    """The power of a distribution that another is, from the log-probs s and o of tokens that the first one sampled.

    Logits that are divided by a temperature make ``o_t = slope s_t - log sum_v p_t(v)^slope``, and only the position
    decides the sum. At every position, ``w = exp(o - s) - 1`` has mean 0 over what is sampled, whatever the two
    distributions are. So w does not go with anything that the position decides, ``Cov(w, o) = slope Cov(w, s)``: exact
    for any logits and any temperature. Noise of o alone adds its own square to the left, and moves the slope from 1.

    Attributes:
        excess: The mean of w: 0, unless the tokens were sampled from something else.
        excess_error: Its standard error.
        slope: The power.
        error: Its standard error.
        fit: The mean of w, weighted by the square of ``o - slope s``, between -1 and 1. It is 0 for a power.
    """

    excess: float
    excess_error: float
    slope: float
    error: float
    fit: float

    @classmethod
    def of(cls, plain: Moments, once: Moments, squared: Moments, absolute: Moments) -> Power:
        """From sums with the weights 1, w, w^2 and abs(w)."""
        count = max(plain.one, 1.0)
        excess, excess_error = once.one / count, math.sqrt(squared.one) / count
        along = once.s - plain.s * excess
        if not along or not squared.one:
            return cls(excess, excess_error, math.nan, math.inf, math.nan)
        slope = (once.o - plain.o * excess) / along
        intercept = (plain.o - slope * plain.s) / count
        left, signed, size = (each.squares(slope, intercept) for each in (squared, once, absolute))
        fit = signed / size if size > 0.0 else math.nan
        return cls(excess, excess_error, slope, math.sqrt(max(left, 0.0)) / abs(along), fit)
