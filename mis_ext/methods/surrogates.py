"""Surrogates: what carries the gradient. Each gives the objective per unit of advantage, and its slope in log pi.

A bound here stops the gradient of what lies beyond it, as the clamp of a ratio with gradient does. A bound of a
:class:`~mis_ext.methods.factors.RatioWeight` does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from mis_ext.correction.formula import bounded_exp
from mis_ext.methods.batch import STALENESS, Batch, Pair
from mis_ext.methods.bounds import RatioBound, log_edge
from mis_ext.methods.factors import REDUCE_OF_LEVEL, RatioLevel
from mis_ext.methods.reductions import MethodReduce

Spread = Literal["token", "sequence"]


class Slope(NamedTuple):
    """``[T]`` each: objective and derivative by log pi, per unit of advantage; where a bound stopped it."""

    value_T: Tensor
    slope_T: Tensor
    is_clipped_T: Tensor


class Surrogate(Protocol):
    """What a method asks of its surrogate, the part of the loss that carries the gradient."""

    @property
    def spread(self) -> Spread:
        """``sequence``: each token's gradient is the mean over its sequence. ``token``: its own."""

    @property
    def reduces(self) -> tuple[MethodReduce, ...]:
        """How it reduces over a sequence: where by a sum or mean, a token without a ratio takes its sequence along."""

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Numerator and denominator of each of its ratios."""

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """``A log pi``: all that weighs the token stands in the factors."""

    @property
    def spread(self) -> Spread:
        """``token``: each token has its own gradient."""
        return "token"

    @property
    def reduces(self) -> tuple[MethodReduce, ...]:
        """How it reduces over a sequence: where by a sum or mean, a token without a ratio takes its sequence along."""
        return ()

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Empty: the score function has no ratio."""
        return ()

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""
        log_prob_T = batch.log_prob("current")
        return Slope(log_prob_T, torch.ones_like(log_prob_T), torch.zeros_like(batch.valid_T))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
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
    level: RatioLevel = "token"
    low: RatioBound | None = None
    high: RatioBound | None = None
    sides: Literal["outward", "both"] = "outward"
    dual: RatioBound | None = None
    spread: Spread = "token"

    @property
    def reduces(self) -> tuple[MethodReduce, ...]:
        """How it reduces over a sequence: where by a sum or mean, a token without a ratio takes its sequence along."""
        return (REDUCE_OF_LEVEL[self.level],)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Numerator and denominator of each of its ratios."""
        return (self.pair,)

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""
        log_ratio_T = batch.log_ratio(self.pair, REDUCE_OF_LEVEL[self.level])
        bounded_T = log_ratio_T
        low, high, dual = (
            None if bound is None else log_edge(bound, batch, self.pair) for bound in (self.low, self.high, self.dual)
        )
        if self.sides == "both":
            bounded_T = _clamped(bounded_T, low, high)
            low = high = None
        if high is not None:
            bounded_T = torch.where(batch.advantages_T > 0.0, _clamped(bounded_T, None, high), bounded_T)
        if low is not None or dual is not None:
            bounded_T = torch.where(batch.advantages_T < 0.0, _clamped(bounded_T, low, dual), bounded_T)
        value_T, is_clipped_T = bounded_exp(bounded_T), bounded_T != log_ratio_T
        return Slope(value_T, torch.where(is_clipped_T, 0.0, value_T), is_clipped_T)


def _clamped(values_T: Tensor, low: Tensor | float | None, high: Tensor | float | None) -> Tensor:
    # One after the other: clamp takes no tensor beside a number.
    if low is not None:
        values_T = values_T.clamp(min=low)
    if high is not None:
        values_T = values_T.clamp(max=high)
    return values_T
