"""Additive terms: divergences between two policies, as estimated on the sampled token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.formula import MAX_LOG_RATIO, MAX_NATS, bounded_exp, bounded_expm1
from mis_ext.correction.statistics import Pair, Reduce
from mis_ext.methods.batch import Batch

Estimator = Literal["k1", "k2", "k3", "squared"]


class Penalty(NamedTuple):
    """``[T]`` each: the penalty, and its derivative by log pi."""

    value_T: Tensor
    slope_T: Tensor


class Term:
    """A KL term or another penalty per token, which is subtracted from the objective.

    Attributes:
        pair: The policies that it compares.
        scale: What it is multiplied by.
        on: ``valid``: every response token that has log-probs. ``kept``: those that no factor rejects.
        reduce: What it looks at besides the token itself.
        needs_state_values: Whether it looks at the value of the token's state.
    """

    __slots__ = ()
    pair: Pair
    scale: float
    on: Literal["valid", "kept"] = "valid"
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
    """``scale`` times an estimate of how far the current policy is from another one, subtracted from the objective.

    With ``d = log(current / other)``:

    | estimator | value | its gradient's coefficient | the gradient's expectation |
    |---|---|---|---|
    | ``k1`` | ``d`` | 1 | 0 on-policy: no penalty at all |
    | ``k2`` | ``d^2 / 2`` | ``d`` | that of ``KL(current, other)``, on-policy |
    | ``k3`` | ``exp(-d) - 1 + d`` | ``1 - exp(-d)`` | that of ``KL(other, current)``, on-policy |
    | ``squared`` | ``d^2`` | ``2 d`` | twice that of ``k2`` |

    With ``importance`` the value is multiplied by that ratio ``w``, with gradient through ``w``: the coefficient is
    ``w`` times the sum of value and coefficient. Of ``k3`` that is ``w d``, and its expectation is the gradient of
    ``KL(current, other)``, whatever sampled.

    Args:
        estimator: As above.
        scale: What it is multiplied by.
        pair: The current policy, and the other one.
        importance: The ratio that makes it unbiased: current by what the token was sampled from; or None.
        cap: Largest absolute value, beyond which the gradient stops; or None.
        on: ``valid``: every response token that has log-probs. ``kept``: those that no factor rejects.

    References:
        Schulman, Approximating KL Divergence, 2020; DeepSeek-V3.2, arXiv:2512.02556 (unbiased).
    """

    estimator: Estimator
    scale: float
    pair: Pair = ("current", "reference")
    importance: Pair | None = None
    cap: float | None = None
    on: Literal["valid", "kept"] = "valid"

    @property
    def pairs(self) -> tuple[Pair, ...]:
        """Numerator and denominator of each of its ratios."""
        return (self.pair,) if self.importance is None else (self.pair, self.importance)

    def evaluate(self, batch: Batch) -> Penalty:
        """Value and slope ``[T]`` of each token in nats, not yet multiplied by ``scale``."""
        log_ratio_T = batch.log_ratio(self.pair)
        value_T, slope_T = self._estimate(log_ratio_T)
        if self.importance is not None:
            importance_T = bounded_exp(batch.log_ratio(self.importance))
            # Of k3 the sum is the log-ratio itself, without the digits that the difference of two exponentials loses.
            through_T = log_ratio_T if self.estimator == "k3" else value_T + slope_T
            value_T, slope_T = importance_T * value_T, importance_T * through_T
        if self.cap is not None:
            slope_T = torch.where(value_T.abs() <= self.cap, slope_T, 0.0)
            value_T = value_T.clamp(-self.cap, self.cap)
        return Penalty(value_T, slope_T)

    def _estimate(self, log_ratio_T: Tensor) -> Penalty:
        if self.estimator == "k1":
            return Penalty(log_ratio_T, torch.ones_like(log_ratio_T))
        if self.estimator in ("k2", "squared"):
            factor = 0.5 if self.estimator == "k2" else 1.0
            # No bound of an exponent: its square is finite for all log-probs that engines give.
            near_T = log_ratio_T.clamp(-MAX_NATS, MAX_NATS)
            return Penalty(factor * near_T.square(), 2.0 * factor * near_T)
        excess_T = bounded_expm1(-log_ratio_T)
        return Penalty(excess_T + log_ratio_T.clamp(min=-MAX_LOG_RATIO), -excess_T)
