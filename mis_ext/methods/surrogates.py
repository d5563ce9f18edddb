"""Surrogates: what carries the gradient. Each gives the objective per unit of advantage, and its slope in log pi.

A bound here stops the gradient of what lies beyond it, as the clamp of a ratio with gradient does. A bound of a
:class:`~mis_ext.Weight` does not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.formula import bounded_exp
from mis_ext.correction.statistics import STALENESS, STATISTICS, Pair, Reduce
from mis_ext.correction.weights import REDUCTIONS, Level
from mis_ext.methods.batch import Batch

Spread = Literal["token", "sequence"]


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
"""Of a ratio with gradient: a number, or one that follows from the token."""


class Slope(NamedTuple):
    """``[T]`` each: objective and derivative by log pi, per unit of advantage; where a bound stopped it."""

    value_T: Tensor
    slope_T: Tensor
    is_clipped_T: Tensor


class Surrogate:
    """The part of a method's loss that carries the gradient.

    Attributes:
        pair: Numerator and denominator of its ratio; None if it has none.
        reduce: How it reduces over a sequence; where by a sum or mean, a token without a ratio takes it along.
        spread: ``sequence``: each token's gradient is the mean over its sequence. ``token``: its own.
    """

    __slots__ = ()
    pair: Pair | None = None
    reduce: Reduce = "token"
    spread: Spread = "token"

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class Score(Surrogate):
    """``A log pi``: all that weighs the token stands in the factors."""

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""
        log_prob_T = batch.log_prob("current")
        return Slope(log_prob_T, torch.ones_like(log_prob_T), torch.zeros_like(batch.valid_T))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio(Surrogate):
    """``A`` times the ratio of ``pair`` at ``level``, clipped.

    Args:
        pair: Numerator, the current policy, and denominator.
        level: ``token``; ``geometric``: of the whole sequence; ``prefix``: up to the token, with a gradient through the
            token's own log-prob only.
        low: Lower bound, or None.
        high: Upper bound, or None.
        sides: ``outward``: the smaller of clipped and unclipped objective, so that only a move away from ratio 1 is
            stopped. ``both``: whatever the sign of the advantage.
        dual: Upper bound where the advantage is negative, or None.
        spread: ``sequence``: each token's gradient is the mean over its sequence, as where every token's ratio is that
            of the sequence and carries its gradient. ``token``: its own.
    """

    pair: Pair = STALENESS
    level: Level = "token"
    low: RatioBound | None = None
    high: RatioBound | None = None
    sides: Literal["outward", "both"] = "outward"
    dual: RatioBound | None = None
    spread: Spread = "token"
    reduce: Reduce = field(init=False, repr=False, compare=False, default="token")

    def __post_init__(self) -> None:
        object.__setattr__(self, "reduce", REDUCTIONS[self.level])

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""
        log_ratio_T = batch.log_ratio(self.pair, self.reduce)
        bounded_T = log_ratio_T
        low, high, dual = (self._log_edge(bound, batch) for bound in (self.low, self.high, self.dual))
        if self.sides == "both":
            bounded_T = _clamped(bounded_T, low, high)
            low = high = None
        if high is not None:
            bounded_T = torch.where(batch.advantages_T > 0.0, _clamped(bounded_T, None, high), bounded_T)
        if low is not None or dual is not None:
            bounded_T = torch.where(batch.advantages_T < 0.0, _clamped(bounded_T, low, dual), bounded_T)
        value_T, is_clipped_T = bounded_exp(bounded_T), bounded_T != log_ratio_T
        return Slope(value_T, torch.where(is_clipped_T, 0.0, value_T), is_clipped_T)

    def _log_edge(self, bound: RatioBound | None, batch: Batch) -> Tensor | float | None:
        if isinstance(bound, (GrowingBound, ProbabilityBound)):
            return bound.log_edge(batch, self.pair)
        return None if bound is None else STATISTICS["ratio"].edge(bound)


def _clamped(values_T: Tensor, low: Tensor | float | None, high: Tensor | float | None) -> Tensor:
    # One after the other: clamp takes no tensor beside a number.
    if low is not None:
        values_T = values_T.clamp(min=low)
    if high is not None:
        values_T = values_T.clamp(max=high)
    return values_T
