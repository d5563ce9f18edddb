# SPDX-License-Identifier: Apache-2.0
"""Effect of a configuration in the Gaussian approximation of a mismatch.

``d = log pi_prox - log mu`` of a token is taken as ``N(m, s^2)``, tokens as independent. Ratios have mean 1 under the
policy that sampled, ``E[exp d] = exp(m + s^2 / 2) = 1``, so ``m = -s^2 / 2``; and ``k3 = E[exp d - 1 - d] = -m``. So
one number says what ratios, their products and means do, and so a gate. Real mismatch has heavier tails, and errors
that repeat within a response.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mis_ext.correction.config import OF_SEGMENTS, CorrectionConfig, Gate

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


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Expected values; NaN where the approximation has none.

    Attributes:
        k3: Per token, in nats.
        length: Tokens of a response.
        ess_token: Kish's effective share of token ratios; of products over responses and of their geometric means.
        accepted: Share of tokens, or of responses, that each gate keeps or weighs.
        kept_tokens: Share of tokens that stay in the mask. Gates on other things than the ratio of a token or of a
            response count as independent of each other.
        kept_sequences: The same as ``kept_tokens`` of responses.
    """

    k3: float
    length: float
    ess_token: float
    ess_sequence: float
    ess_geometric: float
    accepted: dict[str, float]
    kept_tokens: float
    kept_sequences: float


def effect_of(config: CorrectionConfig, *, k3: float, length: float) -> Effect:
    """Compute the effect of ``config`` on responses of ``length`` tokens with a mismatch of ``k3`` nats per token."""
    law, gates = GaussianLaw(k3, length), described_gates(config)
    kept_tokens, kept_sequences = _kept(law, (gate for gate in gates.values() if gate.action == "reject"))
    return Effect(
        k3=k3,
        length=length,
        ess_token=law.ess("token"),
        ess_sequence=law.ess("sequence"),
        ess_geometric=law.ess("geometric"),
        accepted={name: law.acceptance(gate) for name, gate in gates.items()},
        kept_tokens=kept_tokens,
        kept_sequences=kept_sequences,
    )


def described_gates(config: CorrectionConfig) -> dict[str, Gate]:
    """Every gate of a configuration by its name and what it compares; the one that the weight implies is ``weight``."""
    implied = config.weight.gate if config.weight is not None else None
    named = {} if implied is None else {"weight": implied}
    return {f"{name}: {band_of(gate)}": gate for name, gate in (named | config.labelled_gates).items()}


def band_of(gate: Gate) -> str:
    """The band of a gate as an inequality of its statistic: what satisfies it passes."""
    low, high = ("" if bound is None else f"{bound:g}" for bound in (gate.low, gate.high))
    value = formula_of(gate.row.symbol or gate.statistic, gate.reduce, is_log=gate.row.is_log)
    return f"{low}{' <= ' if low else ''}{value}{' <= ' if high else ''}{high}"


def formula_of(symbol: str, reduce: str, *, is_log: bool) -> str:
    """A number of a token, or what a reduction makes of it; of logarithms it is that of what they are of."""
    if reduce == "token":
        return symbol
    if reduce in OF_SEGMENTS:
        return f"{formula_of(symbol, reduce.removeprefix('segment_'), is_log=is_log)} over a segment of T tokens"
    if is_log and reduce in ("sum", "mean"):
        product = f"prod_t {symbol}"
        return product if reduce == "sum" else f"({product})^(1/T)"
    return f"{reduce}_t ({symbol})" if " " in symbol else f"{reduce}_t {symbol}"


def _kept(law: GaussianLaw, gates: Iterable[Gate]) -> tuple[float, float]:
    """Shares of tokens and of responses that pass filters, in [0, 1]; NaN if the law does not know one of them."""
    token = product = EVERYTHING
    others = 1.0
    for gate in gates:
        accepted = law.acceptance(gate)
        if gate.statistic == "ratio" and gate.reduce in ("sum", "mean"):
            scale = law.length if gate.reduce == "mean" else 1.0
            product = _common(product, (gate.edges[0] * scale, gate.edges[1] * scale))
        elif not math.isnan(accepted) and gate.reduce == "token":
            token = _common(token, gate.edges)
        else:
            others *= accepted
    share = law.of_level("token").between(*token)
    of_responses = law.of_level("sequence").between(*product) * others
    # A response is kept if a token of it is left.
    has_token = float(1.0 - min(max(1.0 - share, 0.0), 1.0) ** law.length)
    return share * of_responses, has_token * of_responses


def _common(first: Interval, second: Interval) -> Interval:
    return max(first[0], second[0]), min(first[1], second[1])
