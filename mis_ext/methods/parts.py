# SPDX-License-Identifier: Apache-2.0
"""Parts that several methods share. A part of only one method is next to this method.

Surrogates carry the gradient: each gives the objective per unit of advantage, and its slope in log pi. A bound of a
surrogate stops the gradient of values beyond it, like the clamp of a ratio with gradient. A bound of a
:class:`PairWeight` does not.

Factors multiply this gradient and have no gradient: weights, and gates that drop tokens, for any pair of policies. Each
reads the same valid tokens, even those that another gate rejects, so their order does not matter.

Terms are subtracted: divergences between two policies, as estimated on the sampled token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from mis_ext.correction import config
from mis_ext.correction.config import Action
from mis_ext.correction.tokens import LAG, MAX_LOG_RATIO, MAX_NATS, STATISTICS, bounded_exp, bounded_expm1
from mis_ext.methods.batch import MISMATCH, UPDATE, Batch, Pair, Policy, Reduce, When
from mis_ext.validation import check_choice

Level = config.Level | Literal["prefix", "segment"]
REDUCTIONS: dict[str, Reduce] = {**config.REDUCTIONS, "prefix": "prefix", "segment": "segment_sum"}
"""Reduction of log-ratios by level. ``prefix``: the product up to the token. ``segment``: over generated tokens in a
row.
"""
Spread = Literal["token", "sequence"]
Sides = Literal["outward", "both"]
Estimator = Literal["k1", "k2", "k3", "squared"]

# Surrogates.


class Slope(NamedTuple):
    """``[T]`` each: objective and derivative by log pi, per unit of advantage; whether a bound stopped it.

    ``through_T``: bool, if the tokens of a sequence share one ratio: the tokens that it depends on. The gradient of
    each is the mean over the sequence of the slopes of all tokens, with their own advantages, weights and masks. None:
    each token has its own ratio.
    """

    value_T: Tensor
    slope_T: Tensor
    is_clipped_T: Tensor
    through_T: Tensor | None = None

    def spread(self, slope_T: Tensor, batch: Batch) -> Tensor:
        """``[T]``: the derivative by each log-prob of a sum whose terms have these slopes in their ratio."""
        if self.through_T is None:
            return slope_T
        return torch.where(self.through_T, batch.reductions.reduce(slope_T, batch.valid_T, "mean"), 0.0)


def ratio_and_slope(log_ratio_T: Tensor, bounded_T: Tensor) -> tuple[Tensor, Tensor]:
    """``[T]`` each: the ratio of a bounded log-ratio, and its derivative by ``log_ratio_T``, 0 beyond a bound.

    A ratio above ``e^20`` or below ``e^-20`` is beyond a bound, because every exponent is clamped.
    """
    near_T = bounded_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio_T = near_T.exp()
    return ratio_T, torch.where(near_T == log_ratio_T, ratio_T, 0.0)


class Surrogate:
    """The part of a method's loss that carries the gradient.

    Attributes:
        pair: Numerator and denominator of its ratio; None if it has none.
        reduce: Its reduction over a sequence. In a sum or mean, a token without a ratio invalidates the sequence.
        spread: ``sequence``: each token's gradient is the mean over its sequence, see :class:`Slope`. ``token``: its
            own gradient.
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
    """``A log pi``: all weights are in the factors."""

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``, as :meth:`Surrogate.evaluate`: log pi, whose slope is 1."""
        log_prob_T = batch.log_prob("current")
        return Slope(log_prob_T, torch.ones_like(log_prob_T), torch.zeros_like(batch.valid_T))


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowingBound:
    """``exp(log_bound * t ** power)`` for token ``t`` of a response: it grows like the spread of ``t`` log-ratios."""

    log_bound: float
    power: float = 0.5

    def log_edge(self, batch: Batch, _pair: Pair) -> Tensor:
        """``[T]``: log of the bound of each token, in nats."""
        return self.log_bound * batch.position_T.pow(self.power)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbabilityBound:
    """The ratio ``r`` with ``q r (r - 1) = gain``, ``q`` the denominator's probability: wide for rare tokens.

    Args:
        gain: Positive for a bound above 1, negative for a bound below 1, which is 1/2 if the equation has no solution.
        cap: Largest bound.
    """

    gain: float
    cap: float = 10.0

    def log_edge(self, batch: Batch, pair: Pair) -> Tensor:
        """``[T]``: log of the bound of each token, in nats."""
        # r = (1 + sqrt(1 + 4 gain / q)) / 2
        discriminant_T = (1.0 + 4.0 * self.gain / batch.log_prob(pair[1]).exp()).clamp_min(0.0)
        return ((1.0 + discriminant_T.sqrt()) * 0.5).clamp_max(self.cap).log()


RatioBound = float | GrowingBound | ProbabilityBound
"""Bound of a ratio with gradient: a number, or a function of the token."""


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
            stopped. ``both``: for both signs of the advantage.
        dual: Upper bound for a negative advantage, or None.
        spread: ``sequence``: every token has the ratio of the sequence with its gradient, so each token's gradient is
            the mean over its sequence. ``token``: its own gradient.
    """

    pair: Pair = UPDATE
    level: Level = "token"
    low: RatioBound | None = None
    high: RatioBound | None = None
    sides: Sides = "outward"
    dual: RatioBound | None = None
    spread: Spread = "token"
    reduce: Reduce = field(init=False, repr=False, compare=False, default="token")

    def __post_init__(self) -> None:
        check_pair("pair", self.pair)
        check_choice("pair: the numerator", self.pair[0], ("current",))
        check_choice("sides", self.sides, get_args(Sides))
        check_choice("spread", self.spread, get_args(Spread))
        object.__setattr__(self, "reduce", REDUCTIONS[check_choice("level", self.level, REDUCTIONS)])
        if self.spread == "sequence" and self.level != "geometric":
            raise ValueError(f"level must be geometric with spread='sequence', got {self.level!r}: only this is a mean")
        low, high = (each if isinstance(each, int | float) else None for each in (self.low, self.high))
        _check_order(-math.inf if low is None else low, math.inf if high is None else high)

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``, as :meth:`Surrogate.evaluate`: the ratio, whose slope is the ratio, 0 beyond a bound."""
        log_ratio_T = batch.log_ratio(self.pair, self.reduce)
        bounded_T = self.bounded(log_ratio_T, batch)
        value_T, slope_T = ratio_and_slope(log_ratio_T, bounded_T)
        through_T = batch.valid_T if self.spread == "sequence" else None
        # The clamp of exponents does not count as a clip of the method.
        return Slope(value_T, slope_T, bounded_T != log_ratio_T, through_T)

    def bounded(self, log_ratio_T: Tensor, batch: Batch) -> Tensor:
        """``[T]``: the log-ratio, or the bound that stops it."""
        low, high, dual = (self._log_edge(bound, batch) for bound in (self.low, self.high, self.dual))
        bounded_T = log_ratio_T
        if self.sides == "both":
            bounded_T, low, high = _clamped(log_ratio_T, low, high), None, None
        if high is not None:
            bounded_T = torch.where(batch.advantages_T > 0.0, _clamped(bounded_T, None, high), bounded_T)
        if low is not None or dual is not None:
            bounded_T = torch.where(batch.advantages_T < 0.0, _clamped(bounded_T, low, dual), bounded_T)
        return bounded_T

    def _log_edge(self, bound: RatioBound | None, batch: Batch) -> Tensor | float | None:
        if isinstance(bound, (GrowingBound, ProbabilityBound)):
            return bound.log_edge(batch, self.pair)
        return None if bound is None else STATISTICS["ratio"].edge(bound)


def _clamped(values_T: Tensor, low: Tensor | float | None, high: Tensor | float | None) -> Tensor:
    # Separately, because clamp does not accept a tensor together with a number.
    values_T = values_T if low is None else values_T.clamp(min=low)
    return values_T if high is None else values_T.clamp(max=high)


# Factors.


class Factor:
    """A weight of tokens, or a rule that drops some.

    Attributes:
        pair: Numerator and denominator of the ratio, each a policy.
        reduce: Its reduction over a sequence. In a sum or mean, a token without a ratio invalidates the sequence.
        action: The effect on a dropped token; None for a weight, which drops none.
    """

    __slots__ = ()
    pair: Pair
    reduce: Reduce = "token"
    action: Action | None = None

    @property
    def rejects_single_tokens(self) -> bool:
        """True if a sequence can lose some of its tokens and keep others."""
        return False

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]``, without gradient: a weight of at least 0, or bool: whether to keep the token."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class PairWeight(Factor):
    """The ratio of ``pair`` at ``level``, raised to ``power`` and then clamped into ``[low, high]``.

    Args:
        pair: Numerator and denominator.
        level: ``token``, ``sequence`` (product of ratios), ``geometric`` (their geometric mean), ``prefix`` (product up
            to the token) or ``segment`` (product over a run of generated tokens).
        low: Lower bound.
        high: Upper bound.
        power: Exponent of the ratio.
        when: Tokens that get this weight; all other tokens have weight 1.
    """

    pair: Pair = MISMATCH
    level: Level = "token"
    low: float = 0.0
    high: float = math.inf
    power: float = 1.0
    when: When = "always"
    reduce: Reduce = field(init=False, repr=False, compare=False, default="token")

    def __post_init__(self) -> None:
        check_pair("pair", self.pair)
        check_choice("when", self.when, get_args(When))
        object.__setattr__(self, "reduce", REDUCTIONS[check_choice("level", self.level, REDUCTIONS)])
        _check_order(self.low, self.high)

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` weights, without gradient."""
        log_ratio_T = batch.log_ratio(self.pair, self.reduce)
        low, high = map(STATISTICS["ratio"].edge, (self.low, self.high))
        log_weight_T = log_ratio_T if self.power == 1.0 else log_ratio_T * self.power
        weight_T = log_weight_T.clamp(max(low, -MAX_LOG_RATIO), min(high, MAX_LOG_RATIO)).exp()
        return weight_T if self.when == "always" else torch.where(batch.when(self.when, self.pair), weight_T, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class PairGate(Factor):
    """Keep the tokens whose statistic of ``pair``, reduced over their sequence, lies in ``[low, high]``.

    A minimum without an upper bound, or a maximum without a lower bound, also drops every sequence with an invalid
    response token.

    Args:
        statistic: A name of :data:`~mis_ext.correction.tokens.STATISTICS`, except ``lag``, which methods do not get.
        reduce: See :data:`~mis_ext.methods.batch.Reduce`.
        low: Lower bound.
        high: Upper bound.
        action: ``reject`` sets the mask of dropped tokens to 0, ``zero`` their weight.
        pair: Numerator and denominator of the ratio.
        when: Tokens that can be dropped.
        of_tokens: Tokens that the statistic counts, if it is over several tokens.
    """

    statistic: str = "ratio"
    reduce: Reduce = "token"
    low: float = -math.inf
    high: float = math.inf
    action: Action = "reject"
    pair: Pair = MISMATCH
    when: When = "always"
    of_tokens: When = "always"

    def __post_init__(self) -> None:
        check_pair("pair", self.pair)
        check_choice("statistic", self.statistic, [name for name in STATISTICS if name != LAG])
        for key, choices in {"reduce": Reduce, "action": Action, "when": When, "of_tokens": When}.items():
            check_choice(key, getattr(self, key), get_args(choices))
        _check_order(self.low, self.high)

    @property
    def rejects_single_tokens(self) -> bool:
        """See :class:`Factor`."""
        is_of_sequences = self.reduce in ("sum", "mean", "max", "min") and self.when == "always"
        return self.action == "reject" and not is_of_sequences

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` bool: whether the token stays."""
        open_end = {"min": self.high == math.inf, "max": self.low == -math.inf}
        reduced = batch.worst if open_end.get(self.reduce) else batch.statistic
        value_T = reduced(self.statistic, self.pair, self.reduce, of=self.of_tokens)
        low, high = map(STATISTICS[self.statistic].edge, (self.low, self.high))
        # NaN is in no interval.
        is_inside_T = (value_T >= low) & (value_T <= high)
        return is_inside_T if self.when == "always" else is_inside_T | ~batch.when(self.when, self.pair)


def check_pair(key: str, pair: Pair) -> None:
    """Raise an error for values other than a numerator and a denominator."""
    if not isinstance(pair, tuple) or len(pair) != 2:
        raise TypeError(f"{key} must be a tuple of two policies, got {pair!r}")
    for policy in pair:
        check_choice(key, policy, get_args(Policy))


def _check_order(low: float, high: float) -> None:
    if not low <= high:  # Neither is NaN.
        raise ValueError(f"low must be at most high, got low={low} and high={high}")


# Terms.


class Penalty(NamedTuple):
    """``[T]`` each: the penalty, and its derivative by log pi."""

    value_T: Tensor
    slope_T: Tensor


class Term:
    """A KL term or another penalty of every valid token, which is subtracted from the objective.

    Attributes:
        pair: The policies that it compares.
        scale: Its factor.
        reduce: Its reduction over other tokens.
        needs_state_values: Whether it uses the value of the token's state.
    """

    __slots__ = ()
    pair: Pair
    scale: float
    reduce: Reduce = "token"
    needs_state_values: bool = False

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """All pairs of policies that it compares."""
        return (self.pair,)

    def evaluate(self, batch: Batch) -> Penalty:
        """Value and slope ``[T]`` of each token, not yet multiplied by ``scale``."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, slots=True)
class KlTerm(Term):
    """``scale`` times an estimate of the KL between the current policy and another, subtracted from the objective.

    With ``d = log(current / other)``:

    | estimator | value | its gradient's coefficient | the gradient's expectation |
    |---|---|---|---|
    | ``k1`` | ``d`` | 1 | 0 on-policy: no penalty at all |
    | ``k2`` | ``d^2 / 2`` | ``d`` | that of ``KL(current, other)``, on-policy |
    | ``k3`` | ``exp(-d) - 1 + d`` | ``1 - exp(-d)`` | that of ``KL(other, current)``, on-policy |
    | ``squared`` | ``d^2`` | ``2 d`` | twice that of ``k2`` |

    With ``importance`` the value is multiplied by that ratio ``w``, with gradient through ``w``: the coefficient is
    ``w`` times the sum of value and coefficient. For ``k3`` that is ``w d``, and its expectation is the gradient of
    ``KL(current, other)`` for any sampling policy.

    Exponents are clamped to 20 nats. Beyond, the coefficient is not 0, unlike that of a ratio in the policy gradient,
    because it must pull the policy back.

    Args:
        estimator: As above.
        scale: Its factor.
        pair: The current policy, and the other one.
        importance: The ratio that makes it unbiased: current / the policy that sampled the token; or None.
        cap: Largest absolute value; the gradient is 0 beyond it. Or None.

    References:
        Schulman, Approximating KL Divergence, 2020; DeepSeek-V3.2, arXiv:2512.02556 (unbiased).
    """

    estimator: Estimator
    scale: float
    pair: Pair = ("current", "reference")
    importance: Pair | None = None
    cap: float | None = None

    def __post_init__(self) -> None:
        check_choice("estimator", self.estimator, get_args(Estimator))
        check_pair("pair", self.pair)
        if self.importance is not None:
            check_pair("importance", self.importance)

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Numerator and denominator of each of its ratios."""
        return (self.pair,) if self.importance is None else (self.pair, self.importance)

    def evaluate(self, batch: Batch) -> Penalty:
        """Value and slope ``[T]`` of each token in nats, not yet multiplied by ``scale``."""
        log_ratio_T = batch.log_ratio(self.pair)
        if self.estimator == "k1":
            value_T, slope_T = log_ratio_T, torch.ones_like(log_ratio_T)
        elif self.estimator == "k3":
            excess_T = bounded_expm1(-log_ratio_T)
            value_T, slope_T = excess_T + log_ratio_T.clamp(min=-MAX_LOG_RATIO), -excess_T
        else:
            factor = 0.5 if self.estimator == "k2" else 1.0
            # No clamp of an exponent is needed: the square is finite for all log-probs of engines.
            near_T = log_ratio_T.clamp(-MAX_NATS, MAX_NATS)
            value_T, slope_T = factor * near_T.square(), 2.0 * factor * near_T
        if self.importance is not None:
            importance_T = bounded_exp(batch.log_ratio(self.importance))
            # For k3 the sum is the log-ratio itself, without the rounding error of a difference of two exponentials.
            through_T = log_ratio_T if self.estimator == "k3" else value_T + slope_T
            value_T, slope_T = importance_T * value_T, importance_T * through_T
        if self.cap is not None:
            slope_T = torch.where(value_T.abs() <= self.cap, slope_T, 0.0)
            value_T = value_T.clamp(-self.cap, self.cap)
        return Penalty(value_T, slope_T)
