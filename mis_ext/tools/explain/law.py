# SPDX-License-Identifier: Apache-2.0
"""The Gaussian law of a mismatch: what ratios, their products and means do if tokens are independent, and so a gate.

``d = log pi_prox - log mu`` of a token is taken as ``N(m, s^2)``. Ratios have mean 1 under the policy that sampled,
``E[exp d] = exp(m + s^2 / 2) = 1``, so ``m = -s^2 / 2``; and ``k3 = E[exp d - 1 - d] = -m``. So one number says all.
Real mismatch has heavier tails, and errors that repeat within a response.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mis_ext.correction.config import Gate

Interval = tuple[float, float]
EVERYTHING: Interval = (-math.inf, math.inf)


@dataclass(frozen=True)
class Normal:
    """A Gaussian variable; a variance of 0 is a fixed number."""

    mean: float
    variance: float

    def between(self, low: float, high: float) -> float:
        """The probability that the variable lies in ``[low, high]``, in [0, 1], exact in both tails."""
        if low > high or self.variance == 0.0:
            return float(low <= self.mean <= high)
        small, large = ((edge - self.mean) / math.sqrt(2.0 * self.variance) for edge in (low, high))
        if large < 0.0:
            small, large = -large, -small
        return 0.5 * (math.erfc(small) - math.erfc(large))


@dataclass(frozen=True)
class GaussianLaw:
    """Gaussian approximation of responses of ``length`` tokens with a mismatch of ``k3`` nats per token."""

    k3: float
    length: float

    def of_level(self, level: str) -> Normal:
        """The log-ratio in nats whose ``exp`` a weight of this level is: of a token, their sum, or their mean."""
        mean, variance = {"token": (1.0, 1.0), "sequence": (self.length,) * 2, "geometric": (1.0, 1.0 / self.length)}[
            level
        ]
        return Normal(-self.k3 * mean, 2.0 * self.k3 * variance)

    def ess(self, level: str) -> float:
        """Kish's effective share of plain ratios at a level."""
        return math.exp(-self.of_level(level).variance)

    def acceptance(self, gate: Gate) -> float:
        """Share of tokens, or of responses, that a gate keeps; NaN where the law does not say.

        It knows ratios of tokens, and their products and means over responses: no other statistic, and no segments.
        """
        if gate.statistic != "ratio" or gate.is_of_segments:
            return math.nan
        low, high = gate.edges
        token = self.of_level("token")
        if gate.reduce == "token":
            return token.between(low, high)
        if gate.reduce in ("min", "max"):
            # All tokens are at most at a bound, or all are above it.
            low, high = (token.between(-math.inf, each) for each in (low, high))
            if gate.reduce == "min":
                low, high = 1.0 - high, 1.0 - low
            return float(high**self.length - low**self.length)
        return self.of_level("sequence" if gate.reduce == "sum" else "geometric").between(low, high)
