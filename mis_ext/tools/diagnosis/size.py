# SPDX-License-Identifier: Apache-2.0
"""What a mismatch of this size usually is, where nothing else explains it."""

from __future__ import annotations

import math

from mis_ext.checks.token_sums import KERNEL_K3, MIN_TOKENS, PRETRAINED_K3, QUANTISED_K3, SAMPLED_ERRORS, Power
from mis_ext.tools.diagnosis.cause import Confidence, Finding, cause, percent
from mis_ext.tools.diagnosis.measuring import Measured
from mis_ext.tools.diagnosis.signals import FIRST_LATE, Place, Signals

MAX_EXPLAINED = 0.87
"""Where other causes explain more of k3, what is left is not named: shares are not that exact."""

MIN_OPEN, RAISED, RAISED_ERRORS = 200, 0.55, 4.0
"""Of so many open tokens, so many raised, and so many standard errors above one half: weights that have learned since.
In a pretrained model weights one update old raised 57 % of the open tokens, weights four or eight updates old 62 %; 121
measurements with fresh weights had 39 to 54 % (lab/evidence/README.md). Alone they name no
cause: they move a limit between old weights and precision, and are words among alternatives."""

QUIET_K3 = 2e-4
"""So little is not named beside a cause of half of k3, and old weights are no alternative without evidence of them."""

WITHIN = 0.6
"""Share of the variance of log-probs that the tokens of one position have; the rest is that of positions, whose mean a
temperature does not move. It is a line's slope over a temperature's, and what a line explains over its share of k3. No
log-prob shows it. A share of k3 from it is right within a factor of 2."""
MIN_EXPLAINED, MIN_SLOPE_ERRORS = 0.1 * WITHIN, 6.0
"""Of the variance: a tenth of k3 by a temperature."""
MIN_DEFICIT, MIN_DEFICIT_ERRORS = 1e-3, 8.0
EXPLAINED = 0.5
"""Of the variance by a base of logarithms: more than it leaves."""

MORE = "more of what is named besides: its share is an estimate"
SMALL_PRECISION = "low precision that hardly shows: an fp8 cache in e4m3 gave 1e-3 in a small model"
OTHER_KERNELS = "kernels in bfloat16 of a model that rounding moves more than the largest of ours, 2.2e-3"
OTHER_PRECISION = "low precision of another model: a cache in e4m3 gave 0.3 to 0.4 in Qwen2.5-Coder-1.5B"
OLD_WEIGHTS = "stale weights, or an adapter that one side lacks"
PENALTIES = "penalties or a logits processor of the engine"


def _left(k3: str) -> str:
    return f"other causes explain at most {percent(MAX_EXPLAINED)} of k3, and the rest is {k3} (SmolLM2-135M's sizes)"


BF16 = (
    "bfloat16 on both sides gave 1e-5 to 1e-4 in small models, 1.7e-3 to 2.2e-3 in SmolLM2-135M "
    "(lab/real_stack/slime_gpu.md), 2e-4 in Qwen2.5-Coder-1.5B; yours may differ"
)
QUANTISED = (
    "caches, weights and products of 8 bits gave 1e-3 to 8e-3 in small models, 1.4e-2 to 7e-2 in SmolLM2-135M, a cache "
    "in e4m3 0.3 to 0.4 in Qwen2.5-Coder-1.5B (lab/evidence/README.md)"
)


@cause(
    name="equal",
    title="no difference",
    looks_like="every log-prob is the same number on both sides",
    advice="Nothing to correct. A copy of one side looks the same: mis-ext audit tells them apart.",
)
def equal(measured: Measured, signals: Signals) -> Finding | None:
    if measured.tokens.num_valid == 0 or measured.tokens.num_different:
        return None
    return Finding(confidence="certain", evidence="every log-prob is the same number on both sides")


@cause(
    name="bf16_kernels",
    title="other kernels or rounding, no larger than that of bfloat16",
    looks_like=f"no other cause, and k3 is below {KERNEL_K3:g}",
    advice="No correction is needed for this alone. To find the first module that differs: mis-ext diff.",
)
def kernels(measured: Measured, signals: Signals) -> Finding | None:
    is_quiet, old = measured.k3_left < QUIET_K3, stale_words(measured)
    if not _is_left(measured, 0.0, KERNEL_K3) or (is_quiet and measured.has_main):
        return None
    others = (*old, SMALL_PRECISION)
    if not is_quiet:
        others = _behind(old, SMALL_PRECISION, "a mixture of experts", more=more_words(measured))
    return _rest(measured, f"no more than dense models have: {BF16}", others, confidence="likely")


@cause(
    name="bf16_or_low_precision",
    title="kernels in bfloat16 of a pretrained model (usual, no fault), or lower precision on one side",
    looks_like=_left(f"{KERNEL_K3:g} to {PRETRAINED_K3:g}"),
    advice="Nothing is wrong if the model is pretrained and both sides compute in bfloat16. With float16 on "
    "both k3 was a 65th, and training learned in about half the steps; with only the engine's head in float32 it was "
    "three quarters (lab/evidence/normal.md). In small models an fp8 cache or fp8 weights have this size. Token TIS "
    "(yaml/mis.yaml) rejects nothing, and made no difference there (docs/guide/presets.md).",
)
def kernels_or_low_precision(measured: Measured, signals: Signals) -> Finding | None:
    """A difference that kernels in bfloat16 give in a pretrained model, and low precision in a small one.

    Tails do not tell them apart: low precision adds some, but which model it is decides more.
    """
    if not _is_left(measured, KERNEL_K3, PRETRAINED_K3):
        return None
    evidence = f"within what both give: {BF16}; {QUANTISED}"
    # What is left behind a cause with evidence of its own does not come first.
    return _rest(measured, evidence, _others(measured), confidence="possible" if measured.explained else "likely")


@cause(
    name="low_precision",
    title="lower precision on one side (fp8 or int8 weights or cache)",
    looks_like=_left(f"{PRETRAINED_K3:g} to {QUANTISED_K3:g}"),
    advice="Token TIS (yaml/mis.yaml) is a precaution with a price: at a k3 of 0.06 our runs learned without a "
    "correction, and needed 8 steps more than 107 to a reward of 0.9 with it (docs/reference/presets.md). A k3 far "
    "above that of the same engine in bfloat16 is for repair: scales of an 8-bit cache, another dtype.",
)
def low_precision(measured: Measured, signals: Signals) -> Finding | None:
    if not _is_left(measured, PRETRAINED_K3, QUANTISED_K3):
        return None
    return _rest(measured, f"above kernels: {BF16}; {QUANTISED}", (*_others(measured), OTHER_KERNELS))


@cause(
    name="large_mismatch",
    title="a large mismatch, which low precision gave in some models only",
    looks_like=_left(f"above {QUANTISED_K3:g}"),
    advice="Check weight syncs first, then correct with token TIS (yaml/mis.yaml).",
)
def large(measured: Measured, signals: Signals) -> Finding | None:
    if not _is_left(measured, QUANTISED_K3, math.inf):
        return None
    others = (
        *(OLD_WEIGHTS, OTHER_PRECISION, "another prompt, chat template or context", PENALTIES),
        *("a mixture of experts in low precision", "low precision beside one of these", *more_words(measured)),
    )
    evidence = f"above what low precision gave in SmolLM2-135M, {QUANTISED_K3:g}"
    return _rest(measured, f"{evidence}; weights a step old gave 8e-2 in a small model", others)


def _is_left(measured: Measured, low: float, high: float) -> bool:
    """Whether what no cause explains is known, and of this size."""
    tokens = measured.tokens
    is_known = bool(tokens.num_different) and tokens.num_rest >= MIN_TOKENS and measured.explained <= MAX_EXPLAINED
    return is_known and low <= measured.k3_left < high


def _rest(
    measured: Measured, evidence: str, alternatives: tuple[str, ...], confidence: Confidence = "possible"
) -> Finding:
    """All that no cause explains."""
    return Finding(
        confidence=confidence,
        evidence=f"k3 {measured.k3_left:.2g} is {evidence}",
        k3_share=1.0 - measured.explained,
        is_up_to=True,
        alternatives=alternatives,
    )


def _others(measured: Measured) -> tuple[str, ...]:
    """What has the size of low precision without being one."""
    return _behind(stale_words(measured), "a mixture of experts", more=(PENALTIES, *more_words(measured)))


def _behind(old: tuple[str, ...], *others: str, more: tuple[str, ...]) -> tuple[str, ...]:
    """Old weights come first where there is evidence of them, and behind the others where they are only possible."""
    return (*old, *others, *(() if old else (OLD_WEIGHTS,)), *more)


def more_words(measured: Measured) -> tuple[str, ...]:
    """What may be hidden in a difference that only its size names."""
    more = (MORE,) if measured.explained else ()
    # A temperature that was found says both itself.
    lines = () if "temperature" in measured.found else (*base_words(measured), *_line_words(measured))
    return (*unfit_words(measured), *more, *lines, *_place_words(measured))


def loses_mass(power: Power) -> bool:
    """Whether the mean ratio is surely below 1: no temperature does that."""
    return -power.excess > max(MIN_DEFICIT, MIN_DEFICIT_ERRORS * power.excess_error)


def base_words(measured: Measured) -> tuple[str, ...]:
    """That logarithms to a base explain much of how the differences vary."""
    explained, side, base = measured.likely_base()
    if measured.tokens.line.num_tokens < MIN_TOKENS or explained <= EXPLAINED:
        return ()
    return (f"logarithms to the base {base:g} on the {side}'s side beside it: they explain {explained:.0%}",)


def _line_words(measured: Measured) -> tuple[str, ...]:
    """That a line in the engine's log-probs is there, which what else differs makes too uncertain for a temperature."""
    line = measured.tokens.line
    slope, explained = line.on("behavior")
    least = max(MIN_EXPLAINED * (1.0 - measured.explained), MIN_SLOPE_ERRORS**2 / max(line.num_tokens, 1.0))
    # A cut makes a line that rises.
    if explained <= least or (slope > 0.0 and loses_mass(measured.tokens.powers[0])):
        return ()
    return (f"a temperature {'above' if slope > 0.0 else 'below'} 1 beside it: a line explains {explained:.0%}",)


def _place_words(measured: Measured) -> tuple[str, ...]:
    """That tokens of some positions differ twice as much as those of others."""
    if measured.signals is None or "late_positions" in measured.found:
        return ()
    places = [Place.of(each) for each in measured.signals.positions[FIRST_LATE:]]
    places = [each for each in places if each.num_tokens >= MIN_TOKENS]
    if not places:
        return ()
    most, least = (choose(places, key=lambda each: each.shift.value) for choose in (max, min))
    return ("what begins at a position, or ends there",) if most.stands_out_of(least) else ()


def unfit_words(measured: Measured) -> tuple[str, ...]:
    """That no cause of the table fits: of two policies the mean ratio is 1 where all is sampled, and never above."""
    engine, trainer = measured.tokens.powers
    if any(each.excess <= SAMPLED_ERRORS * each.excess_error for each in (engine, trainer)):
        return ()
    return (
        f"none of these: it fits badly. The mean ratio is {1.0 + engine.excess:.3g}, that of the reverse "
        f"{1.0 + trainer.excess:.3g}, and no two policies give more than 1 to what one of them has sampled",
    )


def stale_words(measured: Measured) -> tuple[str, ...]:
    """That weights are old: every token is of another version, so that no fresh one tells what they do, or by signs.

    The standard error is over samples, whose tokens belong together.
    """
    samples = None if measured.samples is None else measured.samples.measured
    if samples is None or not len(samples):
        return ()
    behind = samples["versions_behind"]
    if not bool((behind.isnan() | (behind == 0.0)).any()):
        count = int(samples["num_tokens"].sum())
        return (f"stale weights: all {count} tokens were sampled with weights of another version",)
    num_open_S, num_raised_S = samples["num_open"], samples["num_raised"]
    total = float(num_open_S.sum())
    if bool((behind == 0.0).all()) or total < MIN_OPEN:
        return ()
    share = float(num_raised_S.sum()) / total
    error = float((num_raised_S - share * num_open_S).square().sum().sqrt()) / total
    if share < RAISED or share - 0.5 < RAISED_ERRORS * error:
        return ()
    return (
        f"{OLD_WEIGHTS}, or a penalty: the trainer finds {share:.0%} of {total:.0f} open tokens more "
        "probable than the engine, as after learning; rounding raises about half",
    )
