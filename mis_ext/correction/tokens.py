# SPDX-License-Identifier: Apache-2.0
"""Tokens under two policies, and the statistics that compare them: one row each.

In the correction the two policies are the trainer before the update and the engine that sampled. A method may compare
any other pair. Only the correction has ``lag``: the weight updates since the weights that sampled the token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Exponents are clamped to +-20: a ratio of 4.9e8 is as extreme as any larger one, and its square fits float32."""
MAX_NATS = 1e6
"""Largest difference of log-probs in a metric, so that sums over tokens stay finite."""
UNKNOWN_LAG = 1e6
"""Lag of a token whose weight version is unknown: above every bound, and finite."""
OPEN = (0.05, 0.9)
"""Range of behavior probabilities of uncertain tokens: neither rare nor nearly certain, so that training moves them."""


def bounded_exp(x: Tensor) -> Tensor:
    """``exp x`` with the exponent clamped to +-:data:`MAX_LOG_RATIO`."""
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def bounded_expm1(x: Tensor) -> Tensor:
    """``exp x - 1`` with the same clamp."""
    return x.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).expm1()


def k3(d: Tensor, excess: Tensor | None = None) -> Tensor:
    """``exp d - 1 - d``, an estimator of KL(mu, pi) in nats (Schulman, Approximating KL Divergence, 2020).

    ``excess``: ``exp d - 1`` if it is known.
    """
    # Bounded above like the ratio, so that a huge log-ratio gives the largest value and not a negative one.
    return ((bounded_expm1(d) if excess is None else excess) - d.clamp(max=MAX_LOG_RATIO)).clamp(min=0.0)


def binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL(p, q) of the events "this token" and "any other token"; :data:`MAX_NATS` where only ``q`` is certain."""
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)
    other_p, other_q = -log_p.expm1(), -log_q.expm1()
    # p log(p / q) + (1 - p) log((1 - p) / (1 - q))
    of_others = torch.where(other_p > 0.0, other_p * (other_p.log() - other_q.log()), 0.0)
    return (log_p.exp() * (log_p - log_q) + of_others).clamp(0.0, MAX_NATS)


def is_open(log_mu: Tensor, d: Tensor) -> Tensor:
    """bool: a behavior probability in :data:`OPEN`, and two different log-probs."""
    return (log_mu > math.log(OPEN[0])) & (log_mu < math.log(OPEN[1])) & (d != 0.0)


@dataclass(eq=False)
class Tokens:
    """Tokens of any shape under two policies. Where a token is not ``valid``, ``d`` and the log-probs are 0.

    Attributes:
        d: ``log pi - log mu``.
        log_pi: Nats, of the numerator of the ratio: in the correction the trainer before the update.
        log_mu: Nats, of the denominator: in the correction the engine that sampled.
        generated: bool, the response mask.
        valid: bool, generated and with a finite log-ratio.
        lag: Weight updates since the weights that sampled the token, :data:`UNKNOWN_LAG` if unknown; or None.
    """

    d: Tensor
    log_pi: Tensor
    log_mu: Tensor
    generated: Tensor
    valid: Tensor
    lag: Any = None
    # Kept, because several sums read them. torch.compile traces no cached_property before Python 3.12.
    _ratio: Tensor | None = None
    _excess: Tensor | None = None

    @classmethod
    def read(cls, log_pi: Tensor, log_mu: Tensor, generated: Tensor, lag: Tensor | None = None) -> Tokens:
        """Subtract in float32. A token without a finite difference is not ``valid``, and its three values are 0.

        Check ``valid`` before you use a value: a difference of 0 looks like an on-policy token.
        """
        log_pi, log_mu = log_pi.detach().float(), log_mu.detach().float()
        # d = log pi - log mu
        d = log_pi - log_mu
        # False for NaN too.
        valid = generated & (d.abs() < math.inf)
        # torch.where and not a product: 0 * NaN is NaN.
        d, log_pi, log_mu = torch.where(valid, d, 0.0), torch.where(valid, log_pi, 0.0), torch.where(valid, log_mu, 0.0)
        if lag is not None:
            lag = lag.detach().float()
            # Also False for NaN, and for a version newer than the trainer's, which is a reading error.
            lag = torch.where((lag >= 0.0) & (lag < UNKNOWN_LAG), lag, UNKNOWN_LAG)
        return cls(d, log_pi, log_mu, generated, valid, lag)

    @property
    def is_stale(self) -> Tensor:
        """bool: older weights sampled the token than the trainer has. An unknown or negative lag counts as stale.

        In slime and Miles ``_token_lags`` of :mod:`mis_ext.hosts.slime_miles.rollout` finds the lags.
        """
        return torch.gt(self.lag, 0.0)

    @property
    def ratio(self) -> Tensor:
        """``rho = pi / mu``."""
        if self._ratio is None:
            self._ratio = bounded_exp(self.d)
        return self._ratio

    @property
    def excess(self) -> Tensor:
        """``rho - 1``, accurate near 0."""
        if self._excess is None:
            self._excess = bounded_expm1(self.d)
        return self._excess


@dataclass(frozen=True, slots=True)
class Statistic:
    """A statistic of a token, or of a response after a reduction over its tokens.

    Attributes:
        name: As in ``Gate(statistic=...)``.
        of: Its value at each token; for a ratio or a probability, its log.
        symbol: Its formula at token ``t``, or its name, for explanations.
        unit: The unit of its bounds.
        text: What it measures, for the documentation.
        low: Smallest legal bound.
        high: Largest legal bound.
        is_log: Bounds are given for its ``exp``; a sum is then a product, and a mean the geometric mean.
    """

    name: str
    of: Callable[[Tokens], Tensor]
    symbol: str
    unit: str
    text: str
    low: float = 0.0
    high: float = math.inf
    is_log: bool = False

    def edge(self, bound: float) -> float:
        """Convert a bound to the scale of :attr:`of`."""
        if not self.is_log:
            return bound
        return math.log(bound) if bound > 0.0 else -math.inf


def _k2(t: Tokens) -> Tensor:
    return t.d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square() / 2.0


def _gain(t: Tokens) -> Tensor:
    return bounded_exp(t.log_pi) - bounded_exp(t.log_mu)


LAG = "lag"
_K1_TEXT = "behavior minus proximal log-prob: a KL estimate of any sign"
_KL_TEXT = "KL from trainer to sampler, of this token against all others"
_REVERSE_KL_TEXT = "KL from sampler to trainer, of this token against all others"
_EXCESS_TEXT = "half the distance of the ratio from 1, whose expectation is the total variation"
_EXP_TEXT = "the larger of ratio and 1 / ratio: it adds up errors in both directions, which cancel in a geometric mean"
_GAIN_TEXT = "the trainer's probability minus the sampler's"
_DIFFERENCE_TEXT = "absolute difference of the probabilities (total variation on the sampled token)"
_LAG_TEXT = "weight updates since the weights that sampled the token; if unknown, above every bound"
_P = "probability"
_ROWS = (
    Statistic("ratio", lambda t: t.d, "rho_t", "ratio", f"proximal / behavior {_P}", is_log=True),
    Statistic("abs_log_ratio", lambda t: t.d.abs(), "|d_t|", "nats", "absolute difference of the log-probs"),
    Statistic("k1", lambda t: -t.d, "-d_t", "nats", _K1_TEXT, low=-math.inf),
    Statistic("k2", _k2, "d_t^2 / 2", "nats", "half the squared log-ratio: a KL estimate"),
    Statistic("k3", lambda t: k3(t.d, t.excess), "rho_t - 1 - d_t", "nats", "`exp d - 1 - d`: an unbiased KL estimate"),
    Statistic("exp_abs_log_ratio", lambda t: bounded_exp(t.d.abs()), "exp |d_t|", "ratio", _EXP_TEXT, low=1.0),
    Statistic("half_abs_ratio_excess", lambda t: t.excess.abs() / 2.0, "|rho_t - 1| / 2", _P, _EXCESS_TEXT),
    Statistic("probability_gain", _gain, "pi_t - mu_t", _P, _GAIN_TEXT, low=-1.0, high=1.0),
    Statistic("probability_difference", lambda t: _gain(t).abs(), "|pi_t - mu_t|", _P, _DIFFERENCE_TEXT, high=1.0),
    Statistic("binary_kl", lambda t: binary_kl(t.log_pi, t.log_mu), "KL(pi_t, mu_t)", "nats", _KL_TEXT),
    Statistic("reverse_binary_kl", lambda t: binary_kl(t.log_mu, t.log_pi), "KL(mu_t, pi_t)", "nats", _REVERSE_KL_TEXT),
    Statistic("proximal_probability", lambda t: t.log_pi, "pi_t", _P, f"the trainer's {_P}", high=1.0, is_log=True),
    Statistic("behavior_probability", lambda t: t.log_mu, "mu_t", _P, f"the sampler's {_P}", high=1.0, is_log=True),
    Statistic(LAG, lambda t: t.lag, "lag_t", "updates", _LAG_TEXT, high=UNKNOWN_LAG),
)

STATISTICS: dict[str, Statistic] = {row.name: row for row in _ROWS}
"""The statistics of gates by name. Sources: k1, k2 and k3, Schulman, Approximating KL Divergence, 2020; probability
difference, DPPO, arXiv:2602.04879, signed: ROLL (code); gates on k2, M2PO, arXiv:2510.01161; binary KL, DPPO and KPop
(report, 2026); exp abs d, NeMo RL (code)."""
