"""All that is said about a configuration before it runs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mis_ext.correction.config import CorrectionConfig
from mis_ext.jsonable import to_jsonable
from mis_ext.loss.objective import objective_of
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.first_update import equivalent_correction
from mis_ext.methods.published import SYMBOLS as METHOD_SYMBOLS
from mis_ext.tools.explain.effect import Effect, effect_of, effect_of_method, method_notes
from mis_ext.tools.explain.traps import Circumstances, Trap, traps_of
from mis_ext.tools.explain.words import SYMBOLS, Step, denominator_of, gradient_of, steps_of
from mis_ext.validation import check_number

FORMAT = 1
"""Version of the format of the JSON."""

MAX_K3, MAX_LENGTH = 10.0, 1e7
DEFAULT_K3, DEFAULT_LENGTH = 1e-3, 2048
_OTHER_LENGTHS = (1 / 16, 1 / 4, 1.0, 4.0)
_IDLE = 1e-6

LIMITS = (
    "Expected by the Gaussian law: the d of all tokens are independent, N(-k3, 2 k3). So ratios have mean 1 and this "
    "k3. Real mismatch has heavier tails, and its errors repeat within a response. An example is an fp8 cache, k3 "
    "5e-3, 421 tokens: a band of [1/2, 2] on products kept 30 % (the law: 16 %), one of 1 % on geometric means 80 % "
    "(the law: 84 %; lab/evidence/length.md). `mis-ext report` measures your own dumps."
)
METHOD_LIMITS = (
    "Numbers of a method are those of the first update, where the current policy is the proximal one. If the hook "
    "could run it too, the law gives them. Others are measured on random responses that follow the law, every second "
    "one with a positive advantage. Two sets with different probabilities must agree to 5 %, else a number is unknown."
)
_METHOD_UNKNOWN = ("kept_tokens", "live_tokens", "kept_sequences", "learning_rate", "ess")


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What a configuration does, in words and in numbers expected by the Gaussian law.

    Attributes:
        about: What is known of a published method, by title; empty without one.
        symbols: What the letters of the formulas mean.
        steps: In their order.
        gradient: What carries gradient, and what does not.
        denominator: What counts in it.
        effect: Expected at the k3 and the length that were asked for.
        at_lengths: The same at other lengths, the one asked for among them.
        traps: What speaks against it there.
        notes: What is worth knowing.
        limits: What the expectation leaves out.
    """

    about: Mapping[str, str]
    symbols: str
    steps: tuple[Step, ...]
    gradient: tuple[str, ...]
    denominator: tuple[str, ...]
    effect: Effect
    at_lengths: tuple[Effect, ...]
    traps: tuple[Trap, ...]
    notes: tuple[str, ...]
    limits: str

    @property
    def is_known(self) -> bool:
        """Whether the law says what the loss is multiplied by, so that no trap means none."""
        return not math.isnan(self.effect.learning_rate)

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON: NaN is None."""
        steps, traps = ([each._asdict() for each in rows] for rows in (self.steps, self.traps))
        content: dict[str, Any] = to_jsonable(self)
        return {"format": FORMAT} | content | {"steps": steps, "traps": traps}


def explain_config(
    config: CorrectionConfig,
    *,
    k3: float = DEFAULT_K3,
    length: float = DEFAULT_LENGTH,
    is_stale: bool = False,
    num_sequences: int | None = None,
    said: Sequence[str] = (),
    loss: LossSettings | None = None,
    about: Mapping[str, str] | None = None,
) -> Explanation:
    """What ``config`` does, what is to be expected of it, and what speaks against it.

    Args:
        config: The configuration.
        k3: Mismatch per token, in nats, in [0, 10].
        length: Tokens of a response, in [1, 1e7].
        is_stale: Whether responses are sampled with weights of an earlier step.
        num_sequences: Responses over which the weights of one call are normalised, if known; 1 or more.
        said: Warnings that reading the configuration gave.
        loss: The whole loss, where the configuration is used in one.
        about: What is known of the method, by title, to be said as it is.

    Raises:
        ValueError: A number is out of its range.
    """
    check_number("k3", k3, low=0.0, high=MAX_K3)
    check_number("length", length, low=1.0, high=MAX_LENGTH)
    if num_sequences is not None:
        check_number("num_sequences", num_sequences, low=1.0, high=math.inf, open_high=True)
    method = None if loss is None or loss.method is None else objective_of(loss).method
    # The numbers of a method that the hook could do too are those of its configuration, at the first update.
    equivalent = None if method is None else equivalent_correction(config, method)
    judged, drawn = (config, method) if equivalent is None else (equivalent, None)

    def expected(length: float) -> Effect:
        if drawn is None:
            return effect_of(judged, k3=k3, length=length)
        return effect_of_method(judged, drawn, k3=k3, length=length)

    effect = expected(length)
    lengths = sorted({min(max(1.0, length * factor), MAX_LENGTH) for factor in _OTHER_LENGTHS})
    found = Circumstances.expected(effect, is_stale=is_stale, num_sequences=num_sequences)
    notes = [*said, *_notes(judged, effect)]
    if method is not None:
        notes += method_notes(method)
        if any(math.isnan(getattr(effect, name)) for name in _METHOD_UNKNOWN):
            notes.append("numbers that are - cannot be predicted: they depend on probabilities, or on a few responses")
    return Explanation(
        about=about or {},
        symbols=SYMBOLS if not about else f"{SYMBOLS} In the formula of the method: {METHOD_SYMBOLS}",
        steps=steps_of(config, loss),
        gradient=gradient_of(config, loss),
        denominator=denominator_of(config, loss),
        effect=effect,
        at_lengths=tuple(effect if each == length else expected(each) for each in lengths),
        traps=tuple(traps_of(judged, found, drawn)),
        notes=tuple(notes),
        limits=LIMITS if method is None else f"{LIMITS} {METHOD_LIMITS}",
    )


def _notes(config: CorrectionConfig, effect: Effect) -> Iterator[str]:
    weight = config.weight
    if weight is not None and weight.only_outside is not None:
        yield "the law cannot predict the weights: their bound acts in some responses only (only_outside)"
    elif weight is not None and weight.bound.has_high and effect.above_high < _IDLE and not weight.bound.rejects:
        yield (
            f"by the law no ratio reaches the bound {weight.high:g}: it acts only on heavy tails, which the law lacks"
        )
    for name, gate in config.labelled_gates.items():
        if gate.target_accept is not None:
            yield (
                f"{name}: each rollout moves the band towards keeping {gate.target_accept:.0%}; the numbers here are "
                "those of the band as it is written"
            )
    for name, accepted in effect.accepted.items():
        if math.isnan(accepted):
            yield (
                f"{name}: the law cannot predict its kept share, which depends on probabilities or on another gate. So "
                "the share that all gates keep is not known either"
            )
        elif 1.0 - accepted < _IDLE:
            yield f"{name}: by the law it removes nothing; it acts only on heavy tails"
