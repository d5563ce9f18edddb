"""What a configuration does, in words and formulas: each step, what it touches, what carries gradient, what counts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import OF_SEGMENTS
from mis_ext.correction.weights import REDUCTIONS, Weight
from mis_ext.loss.objective import objective_of
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.catalogue import find_method
from mis_ext.methods.method import Method

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
    if config.metrics_only:
        yield Step("ratio", "rho_t = exp(clip(d_t, -20, 20))", "response tokens", "measured only, in float32")
        yield Step("result", "w_t = 1, m_t = the response mask", "nothing", "loss and masks come back as they were")
        return
    what = "its whole response" if config.rejects_whole_sequences else "that token"
    yield Step(
        "ratio",
        "rho_t = exp(clip(d_t, -20, 20))",
        "response tokens",
        f"in float32. A token whose log-prob is not finite on one side removes {what} from the mask",
    )
    if config.weight is not None:
        yield _weight_step(config.weight)
        if config.weight.gate is not None:
            yield _gate_step("gate of the weight", config.weight.gate)
    for name, gate in config.labelled_gates.items():
        yield _gate_step(f"{'veto' if gate.is_veto else 'gate'} {name}", gate)
    if config.normalize_over is not None:
        yield Step(
            "normalise",
            "w <- w / mean(w)",
            "all weights",
            f"the mean over {config.normalize_over} {_terms(config.weight)} {_SCOPES[config.scope]}",
        )
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
    condition = weight.only_outside
    only = "" if condition is None else f"; bounded only in responses outside of {band_of(condition)}"
    return Step(f"weight, {weight.level}", f"x = {ratio}; w = {text}{only}", touches, _LEVELS[weight.level])


def _gate_step(name: str, gate: Gate) -> Step:
    what = "segments" if gate.is_of_segments else "tokens" if gate.is_of_tokens else "whole responses"
    after = "" if gate.after is None else f", of the tokens that {gate.after} leaves"
    if gate.target_accept is not None:
        after += f" at first; then scaled so that {gate.target_accept:.0%} pass"
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
        kept = []
        if loss is not None and loss.kl is not None and loss.kl.tokens == "all":
            kept.append("KL")
        if loss is not None and loss.entropy_tokens == "all":
            kept.append("entropy")
        if kept:
            yield f"Rejected: no gradient of the policy loss; {' and '.join(kept)} terms stay."
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


def _terms(weight: Weight | None) -> str:
    return "tokens" if weight is None or weight.level == "token" else "responses"
