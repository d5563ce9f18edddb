# SPDX-License-Identifier: Apache-2.0
"""A configuration before it runs: a line per step, what the Gaussian law expects of it, and its traps."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from mis_ext.correction.config import REDUCTIONS, CorrectionConfig, Gate, Weight
from mis_ext.files import to_jsonable
from mis_ext.loss.objective import objective_of
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.catalogue import find_method
from mis_ext.methods.first_update import equivalent_correction
from mis_ext.tools.explain.effect import Effect, band_of, effect_of, formula_of
from mis_ext.tools.explain.traps import Circumstances, Trap, traps_of
from mis_ext.validation import check_number

SYMBOLS = (
    "At token t, d_t = log pi_t - log mu_t and rho_t = pi_t / mu_t. mu is the policy that sampled, pi the trainer's "
    "own scoring, frozen for the step. T counts the tokens of a response with a finite ratio. ESS is the effective "
    "sample size, as a share."
)


class Step(NamedTuple):
    """One step of the correction: its name and its formula."""

    name: str
    formula: str


def steps_of(config: CorrectionConfig, loss: LossSettings | None = None) -> tuple[Step, ...]:
    """List the steps in their order. Filters read the original mask, so their own order does not matter."""
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
        if config.weight.gate is not None:
            yield _gate_step("gate of the weight", config.weight.gate)
    for name, gate in config.labelled_gates.items():
        yield _gate_step(f"{'veto' if gate.is_veto else 'gate'} {name}", gate)
    if config.normalize_over is not None:
        terms = "tokens" if config.weight is None or config.weight.level == "token" else "responses"
        yield Step("normalise", f"w <- w / mean(w) over {config.normalize_over} {terms}, {config.scope}")
    if config.denominator == "kept":
        unit = "response tokens / kept tokens" if config.per_token_loss else "responses / sum of their kept shares"
        yield Step("denominator", f"w <- w * {unit}")


def _weight_step(weight: Weight) -> Step:
    ratio = formula_of("rho_t", REDUCTIONS[weight.level], is_log=True)
    bounds = {"low": weight.low, "high": weight.high}
    known = {name: f"{bound:g}" for name, bound in bounds.items() if bound is not None}
    text = weight.bound.text.replace("the ratio", "x", 1).replace("`", "")
    text = re.sub(r"\b(low|high)\b", lambda found: known.get(found[0], found[0]), text)
    stale = "; w = 1 where lag_t = 0" if weight.when == "stale" else ""
    return Step(f"weight, {weight.level}", f"x = {ratio}; w = {text}{stale}")


def _gate_step(name: str, gate: Gate) -> Step:
    zero = "; else w = 0" if gate.action == "zero" else ""
    return Step(name, f"{band_of(gate)}{zero}")


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
        steps: In their order.
        effect: Expected at the k3 and the length that were asked for.
        at_lengths: The same at other lengths, the one asked for among them.
        traps: What speaks against it there.
        notes: What reading the configuration warned of, and what is not known.
    """

    steps: tuple[Step, ...]
    effect: Effect
    at_lengths: tuple[Effect, ...]
    traps: tuple[Trap, ...]
    notes: tuple[str, ...]

    @property
    def is_known(self) -> bool:
        """True if the law knows what each filter keeps, so that an empty list of warnings means none."""
        return not any(map(math.isnan, (self.effect.kept_tokens, *self.effect.accepted.values())))

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON: NaN is None."""
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
        num_sequences: Responses over which the weights of one call are normalised, if known; 1 or more.
        said: Warnings that reading the configuration gave.
        loss: The whole loss, where the configuration is used in one.

    Raises:
        ValueError: A number is out of its range.
    """
    check_number("k3", k3, low=0.0, high=MAX_K3)
    check_number("length", length, low=1.0, high=MAX_LENGTH)
    if num_sequences is not None:
        check_number("num_sequences", num_sequences, low=1.0, high=math.inf, open_high=True)
    method = None if loss is None or loss.method is None else objective_of(loss).method
    # At the first update a method that the hook can do too is that configuration of the hook.
    equivalent = None if method is None else equivalent_correction(config, method)
    judged, unknown = (config, method) if equivalent is None else (equivalent, None)

    def expected(length: float) -> Effect:
        found = effect_of(judged, k3=k3, length=length)
        # The law does not have these for a method outside of the hook.
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
        notes.append("the law has no prediction for this method: mis-ext report --method measures it on a dump")
    return Explanation(
        steps=steps_of(config, loss),
        effect=effect,
        at_lengths=tuple(effect if each == length else expected(each) for each in lengths),
        traps=tuple(traps_of(judged, found, unknown)),
        notes=tuple(notes),
    )
