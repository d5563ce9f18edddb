# SPDX-License-Identifier: Apache-2.0
"""Statistics of a token under two policies, which gates compare with bounds and metrics report: one row each.

In the correction the two policies are the trainer before the update and the engine that sampled. A method may ask the
same of any other pair. The correction alone has ``lag``, and only where a configuration asks for it: the weight updates
since the weights that sampled the token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from mis_ext.correction.tokens import UNKNOWN_LAG, Tokens, binary_kl, bounded_exp

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
        of: Its value at each token; of a ratio or a probability its log.
        unit: Of its bounds.
        text: What it measures, for the documentation.
        symbol: Its formula at token ``t``, for explanations; its name where there is none.
        low: Smallest legal bound.
        high: Largest legal bound.
        on_policy: Its value where both engines agree; None where agreement says nothing about it.
        is_log: Bounds are given for its ``exp``; a sum then is a product, a mean the geometric mean.
    """

    name: str
    of: Callable[[Tokens], Tensor]
    unit: str
    text: str
    symbol: str = ""
    low: float = 0.0
    high: float = math.inf
    on_policy: float | None = 0.0
    is_log: bool = False

    def edge(self, bound: float) -> float:
        """A bound on the scale of :attr:`of`."""
        if not self.is_log:
            return bound
        return math.log(bound) if bound > 0.0 else -math.inf


_ROWS = (
    Statistic(
        "ratio", lambda t: t.d, "ratio", "proximal / behavior probability", symbol="rho_t", on_policy=1.0, is_log=True
    ),
    Statistic("abs_log_ratio", lambda t: t.abs_d, "nats", "absolute difference of the log-probs", symbol="|d_t|"),
    Statistic(
        "k1",
        lambda t: -t.d,
        "nats",
        "behavior minus proximal log-prob: a KL estimate of any sign",
        symbol="-d_t",
        low=-math.inf,
    ),
    Statistic(
        "k2", lambda t: t.squared_d / 2.0, "nats", "half the squared log-ratio: a KL estimate", symbol="d_t^2 / 2"
    ),
    Statistic("k3", lambda t: t.k3, "nats", "`exp d - 1 - d`: an unbiased KL estimate", symbol="rho_t - 1 - d_t"),
    Statistic("squared_log_ratio", lambda t: t.squared_d, "nats^2", "squared log-ratio", symbol="d_t^2"),
    Statistic(
        "exp_abs_log_ratio",
        lambda t: bounded_exp(t.abs_d),
        "ratio",
        "the larger of ratio and 1 / ratio: an error in both directions, which a geometric mean cancels",
        symbol="exp |d_t|",
        low=1.0,
        on_policy=1.0,
    ),
    Statistic(
        "half_abs_ratio_excess",
        lambda t: t.excess.abs() / 2.0,
        "probability",
        "half the distance of the ratio from 1, whose expectation is the total variation",
        symbol="|rho_t - 1| / 2",
    ),
    Statistic(
        "probability_gain",
        lambda t: t.gain,
        "probability",
        "the trainer's probability minus the sampler's",
        symbol="pi_t - mu_t",
        low=-1.0,
        high=1.0,
    ),
    Statistic(
        "probability_difference",
        lambda t: t.gain.abs(),
        "probability",
        "absolute difference of the probabilities (total variation on the sampled token)",
        symbol="|pi_t - mu_t|",
        high=1.0,
    ),
    Statistic(
        "binary_kl",
        lambda t: binary_kl(t.log_pi, t.log_mu),
        "nats",
        "KL from trainer to sampler, of this token against all others",
        symbol="KL(pi_t, mu_t)",
    ),
    Statistic(
        "reverse_binary_kl",
        lambda t: binary_kl(t.log_mu, t.log_pi),
        "nats",
        "KL from sampler to trainer, of this token against all others",
        symbol="KL(mu_t, pi_t)",
    ),
    Statistic(
        "proximal_probability",
        lambda t: t.log_pi,
        "probability",
        "the trainer's probability",
        symbol="pi_t",
        high=1.0,
        on_policy=None,
        is_log=True,
    ),
    Statistic(
        "behavior_probability",
        lambda t: t.log_mu,
        "probability",
        "the sampler's probability",
        symbol="mu_t",
        high=1.0,
        on_policy=None,
        is_log=True,
    ),
    Statistic(
        LAG,
        lambda t: t.lag,
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
