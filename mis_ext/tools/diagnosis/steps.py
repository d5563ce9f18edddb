# SPDX-License-Identifier: Apache-2.0
"""When a mismatch starts: compares k3 of each step with the first steps, and of each weight version with current ones.

This file has all rules of the cause ``stale_weights``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.tools.diagnosis import thresholds as limit
from mis_ext.tools.diagnosis.cause import Found, Left, cause
from mis_ext.tools.diagnosis.evidence import Evidence, t_quantile
from mis_ext.tools.diagnosis.groups import MIXED_UP, OTHER_CONTEXT, PACKED, groups_of, of_weights
from mis_ext.tools.diagnosis.places import more_words
from mis_ext.tools.diagnosis.sampling import PENALTIES

OTHER_TOKENS = "log-probs of other tokens: shifted by several positions, or of other samples"
OTHER_PRECISION = "low precision of another model: a cache in e4m3 gave 0.3 to 0.4 in Qwen2.5-Coder-1.5B"
NOT_SENT = (
    "a tensor that the sync omits",
    "an adapter that one side scales twice or merges differently",
    "a mismatch that grows during training without a fault",
    "a setting that was changed, such as the temperature or top-p",
)
COMPARE = (
    "Compare the weights of both sides tensor by tensor with mis_ext.rollout.compare_weights: a weight version does "
    "not show an omitted tensor or an adapter that was merged twice. "
)


class Step(NamedTuple):
    """Responses of one step, or of one weight version.

    Attributes:
        number: Its index in the order of steps.
        name: Name of the step.
        num_tokens: Tokens of all its responses.
        k3: Mean per token.
        typical: The median ``|d| / (1 - p)`` of uncertain tokens.
        level: The mean over responses of the log of ``|d| / (1 - p)``. Unlike k3, a few tokens do not dominate it.
        error: The standard error of ``level``.
        num_responses: Number of responses in ``level``.
    """

    number: int
    name: str
    num_tokens: int
    k3: float
    typical: float
    level: float
    error: float
    num_responses: int

    @classmethod
    def of(cls, tokens: Evidence, number: int = 0, name: str = "") -> Step:
        """Measure the tokens of some responses."""
        levels = tokens.shift_S[tokens.shift_S > 0.0].log()
        count = len(levels)
        error = float(levels.std()) / math.sqrt(count) if count > 1 else math.inf
        level = float(levels.mean()) if count else math.nan
        return cls(number, name, len(tokens), tokens.k3, tokens.typical_shift, level, error, count)

    def is_above(self, other: Step, factor: float) -> bool:
        """True if k3 is more than ``factor`` times another, and typical responses differ by more than chance."""
        if not self.k3 > factor * other.k3:
            return False
        if not other.k3:
            # The chance that all tokens are equal, if each differs with probability 1/2 or more.
            return other.num_tokens * math.log(0.5) < math.log(limit.MAX_CHANCE)
        freedom = min(self.num_responses, other.num_responses) - 1
        errors = t_quantile(limit.STEP_ERRORS, freedom)
        return self.level - other.level > errors * math.hypot(self.error, other.error)


def steps_of(tokens: Evidence) -> list[Step]:
    """The steps with enough tokens, in order."""
    names = dict(zip(tokens.step_S.tolist(), tokens.steps, strict=True))
    parts = tokens.split(tokens.spread(tokens.step_S), 1 + max(names, default=-1))
    return [Step.of(part, number, names[number]) for number, part in enumerate(parts) if len(part) >= limit.MIN_TOKENS]


class Story(NamedTuple):
    """A change of k3 over steps: a description, the k3 of the reference, and the reference steps."""

    evidence: str
    floor: float
    reference: tuple[int, ...]
    is_return: bool = False


def story_of(steps: Sequence[Step]) -> Story | None:
    """Find a return to a floor, a jump, or a growth; None if k3 does not change."""
    if len(steps) < 2:
        return None
    return _returns(steps) or _jumps(steps) or _grows(steps) or _stands_out(steps)


def _has_risen(step: Step, reference: Step) -> bool:
    """A few tokens, from expert routing or sentinels, also raise k3, but not the typical shift."""
    return step.is_above(reference, limit.GROWTH) and step.typical > limit.TYPICAL_GROWTH * reference.typical


def _returns(steps: Sequence[Step]) -> Story | None:
    """k3 rises and returns to its floor, as between weight syncs."""
    floor = min(steps, key=lambda step: step.k3)
    fresh, has_risen, highest = list[Step](), True, floor.k3
    for step in steps:
        if has_risen and not step.is_above(floor, limit.NOTICED):
            fresh, has_risen = [*fresh, step], False
        elif _has_risen(step, floor) and step.k3 > limit.KERNEL_K3:
            has_risen, highest = True, max(highest, step.k3)
    if len(fresh) < 2:
        return None
    names = [step.name for step in fresh]
    numbers = [int(name) if name.isdecimal() else -1 for name in names]
    periods = {later - earlier for earlier, later in pairwise(numbers)}
    period = periods.pop() if len(periods) == 1 and len(names) > 2 else 0
    when = f"every {period} steps, as with a weight sync every {period} steps" if period else "and rises again"
    listed = ", ".join(names[: limit.MAX_LISTED]) + (", ..." if len(names) > limit.MAX_LISTED else "")
    evidence = f"k3 rises to {highest:.2g} and returns to its floor of {floor.k3:.2g} {when} (from step {listed})"
    return Story(evidence, floor.k3, tuple(step.number for step in steps if not _has_risen(step, floor)), True)


def _jumps(steps: Sequence[Step]) -> Story | None:
    """k3 changes permanently at one step: an event before this step broke one side."""
    for index, (before, step) in enumerate(pairwise(steps), 1):
        earlier, later = steps[:index], steps[index:]
        most, least = max(earlier, key=lambda each: each.k3), min(later, key=lambda each: each.k3)
        rise = max(each.k3 for each in later) / least.k3 if least.k3 else math.inf
        # Over a gap between step numbers, k3 may grow by training itself.
        is_next = not (before.name.isdecimal() and step.name.isdecimal()) or int(step.name) == int(before.name) + 1
        # One step with a different k3 is not a growth.
        usual = sorted(each.k3 for each in earlier)[index // 2]
        is_flat = not _rise(earlier) and before.k3 <= limit.GROWTH * usual and not _rise(later)
        if is_next and _has_risen(least, most) and is_flat and (not before.k3 or rise < step.k3 / before.k3):
            last = earlier[-1]
            where = f"in step {last.name}" if len(earlier) == 1 else f"up to step {last.name}"
            update = ": the first update broke one side" if len(earlier) == 1 else ""
            k3 = _mean(earlier)
            evidence = f"k3 is {k3:.2g} {where} and {_mean(later):.2g} from step {step.name} on{update}"
            return Story(evidence, k3, tuple(each.number for each in earlier))
    return None


def _rise(steps: Sequence[Step]) -> bool:
    """Return True if k3 rises threefold, in most steps."""
    rises = [later.k3 > earlier.k3 for earlier, later in pairwise(steps)]
    return steps[-1].k3 > limit.GROWTH * steps[0].k3 and sum(rises) >= limit.RISING * len(rises)


def _grows(steps: Sequence[Step]) -> Story | None:
    """k3 rises from step to step, from the first or a later step on: weights or a tensor are not synced."""
    first, last = steps[0], steps[-1]
    # One step of a growth has a large error, so one step above the first is enough.
    floor = [*takewhile(lambda step: not step.is_above(first, limit.NOTICED), steps)]
    if len(floor) == len(steps) or last.typical <= limit.TYPICAL_GROWTH * first.typical:
        return None
    for rising, begins, synced in (
        (steps, f"grows from {first.k3:.2g} in step {first.name}", "never"),
        (steps[len(floor) - 1 :], f"is {_mean(floor):.2g} up to step {floor[-1].name} and grows", "no longer"),
    ):
        rises = [later.k3 > earlier.k3 for earlier, later in pairwise(rising)]
        if len(rising) >= limit.MIN_GROWING and _rise(rising):
            evidence = (
                f"k3 {begins} to {last.k3:.2g} in step {last.name}, with a rise in {sum(rises)} of {len(rises)} steps, "
                f"as if weights were {synced} synced: low precision would give the same k3 in each step"
            )
            reference = tuple(each.number for each in steps if not each.is_above(first, limit.NOTICED))
            return Story(evidence, _mean(floor), reference)
    return None


def _stands_out(steps: Sequence[Step]) -> Story | None:
    """A few steps have a much larger k3 than most."""
    usual = sorted(steps, key=lambda each: each.k3)[len(steps) // 2]
    high = [each for each in steps if _has_risen(each, usual) and each.k3 > limit.KERNEL_K3]
    if len(steps) < 3 or not high:
        return None
    listed = ", ".join(each.name for each in high[: limit.MAX_LISTED])
    evidence = f"in step {listed} k3 is {max(each.k3 for each in high):.2g}, in most steps {usual.k3:.2g}"
    return Story(evidence, usual.k3, tuple(each.number for each in steps if each not in high))


def _mean(steps: Sequence[Step]) -> float:
    return sum(each.k3 * each.num_tokens for each in steps) / sum(each.num_tokens for each in steps)


def reference_of(tokens: Evidence) -> Evidence:
    """The tokens of the steps before a change. A wrong setting of engine or trainer shows there too."""
    story = story_of(steps_of(tokens))
    if story is None:
        return tokens
    kept = tokens.of_samples(torch.isin(tokens.step_S, torch.tensor(story.reference, dtype=torch.int64)))
    return kept if len(kept) >= limit.MIN_TOKENS else tokens


def change_words(tokens: Evidence) -> str:
    """Describe a k3 that exceeds that of the first step by more than its errors; empty if none does."""
    steps = steps_of(tokens)
    # While a policy learns, it becomes more certain and k3 falls.
    higher = [each for each in steps[1:] if each.is_above(steps[0], limit.NOTICED)]
    if not higher:
        return ""
    high = max(higher, key=lambda each: each.k3)
    return f"k3 is {steps[0].k3:.2g} in step {steps[0].name} and {high.k3:.2g} in step {high.name}, more than by chance"


# --- the cause


@cause(
    name="stale_weights",
    title="stale weights, or a tensor that was not sent",
    looks_like="The canary of mis_ext.rollout.generate reports it. Or k3 jumps, grows, or returns over steps or "
    "recorded versions, or one file differs",
    advice="Sync the weights before sampling, and in the trainer's dtype: in bf16 an engine stays behind a trainer in "
    "fp16. After an update during generation, one response has tokens of two versions.",
)
def stale(left: Left) -> Found | None:
    """Find weights of other steps: first from the canary, then from recorded versions.

    If recorded versions make it likely, steps and files are not compared. If they make it only possible, steps come
    first and files last. If this rule finds nothing, :func:`stale_by_size` can still name the cause, after all other
    rules.
    """
    tokens = left.tokens.without_samples(left.tokens.num_S > 0)
    if not len(tokens):
        return None
    behind_S, old_S = tokens["versions_behind"], tokens["has_old_weights"] == 1.0
    has_both = bool(old_S.any()) and not bool(old_S.all())
    if has_both and (found := _by_canary(tokens, old_S)):
        return found
    has_other_version = bool((behind_S.abs() > 0.0).any())
    by_version = _by_version(tokens.without_samples(~behind_S.isnan())) if has_other_version else None
    if by_version is not None and by_version.diagnosis.confidence == "likely":
        return by_version
    if bool(old_S.all()):
        return _by_canary(tokens, old_S)
    return _by_step(tokens) or by_version or _by_group(tokens)


def _by_canary(tokens: Evidence, old_S: Tensor) -> Found | None:
    """Tokens of engines whose canary score is that of earlier weights, whatever version they report."""
    old, others = tokens.of_samples(old_S), tokens.of_samples(~old_S)
    if len(others) and not Step.of(old).is_above(Step.of(others), limit.GROWTH):
        return None
    share = max(old.k3 - others.k3, 0.0) * len(old) / float(tokens.k3_T.sum()) if len(others) else 1.0
    return stale.found(
        confidence="likely" if len(others) else "possible",
        evidence=f"{int(old_S.sum())} of {len(old_S)} samples are from an engine that scored a fixed text as "
        f"earlier weights do (the canary){_agree(tokens)}; their k3 is {old.k3:.2g}"
        + (f", and {others.k3:.2g} in the others" if len(others) else ""),
        k3_share=share,
        is_up_to=not len(others),
        alternatives=("an update that changed no weight, as at a learning rate of 0",),
    )


def _agree(tokens: Evidence) -> str:
    """Describe the contradiction that log-probs are old and the reported versions are not; else empty."""
    return ", although the weight versions agree" if bool((tokens["versions_behind"] == 0.0).all()) else ""


def _by_version(tokens: Evidence) -> Found | None:
    """Find tokens of the farthest version that differ more than those of the nearest."""
    behind_S = tokens["versions_behind"]
    groups = {lag: tokens.of_samples(behind_S == lag) for lag in sorted({*behind_S.tolist()}, key=abs)}
    (lag, nearest), farthest = next(iter(groups.items())), [*groups.values()][-1]
    named = [f"{f'{each:g} behind' if each else 'fresh'} {group.k3:.2g}" for each, group in groups.items()]
    share = sum(len(group) for each, group in groups.items() if each) / len(tokens)
    evidence = (
        f"{share:.0%} of the tokens were sampled with other weights than the trainer's; k3 by version: "
        f"{', '.join(named[: limit.MAX_LISTED])}"
    )
    if Step.of(farthest).is_above(Step.of(nearest), limit.GROWTH):
        above = sum(max(group.k3 - nearest.k3, 0.0) * len(group) for group in groups.values())
        return stale.found(confidence="likely", evidence=evidence, k3_share=above / float(tokens.k3_T.sum()))
    is_few = len(tokens) < limit.MIN_TOKENS and nearest.k3 > 0.0
    if not lag or not (is_few or nearest.k3 > limit.KERNEL_K3):
        return None
    # Other causes of this size with up-to-date weights.
    usual = ("kernels in bfloat16 of a pretrained model, the usual case",) if nearest.k3 < limit.PRETRAINED_K3 else ()
    precision = "lower precision on one side" if nearest.k3 < limit.QUANTIZED_K3 else OTHER_PRECISION
    return stale.found(
        confidence="possible",
        evidence=f"{evidence}; no fresh token shows which one it is",
        k3_share=1.0,
        is_up_to=True,
        alternatives=("other kernels",) if is_few else (*usual, precision),
    )


def _by_step(tokens: Evidence) -> Found | None:
    """Find a k3 that changes over steps."""
    steps = steps_of(tokens)
    story = story_of(steps)
    if story is None:
        return None
    groups = groups_of(tokens)
    # If most responses of a step are far, its k3 shows it.
    is_apart = groups is not None and groups.apart_by != "step" and of_weights(tokens, groups)
    text = (f"another text, or {MIXED_UP}",) if is_apart else ()
    above = sum(max(each.k3 - story.floor, 0.0) * each.num_tokens for each in steps)
    return stale.found(
        confidence="possible",
        evidence=story.evidence + _agree(tokens),
        k3_share=above / float(tokens.k3_T.sum()),
        advice=stale.advice if story.is_return else COMPARE + ("" if _agree(tokens) else stale.advice),
        alternatives=(*text, *(() if story.is_return else NOT_SENT)),
    )


def _by_group(tokens: Evidence) -> Found | None:
    """Find responses of one file that differ more than those of other files: an engine or a rank with other weights."""
    groups = groups_of(tokens)
    if groups is None or groups.apart_by != "source":
        return None
    near = tokens.of_samples(~groups.far_S)
    return stale.found(
        confidence="possible",
        evidence=f"{groups.evidence}; {groups.told}{_agree(tokens)}",
        k3_share=1.0 - near.k3 * len(tokens) / float(tokens.k3_T.sum()),
        alternatives=("another setting or precision of that rank's engine", *NOT_SENT[:2]),
    )


def stale_by_size(left: Left) -> Found | None:
    """Find a mean difference that no kernels give and no other cause explains. Called by ``size`` of ``size.py``."""
    gap = float(left.tokens.d_T.abs().mean())
    if gap <= limit.MAX_MEAN_ABS_DIFF or left.explained > limit.MAX_EXPLAINED_OF_WEIGHTS:
        return None
    cuts = "top-p or top-k that cut off much"
    return stale.found(
        confidence="possible",
        evidence=f"the log-probs differ by {gap:.2g} nats per token on average, more than {limit.MAX_MEAN_ABS_DIFF:g} "
        f"and far more than kernels gave in any model of the lab (at most 0.1 in bfloat16){_agree(left.tokens)}",
        k3_share=1.0 - left.explained,
        is_up_to=True,
        alternatives=(OTHER_PRECISION, OTHER_CONTEXT, OTHER_TOKENS, PACKED, PENALTIES, cuts, *more_words(left)),
    )
