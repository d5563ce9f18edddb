"""Kernels: smooth functions of a ratio instead of bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from mis_ext.correction.formula import MAX_LOG_RATIO, bounded_exp
from mis_ext.correction.statistics import STALENESS, TOTAL, Pair
from mis_ext.methods.batch import Batch
from mis_ext.methods.factors import OtherFactor
from mis_ext.methods.method import Method
from mis_ext.methods.published import NotNegative, Positive, Range, published
from mis_ext.methods.surrogates import Ratio, Score, Slope, Surrogate

_TRUST = (0.1, 10.0)
_ShapeScale = tuple[NotNegative, Positive]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sigmoid(Surrogate):
    """``A`` times ``4 / tau * sigmoid(tau (ratio - 1))``: slope 1 at ratio 1, falling off on both sides.

    Args:
        pair: Numerator, the current policy, and denominator.
        positive: ``tau`` where the advantage is positive.
        negative: ``tau`` elsewhere.
    """

    positive: float
    negative: float
    pair: Pair = STALENESS

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""
        ratio_T = bounded_exp(batch.log_ratio(self.pair))
        tau_T = batch.by_sign(self.positive, self.negative)
        excess_T = tau_T * (ratio_T - 1.0)
        gate_T = torch.sigmoid(excess_T)
        # Not 1 - gate, which at a ratio of 18 has lost every digit.
        slope_T = 4.0 * gate_T * torch.sigmoid(-excess_T) * ratio_T
        return Slope(gate_T * 4.0 / tau_T, slope_T, torch.zeros_like(batch.valid_T))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gamma(OtherFactor):
    """``exp(scale) W^shape exp(-scale W)`` of the sequence's product of ratios ``W``: 1 at 1, largest at shape / scale.

    Args:
        pair: Numerator and denominator.
        positive: Shape and scale where the advantage is positive.
        negative: Shape and scale elsewhere.
    """

    pair: Pair
    positive: tuple[float, float]
    negative: tuple[float, float]
    reduce = "sum"

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` weights, at least 0, without gradient."""
        log_ratio_T = batch.log_ratio(self.pair, "sum")
        shape_T, scale_T = map(batch.by_sign, self.positive, self.negative)
        # Its largest value, at W = shape / scale, may be any: it ends where every ratio ends.
        log_weight_T = scale_T + shape_T * log_ratio_T - scale_T * bounded_exp(log_ratio_T)
        return log_weight_T.clamp_max(MAX_LOG_RATIO).exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture(OtherFactor):
    """``1 + mix (ratio - 1)``: between no correction, 0, and the token's ratio, 1."""

    pair: Pair
    mix: float

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` weights, at least 0, without gradient."""
        return 1.0 + self.mix * (bounded_exp(batch.log_ratio(self.pair)) - 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianGate(OtherFactor):
    """``exp(-(ratio - 1)^2 / (2 sigma^2))`` where the update moves the ratio away from 1, elsewhere 1.

    ``sigma`` is ``scale / q ** power``, ``q`` the denominator's probability, within ``[scale, high]``; times
    ``1 + positive A`` where the advantage ``A`` is positive, over ``1 + negative abs(A)`` where it is negative, that
    factor within [0.1, 10].

    Args:
        pair: Numerator, the current policy, and denominator.
        scale: Smallest ``sigma``, that of a certain token.
        power: How fast it widens where a token is rare.
        high: Where that ends.
        positive: How much it widens per unit of positive advantage.
        negative: How much it narrows per unit of negative advantage.
    """

    scale: float
    power: float
    high: float
    positive: float
    negative: float
    pair: Pair = STALENESS

    def evaluate(self, batch: Batch) -> Tensor:
        """The factor ``[T]``, at most 1; 1 where the step does not lead away from the old policy."""
        # In the log, where no power of a tiny probability overflows.
        widening_T = (-self.power * batch.log_prob(self.pair[1])).clamp(0.0, math.log(self.high / self.scale))
        size_T = batch.advantages_T.abs()
        trust_T = torch.where(
            batch.advantages_T > 0.0, 1.0 + self.positive * size_T, (1.0 + self.negative * size_T).reciprocal()
        )
        sigma_T = self.scale * widening_T.exp() * trust_T.clamp(*_TRUST)
        gate_T = ((bounded_exp(batch.log_ratio(self.pair)) - 1.0) / sigma_T).square().mul(-0.5).exp()
        return torch.where(batch.when("outward", self.pair), gate_T, 1.0)


@published(
    formula="sg(phi(w_1..T)) A log pi, phi(W) = exp(scale) W^shape exp(-scale W)",
    paper="Shen et al., VESPO: Variational Sequence-Level Soft Policy Optimization, arXiv:2602.10693",
)
def vespo(*, positive: _ShapeScale = (2.0, 3.0), negative: _ShapeScale = (3.0, 2.0)) -> Method:
    """A soft weight of the whole sequence: (shape, scale) by the sign of the advantage.

    When: very stale data.
    Claims: stable at a staleness of 64 updates, without normalising by length.
    Counter-claims: a product of long sequences is far from 1 by noise alone: then every weight is near 0.
    """
    return Method(surrogate=Score(), factors=(Gamma(pair=TOTAL, positive=positive, negative=negative),))


@published(
    formula="4 / tau sigmoid(tau (r - 1)) A",
    paper="Gao et al., Soft Adaptive Policy Optimization, arXiv:2511.20347",
)
def sapo(*, positive: Positive = 1.0, negative: Positive = 1.05) -> Method:
    """A soft gate instead of PPO's clip; ``tau`` by the sign of the advantage.

    When: hard clips remove tokens that are only a little outside.
    Claims: more stable and better than GSPO and GRPO at equal budget.
    Counter-claims: far outside the gradient is small, not gone.
    """
    return Method(surrogate=Sigmoid(positive=positive, negative=negative))


@published(
    formula="r A sg(exp(-(r - 1)^2 / (2 sigma^2)) where the update moves r away from 1), sigma = clip(scale / "
    "proximal^power, scale, high) clip(A > 0: 1 + positive A; A < 0: 1 / (1 - negative A), 0.1, 10)",
    paper="Fu et al., MASPO: Unifying Gradient Utilization, Probability Mass, and Signal Reliability, arXiv:2602.17550 "
    "(code)",
)
def maspo(
    *,
    scale: Positive = 1.0,
    power: NotNegative = 0.3,
    high: Annotated[float, Range(low="scale")] = 10.0,
    positive: NotNegative = 0.03,
    negative: NotNegative = 0.03,
) -> Method:
    """A soft gate that is wide for rare tokens and for good answers, narrow for bad ones.

    When: hard clips remove gradients, and the policy should learn rare tokens.
    Claims: up to 3 points over GRPO at 1.5B to 14B, with more entropy.
    Counter-claims: with the authors' numbers a ratio of 2 still keeps 0.6 of its gradient: nothing else bounds it. The
    formula is that of the authors' code.
    """
    gate = GaussianGate(scale=scale, power=power, high=high, positive=positive, negative=negative)
    return Method(surrogate=Ratio(), factors=(gate,))


FAMILY = (vespo, sapo, maspo)
