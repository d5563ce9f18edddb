# SPDX-License-Identifier: Apache-2.0
"""Explanation of a configuration: its effect in the Gaussian approximation, its pitfalls, and its steps.

``d = log pi_prox - log mu`` of a token is assumed to be ``N(m, s^2)``, independent for each token. Ratios have mean 1
under the sampling policy, ``E[exp d] = exp(m + s^2 / 2) = 1``, so ``m = -s^2 / 2`` and ``k3 = E[exp d - 1 - d] = -m``.
So k3 alone gives the distribution of ratios, of their products and means, and the effect of gates. Real mismatch has
heavier tails, and errors that repeat within a response.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from mis_ext.correction.config import OF_SEGMENTS, REDUCTIONS, CorrectionConfig, Gate, Weight
from mis_ext.files import to_jsonable
from mis_ext.loss.objective import objective_of
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.catalogue import find_method
from mis_ext.methods.first_update import equivalent_correction
from mis_ext.methods.method import Method
from mis_ext.validation import check_number

Interval = tuple[float, float]
EVERYTHING: Interval = (-math.inf, math.inf)


@dataclass(frozen=True)
class Normal:
    """A Gaussian variable; with variance 0 it is a constant."""

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
        """Distribution of the log weight of this level in nats: log-ratio of a token, or their sum or mean."""
        mean, variance = {"token": (1.0, 1.0), "sequence": (self.length,) * 2, "geometric": (1.0, 1.0 / self.length)}[
            level
        ]
        return Normal(-self.k3 * mean, 2.0 * self.k3 * variance)

    def ess(self, level: str) -> float:
        """Kish's effective sample size of unbounded ratios at a level, as a share."""
        return math.exp(-self.of_level(level).variance)

    def acceptance(self, gate: Gate) -> float:
        """Share of tokens, or of responses, that a gate keeps; NaN if the approximation has no value.

        It has values for ratios of tokens, and for their products and means over responses; not for other statistics or
        segments.
        """
        if gate.statistic != "ratio" or gate.is_of_segments:
            return math.nan
        low, high = gate.edges
        token = self.of_level("token")
        if gate.reduce == "token":
            return token.between(low, high)
        if gate.reduce in ("min", "max"):
            # The probability that all tokens are at most a bound, or that all are above it.
            low, high = (token.between(-math.inf, each) for each in (low, high))
            if gate.reduce == "min":
                low, high = 1.0 - high, 1.0 - low
            return float(high**self.length - low**self.length)
        return self.of_level("sequence" if gate.reduce == "sum" else "geometric").between(low, high)


@dataclass(frozen=True, kw_only=True)
class Effect:
    """Expected values; NaN if the approximation has none.

    Attributes:
        k3: Per token, in nats.
        length: Tokens of a response.
        ess_token: Kish's effective sample size of token ratios, as a share. ``ess_sequence``: of products over
            responses. ``ess_geometric``: of geometric means.
        accepted: Share of tokens, or of responses, that each gate keeps or gives a nonzero weight.
        kept_tokens: Share of tokens that stay in the mask. Gates on statistics other than the ratio of a token or
            response count as independent.
        kept_sequences: The same for responses.
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
    """All gates of a configuration by name and inequality. The gate implied by the weight is named ``weight``."""
    return {f"{name.removeprefix('of the ')}: {band_of(gate)}": gate for name, gate in config.all_gates.items()}


def band_of(gate: Gate) -> str:
    """The bounds of a gate as an inequality. Values that satisfy it pass."""
    low, high = ("" if bound is None else f"{bound:g}" for bound in (gate.low, gate.high))
    value = formula_of(gate.row.symbol or gate.statistic, gate.reduce, is_log=gate.row.is_log)
    return f"{low}{' <= ' if low else ''}{value}{' <= ' if high else ''}{high}"


def formula_of(symbol: str, reduce: str, *, is_log: bool) -> str:
    """Formula of a statistic of a token after a reduction; for logarithms, the formula of their argument."""
    if reduce == "token":
        return symbol
    if reduce in OF_SEGMENTS:
        return f"{formula_of(symbol, reduce.removeprefix('segment_'), is_log=is_log)} over a segment of T tokens"
    if is_log and reduce in ("sum", "mean"):
        product = f"prod_t {symbol}"
        return product if reduce == "sum" else f"({product})^(1/T)"
    return f"{reduce}_t ({symbol})" if " " in symbol else f"{reduce}_t {symbol}"


def _kept(law: GaussianLaw, gates: Iterable[Gate]) -> tuple[float, float]:
    """Shares of tokens and responses that pass filters, in [0, 1]; NaN if the approximation lacks a filter."""
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
    # A response is kept if at least one of its tokens is kept.
    has_token = float(1.0 - min(max(1.0 - share, 0.0), 1.0) ** law.length)
    return share * of_responses, has_token * of_responses


def _common(first: Interval, second: Interval) -> Interval:
    return max(first[0], second[0]), min(first[1], second[1])


# --- traps: known pitfalls of configurations, on measured data or in the Gaussian approximation


MIN_LEARNING_RATE = 0.9
MAX_LENGTH_BIAS, SHORTER, LONGER = 0.2, 0.25, 4.0
FEW_SEQUENCES_ESS = 0.2
"""If the effective sample size of products of ratios is below this share, a few responses dominate.

In the Gaussian approximation it is exp(-s^2), with s the standard deviation of the log of a product. Then the heaviest
Phi(-s) of the responses have half of all weight: a tenth of them at 0.19, a fifth at 0.5, one in fifteen at 0.1.
"""
HARMLESS_K3 = 1e-3
"""Up to this k3, no study found a correction better or worse than no correction."""
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
    """A warning: its name, a stable identifier, and its text."""

    name: TrapName
    text: str


@dataclass(frozen=True, kw_only=True)
class Circumstances:
    """Data for which a configuration is checked; NaN or None if unknown.

    Attributes:
        k3: Mismatch per token, in nats.
        length: Mean tokens of a response.
        ess_sequence: Effective sample size of products of ratios as a share, measured or from the Gaussian
            approximation.
        k_hat: Pareto k-hat of products of ratios.
        kept_tokens: Share of tokens that stay in the mask.
        kept_sequences: The same for responses.
        learning_rate: Measured mean of the factor on the loss.
        is_stale: Whether responses were sampled with weights of an earlier step.
        num_sequences: Responses per call, over all ranks of the normalization.
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


def traps_of(config: CorrectionConfig, found: Circumstances, method: Method | None = None) -> Iterator[Trap]:
    """The pitfalls of ``config``, combined with a method, for this data."""
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
            f"{found.ess_sequence:.2g} of the batch: a few sequences dominate{tail}; use {advice}, or shorter "
            "responses",
        )
    removed = 1.0 - min(found.kept_tokens, found.kept_sequences)
    if removed > config.max_reject_fraction:
        yield Trap(
            "rejects_much",
            f"it removes {removed:.1%}, more than mis_max_reject_fraction = {config.max_reject_fraction:g}: in our "
            "runs, a geometric filter that rejected 38 % or more lowered the reward",
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
    # With stale weights they cost more; ``stale_gates`` reports this.
    if bands and found.k3 > HARMLESS_K3 and not found.is_stale:
        yield Trap(
            "costly_gates",
            f"{COST_OF_GATES} and increased it in no run: above k3 {HARMLESS_K3:g} use mis, unless the filter is for a "
            "few invalid responses",
        )
    # The number of sequences per call may be unknown. Then a micro-batch may have one; all ranks together rarely do.
    is_single = found.num_sequences == 1 or (found.num_sequences is None and config.scope == "micro_batch")
    if is_single and config.normalize_over is not None and weight is not None and weight.level != "token":
        yield Trap(
            "single_sequence",
            f"{weight.level}-level weights normalized over a single sequence are always 1, so nothing is corrected: "
            "use tis_normalize_scope: data_parallel, or larger micro-batches",
        )
    if found.learning_rate < MIN_LEARNING_RATE:
        yield Trap(
            "low_learning_rate",
            f"it multiplies the gradient by {found.learning_rate:.2g} on average, and with SGD the step; with Adam, or "
            "if the norm is clipped, a constant factor cancels",
        )


def gates_sequences(config: CorrectionConfig) -> bool:
    """Return True if a filter rejects whole responses by a statistic of all their tokens."""
    return any(not gate.is_of_tokens for gate in config.all_gates.values())


def _length_bias(name: str, gate: Gate, found: Circumstances) -> Iterator[Trap]:
    # A response has at least one token.
    shorter, longer = max(1.0, SHORTER * found.length), LONGER * found.length
    short, expected, long = (GaussianLaw(found.k3, each).acceptance(gate) for each in (shorter, found.length, longer))
    # If the approximation expects fewer responses than were kept, it does not describe this data.
    if expected > found.kept_sequences - MAX_LENGTH_BIAS and abs(short - long) > MAX_LENGTH_BIAS:
        side = "long" if short > long else "short"
        yield Trap(
            "length_bias",
            f"{name}: in the Gaussian approximation, it accepts {short:.0%} of responses at a length of "
            f"{shorter:.0f} and {long:.0%} at {longer:.0f} tokens: it rejects {side} ones because of their length",
        )


# --- the explanation of a configuration before it runs


SYMBOLS = (
    "At token t, d_t = log pi_t - log mu_t and rho_t = pi_t / mu_t. mu is the policy that sampled the token, "
    "and pi the trainer's policy before the update, frozen for the step. T counts the tokens of a response with a "
    "finite ratio. ESS is the effective sample size, as a share."
)


class Step(NamedTuple):
    """One step of the correction: its name and its formula."""

    name: str
    formula: str


def steps_of(config: CorrectionConfig, loss: LossSettings | None = None) -> tuple[Step, ...]:
    """List the steps in order. All filters use the original mask, so their order does not matter."""
    steps = [] if config.metrics_only and loss is not None and loss.method is not None else [*_steps(config)]
    if loss is not None and loss.method is not None:
        row = find_method(loss.method.name)
        chosen = " ".join(f"{name}={value}" for name, value in (row.defaults | dict(loss.method.parameters)).items())
        steps.append(Step(f"method {row.name}", f"{row.formula}{f'; {chosen}' if chosen else ''}"))
    return tuple(steps)


def _steps(config: CorrectionConfig) -> Iterator[Step]:
    yield Step("ratio", "rho_t = exp(clip(d_t, -20, 20))")
    if config.metrics_only:
        return
    if config.weight is not None:
        yield _weight_step(config.weight)
    for name, gate in config.all_gates.items():
        zero = "; else w = 0" if gate.action == "zero" else ""
        yield Step(f"{'veto' if gate.is_veto else 'gate'} {name}", f"{band_of(gate)}{zero}")
    if config.normalize_over is not None:
        terms = "tokens" if config.weight is None or config.weight.level == "token" else "responses"
        yield Step("normalize", f"w <- w / mean(w) over {config.normalize_over} {terms}, {config.scope}")
    if config.denominator == "kept":
        unit = "response tokens / kept tokens" if config.per_token_loss else "responses / sum of their kept shares"
        yield Step("denominator", f"w <- w * {unit}")


def _weight_step(weight: Weight) -> Step:
    ratio = formula_of("rho_t", REDUCTIONS[weight.level], is_log=True)
    bounds = {"low": weight.low, "high": weight.high}
    known = {name: f"{bound:g}" for name, bound in bounds.items() if bound is not None}
    text = re.sub(r"(the )?ratio", "x", weight.bound.text, count=1).replace("`", "")
    text = re.sub(r"\b(low|high)\b", lambda found: known.get(found[0], found[0]), text)
    stale = "; w = 1 where lag_t = 0" if weight.when == "stale" else ""
    return Step(f"weight, {weight.level}", f"x = {ratio}; w = {text}{stale}")


MAX_K3, MAX_LENGTH = 10.0, 1e7
DEFAULT_K3, DEFAULT_LENGTH = 1e-3, 2048
_OTHER_LENGTHS = (1 / 16, 1 / 4, 1.0, 4.0)

LIMITS = (
    "Expected by the Gaussian approximation: the d of all tokens are independent, N(-k3, 2 k3). Real mismatch has "
    "heavier tails, and its errors repeat within a response. mis-ext report measures your own dumps."
)


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Steps of a configuration, and values expected in the Gaussian approximation.

    Attributes:
        steps: Steps in order.
        effect: Expected effect at the given k3 and length.
        at_lengths: The same at several lengths, including the given one.
        traps: Its pitfalls at this k3 and length.
        notes: Warnings from reading the configuration, and unknown values.
    """

    steps: tuple[Step, ...]
    effect: Effect
    at_lengths: tuple[Effect, ...]
    traps: tuple[Trap, ...]
    notes: tuple[str, ...]

    @property
    def is_known(self) -> bool:
        """True if the approximation has values for all filters, so that an empty list of warnings means no warning."""
        return not any(map(math.isnan, (self.effect.kept_tokens, *self.effect.accepted.values())))

    def to_dict(self) -> dict[str, Any]:
        """Return all content for JSON, with None for NaN."""
        content: dict[str, Any] = to_jsonable(self)
        return {"format": 2} | content


def explain_config(
    config: CorrectionConfig,
    *,
    k3: float = DEFAULT_K3,
    length: float = DEFAULT_LENGTH,
    is_stale: bool = False,
    num_sequences: int | None = None,
    said: Sequence[str] = (),
    loss: LossSettings | None = None,
) -> Explanation:
    """Explain ``config``: its steps, its expected effect, and warnings.

    Args:
        config: The configuration.
        k3: Mismatch per token, in nats, in [0, 10].
        length: Tokens of a response, in [1, 1e7].
        is_stale: Whether responses are sampled with weights of an earlier step.
        num_sequences: Responses over which one call normalizes the weights, if known; 1 or more.
        said: Warnings from reading the configuration.
        loss: The full policy loss, if the configuration is used in one.

    Raises:
        ValueError: If a number is out of range.
    """
    check_number("k3", k3, low=0.0, high=MAX_K3)
    check_number("length", length, low=1.0, high=MAX_LENGTH)
    if num_sequences is not None:
        check_number("num_sequences", num_sequences, low=1.0, high=math.inf, open_high=True)
    method = None if loss is None or loss.method is None else objective_of(loss).method
    # At the first update, a method that the hook can express equals that configuration of the hook.
    equivalent = None if method is None else equivalent_correction(config, method)
    judged, unknown = (config, method) if equivalent is None else (equivalent, None)

    def expected(length: float) -> Effect:
        found = effect_of(judged, k3=k3, length=length)
        # The approximation has no values for a method outside of the hook.
        return found if unknown is None else replace(found, kept_tokens=math.nan, kept_sequences=math.nan)

    effect = expected(length)
    lengths = sorted({min(max(1.0, length * factor), MAX_LENGTH) for factor in _OTHER_LENGTHS})
    found = Circumstances(
        k3=k3,
        length=length,
        ess_sequence=effect.ess_sequence,
        kept_tokens=effect.kept_tokens,
        kept_sequences=effect.kept_sequences,
        is_stale=is_stale,
        num_sequences=num_sequences,
    )
    notes = [*said]
    if unknown is not None:
        notes.append(
            "the Gaussian approximation does not cover this method: mis-ext report --method measures it on a dump"
        )
    return Explanation(
        steps=steps_of(config, loss),
        effect=effect,
        at_lengths=tuple(effect if each == length else expected(each) for each in lengths),
        traps=tuple(traps_of(judged, found, unknown)),
        notes=tuple(notes),
    )
