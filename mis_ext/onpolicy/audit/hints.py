"""From what an audit measured to the likely cause: one rule per cause, the most specific evidence first.

Sizes are those of our own measurements: kernels that differ (attention, matrix products, normalisation) move log-probs
by 2e-2 to 1e-1 on average and 0.9 at most in bfloat16, by 1e-6 to 1e-5 in float32; weights of another step moved them
by several nats. Two formulas for the same float32 log-prob (``log_softmax``, ``log(softmax)``) stay within one float32
ULP of ``max(1, |log-prob|)``, while float32 kernels reach two and more in any batch of some hundred tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from mis_ext.correction.suspicions import MAX_MEAN_ABS_DIFF, MIN_CONSTANT_TOKENS, MIN_SHIFT_TOKENS, SHIFT_FACTOR
from mis_ext.onpolicy.audit.sample import Facts

MAX_KERNEL_MEAN = 0.1
MAX_KERNEL_DIFF = 1.0
MAX_FORMULA_UNIT_ULPS = 1.5
MIN_TOKENS = 64
"""Fewer tokens say too little about sizes and grids."""
MAX_CHANCE = 1e-3


def likely_cause(samples: Sequence[Facts], mean_abs_diff: float) -> str | None:
    """The cause of a difference that the measurements point to, worded as likely and with the evidence for it."""
    for cause, evidence in (
        ("placeholders in place of log-probs", constant_stream(samples) or _constant_where_different(samples)),
        ("stale weights", _other_versions(samples)),
        ("misaligned by one token", _misaligned(samples)),
        ("stale weights", _large(samples, mean_abs_diff)),
        ("log-probs in bfloat16 on one side", _bf16_on_one_side(samples)),
        ("decode or prefix dependence (attention, KV cache)", _later_tokens_only(samples)),
        ("another log-prob formula (such as log(softmax) for log_softmax)", _within_formulas(samples)),
        ("other kernels or rounding in the model or the log-prob", _as_kernels(samples, mean_abs_diff)),
        (
            "single tokens apart (missing log-probs, in a mixture of experts other experts)",
            _outliers(samples, mean_abs_diff),
        ),
    ):
        if evidence is not None:
            return f"likely {cause}: {evidence}"
    return None


def _other_versions(samples: Sequence[Facts]) -> str | None:
    num_nonzero = sum(sample.num_nonzero for sample in samples)
    num_explained = sum(sample.num_nonzero for sample in samples if sample.is_stale)
    if 2 * num_explained < num_nonzero or num_explained == 0:
        return None
    return f"{num_explained} of {num_nonzero} different tokens were sampled with weights of another version"


def constant_stream(samples: Sequence[Facts]) -> str | None:
    """That all log-probs of a side are one number, in words."""
    num_active = sum(sample.num_active for sample in samples)
    if num_active < MIN_CONSTANT_TOKENS:
        return None
    for side, ranges in (
        ("rollout", [sample.rollout_range for sample in samples]),
        ("train", [sample.train_range for sample in samples]),
    ):
        low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
        if low == high:
            return f"all {num_active} {side} log-probs are {low:g}, as where an engine returned none"
    return None


def _constant_where_different(samples: Sequence[Facts]) -> str | None:
    num_nonzero = sum(sample.num_nonzero for sample in samples)
    sum_abs_diff = math.fsum(decile.sum_abs_diff for sample in samples for decile in sample.deciles)
    if num_nonzero < MIN_CONSTANT_TOKENS or sum_abs_diff <= MAX_KERNEL_MEAN * num_nonzero:
        return None
    for side, ranges in (
        ("rollout", [sample.rollout_range_of_nonzero for sample in samples]),
        ("train", [sample.train_range_of_nonzero for sample in samples]),
    ):
        ends = {end for pair in ranges if pair is not None for end in pair}
        if len(ends) == 1:
            return f"the {num_nonzero} {side} log-probs that differ are all {ends.pop():g}"
    return None


def _misaligned(samples: Sequence[Facts]) -> str | None:
    shifts = [sample.shift for sample in samples]
    num_pairs = sum(shift.num_pairs for shift in shifts)
    aligned = math.fsum(shift.aligned for shift in shifts)
    shifted = min(math.fsum(shift.rollout_late for shift in shifts), math.fsum(shift.rollout_early for shift in shifts))
    if num_pairs < MIN_SHIFT_TOKENS or shifted >= SHIFT_FACTOR * aligned:
        return None
    return (
        f"moved by one token they differ by {shifted / num_pairs:.2g} nats on average, as given by "
        f"{aligned / num_pairs:.2g}"
    )


def _large(samples: Sequence[Facts], mean_abs_diff: float) -> str | None:
    if mean_abs_diff <= MAX_MEAN_ABS_DIFF:
        return None
    known = all(sample.train_versions and sample.rollout_versions for sample in samples)
    return (
        f"a mean difference of {mean_abs_diff:.2g} nats is far more than kernels give (at most 1e-1 in bfloat16)"
        f"{', although the weight versions agree' if known else ''}; another temperature, top-p or context would do "
        "this too"
    )


def _bf16_on_one_side(samples: Sequence[Facts]) -> str | None:
    train = all(sample.train_is_bf16 for sample in samples)
    rollout = all(sample.rollout_is_bf16 for sample in samples)
    if train == rollout or sum(sample.num_active for sample in samples) < MIN_TOKENS:
        return None
    remaining = sum(sample.num_nonzero_in_bf16 for sample in samples)
    rest = f"and {remaining} tokens differ even" if remaining else "and all tokens are equal"
    return f"every {'train' if train else 'rollout'} log-prob is a bfloat16 number, {rest} once both sides are rounded"


def _later_tokens_only(samples: Sequence[Facts]) -> str | None:
    first = [sample.first_token_differs for sample in samples if sample.first_token_differs is not None]
    num_later = sum(sample.num_uncertain for sample in samples)
    if any(first):
        return None
    # One more than counted, so that few tokens cannot make a certainty.
    share = sum(sample.num_uncertain_nonzero for sample in samples) / (num_later + 1)
    chance = (1.0 - share) ** len(first)
    if chance > MAX_CHANCE:
        return None
    return (
        f"the first tokens of {len(first)} responses are all equal, later ones differ in {share:.0%} of the cases (by "
        f"chance: {chance:.0e})"
    )


def _within_formulas(samples: Sequence[Facts]) -> str | None:
    largest = max(sample.max_unit_ulps for sample in samples)
    if largest > MAX_FORMULA_UNIT_ULPS or sum(sample.num_active for sample in samples) < MIN_TOKENS:
        return None
    return f"no difference exceeds {largest:.2g} float32 ULPs of max(1, |log-prob|), less than kernels give"


def _as_kernels(samples: Sequence[Facts], mean_abs_diff: float) -> str | None:
    few = sum(sample.num_active for sample in samples) < MIN_TOKENS
    if few or mean_abs_diff > MAX_KERNEL_MEAN or _max_abs_diff(samples) > MAX_KERNEL_DIFF:
        return None
    return f"a mean difference of {mean_abs_diff:.2g} nats is of their size; compare the modules to find the first one"


def _outliers(samples: Sequence[Facts], mean_abs_diff: float) -> str | None:
    num_active = sum(sample.num_active for sample in samples)
    num_nonzero = sum(sample.num_nonzero for sample in samples)
    if num_active < MIN_TOKENS or mean_abs_diff > MAX_KERNEL_MEAN:
        return None
    largest = f"one by {_max_abs_diff(samples):.2g} nats, which is more than kernels give"
    return f"{num_nonzero} of {num_active} tokens differ, {largest}"


def _max_abs_diff(samples: Sequence[Facts]) -> float:
    return max(decile.max_abs_diff for sample in samples for decile in sample.deciles)
