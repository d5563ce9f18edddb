# SPDX-License-Identifier: Apache-2.0
"""Effect of a configuration in the Gaussian approximation of a mismatch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from mis_ext.correction.config import OF_SEGMENTS, CorrectionConfig, Gate
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
