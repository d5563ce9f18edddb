# SPDX-License-Identifier: Apache-2.0
"""Known traps: what speaks against a configuration, on data that were measured or that the Gaussian law describes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from mis_ext.correction.config import CorrectionConfig, Gate
from mis_ext.methods.method import Method
from mis_ext.tools.explain.effect import GaussianLaw, described_gates

MIN_LEARNING_RATE = 0.9
MAX_LENGTH_BIAS, SHORTER, LONGER = 0.2, 0.25, 4.0
FEW_SEQUENCES_ESS = 0.2
"""Effective share of products of ratios below which a few responses decide.

By the Gaussian law it is exp(-s^2), with s the standard deviation of the log of a product, and the heaviest Phi(-s) of
the responses have half of all weight: a tenth of them at 0.19, a fifth at 0.5, one in fifteen at 0.1.
"""
HARMLESS_K3 = 1e-3
"""Up to here no study found a correction better than none, or worse."""
COST_OF_GATES = (
    "filters on sequences with bounds of 1 % lowered the reward by 0.08 to 0.28 at a staleness of 1 or 2 steps"
)

TrapName = Literal[
    "hopeless_sequences",
    "rejects_much",
    "length_bias",
    "stale_gates",
    "costly_gates",
    "single_sequence",
    "low_learning_rate",
]


class Trap(NamedTuple):
    """A warning: its name, stable for programs, and what it says."""

    name: TrapName
    text: str


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Data on which a configuration is judged; NaN or None if unknown.

    Attributes:
        k3: Mismatch per token, in nats.
        length: Mean tokens of a response.
        ess_sequence: Effective share of products of ratios; measured, or by the Gaussian law.
        k_hat: Of the same.
        kept_tokens: Share that stays in the mask.
        kept_sequences: The same of responses.
        learning_rate: Mean of what multiplies the loss, measured.
        is_stale: Whether responses were sampled with weights of an earlier step.
        num_sequences: Responses in a call, on all ranks over which is normalised.
    """

    k3: float
    length: float
    ess_sequence: float
    k_hat: float = math.nan
    kept_tokens: float
    kept_sequences: float
    learning_rate: float = math.nan
    is_stale: bool = False
    num_sequences: int | None = None


def traps_of(config: CorrectionConfig, found: Circumstances, method: Method | None = None) -> list[Trap]:
    """The traps that ``config``, beside a method, falls into under these circumstances."""
    return [*_traps(config, found, method)]


def _traps(config: CorrectionConfig, found: Circumstances, method: Method | None) -> Iterator[Trap]:
    gates, weight = config.all_gates.values(), config.weight
    products = any(gate.statistic == "ratio" and gate.reduce == "sum" for gate in gates)
    products = products or (weight is not None and weight.level == "sequence")
    is_of_method = method is not None and method.multiplies_ratios
    if (products or is_of_method) and found.ess_sequence < FEW_SEQUENCES_ESS:
        of_both = {"the token or geometric level": products, "a method of tokens": is_of_method}
        advice = " and ".join(name for name, multiplies in of_both.items() if multiplies)
        tail = "" if math.isnan(found.k_hat) else f" (k-hat {found.k_hat:.2g}; above 0.7 their mean is unreliable)"
        yield Trap(
            "hopeless_sequences",
            f"products of ratios over {found.length:.0f} tokens have an effective sample size of "
            f"{found.ess_sequence:.2g} of the batch: a few sequences decide{tail}; use {advice}, or shorter responses",
        )
    removed = 1.0 - min(found.kept_tokens, found.kept_sequences)
    if removed > config.max_reject_fraction:
        yield Trap(
            "rejects_much",
            f"removes {removed:.1%}, more than mis_max_reject_fraction = {config.max_reject_fraction:g}: in our runs, "
            "a geometric filter that rejected 38 % or more lowered the reward",
        )
    for name, gate in described_gates(config).items():
        if not gate.is_of_tokens:
            yield from _length_bias(name, gate, found)
    if found.is_stale and (gates_sequences(config) or (method is not None and method.judges_sequences)):
        yield Trap(
            "stale_gates",
            "with stale weights, filters on sequences with bounds of 1 % rejected 66 to 93 % of the responses at "
            "first, and runs collapsed earlier; wider bounds were not tested",
        )
    bands = any(gate.statistic == "ratio" and gate.reduce in ("sum", "mean") for gate in gates)
    # With stale weights they cost more, which ``stale_gates`` says.
    if bands and found.k3 > HARMLESS_K3 and not found.is_stale:
        yield Trap(
            "costly_gates",
            f"{COST_OF_GATES} and raised it nowhere: above k3 {HARMLESS_K3:g} use mis, unless the filter is for a few "
            "invalid responses",
        )
    # How many a call has is not always known: then a micro-batch may have one, and all ranks together hardly.
    is_single = found.num_sequences == 1 or (found.num_sequences is None and config.scope == "micro_batch")
    if is_single and config.normalize_over is not None and weight is not None and weight.level != "token":
        yield Trap(
            "single_sequence",
            f"{weight.level}-level weights normalised over a single sequence are always 1, so nothing is corrected: "
            "use tis_normalize_scope: data_parallel, or larger micro-batches",
        )
    if found.learning_rate < MIN_LEARNING_RATE:
        yield Trap(
            "low_learning_rate",
            f"multiplies the gradient by {found.learning_rate:.2g} on average: with SGD the step too; with Adam, or "
            "where the norm is clipped, a factor that stays the same cancels",
        )


def gates_sequences(config: CorrectionConfig) -> bool:
    """Return True if a filter rejects whole responses by a statistic of all their tokens."""
    return any(not gate.is_of_tokens for gate in config.all_gates.values())


def _length_bias(name: str, gate: Gate, found: Circumstances) -> Iterator[Trap]:
    # No response is shorter than a token.
    shorter, longer = max(1.0, SHORTER * found.length), LONGER * found.length
    short, expected, long = (GaussianLaw(found.k3, each).acceptance(gate) for each in (shorter, found.length, longer))
    # Where the law expects fewer responses than were kept, it does not describe these.
    if expected > found.kept_sequences - MAX_LENGTH_BIAS and abs(short - long) > MAX_LENGTH_BIAS:
        side = "long" if short > long else "short"
        yield Trap(
            "length_bias",
            f"{name}: by the Gaussian approximation it accepts {short:.0%} of responses at a length of {shorter:.0f} "
            f"and {long:.0%} at {longer:.0f} tokens: {side} ones are rejected for their length",
        )
