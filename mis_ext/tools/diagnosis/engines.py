# SPDX-License-Identifier: Apache-2.0
"""Causes in the engines: how they compute, and on which tokens it shows.

The numbers come from the geometry of each cause and from our own measurements (lab/evidence): bfloat16 kernels
give a k3 of 5e-5, an fp8 cache 4e-3 to 8e-3, weights a step old 8e-2, other experts 4e-4. Look at tokens 12 times as
far apart as is typical for their probability. Where experts differ, these are 0.5 to 1.3 % of the tokens, and carry
0.75 to 0.95 of k3. Where only precision differs they carry less than 0.45, or (fp8 cache, long responses) they are more
than 4 % of the tokens. Two formulas for the same float32 log-prob (``log_softmax``, ``log(softmax)``) stay within one
float32 step of ``max(1, |log-prob|)``, while float32 kernels reach two and more in any batch of some hundred tokens.
"""

from __future__ import annotations

import math
from itertools import product, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.checks.token_sums import MAX_CHANCE, MIN_TOKENS
from mis_ext.tools.diagnosis.cause import TAILS, Finding, cause
from mis_ext.tools.diagnosis.measuring import Measured
from mis_ext.tools.diagnosis.signals import FIRST_LATE, PER_OCTAVE, PLACE_ERRORS, Place, Signals, first_position
from mis_ext.tools.diagnosis.size import stale_words

ALL = 0.99
MAX_FORMULA_STEPS = 1.5
TAIL_FACTOR, TAIL_K3_SHARE, FEW_SHARE, MAX_TAIL_SHARE = 12.0, 0.6, 0.002, 0.03
LEAST_LATE = 0.1
"""Share of k3: less need not be named."""

LEAST_BEHIND = 2
"""Bins behind a place, where responses end there: half an octave."""


@cause(
    name="log_prob_formula",
    title="another formula for the same log-prob, such as log(softmax) for log_softmax",
    looks_like="no difference exceeds 1.5 float32 steps of a log-prob, or of 1 where it is above -1",
    advice="Nothing to correct. For equal bits use the same formula on both sides.",
)
def formula(measured: Measured, signals: Signals) -> Finding | None:
    steps, _, largest = signals.largest.tolist()
    if not 0.0 < steps <= MAX_FORMULA_STEPS or measured.tokens.line.num_tokens < MIN_TOKENS:
        return None
    return Finding(
        confidence="likely",
        evidence=f"no difference exceeds {steps:.2g} float32 steps, {largest:.1g} nats",
        k3_share=1.0,
        is_all=True,
    )


@cause(
    name="bf16_log_probs",
    title="log-probs rounded to bfloat16",
    looks_like="99 % of the log-probs of one side are bfloat16 numbers",
    advice="Keep log-probs in float32 from the log-softmax to the dump.",
)
def bf16(measured: Measured, signals: Signals) -> Finding | None:
    rounded = dict(zip(("proximal", "behavior"), signals.rounded.tolist(), strict=True))
    if min(count for count, _, _ in rounded.values()) < MIN_TOKENS or signals.largest[2] == 0.0:
        return None
    sides = {name: expected for name, (count, of_bf16, expected) in rounded.items() if of_bf16 > ALL * count}
    if not sides:
        return None
    alone = sum(sides.values()) / measured.tokens.num_rest
    return Finding(
        confidence="certain",
        evidence=f"{' and '.join(sides)} log-probs are bfloat16 numbers: that alone gives a k3 near {alone:.1g}",
        k3_share=min(alone / measured.k3, 1.0) if measured.k3 else math.nan,
    )


@cause(
    name="decode_dependence",
    title="decode or prefix dependence (attention, KV cache)",
    looks_like="first tokens of responses are equal, later ones differ",
    advice="Compare prefill and decode of the engine (mis-ext diff).",
    hides=("late_positions",),
)
def decoding(measured: Measured, signals: Signals) -> Finding | None:
    first, first_different, later, later_different = signals.firsts.tolist()
    if first_different or not later_different:
        return None
    # One more than counted, so that few tokens cannot make a certainty.
    share = later_different / (later + 1.0)
    chance = (1.0 - share) ** first
    if chance > MAX_CHANCE:
        return None
    return Finding(
        confidence="likely",
        evidence=f"the first tokens of {first:.0f} responses are all equal, later ones differ in {share:.0%} of the "
        f"cases (by chance: {chance:.0e})",
    )


_PREFIX_ADVICE = (
    "Flush the engine's prefix cache at every weight update. Or let each request name the version of the weights: in "
    "slime and Miles with cache_by_version: true under on_policy_tokens, elsewhere as extra_key (SGLang) or cache_salt "
    "(vLLM)."
)


@cause(
    name="stale_prefix_cache",
    title="a prefix in the cache that was computed with old weights",
    looks_like="the first 8 or 32 tokens of a turn differ twice as much as the 65th to 256th, or have 5 times "
    "their k3; or turns after the first do",
    advice=_PREFIX_ADVICE,
    hides=TAILS,
)
def prefix(measured: Measured, signals: Signals) -> Finding | None:
    first, later = signals.places
    total = float((first + later)[:, 1].sum())
    # A prefix that all share shows in all turns, one of the conversation behind the first only.
    all_turns = {"": first + later, " after the first": later}
    for has_more, (where, moments) in product((Place.stands_out_of, Place.has_more_k3_than), all_turns.items()):
        *before, ends, _ = (Place.of(each) for each in moments)
        # The first 8 tokens of a turn, or the first 32.
        beginnings = (Place.of(moments[0]), Place.of(moments[:2].sum(0)))
        begins = next((each for each in beginnings if has_more(each, ends)), None)
        if begins is not None:
            excess = sum(each.excess_over(ends) for each in before if each.num_tokens)
            return Finding(
                # The beginning of a later turn is a late position, too.
                hides=("late_positions",) if bool(later.any()) else (),
                confidence="possible",
                evidence=f"uncertain tokens differ by {begins.shift.value:.2g} (1 - p) nats early in a turn{where}, by "
                f"{ends.shift.value:.2g} later, and have a k3 of {begins.size.value:.2g} and {ends.size.value:.2g}",
                k3_share=excess / total if total else math.nan,
                alternatives=(
                    "another prompt, chat template or context",
                    "stale weights of the first tokens, where weights change within responses",
                    "other kernels for the prefill",
                    "low precision, or old weights, that move the first tokens of a response more than later ones",
                ),
            )
    others, one = Place.of(later.sum(0)), Place.of(first.sum(0))
    if not others.stands_out_of(one):
        return None
    return Finding(
        confidence="possible",
        evidence=f"uncertain tokens differ by {one.shift.value:.2g} (1 - p) nats in the first turn, by "
        f"{others.shift.value:.2g} in later ones",
        k3_share=others.excess_over(one) / total if total else math.nan,
        hides=("late_positions",),
        advice=f"{_PREFIX_ADVICE} If that is done, check that later turns are scored with the ids that were sampled.",
        alternatives=("turns that were tokenised again",),
    )


@cause(
    name="late_positions",
    title="positions that one side treats differently, as with RoPE scaling, a window or a length limit",
    looks_like="tokens after a position (from the 32nd on) differ twice as much as those before, have 5 times "
    "their k3, or differ more by a step that is no part of a steady rise; and that is a tenth of k3",
    advice="Compare rope_scaling, max_position_embeddings and sliding_window of both sides.",
    hides=TAILS,
)
def late(measured: Measured, signals: Signals) -> Finding | None:
    bins = signals.positions
    places = [Place.of(each) for each in bins]
    total, found = float(bins[:, 1].sum()), list[tuple[bool, float, int, float]]()
    # Behind the longest response are no tokens.
    for index in range(FIRST_LATE, 1 + max((at for at, each in enumerate(places) if each.num_tokens), default=0)):
        begins = _begins_at(index, bins, places)
        # What is far in front of a step may differ by something else.
        before = Place.of(bins[index - PER_OCTAVE if begins else 0 : index].sum(0))
        behind = Place.of(bins[index:].sum(0))
        if not (begins or behind.stands_out_of(before) or behind.has_more_k3_than(before)):
            continue
        excess = behind.excess_over(before)
        if excess > LEAST_LATE * total:
            usual = before.shift.value
            found.append((begins, behind.shift.value / usual if usual else math.inf, index, excess))
    if not found:
        return None
    _, ratio, index, excess = max(found)
    return Finding(
        confidence="possible",
        evidence=f"uncertain tokens after position {first_position(index)} of a response differ {ratio:.2g} times "
        f"as much as those before, and carry {excess / total:.0%} of k3 beyond theirs",
        k3_share=excess / total,
        alternatives=(
            "stale weights of the last tokens, where weights change within responses",
            "low precision, or old weights, that move late tokens of a response more than early ones",
        ),
    )


def _begins_at(index: int, bins: Tensor, place_of_bin: list[Place]) -> bool:
    """Whether tokens differ more from a position on, by a step that is no part of a steady rise.

    What differs everywhere hides by its size what begins somewhere, and not its place.
    """
    around = place_of_bin[index - PER_OCTAVE : index + PER_OCTAVE]
    places = [*takewhile(lambda each: each.num_tokens >= MIN_TOKENS, around)]
    if len(places) < PER_OCTAVE + LEAST_BEHIND:
        return False
    # The step, in bins of one width, of a line through the shifts that may have one.
    rise = torch.arange(len(places), dtype=torch.float64)
    contrast = torch.linalg.pinv(torch.stack([rise**0, rise, (rise >= PER_OCTAVE).double()], dim=1))[2].tolist()
    weighted = [*zip(contrast, (each.shift for each in places), strict=True)]
    step = sum(weight * shift.value for weight, shift in weighted)
    variance = sum(weight**2 * shift.variance for weight, shift in weighted)
    before = Place.of(bins[index - PER_OCTAVE : index].sum(0))
    behind = Place.of(bins[index : index + len(places) - PER_OCTAVE].sum(0))
    return behind.shift.is_above(before.shift, 1.0) and step > PLACE_ERRORS * math.sqrt(variance)


class Tail(NamedTuple):
    """Uncertain tokens that are much farther apart than is typical: their share, that of k3, and words for both."""

    share: float
    k3_share: float
    evidence: str


def _tail(signals: Signals) -> Tail | None:
    """The few tokens that carry most of the mismatch, if there are."""
    count = signals.tokens.line.num_tokens
    if count < MIN_TOKENS:
        return None
    num_different, k3 = signals.shifts.sum((0, 2)).tolist()
    if 0 < num_different <= max(1.0, FEW_SHARE * count):
        share = num_different / count
        evidence = f"{num_different:.0f} of {count:.0f} uncertain tokens differ, the others are equal"
        return Tail(share, 1.0, evidence)
    typical = signals.typical_shift()
    num_far, k3_far = signals.beyond(TAIL_FACTOR * typical).sum(0).tolist()
    share, k3_share = num_far / count, k3_far / k3 if k3 else 0.0
    if num_far < 3 or k3_share < TAIL_K3_SHARE or share > MAX_TAIL_SHARE:
        return None
    evidence = (
        f"{share:.2%} of the uncertain tokens are more than {TAIL_FACTOR:g} times as far apart as is typical "
        f"({typical:.2g} (1 - p) nats), and carry {k3_share:.0%} of k3"
    )
    return Tail(share, k3_share, evidence)


@cause(
    name="few_tokens",
    title="a few tokens only",
    looks_like="less than 0.2 % of the uncertain tokens carry at least 60 % of k3",
    advice="Look at the worst tokens. Truncated token weights (yaml/mis.yaml) limit the effect of each.",
)
def few_tokens(measured: Measured, signals: Signals) -> Finding | None:
    tail = _tail(signals)
    if tail is None or tail.share >= FEW_SHARE:
        return None
    return Finding(confidence="likely", evidence=tail.evidence, k3_share=tail.k3_share)


@cause(
    name="expert_routing",
    title="most tokens agree and a few differ much, as with other experts in a mixture of experts",
    looks_like="at most 3 % of the uncertain tokens differ 12 times as much as is typical, and carry at "
    "least 60 % of k3",
    advice="In a mixture of experts replay the engine's routing (R3): it took k3 from 4e-4 to 5e-5 "
    "(lab/evidence/moe_mismatch.md). In a pretrained model it took it from 2.4e-3 to 1.1e-3, and the "
    "reward was the same (lab/evidence/pretrained_moe.md).",
)
def experts(measured: Measured, signals: Signals) -> Finding | None:
    tail = _tail(signals)
    if tail is None or tail.share < FEW_SHARE:
        return None
    return Finding(
        confidence="possible",
        evidence=tail.evidence,
        k3_share=tail.k3_share,
        alternatives=(*stale_words(measured), "low precision, which lets more experts differ, or has such tails alone"),
    )
