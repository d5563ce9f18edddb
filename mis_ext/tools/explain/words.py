# SPDX-License-Identifier: Apache-2.0
"""All that is said about a configuration before it runs, in words and formulas, and in numbers by the Gaussian law."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import OF_SEGMENTS
from mis_ext.correction.weights import REDUCTIONS, Weight
from mis_ext.files import to_jsonable
from mis_ext.loss.objective import objective_of
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.catalogue import find_method
from mis_ext.methods.first_update import equivalent_correction
from mis_ext.methods.method import Method
from mis_ext.methods.published import SYMBOLS as METHOD_SYMBOLS
from mis_ext.tools.explain.effect import Effect, effect_of, effect_of_method, method_notes
from mis_ext.tools.explain.traps import Circumstances, Trap, traps_of
from mis_ext.validation import check_number

SYMBOLS = (
    "At token t, d_t = log pi_t - log mu_t and rho_t = pi_t / mu_t. mu is the policy that sampled, pi the trainer's "
    "own scoring, frozen for the step. T counts the tokens of a response with a finite ratio. sg() stops the gradient. "
    "ESS is the effective sample size, as a share."
)

_LEVELS = {
    "token": "corrects the next token only; the prefix stays off-policy. Its variance is low, and it is biased",
    "sequence": "the exact weight of a response. Its variance grows exponentially with the length",
    "geometric": "no importance weight: it is biased. Its size does not depend on the length: about exp(-KL per token)",
}
_SCOPES = {
    "micro_batch": "of this call on this rank",
    "data_parallel": "of this call on all data-parallel ranks",
    "rollout": "of the whole rollout on all ranks",
}


_CLIPPED = "loss_t = -min(r_t A_t, clip(r_t) A_t), r_t = current / pi, which carries the gradient"
_MODES = {
    "baseline": _CLIPPED,
    "decoupled": _CLIPPED,
    "bypass": (
        "loss_t = -min(v_t A_t, clip(v_t) A_t) / sg(v_t), v_t = current / mu, which carries the gradient; "
        "pi is sg(current) here"
    ),
    "reinforce": "loss_t = -A_t log current, which carries the gradient; pi is sg(current) here",
}
_DENOMINATORS = {
    "kept": "the kept tokens of each response: removed tokens do not count",
    "sequence": "the response's own tokens, also if several share a rollout; all are counted before any rejection",
    "constant": "a constant number of tokens: the length of a response does not matter",
}


_WHAT_IS_DROPPED = "A rejected token does not count as kept. A token with weight 0, or a clipped one, does"


class Step(NamedTuple):
    """One step of the correction: its name, its formula, the tokens or responses that it touches, and its meaning."""

    name: str
    formula: str
    touches: str
    meaning: str


def steps_of(config: CorrectionConfig, loss: LossSettings | None = None) -> tuple[Step, ...]:
    """What is done, in this order; gates look at the original mask, so their own order does not matter."""
    if loss is None or loss.method is None:
        return tuple(_steps(config))
    row = find_method(loss.method.name)
    chosen = " ".join(f"{name}={value}" for name, value in (row.defaults | dict(loss.method.parameters)).items())
    method = Step(
        f"method {row.name}", f"{row.formula}{f'; {chosen}' if chosen else ''}", "the policy gradient", _WHAT_IS_DROPPED
    )
    if config.metrics_only:
        return (method._replace(meaning=f"nothing else is corrected. {_WHAT_IS_DROPPED}"),)
    *steps, result = _steps(config)
    return (*steps, method, result)


def _steps(config: CorrectionConfig) -> Iterator[Step]:
    ratio = Step("ratio", "rho_t = exp(clip(d_t, -20, 20))", "response tokens", "measured only, in float32")
    if config.metrics_only:
        yield ratio
        yield Step("result", "w_t = 1, m_t = the response mask", "nothing", "loss and masks come back as they were")
        return
    what = "its whole response" if config.rejects_whole_sequences else "that token"
    removed = f"in float32. A token whose log-prob is not finite on one side removes {what} from the mask"
    yield ratio._replace(meaning=removed)
    if config.weight is not None:
        yield _weight_step(config.weight)
        if config.weight.gate is not None:
            yield _gate_step("gate of the weight", config.weight.gate)
    for name, gate in config.labelled_gates.items():
        yield _gate_step(f"{'veto' if gate.is_veto else 'gate'} {name}", gate)
    if config.normalize_over is not None:
        terms = "tokens" if config.weight is None or config.weight.level == "token" else "responses"
        mean = f"the mean over {config.normalize_over} {terms} {_SCOPES[config.scope]}"
        yield Step("normalise", "w <- w / mean(w)", "all weights", mean)
    if config.denominator == "kept":
        unit = "response tokens / kept tokens" if config.per_token_loss else "responses / sum of their kept shares"
        yield Step("denominator", f"w <- w * {unit}", "all weights", f"both counted {_SCOPES[config.scope]}")
    yield Step("result", "w_t * loss_t, and masks m_t", "the host's policy loss and masks", "the host reduces it")


def _weight_step(weight: Weight) -> Step:
    ratio = formula_of("rho_t", REDUCTIONS[weight.level], is_log=True)
    bounds = {"low": weight.low, "high": weight.high}
    known = {name: f"{bound:g}" for name, bound in bounds.items() if bound is not None}
    text = weight.bound.text.replace("the ratio", "x", 1).replace("`", "")
    text = re.sub(r"\b(low|high)\b", lambda found: known.get(found[0], found[0]), text)
    touches = "each response token" if weight.level == "token" else "all tokens of a response alike"
    if weight.when == "stale":
        touches = "each response token with lag_t > 0, or of unknown age; w = 1 for the others"
    condition = weight.only_outside
    only = "" if condition is None else f"; bounded only in responses outside of {band_of(condition)}"
    return Step(f"weight, {weight.level}", f"x = {ratio}; w = {text}{only}", touches, _LEVELS[weight.level])


def _gate_step(name: str, gate: Gate) -> Step:
    what = "segments" if gate.is_of_segments else "tokens" if gate.is_of_tokens else "whole responses"
    after = "" if gate.after is None else f", of the tokens that {gate.after} leaves"
    if gate.action == "reject":
        meaning = "outside of it the mask is 0. So there is no policy loss, and no KL or entropy term of the host"
    else:
        meaning = "outside of it the weight is 0, and the mask stays: no policy loss, but KL and entropy terms"
    return Step(name, f"{band_of(gate)}{after}", what, meaning)


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


def gradient_of(config: CorrectionConfig, loss: LossSettings | None) -> tuple[str, ...]:
    """What carries gradient and what does not, in the host's loss or in the whole loss."""
    if loss is None and config.metrics_only:
        return ("The gradient is the host's own.",)
    lines = ["grad = sum_t m_t sg(w_t) grad loss_t / Den: the gradient of the loss, times weight and mask."]
    if config.metrics_only:
        lines = ["grad = sum_t grad loss_t / Den: nothing is corrected."]
    if loss is None:
        lines.append(
            "Carries gradient: loss_t alone, through the current policy in the host's own ratio current / pi, which "
            "the host clips (PPO)."
        )
    elif loss.method is not None:
        lines += _gradient_of_method(loss.method.name, loss.method.method)
    else:
        # Without a weight the ratio of the token stays, which a weight takes the place of.
        text = _MODES[loss.mode] if config.weight is not None else _MODES[loss.mode].replace(" / sg(v_t)", "")
        lines.append(f"The policy loss of mis_ext (mis_ext.policy_loss), mode {loss.mode}: {text}.")
    if loss is not None and loss.proximal == "current":
        lines.append(
            "With mis_loss_proximal: current pi is sg(current): the ratio current / pi is 1, and no clip acts."
        )
    if not config.metrics_only:
        lines.append("Detached: both log-probs on entry, so also rho, w, m, and the mean that w is divided by.")
    lines += _without_gradient(config, loss)
    if loss is None:
        lines.append(
            "The hook sees neither the current policy nor advantages. In mis_ext.policy_loss weight and mask are the "
            "same, mis_loss_mode selects loss_t, and mis_loss_method takes any method."
        )
    return tuple(lines)


def _gradient_of_method(name: str, method: Method) -> Iterator[str]:
    row = find_method(name)
    yield f"The policy loss of mis_ext (mis_ext.policy_loss), method {name}: loss_t = -({row.formula})."
    if method.surrogate.pair is not None:
        over = "a sequence or part of it" if method.surrogate.reduce != "token" else "the token"
        ratio = " / ".join(method.surrogate.pair)
        yield f"Carries gradient: the ratio {ratio} of {over}. Where a bound acts on it, its token has no gradient."
    else:
        yield "Carries gradient: log pi of the token alone. A bound truncates what multiplies it, without gradient."
    if method.surrogate.spread == "sequence":
        yield "Each token of a sequence gets the mean of their gradients."
    if method.factors:
        yield "Detached: the factors in sg() and in 1[...]."
    if method.terms:
        yield "Its penalty has its own gradient, for any advantage."


def _without_gradient(config: CorrectionConfig, loss: LossSettings | None) -> Iterator[str]:
    actions = _actions(config, loss)
    if "reject" in actions:
        has_kl = loss is not None and loss.kl is not None and loss.kl.tokens == "all"
        has_entropy = loss is not None and loss.entropy_tokens == "all"
        staying = [name for name, stays in (("KL", has_kl), ("entropy", has_entropy)) if stays]
        if staying:
            yield f"Rejected: no gradient of the policy loss; {' and '.join(staying)} terms stay."
        else:
            yield "Rejected: no gradient at all, because KL and entropy terms use the returned masks."
    if "zero" in actions:
        yield "Zeroed: no gradient of the policy loss; that of KL and entropy terms stays."


def _actions(config: CorrectionConfig, loss: LossSettings | None) -> set[str]:
    """What becomes of tokens that a gate of the correction, or a factor of the method, drops."""
    factors = () if loss is None else objective_of(loss).method.factors
    dropping = {factor.action for factor in factors if factor.action is not None}
    return dropping | {gate.action for gate in config.all_gates}


def denominator_of(config: CorrectionConfig, loss: LossSettings | None) -> tuple[str, ...]:
    """What the policy loss is divided by, and what that makes of a rejection."""
    if loss is not None and loss.denominator != "original":
        lines = [f"mis_loss_denominator: {loss.denominator} divides by {_DENOMINATORS[loss.denominator]}."]
    else:
        mean = "all response tokens of the batch" if config.per_token_loss else "the response tokens of each response"
        left = "" if loss is not None else " (Miles' FSDP backend: by the kept ones)"
        lines = [f"The host divides by {mean}, counted before any rejection{left}."]
    if config.denominator == "kept" and not config.metrics_only:
        lines.append("mis_denominator: kept scales kept terms up, as if rejected ones did not count.")
    elif _actions(config, loss) and (loss is None or loss.denominator != "kept"):
        lines.append("So removed terms still count: removing a share q multiplies the policy loss by about 1 - q.")
    if config.normalize_over == "valid":
        lines.append("The mean weight also counts removed terms: a removed outlier still scales the kept terms down.")
    elif config.normalize_over == "kept":
        lines.append("The mean weight is over kept terms, so these have a mean weight of 1.")
    return tuple(lines)


# --- all of it

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
        content: dict[str, Any] = to_jsonable(self)
        return {"format": FORMAT} | content


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
    for name, accepted in effect.accepted.items():
        if math.isnan(accepted):
            yield (
                f"{name}: the law cannot predict its kept share, which depends on probabilities or on another gate. So "
                "the share that all gates keep is not known either"
            )
        elif 1.0 - accepted < _IDLE:
            yield f"{name}: by the law it removes nothing; it acts only on heavy tails"
