"""Factors: what multiplies the gradient of a token without carrying gradient itself. A method has any number of them.

Every factor looks at the same valid tokens, whatever the others reject, so that their order does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from mis_ext.correction.formula import bounded_exp
from mis_ext.correction.gates import Action
from mis_ext.correction.weights import REDUCTIONS
from mis_ext.methods.batch import Batch, Pair, When
from mis_ext.methods.reductions import MethodReduce
from mis_ext.methods.statistics import METHOD_STATISTICS

RatioLevel = Literal["token", "prefix", "segment", "geometric", "sequence"]

REDUCE_OF_LEVEL: Mapping[str, MethodReduce] = {**REDUCTIONS, "prefix": "prefix", "segment": "segment_sum"}
"""How a level reduces log-ratios: their sum is the product of ratios, their mean the geometric mean."""


class Factor(Protocol):
    """What a method asks of a factor: a weight of tokens, or a rule that drops some."""

    @property
    def pair(self) -> Pair:
        """Numerator and denominator of the ratio, each a policy."""

    @property
    def reduces(self) -> tuple[MethodReduce, ...]:
        """How it reduces over a sequence: where by a sum or mean, a token without a ratio takes its sequence along."""

    @property
    def action(self) -> Action | None:
        """What becomes of a token that it drops; None of a weight, which drops none."""

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]``: a weight, or bool: whether to keep."""


class WeightFactor:
    """A factor that weighs tokens and drops none."""

    __slots__ = ()

    @property
    def action(self) -> Action | None:
        """None: a weight drops no token."""
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class RatioWeight(WeightFactor):
    """The ratio of ``pair`` at ``level``, to a ``power``, clamped into ``[low, high]``; 1 where ``when`` does not hold.

    Without gradient: a bound truncates, it does not stop a token's gradient.
    """

    pair: Pair
    level: RatioLevel = "token"
    low: float | None = None
    high: float | None = None
    power: float = 1.0
    when: When = "always"

    @property
    def reduces(self) -> tuple[MethodReduce, ...]:
        """How it reduces over a sequence: where by a sum or mean, a token without a ratio takes its sequence along."""
        return (REDUCE_OF_LEVEL[self.level],)

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` weights, at least 0, without gradient."""
        log_weight_T = batch.log_ratio(self.pair, REDUCE_OF_LEVEL[self.level]) * self.power
        weight_T = (
            bounded_exp(log_weight_T).clamp(self.low, self.high) if self._is_bounded else bounded_exp(log_weight_T)
        )
        return weight_T if self.when == "always" else torch.where(batch.when(self.when, self.pair), weight_T, 1.0)

    @property
    def _is_bounded(self) -> bool:
        return self.low is not None or self.high is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """0 where a statistic lies outside ``[low, high]`` and ``when`` holds, else 1.

    A minimum with a lower bound alone, or a maximum with an upper one, is a veto: it also drops every token of a
    sequence in which a response token is not valid.

    Args:
        pair: The policies that are compared.
        statistic: A name of :data:`~mis_ext.methods.statistics.METHOD_STATISTICS`; bounds of a ratio are ratios.
        reduce: The token's own value, or what is made of its sequence or of the batch.
        low: Lower bound, or None.
        high: Upper bound, or None.
        when: Tokens that can be dropped.
        of_tokens: Tokens that the statistic counts, where it is one of the batch.
        action: ``reject``: the token also leaves denominators that count kept tokens. ``zero``: it stays.
    """

    pair: Pair
    statistic: str = "ratio"
    reduce: MethodReduce = "token"
    low: float | None = None
    high: float | None = None
    when: When = "always"
    of_tokens: When = "always"
    action: Action = "reject"

    @property
    def reduces(self) -> tuple[MethodReduce, ...]:
        """How it reduces over a sequence: where by a sum or mean, a token without a ratio takes its sequence along."""
        return (self.reduce,)

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` bool: True where the token stays."""
        reduced = batch.worst if self._is_veto else batch.statistic
        value_T = reduced(self.statistic, self.pair, self.reduce, of=self.of_tokens)
        is_inside_T = self._is_inside(value_T)
        return is_inside_T if self.when == "always" else is_inside_T | ~batch.when(self.when, self.pair)

    def _is_inside(self, value_T: Tensor) -> Tensor:
        # One comparison for each bound that there is, and at least one, which NaN fails.
        edge = METHOD_STATISTICS[self.statistic].edge
        if self.high is None:
            return value_T >= (-math.inf if self.low is None else edge(self.low))
        if self.low is None:
            return value_T <= edge(self.high)
        return (value_T >= edge(self.low)) & (value_T <= edge(self.high))

    @property
    def _is_veto(self) -> bool:
        # As of a gate of the correction: a single token can drop its sequence, and the worst one has no ratio.
        return (self.reduce == "min" and self.high is None) or (self.reduce == "max" and self.low is None)
