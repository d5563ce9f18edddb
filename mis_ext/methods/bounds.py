"""Bounds of a ratio: a number, or one that follows from the token."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mis_ext.correction.statistics import STATISTICS
from mis_ext.methods.batch import Batch, Pair


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingBound:
    """``exp(log_bound * t ** power)`` for the ``t``-th token of a response: as a sum of ``t`` log-ratios spreads."""

    log_bound: float
    power: float = 0.5

    def log_edge(self, batch: Batch, _pair: Pair) -> Tensor:
        """``[T]``: log of the bound of each token, in nats."""
        return self.log_bound * batch.position_T.pow(self.power)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityBound:
    """The ratio ``r`` with ``q r (r - 1) = gain``, ``q`` the denominator's probability: wide where a token is rare.

    Args:
        gain: Positive for a bound above 1, negative for one below, which is 1/2 where the equation has no solution.
        cap: Largest bound.
    """

    gain: float
    cap: float = 10.0

    def log_edge(self, batch: Batch, pair: Pair) -> Tensor:
        """``[T]``: log of the bound of each token, in nats."""
        probability_T = batch.log_prob(pair[1]).exp()
        discriminant_T = (1.0 + 4.0 * self.gain / probability_T).clamp_min(0.0)
        return ((1.0 + discriminant_T.sqrt()) * 0.5).clamp_max(self.cap).log()


RatioBound = float | GrowingBound | ProbabilityBound


def log_edge(bound: RatioBound, batch: Batch, pair: Pair) -> Tensor | float:
    """The log of a bound, ``[T]`` where it differs from token to token."""
    if isinstance(bound, (GrowingBound, ProbabilityBound)):
        return bound.log_edge(batch, pair)
    return STATISTICS["ratio"].edge(bound)
