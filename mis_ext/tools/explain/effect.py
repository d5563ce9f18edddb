# SPDX-License-Identifier: Apache-2.0
"""Effect of a configuration in the Gaussian approximation of a mismatch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mis_ext.correction.config import OF_SEGMENTS, CorrectionConfig, Gate, Weight
from mis_ext.tools.explain.law import EVERYTHING, GaussianLaw, Interval


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
        learning_rate: Mean of what multiplies the loss of a response token: 1 without correction.
        ess: Kish's effective share of that factor.
    """

    k3: float
    length: float
    ess_token: float
    ess_sequence: float
    ess_geometric: float
    accepted: dict[str, float]
    kept_tokens: float
    kept_sequences: float
    learning_rate: float
    ess: float


def effect_of(config: CorrectionConfig, *, k3: float, length: float) -> Effect:
    """Compute the effect of ``config`` on responses of ``length`` tokens with a mismatch of ``k3`` nats per token."""
    law, weight = GaussianLaw(k3, length), config.weight
    gates = described_gates(config)
    kept = _Passed(law, (gate for gate in gates.values() if gate.action == "reject"))
    live = _Passed(law, gates.values())
    first, second = (live.moment(weight, power) for power in (1, 2))
    # As in the correction: the mean over kept weights, and the survivors over all.
    means = {"valid": _Passed(law).moment(weight, 1), "kept": _ratio_or_one(first, live.share), None: 1.0}
    factor = _ratio_or_one(1.0, live.share) if config.denominator == "kept" else 1.0
    return Effect(
        k3=k3,
        length=length,
        ess_token=law.ess("token"),
        ess_sequence=law.ess("sequence"),
        ess_geometric=law.ess("geometric"),
        accepted={name: law.acceptance(gate) for name, gate in gates.items()},
        kept_tokens=kept.share,
        kept_sequences=kept.share_responses,
        learning_rate=first * factor / means[config.normalize_over],
        ess=first**2 / second if second else math.nan,
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


class _Passed:
    """Values that pass filters: log-ratios of a token and of a response, and a share, NaN if one is unknown.

    ``share`` is what is left of all tokens, in [0, 1].
    """

    def __init__(self, law: GaussianLaw, gates: Iterable[Gate] = ()) -> None:
        self.law, self.others = law, 1.0
        self.token: Interval = EVERYTHING
        self.product: Interval = EVERYTHING
        for gate in gates:
            accepted = law.acceptance(gate)
            if gate.statistic == "ratio" and gate.reduce in ("sum", "mean"):
                scale = law.length if gate.reduce == "mean" else 1.0
                self.product = _common(self.product, (gate.edges[0] * scale, gate.edges[1] * scale))
            elif not math.isnan(accepted) and gate.reduce == "token":
                self.token = _common(self.token, gate.edges)
            else:
                self.others *= accepted
        self.share_token = law.of_level("token").between(*self.token)
        self.share_product = law.of_level("sequence").between(*self.product)
        self.share = self.share_token * self.share_product * self.others

    @property
    def share_responses(self) -> float:
        """Of all responses, those of which a token is left, in [0, 1]."""
        lost = min(max(1.0 - self.share_token, 0.0), 1.0)
        return float(1.0 - lost**self.law.length) * self.share_product * self.others

    def moment(self, weight: Weight | None, power: int) -> float:
        """``E[weight^power; passed]``: the moment of a token's weight, over tokens that pass."""
        if weight is None:
            return self.share
        if weight.level == "token":
            within, rest = self.token, self.share_product
        else:
            scale = self.law.length if weight.level == "geometric" else 1.0
            within, rest = (self.product[0] / scale, self.product[1] / scale), self.share_token
        return self.law.of_level(weight.level).moment(weight.bounded, power, within) * rest * self.others


def _common(first: Interval, second: Interval) -> Interval:
    return max(first[0], second[0]), min(first[1], second[1])


def _ratio_or_one(numerator: float, denominator: float) -> float:
    return numerator / denominator if numerator > 0.0 and denominator > 0.0 else 1.0
