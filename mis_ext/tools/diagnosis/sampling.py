# SPDX-License-Identifier: Apache-2.0
"""Faults of the distribution: the two log-probs are not of what was sampled from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mis_ext.checks.token_sums import MIN_TOKENS, SAMPLED_ERRORS, TokenSums
from mis_ext.tools.diagnosis.cause import TAILS, Finding, cause
from mis_ext.tools.diagnosis.engines import TAIL_FACTOR
from mis_ext.tools.diagnosis.measuring import Measured, factor, may_be_zero
from mis_ext.tools.diagnosis.missing import of_weights
from mis_ext.tools.diagnosis.signals import Signals
from mis_ext.tools.diagnosis.size import (
    EXPLAINED,
    MAX_EXPLAINED,
    MIN_DEFICIT,
    MIN_DEFICIT_ERRORS,
    MIN_EXPLAINED,
    MIN_SLOPE_ERRORS,
    OLD_WEIGHTS,
    PENALTIES,
    WITHIN,
    base_words,
    loses_mass,
)

MIN_SLOPE = 0.01
"""Of the difference along the log-prob of the side that sampled: a hundredth of a temperature changes no run."""
LEAST_WITHIN, MOST_WITHIN = 0.3, 0.92
"""Of ``WITHIN``, in 9 kinds of trained and drawn logits with 48 to 4,000 tokens: from most positions nearly certain to
all positions alike."""
CUT_EXPLAINED = 0.45
"""What a cut (top-p, top-k or min-p) or padding leaves looks like a line that rises, too: up to 0.42 of the variance in
the same logits, and they say by their mean ratio that they are there."""
ONE_SIDED, FITS = 0.9, 0.5
"""Of :attr:`~mis_ext.checks.token_sums.Power.fit`: a cut alone has -0.94 to -1, where noise is small; temperatures from
0.5 to 2 had less than 0.5, and most soft caps on logits more."""
SAMPLED_FACTOR = 0.5
"""Where the tokens were not sampled from the engine's, they were from the trainer's if its mean ratio is nearer to 1 by
this factor. A temperature that fits badly is tried so, too: where few ratios have all of the mean, its error says
little."""
ERRORS = 3.0
"""Standard errors at either end of an interval."""
SMALLEST = 0.1
"""Nobody samples at a tenth of a temperature. Log-probs of two texts look like 0."""
EXACT = 0.9
"""Of the variance by a base of logarithms: all but noise."""
MIN_BELOW = 0.9
SURE, SURE_BOUNDED, BOUNDED = (0.03, 20.0), (0.005, 12.0), 3.0
"""Deficit and standard errors: nothing but a cut or padding lowers the mean ratio by as much, whatever else moves the
log-probs. In a trained model other prompts leave 0.014 and 9, because a sample misses tokens that the trainer finds far
more probable. It misses few where none is far less probable either, by 3 nats: all others stay below 0.003 and 1.5.
Other logits, flat or peaked, with noise of up to twice their deviation added, stay within one standard error."""
MAX_PADDING_GAP = 0.05
SMALLEST_SHIFT = 1e-5

CUTS = "top-p, top-k or min-p, or padding of the trainer's vocabulary, alone or beside it"
LOGITS = "another change of the logits, such as a soft cap"
NOISE = (
    f"a smaller one, beside {OLD_WEIGHTS}, {PENALTIES}, another prompt, chat template or context, low precision, a "
    "mixture of experts, or what begins at a position"
)
SHIFTS = torch.linspace(0.0, 12.0, 1201, dtype=torch.float64)
_OF_ONE = (
    torch.erf(SHIFTS / math.sqrt(2.0)) * (1.0 + SHIFTS**2)
    + math.sqrt(2.0 / math.pi) * SHIFTS * (-0.5 * SHIFTS**2).exp()
)
ASYMMETRY = _OF_ONE.cumsum(0) / (1.0 + SHIFTS**2).cumsum(0)
"""Of the squares of Gaussians that are moved by nothing to so many deviations, each as often: what a cut takes away
differs from position to position. Were it the same everywhere, fewer tokens would be moved up, and these would be taken
for more noise than there is."""


@cause(
    name="temperature",
    title="another temperature in one of the log-probs",
    looks_like="the difference falls or rises with the log-prob, by a line that explains more than 6 % of its "
    "variance, or 45 % where a cut is seen beside it; and `ratio - 1` says that one distribution is a power of "
    "the other",
    advice="Divide the trainer's logits by the sampling temperature, or ask the engine for log-probs of what "
    "it sampled from (vLLM: --logprobs-mode processed_logprobs).",
    is_fault=True,
    hides=("broken_trainer", "broken_engine", "vocabulary_padding", *TAILS),
)
def temperature(measured: Measured, tokens: TokenSums) -> Finding | None:
    """One distribution is a power of the other; what else differs adds noise to it, or takes a part of it away."""
    engine, trainer = tokens.powers
    is_doubtful = engine.excess > SAMPLED_ERRORS * engine.excess_error or abs(engine.fit) > FITS
    is_of_trainer = is_doubtful and abs(trainer.excess) < SAMPLED_FACTOR * engine.excess
    power, side, sign = (trainer, "proximal", -1.0) if is_of_trainer else (engine, "behavior", 1.0)
    line = tokens.line.on(side)
    count, slope = tokens.line.num_tokens, sign * line.slope
    # Only a cut makes a line that rises. Far below a temperature of 1 the largest ratios are in no sample.
    is_cut = loses_mass(power)
    least = CUT_EXPLAINED if is_cut and slope > 0.0 else MIN_EXPLAINED
    if count < MIN_TOKENS or abs(slope) <= MIN_SLOPE or line.explained <= max(least, MIN_SLOPE_ERRORS**2 / count):
        return None
    # Of the variance of log-probs within positions, if nothing else differs.
    within = slope / (power.slope - 1.0) if power.slope != 1.0 else math.nan
    if is_cut:
        if slope < 0.0 and power.fit < -ONE_SIDED:
            return None
    elif not within > MIN_EXPLAINED:
        return None
    is_alone = within >= LEAST_WITHIN and abs(power.slope - 1.0) > ERRORS * power.error
    # What else differs may have all that a line does not explain, or nothing.
    room = [slope, slope / LEAST_WITHIN]
    near, share = slope / WITHIN, min(line.explained / WITHIN, 1.0)
    may_have_more = is_alone and line.explained < MAX_EXPLAINED * MOST_WITHIN
    if is_alone:
        near = power.slope - 1.0
        room = [slope, near + math.copysign(ERRORS * power.error, near)]
        share = share if is_cut and slope > 0.0 else 1.0
    if near <= SMALLEST - 1.0:
        return None
    is_fit = abs(power.fit) <= FITS
    low, high = (1.0 + max(each, SMALLEST - 1.0) for each in (min(room), max(room)))
    return Finding(
        confidence="likely" if is_fit and is_alone and not (is_cut and slope > 0.0) else "possible",
        evidence=f"{_SAMPLED[side]} near {1.0 + near:.3g} times {_OTHER[side]} ({low:.3g} to {high:.3g}, by what else "
        "differs)" + ("" if is_fit else f", but fit it badly: {power.fit:+.2f} between -1 and 1, where it has 0"),
        k3_share=share,
        is_up_to=may_have_more,
        alternatives=(
            *([] if is_alone else [PENALTIES]),
            *([] if is_fit or is_cut else [LOGITS]),
            *([CUTS] if is_cut and slope > 0.0 else []),
            *([] if measured.are_policies else base_words(measured)),
            *([NOISE] if may_have_more else []),
        ),
    )


_SAMPLED = {
    "behavior": "the differences are those of a sampling temperature",
    "proximal": "the tokens were sampled as the trainer scores them, at a temperature",
}
_OTHER = {"behavior": "the trainer's", "proximal": "the one that the engine's log-probs are of"}


@cause(
    name="log_base",
    title="logarithms to base 2 or 10 on one side",
    looks_like="one log-prob is 0.69, 1.44, 0.43 or 2.30 times the other: that explains half of the variance "
    "of the differences and makes the mean ratio 1, which it was not to either side; or it explains 90 %",
    advice="Multiply log-probs to base 2 by 0.693, to base 10 by 2.303.",
    is_fault=True,
)
def other_base(measured: Measured, tokens: TokenSums) -> Finding | None:
    """As they are, no side has sampled the tokens; with logarithms to a base on one side, the engine has.

    Of two policies the mean ratio is 1 to the side that has sampled, at whatever temperature the other is: a power of
    it, above 0. A cut of the engine's moves both means, and tokens that are all alike make a ratio of any size. So a
    base must explain how the tokens differ from each other, too.
    """
    if tokens.line.num_tokens < MIN_TOKENS or measured.are_policies:
        return None
    explained, side, base = measured.likely_base()
    has_sampled = may_be_zero(*tokens.excess_in_base[side, base])
    if explained <= (EXPLAINED if has_sampled else EXACT):
        return None
    is_sure = has_sampled and explained > EXACT
    return Finding(
        confidence="certain" if is_sure else "possible",
        evidence=f"the engine's log-probs are {factor(side, base):.3g} times the trainer's, which explains "
        f"{explained:.1%} of how the differences vary: the {side}'s are logarithms to the base {base:g}"
        + ("" if not has_sampled else ", and the mean ratio is 1 then"),
        k3_share=1.0,
        is_all=True,
        alternatives=() if is_sure else ("a temperature beside another cause, such as top-p",),
    )


@cause(
    name="vocabulary_padding",
    title="the trainer's vocabulary has padding, which takes a part of the probability",
    looks_like="the mean ratio is below 1, larger differences are below 0, and none is above 0.05 nats",
    advice="Set the logits of the padding to minus infinity before the log-softmax.",
    is_fault=True,
    hides=("top_p_or_top_k", *TAILS),
)
def padding(measured: Measured, signals: Signals) -> Finding | None:
    evidence = _deficit(signals)
    lowest = float(signals.largest[1])
    if not evidence or lowest >= MAX_PADDING_GAP:
        return None
    return Finding(
        confidence="possible",
        evidence=f"{evidence}; no token loses more than {lowest:.2g} nats",
        k3_share=_one_sided(signals),
    )


@cause(
    name="top_p_or_top_k",
    title="top-p, top-k or min-p in the sampling, not in the trainer's log-probs",
    looks_like="the mean ratio is below 1 by more than 0.001, and larger differences are below 0; or by more "
    "than 0.03 and 20 standard errors; or by 0.005 and 12, and no token loses 3 nats",
    advice="Sample with top_p 1 and no top_k, or give the trainer the kept tokens (mis_ext.rollout.define_log_probs). "
    "What a request leaves out vLLM takes from the model's generation_config.json: start it with "
    "--generation-config vllm.",
    is_fault=True,
    hides=TAILS,
)
def truncation(measured: Measured, signals: Signals) -> Finding | None:
    evidence = _deficit(signals)
    count, excess, _ = signals.ratios.tolist()
    if not evidence or float(signals.largest[1]) < MAX_PADDING_GAP or -excess <= MIN_DEFICIT * count:
        return None
    # What an update made likelier was too rare before to be sampled, which is no setting of the engine.
    if of_weights(measured):
        return None
    line = measured.tokens.line.on("behavior")
    is_colder = line.slope < 0.0 and line.explained > MIN_EXPLAINED
    return Finding(
        confidence="likely",
        evidence=f"{evidence}; on average it keeps a mass of {1.0 + excess / count:.3g}",
        k3_share=_one_sided(signals),
        is_up_to=is_colder,
        alternatives=(
            "padding of the trainer's vocabulary",
            "a temperature below 1 beside it, which moves the same tokens"
            if is_colder
            else "a temperature above 1 beside it",
        ),
    )


def _deficit(signals: Signals) -> str:
    """Evidence that the trainer gives probability to what cannot be sampled; empty where nothing says so."""
    count, excess, squared = signals.ratios.tolist()
    if count < MIN_TOKENS or signals.tokens.line.num_tokens < MIN_TOKENS:
        return ""
    deficit = -excess / count
    error = math.sqrt(max(squared / count - deficit**2, 0.0) / count)
    num_below, num_above = signals.beyond(max(signals.typical_shift(), SMALLEST_SHIFT))[:, 0].tolist()
    num_large = num_below + num_above
    is_one_sided = 0 < MIN_BELOW * num_large <= num_below
    least, errors = SURE_BOUNDED if float(signals.largest[1]) < BOUNDED else SURE
    is_sure = deficit > max(least, errors * error)
    if not is_sure and not (is_one_sided and deficit >= MIN_DEFICIT_ERRORS * error):
        return ""
    share = num_below / max(num_large, 1.0)
    return (
        f"the mean ratio is {1.0 - deficit:.4g}, {deficit / error if error else math.inf:.0f} standard errors below 1, "
        f"and {share:.0%} of the larger differences are below 0: the trainer gives probability to "
        "tokens that the engine cannot sample"
    )


def _one_sided(signals: Signals) -> float:
    """Share of k3 that a cut has beside noise, which alone moves tokens up and down alike.

    Shifts of 0 to ``x`` deviations of a Gaussian noise have ``x^2 / (3 + x^2)`` of the squares. Then the squares of
    tokens that were moved down exceed those of the others by ``asymmetry(x)`` of all.
    Other noise, whose few largest squares hide that, has them far from the others, and adds nothing to the mass that is
    lost: the same of the tokens that are near, and the k3 of tokens that all lose the same, are the least that a cut
    with this mass can have.
    """
    every = signals.shifts[:, 1].sum(-1)
    if not float(every.sum()):
        return 0.0
    near = every - signals.beyond(TAIL_FACTOR * signals.typical_shift())[:, 1]
    count, excess, _ = signals.ratios.tolist()
    mean = min(excess / count, 0.0)
    least = count * (mean - math.log1p(mean)) / signals.tokens.k3_rest if mean > -1.0 else 1.0
    return min(max(_moved_down(every), _moved_down(near) * float(near.sum() / every.sum()), least), 1.0)


def _moved_down(k3: Tensor) -> float:
    below, above = k3.tolist()
    index = int(torch.searchsorted(ASYMMETRY, (below - above) / (below + above))) if below + above else 0
    shift = float(SHIFTS[min(index, len(SHIFTS) - 1)])
    return shift**2 / (3.0 + shift**2)
