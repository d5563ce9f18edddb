# SPDX-License-Identifier: Apache-2.0
"""The size of the remaining mismatch, and its usual cause if no other cause explains it."""

from __future__ import annotations

import math
from typing import NamedTuple

from mis_ext.correction.tokens import MAX_LOG_RATIO
from mis_ext.tools.diagnosis import thresholds as limit
from mis_ext.tools.diagnosis.cause import Found, Left, cause
from mis_ext.tools.diagnosis.evidence import Evidence
from mis_ext.tools.diagnosis.groups import OTHER_CONTEXT, PACKED
from mis_ext.tools.diagnosis.places import more_words
from mis_ext.tools.diagnosis.sampling import OLD_WEIGHTS, PENALTIES, stale_words
from mis_ext.tools.diagnosis.steps import NOT_SENT, OTHER_PRECISION, change_words, stale_by_size

SMALL_PRECISION = "low precision with little effect: an e4m3 cache gave 1e-3 in a small model"
OTHER_KERNELS = "bfloat16 kernels of a model with more rounding than any that we measured, 2.2e-3"
BF16 = (
    "bfloat16 on both sides gave 1e-5 to 1e-4 in small models, 1.7e-3 to 2.2e-3 in SmolLM2-135M, "
    "2e-4 in Qwen2.5-Coder-1.5B; your model may differ"
)
QUANTIZED = (
    "8-bit caches, weights, and matmuls gave 1e-3 to 8e-3 in small models, 1.4e-2 to 7e-2 in SmolLM2-135M, and an e4m3 "
    "cache 0.3 to 0.4 in Qwen2.5-Coder-1.5B"
)
_STEP_ADVICE = (
    "Look at the steps first: kernels and precision do not change over steps. Compare weights tensor by tensor after "
    "the first update, with mis_ext.rollout.compare_weights."
)


@cause(
    name="equal",
    title="no difference, or one of float32 rounding",
    looks_like="Both sides have the same values, or differ by float32 rounding only",
    advice="Nothing to correct. A copy of one side looks the same: mis-ext audit detects it. For bitwise equality use "
    "the same formula on both sides.",
)
def equal(left: Left) -> Found | None:
    tokens = left.tokens
    if not len(tokens):
        return None
    if not bool((tokens.d_T != 0.0).any()):
        return equal.found(confidence="certain", evidence="every log-prob is the same number on both sides")
    steps = float((tokens.d_T.abs() / (2.0**-23 * tokens.engine_T.abs().clamp_min(1.0))).max())
    if steps > limit.MAX_FORMULA_STEPS or len(tokens.uncertain) < limit.MIN_TOKENS:
        return None
    return equal.found(
        title="another formula for the same log-prob, such as log(softmax) for log_softmax",
        confidence="likely",
        evidence=f"no difference exceeds {steps:.2g} float32 steps, {float(tokens.d_T.abs().max()):.1g} nats",
        k3_share=1.0,
    )


class Size(NamedTuple):
    """The class of a k3 up to ``below`` that no other cause explains."""

    below: float
    name: str
    title: str
    evidence: str
    advice: str


SIZES = (
    Size(
        limit.KERNEL_K3,
        "bf16_kernels",
        "other kernels or rounding, no larger than that of bfloat16",
        f"no more than dense models have: {BF16}",
        "No correction is needed for this alone. To find the first module that differs: mis-ext diff.",
    ),
    Size(
        limit.PRETRAINED_K3,
        "bf16_or_low_precision",
        "kernels in bfloat16 of a pretrained model (usual, no fault), or lower precision on one side",
        f"within what both give: {BF16}; {QUANTIZED}",
        "Nothing is wrong if the model is pretrained and both sides compute in bfloat16. With float16 on "
        "both sides, k3 was 65 times smaller, and training needed about half the steps. With only the engine's head "
        "in float32, k3 was three quarters as large. In small models an fp8 cache or fp8 weights have this "
        "size. Token TIS (preset mis) rejects nothing, and made no difference there.",
    ),
    Size(
        limit.QUANTIZED_K3,
        "low_precision",
        "lower precision on one side (fp8 or int8 weights or cache)",
        f"above kernels: {BF16}; {QUANTIZED}",
        "Token TIS (preset mis) is a precaution with a cost: at a k3 of 0.06 our runs learned without a "
        "correction, and needed 8 steps more than 107 to reach a reward of 0.9 with it. If k3 is far above that of the "
        "same engine in bfloat16, repair the engine: other scales of an 8-bit cache, or another dtype.",
    ),
    Size(
        math.inf,
        "large_mismatch",
        "a large mismatch, which low precision gave in some models only",
        f"above what low precision gave in SmolLM2-135M, {limit.QUANTIZED_K3:g}; weights one step stale gave 8e-2 in a "
        "small model",
        "Check weight syncs first, then correct with token TIS (preset mis).",
    ),
)
"""In ascending order. The limits are those of SmolLM2-135M."""


@cause(
    name="size",
    title="the usual cause of a difference of this size",
    looks_like="No other cause explains k3. The class depends on its size (SmolLM2-135M): "
    f"{', '.join(f'`{each.name}` below {each.below:g}' for each in SIZES[:3])}, `large_mismatch`"
    " above. `stale_weights`: the mean difference exceeds 0.3 nats. `broken_trainer`, `broken_engine`: "
    "the log-probs of this side are worse than a uniform guess",
    advice="See the advice in the report: kernels need no correction; low precision may need token TIS (preset mis); a "
    "broken side has not loaded its weights.",
)
def size(left: Left) -> Found | None:
    tokens = left.tokens
    if not len(tokens) or not bool((tokens.d_T != 0.0).any()) or left.explained > limit.MAX_EXPLAINED:
        return None
    if "temperature" not in left.found and (found := _broken(tokens)):
        return found
    if found := stale_by_size(left):
        return found
    row = next(each for each in SIZES if left.k3 < each.below)
    # A difference between steps always matters.
    changes = "" if "stale_weights" in left.found else change_words(tokens)
    is_quiet = left.k3 < limit.QUIET_K3 and not changes
    is_rest = left.explained >= limit.MAIN_SHARE or len(tokens) < len(left.whole)
    if len(tokens) < limit.MIN_TOKENS or (is_quiet and is_rest):
        return None
    # A remainder after a cause with its own evidence does not come first.
    is_usual = row is SIZES[0] or (row is SIZES[1] and not left.explained)
    return size.found(
        cause=row.name,
        title=row.title,
        confidence="likely" if is_usual and not changes else "possible",
        evidence=f"k3 {left.k3:.2g} is {row.evidence}" + (f"; {changes}" if changes else ""),
        k3_share=1.0 - left.explained,
        is_up_to=True,
        is_growing=bool(changes),
        advice=_STEP_ADVICE if changes else row.advice,
        alternatives=tuple(dict.fromkeys((*(NOT_SENT[:2] if changes else ()), *_others(left, row, is_quiet=is_quiet)))),
    )


def _others(left: Left, row: Size, *, is_quiet: bool) -> tuple[str, ...]:
    """Return other causes of this size. Stale weights come first if there is evidence for them."""
    old, more = stale_words(left.tokens), more_words(left)
    if is_quiet:
        return (*old, SMALL_PRECISION)
    possible = () if old else (OLD_WEIGHTS,)
    mixture = "a mixture of experts"
    if row is SIZES[0]:
        return (*old, SMALL_PRECISION, mixture, *possible, *more)
    if row is SIZES[1]:
        return (*old, mixture, *possible, PENALTIES, *more)
    if row is SIZES[2]:
        return (*old, mixture, *possible, PENALTIES, OTHER_CONTEXT, PACKED, *more, OTHER_KERNELS)
    beside = (f"{mixture} in low precision", "low precision together with one of these")
    return (OLD_WEIGHTS, OTHER_PRECISION, OTHER_CONTEXT, PACKED, PENALTIES, *beside, *more)


def _broken(tokens: Evidence) -> Found | None:
    side = tokens.side_worse_than_a_guess
    if not side:
        return None
    check = {
        "trainer": "its weights were loaded, with the scales of 8-bit weights, and that it scores the sampled ids "
        "after the same prompt",
        "engine": "its last update has loaded all weights, with the scales of 8-bit weights, and that it returns the "
        "log-probs of the sampled tokens",
    }
    return size.found(
        cause=f"broken_{side}",
        title=f"a broken {side}: it finds the sampled tokens less probable than a uniform guess would",
        confidence="certain",
        evidence=f"the {side}'s log-probs are {tokens.mean_log_probs[side]:.3g} on average (each taken as "
        f"{-MAX_LOG_RATIO:g} or more), and a uniform guess among {tokens.num_ids} tokens gives "
        f"{-math.log(tokens.num_ids):.3g}",
        k3_share=1.0,
        advice=f"Check that {check[side]}.",
        is_fault=True,
    )
