"""Statistics of a token, which gates compare with bounds and metrics report: one row each.

``TOKEN_FORMULAS`` says what a name means at one token. Its leaves are what both backends begin with: ``log_ratio``
(proximal minus behavior), ``proximal`` and ``behavior`` (log-probs), all 0 where a token has no ratio, and the masks
``valid`` and ``response``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mis_ext.correction.formula import MAX_LOG_RATIO, Formula, bounded_exp, bounded_expm1, where, where_positive

Reduce = Literal["token", "sum", "mean", "max", "min", "segment_sum", "segment_mean"]
OF_SEGMENTS: tuple[Reduce, ...] = ("segment_sum", "segment_mean")


@dataclass(frozen=True, slots=True)
class Statistic:
    """What is said about a token, or about a sequence after a reduction over its tokens.

    Attributes:
        name: As in ``Gate(statistic=...)``.
        token: Name of the token formula that is reduced.
        is_log: Bounds are given for its ``exp``; a sum then is a product, a mean the geometric mean.
        low: Smallest legal bound.
        high: Largest legal bound.
        on_policy: Its value where both engines agree; None where agreement says nothing about it.
        unit: Of its bounds.
        text: What it measures, for the documentation.
        symbol: Its formula at token ``t``, for explanations; its name where there is none.
    """

    name: str
    token: str
    is_log: bool
    low: float
    high: float
    on_policy: float | None
    unit: str
    text: str
    symbol: str = ""

    def edge(self, bound: float) -> float:
        """A bound on the scale of the token formula."""
        if not self.is_log:
            return bound
        return math.log(bound) if bound > 0.0 else -math.inf


def _k2(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() * 0.5


def _k3(ratio_excess: Tensor, log_ratio: Tensor) -> Tensor:
    # Bounded above with the ratio, so that a huge log-ratio reads as the largest value and not as a negative one.
    return (ratio_excess - log_ratio.clamp(-math.inf, MAX_LOG_RATIO)).clamp(0.0, math.inf)


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
    "k2": Formula.of(_k2),
    "k3": Formula.of(_k3),
    "exp_abs_log_ratio": Formula.of(lambda abs_log_ratio: bounded_exp(abs_log_ratio)),
    "probability_gain": Formula.of(lambda proximal, behavior: bounded_exp(proximal) - bounded_exp(behavior)),
    "probability_difference": Formula.of(lambda probability_gain: probability_gain.abs()),
    "is_open": Formula.of(_is_open),
    "is_raised": Formula.of(lambda is_open, log_ratio: where_positive(log_ratio, is_open)),
}

_ROWS = (
    Statistic(
        "ratio", "log_ratio", True, 0.0, math.inf, 1.0, "ratio", "proximal / behavior probability", symbol="rho_t"
    ),
    Statistic(
        "abs_log_ratio",
        "abs_log_ratio",
        False,
        0.0,
        math.inf,
        0.0,
        "nats",
        "absolute difference of the log-probs",
        symbol="|d_t|",
    ),
    Statistic(
        "k2",
        "k2",
        False,
        0.0,
        math.inf,
        0.0,
        "nats",
        "half the squared log-ratio: a KL estimate",
        symbol="d_t^2 / 2",
    ),
    Statistic(
        "k3",
        "k3",
        False,
        0.0,
        math.inf,
        0.0,
        "nats",
        "`exp d - 1 - d`: an unbiased KL estimate",
        symbol="rho_t - 1 - d_t",
    ),
    Statistic(
        "exp_abs_log_ratio",
        "exp_abs_log_ratio",
        False,
        1.0,
        math.inf,
        1.0,
        "ratio",
        "the larger of ratio and 1 / ratio: an error in both directions, which a geometric mean cancels",
        symbol="exp |d_t|",
    ),
    Statistic(
        "probability_gain",
        "probability_gain",
        False,
        -1.0,
        1.0,
        0.0,
        "probability",
        "the trainer's probability minus the sampler's",
        symbol="pi_t - mu_t",
    ),
    Statistic(
        "probability_difference",
        "probability_difference",
        False,
        0.0,
        1.0,
        0.0,
        "probability",
        "absolute difference of the probabilities (total variation on the sampled token)",
        symbol="|pi_t - mu_t|",
    ),
    Statistic(
        "proximal_probability",
        "proximal",
        True,
        0.0,
        1.0,
        None,
        "probability",
        "the trainer's probability",
        symbol="pi_t",
    ),
    Statistic(
        "behavior_probability",
        "behavior",
        True,
        0.0,
        1.0,
        None,
        "probability",
        "the sampler's probability",
        symbol="mu_t",
    ),
)

STATISTICS: dict[str, Statistic] = {row.name: row for row in _ROWS}
"""The statistics of gates by name. Sources: k2 and k3, Schulman, Approximating KL Divergence, 2020; probability
difference, DPPO, arXiv:2602.04879, signed: ROLL (code); gates on k2, M2PO, arXiv:2510.01161; exp abs d, NeMo RL
(code)."""


def reduced(token: str, reduce: Reduce, *, over: str = "valid") -> Formula:
    """A token formula, or what a reduction over the tokens of a sequence makes of it.

    The names that it needs say what has to be reduced, see :class:`~mis_ext.correction.plan.Column`.

    Args:
        token: Name of the token formula.
        reduce: ``token`` for the formula itself. Of a segment it is a number of the token too, which the first pass
            finds (:mod:`mis_ext.correction.segments`).
        over: Name of the mask of tokens that count.
    """
    if reduce == "token":
        return Formula.named(token)
    if reduce in OF_SEGMENTS:
        return Formula.named(f"{reduce}_{token}")
    suffix = "" if over == "valid" else f"_over_{over}"
    if reduce == "mean":
        return Formula(lambda total, count: total / count.clamp_min(1.0), (f"sum_{token}{suffix}", f"num_{over}"))
    return Formula.named(f"{reduce}_{token}{suffix}")
