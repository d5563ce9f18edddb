# SPDX-License-Identifier: Apache-2.0
"""Statistics of a token under two policies, which gates compare with bounds and metrics report: one row each.

``TOKEN_FORMULAS`` says what a name means at one token. Its leaves are what both backends and the methods begin with:
``log_ratio`` (numerator minus denominator of the ratio), ``proximal`` and ``behavior`` (log-probs of the two), all 0
where a token has no ratio, and the masks ``valid`` and ``response``. In the correction the two policies are what their
names say; a method may ask the same of any other pair. The correction alone has ``lag``, and only where a configuration
asks for it: the weight updates since the weights that sampled the token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mis_ext.correction.formula import (
    MAX_LOG_RATIO,
    MAX_NATS,
    Column,
    Formula,
    bounded_exp,
    bounded_expm1,
    where,
    where_positive,
)
from mis_ext.correction.log_ratio import UNKNOWN_LAG

Policy = Literal["behavior", "proximal", "current", "reference"]
Pair = tuple[Policy, Policy]
"""Numerator and denominator of a ratio."""

MISMATCH: Pair = ("proximal", "behavior")
STALENESS: Pair = ("current", "proximal")
TOTAL: Pair = ("current", "behavior")

When = Literal["always", "positive", "negative", "outward"]
"""Tokens that are meant: all, those whose advantage has a sign, or those that the update moves further from ratio 1."""

HookReduce = Literal["token", "sum", "mean", "max", "min", "segment_sum", "segment_mean"]
Reduce = HookReduce | Literal["prefix", "batch_mean", "batch_rank_mean"]
"""What stands at a token: its own value; the sum, mean, maximum or minimum over its sequence; the sum or mean over its
segment, a run of tokens of the mask. In a method alone: the sum up to the token; the mean over the batch; the mean over
all tokens of the batch whose value is no larger than its own."""
LAG = "lag"
"""The statistic, and the name of what it needs of a token."""
OF_SEGMENTS: tuple[Reduce, ...] = ("segment_sum", "segment_mean")


@dataclass(frozen=True, slots=True)
class Statistic:
    """What is said about a token, or about a sequence after a reduction over its tokens.

    Attributes:
        name: As in ``Gate(statistic=...)``.
        token: Name of the token formula that is reduced.
        unit: Of its bounds.
        text: What it measures, for the documentation.
        symbol: Its formula at token ``t``, for explanations; its name where there is none.
        low: Smallest legal bound.
        high: Largest legal bound.
        on_policy: Its value where both engines agree; None where agreement says nothing about it.
        is_log: Bounds are given for its ``exp``; a sum then is a product, a mean the geometric mean.
    """

    name: str
    token: str
    unit: str
    text: str
    symbol: str = ""
    low: float = 0.0
    high: float = math.inf
    on_policy: float | None = 0.0
    is_log: bool = False

    def edge(self, bound: float) -> float:
        """A bound on the scale of the token formula."""
        if not self.is_log:
            return bound
        return math.log(bound) if bound > 0.0 else -math.inf


def _k3(ratio_excess: Tensor, log_ratio: Tensor) -> Tensor:
    # Bounded above with the ratio, so that a huge log-ratio reads as the largest value and not as a negative one.
    return (ratio_excess - log_ratio.clamp(-math.inf, MAX_LOG_RATIO)).clamp(0.0, math.inf)


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of the events "this token" and "another one"; as large as can be where only the second policy is certain."""
    log_p, log_q = log_p.clamp_max(0.0), log_q.clamp_max(0.0)
    other_p, other_q = -log_p.expm1(), -log_q.expm1()
    # p log(p / q) + (1 - p) log((1 - p) / (1 - q))
    of_others = where(other_p > 0.0, other_p * (other_p.log() - other_q.log()), 0.0)
    return (log_p.exp() * (log_p - log_q) + of_others).clamp(0.0, MAX_NATS)


OPEN = (0.05, 0.9)
"""Probabilities of the engine between which tokens are neither rare nor certain, so that learning moves them."""
_LOG_OPEN = tuple(map(math.log, OPEN))


def _is_open(behavior: Tensor, log_ratio: Tensor) -> Tensor:
    is_between = (behavior > _LOG_OPEN[0]) & (behavior < _LOG_OPEN[1])
    return where(is_between & (log_ratio != 0.0), 1.0, 0.0)


TOKEN_FORMULAS: dict[str, Formula] = {
    "ratio": Formula.of(lambda log_ratio: bounded_exp(log_ratio)),
    "squared_ratio": Formula.of(lambda ratio: ratio.square()),
    "ratio_excess": Formula.of(lambda log_ratio: bounded_expm1(log_ratio)),
    # ratio**2 - 1, with the digits near 0 that a difference of squares has lost.
    "squared_ratio_excess": Formula.of(lambda ratio_excess: ratio_excess * (ratio_excess + 2.0)),
    "abs_log_ratio": Formula.of(lambda log_ratio: log_ratio.abs()),
    "k1": Formula.of(lambda log_ratio: -log_ratio),
    "k2": Formula.of(lambda squared_log_ratio: squared_log_ratio * 0.5),
    "k3": Formula.of(_k3),
    "squared_log_ratio": Formula.of(lambda log_ratio: log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()),
    "exp_abs_log_ratio": Formula.of(lambda abs_log_ratio: bounded_exp(abs_log_ratio)),
    "half_abs_ratio_excess": Formula.of(lambda ratio_excess: ratio_excess.abs() * 0.5),
    "probability_gain": Formula.of(lambda proximal, behavior: bounded_exp(proximal) - bounded_exp(behavior)),
    "probability_difference": Formula.of(lambda probability_gain: probability_gain.abs()),
    "binary_kl": Formula.of(lambda proximal, behavior: _binary_kl(proximal, behavior)),
    "reverse_binary_kl": Formula.of(lambda proximal, behavior: _binary_kl(behavior, proximal)),
    "is_open": Formula.of(_is_open),
    "is_raised": Formula.of(lambda is_open, log_ratio: where_positive(log_ratio, is_open)),
    "dated": Formula.of(lambda valid, lag: valid & (lag < UNKNOWN_LAG)),
    # By age. What nobody knows is not fresh.
    "stale_log_ratio": Formula.of(lambda lag, log_ratio: where(lag > 0.0, log_ratio, 0.0)),
    "stale_ratio": Formula.of(lambda lag, ratio: where(lag > 0.0, ratio, 1.0)),
    "squared_stale_ratio": Formula.of(lambda stale_ratio: stale_ratio.square()),
    "fresh_ratio": Formula.of(lambda lag, ratio: where(lag > 0.0, 1.0, ratio)),
    "squared_fresh_ratio": Formula.of(lambda fresh_ratio: fresh_ratio.square()),
}

_ROWS = (
    Statistic(
        "ratio", "log_ratio", "ratio", "proximal / behavior probability", symbol="rho_t", on_policy=1.0, is_log=True
    ),
    Statistic("abs_log_ratio", "abs_log_ratio", "nats", "absolute difference of the log-probs", symbol="|d_t|"),
    Statistic(
        "k1", "k1", "nats", "behavior minus proximal log-prob: a KL estimate of any sign", symbol="-d_t", low=-math.inf
    ),
    Statistic("k2", "k2", "nats", "half the squared log-ratio: a KL estimate", symbol="d_t^2 / 2"),
    Statistic("k3", "k3", "nats", "`exp d - 1 - d`: an unbiased KL estimate", symbol="rho_t - 1 - d_t"),
    Statistic("squared_log_ratio", "squared_log_ratio", "nats^2", "squared log-ratio", symbol="d_t^2"),
    Statistic(
        "exp_abs_log_ratio",
        "exp_abs_log_ratio",
        "ratio",
        "the larger of ratio and 1 / ratio: an error in both directions, which a geometric mean cancels",
        symbol="exp |d_t|",
        low=1.0,
        on_policy=1.0,
    ),
    Statistic(
        "half_abs_ratio_excess",
        "half_abs_ratio_excess",
        "probability",
        "half the distance of the ratio from 1, whose expectation is the total variation",
        symbol="|rho_t - 1| / 2",
    ),
    Statistic(
        "probability_gain",
        "probability_gain",
        "probability",
        "the trainer's probability minus the sampler's",
        symbol="pi_t - mu_t",
        low=-1.0,
        high=1.0,
    ),
    Statistic(
        "probability_difference",
        "probability_difference",
        "probability",
        "absolute difference of the probabilities (total variation on the sampled token)",
        symbol="|pi_t - mu_t|",
        high=1.0,
    ),
    Statistic(
        "binary_kl",
        "binary_kl",
        "nats",
        "KL from trainer to sampler, of this token against all others",
        symbol="KL(pi_t, mu_t)",
    ),
    Statistic(
        "reverse_binary_kl",
        "reverse_binary_kl",
        "nats",
        "KL from sampler to trainer, of this token against all others",
        symbol="KL(mu_t, pi_t)",
    ),
    Statistic(
        "proximal_probability",
        "proximal",
        "probability",
        "the trainer's probability",
        symbol="pi_t",
        high=1.0,
        on_policy=None,
        is_log=True,
    ),
    Statistic(
        "behavior_probability",
        "behavior",
        "probability",
        "the sampler's probability",
        symbol="mu_t",
        high=1.0,
        on_policy=None,
        is_log=True,
    ),
    Statistic(
        LAG,
        "lag",
        "updates",
        "weight updates since the weights that sampled the token; where nobody knows, above every bound",
        symbol="lag_t",
        high=UNKNOWN_LAG,
    ),
)

STATISTICS: dict[str, Statistic] = {row.name: row for row in _ROWS}
"""The statistics of gates by name. Sources: k1, k2 and k3, Schulman, Approximating KL Divergence, 2020; probability
difference, DPPO, arXiv:2602.04879, signed: ROLL (code); gates on k2 and on the squared log-ratio, M2PO,
arXiv:2510.01161; binary KL, DPPO and KPop (report, 2026); exp abs d, NeMo RL (code)."""


def reduced(token: str, reduce: Reduce, *, over: str = "valid") -> Formula:
    """A token formula, or what a reduction over the tokens of a sequence makes of it.

    Args:
        token: Name of the token formula.
        reduce: ``token`` for the formula itself. Of a segment it is a number of the token too, which the first pass
            finds (:mod:`mis_ext.correction.segments`).
        over: Name of the mask of tokens that count.
    """
    if reduce == "token":
        return Formula.named(token)
    if reduce == "mean":
        # Of a ratio the token formula is the log: so its mean is that of the geometric mean, its sum of the product.
        return Formula(mean, (Column("sum", token, over), Column("sum", over, over)))
    if reduce in ("sum", "min", "max"):
        return Formula.named(Column(reduce, token, over))
    return Formula.named(f"{reduce}_{token}")


def mean(total: Tensor, count: Tensor) -> Tensor:
    """``total / count``; 0 of nothing."""
    return total / count.clamp_min(1.0)
