# SPDX-License-Identifier: Apache-2.0
"""The Gaussian law of a mismatch: what ratios, their products and means do if tokens are independent, and so a gate.

``d = log pi_prox - log mu`` of a token is taken as ``N(m, s^2)``. Ratios have mean 1 under the policy that sampled,
``E[exp d] = exp(m + s^2 / 2) = 1``, so ``m = -s^2 / 2``; and ``k3 = E[exp d - 1 - d] = -m``. So one number says all:

=========  ========================  ===============================
level      log-ratio                 effective share of its weights
=========  ========================  ===============================
token      ``N(-k3, 2 k3)``          ``exp(-2 k3)``
sequence   ``N(-k3 T, 2 k3 T)``      ``exp(-2 k3 T)``
geometric  ``N(-k3, 2 k3 / T)``      ``exp(-2 k3 / T)``
=========  ========================  ===============================

Real mismatch has heavier tails, and errors that repeat within a response (``lab/evidence/length.md``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from mis_ext.correction.config import Gate
from mis_ext.correction.tokens import MAX_LOG_RATIO

Interval = tuple[float, float]
EVERYTHING: Interval = (-math.inf, math.inf)
Weigh = Callable[[torch.Tensor], torch.Tensor]
"""The weights of log-ratios, elementwise."""

_NUM_NODES, _NODE_RANGE = 4001, 10.0


@dataclass(frozen=True)
class Normal:
    """A Gaussian variable; a variance of 0 is a fixed number."""

    mean: float
    variance: float

    def between(self, low: float, high: float) -> float:
        """The probability that the variable lies in ``[low, high]``, in [0, 1], exact in both tails."""
        if low > high or self.variance == 0.0:
            return float(low <= self.mean <= high)
        small, large = (_log_below((edge - self.mean) / math.sqrt(self.variance)) for edge in (low, high))
        if small == -math.inf or large == -math.inf:
            return math.exp(large)
        # Near 1 too a logarithm keeps the digits of what is missing.
        return math.exp(large + math.log(-math.expm1(small - large))) if small < large else 0.0

    def moment(self, weight: Weigh, power: int, within: Interval = EVERYTHING, *, kinks: Iterable[float] = ()) -> float:
        """``E[weight(x) ** power; x in within]`` of a weight of log-ratios that stays the same beyond 20 nats.

        Args:
            weight: Of log-ratios, at most their ``exp``, at least 0.
            power: Of the weight, 1 or 2.
            within: Where it counts.
            kinks: Where it is not smooth.
        """
        first, last = within
        if self.variance == 0.0:
            return _weight_at(self.mean, weight, power) if first <= self.mean <= last else 0.0
        ends = (-MAX_LOG_RATIO, MAX_LOG_RATIO)
        flat = zip(ends, ((first, min(last, ends[0])), (max(first, ends[1]), last)), strict=True)
        total = sum(_weight_at(end, weight, power) * self.between(*part) for end, part in flat if part[0] < part[1])
        # All that counts lies about the mean, or where growing weights move it.
        margin = _NODE_RANGE * math.sqrt(self.variance)
        low = max(first, ends[0], self.mean - margin)
        high = min(last, ends[1], self.mean + power * self.variance + margin)
        edges = [low, *sorted(kink for kink in kinks if low < kink < high), high]
        return total + sum(self._smooth_moment(weight, power, *part) for part in itertools.pairwise(edges))

    def _smooth_moment(self, weight: Weigh, power: int, low: float, high: float) -> float:
        if not low < high:
            return 0.0
        # Simpson's rule.
        nodes = torch.linspace(low, high, _NUM_NODES, dtype=torch.float64)
        share = torch.full_like(nodes, 2.0)
        share[1::2], share[0], share[-1] = 4.0, 1.0, 1.0
        density = (-0.5 * (nodes - self.mean).square() / self.variance).exp() / math.sqrt(math.tau * self.variance)
        return float((share * density * weight(nodes).pow(power)).sum() * (high - low) / (3.0 * (_NUM_NODES - 1)))


def _weight_at(log_ratio: float, weight: Weigh, power: int) -> float:
    return float(weight(torch.tensor([log_ratio], dtype=torch.float64)).pow(power))


def _log_below(value: float) -> float:
    return float(torch.special.log_ndtr(torch.tensor(value, dtype=torch.float64)))


@dataclass(frozen=True)
class GaussianLaw:
    """What to expect of responses of ``length`` tokens whose mismatch is ``k3`` nats per token."""

    k3: float
    length: float

    @property
    def token(self) -> Normal:
        """The distribution of the log-ratio of a token, in nats."""
        return Normal(-self.k3, 2.0 * self.k3)

    @property
    def product(self) -> Normal:
        """The distribution of the sum of log-ratios over a response, in nats: the log of the product of ratios."""
        return Normal(-self.k3 * self.length, 2.0 * self.k3 * self.length)

    @property
    def geometric(self) -> Normal:
        """The distribution of the mean log-ratio of a response, in nats: the log of the geometric mean of ratios."""
        return Normal(-self.k3, 2.0 * self.k3 / self.length)

    def of_level(self, level: str) -> Normal:
        """The log-ratio whose ``exp`` a weight of this level is."""
        return {"token": self.token, "sequence": self.product, "geometric": self.geometric}[level]

    def ess(self, level: str) -> float:
        """Kish's effective share of plain ratios at a level."""
        return math.exp(-self.of_level(level).variance)

    def acceptance(self, gate: Gate) -> float:
        """Share of tokens, or of responses, that a gate keeps; NaN where the law does not say.

        It knows ratios of tokens, and their products and means over responses: no other statistic, no segments, and
        nothing of what another gate leaves.
        """
        if gate.statistic != "ratio" or gate.after is not None or gate.is_of_segments:
            return math.nan
        low, high = gate.edges
        if gate.reduce == "token":
            return self.token.between(low, high)
        if gate.reduce in ("min", "max"):
            # All tokens are at most at a bound, or all are above it.
            low, high = (self.token.between(-math.inf, each) for each in (low, high))
            if gate.reduce == "min":
                low, high = 1.0 - high, 1.0 - low
            return float(high**self.length - low**self.length)
        return (self.product if gate.reduce == "sum" else self.geometric).between(low, high)
