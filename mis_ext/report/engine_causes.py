"""Causes in the engines: how they compute, and on which tokens it shows.

The numbers come from the geometry of each cause and from our own measurements (benchmarks/evidence): bfloat16 kernels
give a k3 of 5e-5, an fp8 cache 4e-3 to 8e-3, weights a step old 8e-2, other experts 4e-4. Look at tokens 12 times as
far apart as is typical for their probability. Where experts differ, these are 0.5 to 1.3 % of the tokens, and carry
0.75 to 0.95 of k3. Where only precision differs they carry less than 0.45, or (fp8 cache, long responses) they are more
than 4 % of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from mis_ext.report.finding import MIN_TOKENS, Case, Diagnosis

ALL = 0.99
MAX_FORMULA_STEPS = 1.5
TAIL_FACTOR, TAIL_K3_SHARE, FEW_SHARE, MAX_TAIL_SHARE = 12.0, 0.6, 0.002, 0.03
PLACE_FACTOR, PLACE_ERRORS = 2.0, 6.0
KERNEL_K3, QUANTISED_K3 = 1e-3, 3e-2


def formula(case: Case) -> Iterator[Diagnosis]:
    """Differences within the rounding of one operation."""
    steps = float(case.signals.largest[0])
    if 0.0 < steps <= MAX_FORMULA_STEPS and case.signals.num_uncertain >= MIN_TOKENS:
        yield Diagnosis(
            "log_prob_formula",
            "likely",
            "another formula for the same log-prob, such as log(softmax) for log_softmax",
            f"no difference exceeds {steps:.2g} float32 steps, {case.summary.overall.abs_max:.1g} nats",
            "Nothing to correct. For equal bits use the same formula on both sides.",
        )


def bf16(case: Case) -> Iterator[Diagnosis]:
    """Log-probs of one side that are bfloat16 numbers."""
    shares = [rounded / count if count else 0.0 for count, rounded in case.signals.rounded.tolist()]
    if float(case.signals.rounded[:, 0].min()) < MIN_TOKENS or case.summary.overall.abs_max == 0.0:
        return
    sides = [name for name, share in zip(("proximal", "behavior"), shares, strict=True) if share > ALL]
    if sides:
        yield Diagnosis(
            "bf16_log_probs",
            "certain",
            "log-probs rounded to bfloat16",
            f"{' and '.join(sides)} log-probs are bfloat16 numbers: that alone gives a k3 near 2e-5",
            "Keep log-probs in float32 from the log-softmax to the dump.",
        )


def prefix(case: Case) -> Iterator[Diagnosis]:
    """The beginning of turns differs more, or turns behind the first do."""
    first, later = case.signals.places
    early, _, late = first + later
    advice = "Flush the engine's prefix cache at every weight update."
    # A prefix that all share shows in all turns, one of the conversation behind the first only.
    for sides, where in (((early, late), ""), ((later[0], later[-1]), " behind the first")):
        if _stands_out(*sides):
            begins, ends = (_mean(side) for side in sides)
            yield Diagnosis(
                "stale_prefix_cache",
                "possible",
                "the beginning of each turn differs more: a prefix cached with other weights, or other prefill kernels",
                f"uncertain tokens differ by {begins:.2g} (1 - p) nats early in a turn{where}, by {ends:.2g} later",
                advice,
            )
            return
    if _stands_out(later.sum(0), first.sum(0)):
        yield Diagnosis(
            "stale_prefix_cache",
            "possible",
            "turns behind the first differ more: their prefix was cached with other weights, or tokenised again",
            f"uncertain tokens differ by {_mean(first.sum(0)):.2g} (1 - p) nats in the first turn, by "
            f"{_mean(later.sum(0)):.2g} in later ones",
            f"{advice} If that is done, check that later turns are scored with the ids that were sampled.",
        )


def _stands_out(more: Tensor, less: Tensor) -> bool:
    """Whether the mean of one side is far above that of another; each has count, sum and sum of squares."""
    if min(float(more[0]), float(less[0])) < MIN_TOKENS:
        return False
    difference = _mean(more) - _mean(less)
    variance = sum((float(side[2] / side[0]) - _mean(side) ** 2) / float(side[0]) for side in (more, less))
    return _mean(more) > PLACE_FACTOR * _mean(less) and difference > PLACE_ERRORS * math.sqrt(max(variance, 0.0))


def _mean(side: Tensor) -> float:
    return float(side[1] / side[0])


def tail(case: Case) -> Iterator[Diagnosis]:
    """Causes that a tail shows: few tokens carry most of the mismatch, as where experts differ."""
    signals = case.signals
    if signals.num_uncertain < MIN_TOKENS:
        return
    typical = signals.typical_shift()
    count, k3_share = signals.shifts_beyond(TAIL_FACTOR * typical)
    share = count / signals.num_uncertain
    if count < 3 or k3_share < TAIL_K3_SHARE or share > MAX_TAIL_SHARE:
        return
    evidence = (
        f"{share:.2%} of the uncertain tokens are more than {TAIL_FACTOR:g} times as far apart as is typical "
        f"({typical:.2g} (1 - p) nats), and carry {k3_share:.0%} of k3"
    )
    if share < FEW_SHARE:
        yield Diagnosis(
            "few_tokens",
            "likely",
            "a few tokens only",
            evidence,
            "Look at the worst tokens; truncated token weights (yaml/mis.yaml) limit what each can do.",
        )
    else:
        yield Diagnosis(
            "expert_routing",
            "possible",
            "a mixture: most tokens agree, some take another way, as with other experts",
            evidence,
            "In a mixture of experts replay the engine's routing (R3): it took k3 from 4e-4 to 5e-5 "
            "(benchmarks/evidence/moe_mismatch.md).",
        )


def size(case: Case) -> Iterator[Diagnosis]:
    """Where nothing else is found: what a mismatch of this size usually is."""
    k3, largest = case.summary.overall.k3, case.summary.overall.abs_max
    if math.isnan(k3):
        return
    if largest == 0.0:
        yield Diagnosis(
            "equal",
            "certain",
            "no difference",
            "every log-prob is the same number on both sides",
            "Nothing to correct. A copy looks the same: mis-ext audit says whether these are two streams.",
        )
    elif k3 < KERNEL_K3:
        yield Diagnosis(
            "bf16_kernels",
            "likely",
            "other kernels or rounding, of the size of bfloat16 or below",
            f"k3 {k3:.2g} is within what dense models in bfloat16 have, up to {KERNEL_K3:g}",
            "No correction is needed for this alone.",
        )
    elif k3 < QUANTISED_K3:
        yield Diagnosis(
            "low_precision",
            "possible",
            "lower precision on one side (fp8 or int8 weights or cache), or a mixture of experts",
            f"k3 {k3:.2g} is above bfloat16 (up to {KERNEL_K3:g}); an fp8 cache or fp8 weights gave 1e-3 to 8e-3",
            "Token TIS (yaml/mis.yaml): no study of ours found it worse than no correction.",
        )
    else:
        yield Diagnosis(
            "large_mismatch",
            "possible",
            "more than precision explains: stale weights, other contexts, or a mixture of experts in low precision",
            f"k3 {k3:.2g} is above what low precision gave (8e-3); weights a step old gave 8e-2",
            "Check weight syncs first, then correct with token TIS (yaml/mis.yaml).",
        )
