# SPDX-License-Identifier: Apache-2.0
"""Weights of other steps: by a canary, by recorded versions, by steps in which k3 returns to its floor, or by size.

Numbers from runs of examples/train_grpo.py with ``--update-weights-interval 4``: right after a sync k3 is 4e-5 to
7e-5, a step later 10 to 4,000 times that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.checks.token_sums import KERNEL_K3, MAX_CHANCE, MAX_MEAN_ABS_DIFF, MIN_TOKENS, PRETRAINED_K3, QUANTISED_K3
from mis_ext.tools.diagnosis.cause import TAILS, Finding, cause
from mis_ext.tools.diagnosis.measuring import Measured, Samples
from mis_ext.tools.diagnosis.missing import MIXED_UP, of_weights
from mis_ext.tools.diagnosis.size import OTHER_PRECISION, more_words

GROWTH, GROWTH_ERRORS, MIN_GAP = 3.0, 4.0, 1e-12
RISE, TYPICAL_RISE = 10.0, 2.0
MIN_DRIFTING, DRIFTING = 5, 0.75
MAX_LISTED = 5
MAX_EXPLAINED = 0.3
"""Where other causes explain more of k3, its size says nothing about weights."""


@cause(
    name="stale_weights",
    title="stale weights: tokens that were sampled with weights of another step",
    looks_like="the canary of mis_ext.rollout.generate says so, or k3 grows with the recorded versions, or over steps "
    "(steadily, or back to its floor), or samples are far apart in steps whose others differ more, too, or the mean "
    "difference exceeds 0.3 nats",
    advice="Sync the weights before sampling, and in the trainer's dtype: in bf16 an engine stays behind a "
    "trainer in fp16. After an update in flight one answer is of two versions (docs/reference/methods_extras.md). "
    "Or correct: token TIS gained 0.06 of reward with weights 4 steps old in a pretrained model, 0.13 with 8 "
    "(lab/evidence/README.md).",
    hides=("decode_dependence", "stale_prefix_cache", "late_positions", *TAILS),
)
def stale(measured: Measured, samples: Samples) -> Finding | None:
    """Weights of other steps. The canary counts where its samples differ more; versions are not guessed from steps."""
    samples = samples.measured
    behind, is_old_S = samples["versions_behind"], samples["has_old_weights"] == 1.0
    old, others = (samples.where(each) for each in (is_old_S, ~is_old_S))
    if len(old) and len(others) and (found := _by_canary(old, others)):
        return found
    is_recorded = bool((behind.abs() > 0.0).any())
    if is_recorded and (found := _by_version(samples.where(~behind.isnan()))):
        return found
    if len(old) and not len(others):
        return _finding_of_canary(old, f"{len(old)} of {len(old)}", "", confidence="possible", k3_share=1.0)
    return None if is_recorded else _by_step(samples, measured) or _by_size(samples, measured)


def _by_canary(old: Samples, others: Samples) -> Finding | None:
    """Tokens of an engine that the canary found with earlier weights differ more than those of the others."""
    groups = _Group.of(math.nan, old), _Group.of(0.0, others)
    if not (groups[0].k3 > GROWTH * groups[1].k3 and _is_more(*groups)):
        return None
    return _finding_of_canary(
        old,
        f"{len(old)} of {len(old) + len(others)}",
        f", and {groups[1].k3:.2g} in the others",
        confidence="likely",
        k3_share=_share_above(groups[1].k3, groups),
    )


def _finding_of_canary(
    old: Samples, how_many: str, others: str, *, confidence: Literal["likely", "possible"], k3_share: float
) -> Finding:
    """An engine that scored a fixed text as with earlier weights, whatever it called its own, sampled these tokens."""
    return Finding(
        confidence=confidence,
        evidence=f"{how_many} samples are of an engine that scored a fixed text as with earlier weights (the "
        f"canary){_agree(old)}; their k3 is {_Group.of(math.nan, old).k3:.2g}{others}",
        k3_share=k3_share,
        is_up_to=not others,
        alternatives=("an update that changed no weight, as at a learning rate of 0",),
    )


def _agree(samples: Samples) -> str:
    """The contradiction, where there is one: log-probs are old, and what the engine names is not."""
    return ", although the weight versions agree" if bool((samples["versions_behind"] == 0.0).all()) else ""


class _Group(NamedTuple):
    """Tokens of a step, or of weights so many versions behind: how many, their k3 per token, and their samples."""

    behind: float
    num_tokens: float
    k3: float
    samples: Samples

    @classmethod
    def of(cls, behind: float, samples: Samples) -> _Group:
        count = float(samples["num_tokens"].sum())
        return cls(behind, count, float(samples["k3"].sum()) / count, samples)

    @property
    def log_gaps(self) -> Tensor:
        """Log of the mean ``|d|`` of each response: unlike k3, few tokens do not decide it."""
        return self.samples.mean_gap.clamp_min(MIN_GAP).log()


def _by_version(samples: Samples) -> Finding | None:
    """Tokens of the farthest versions differ more than those of the nearest."""
    lags = sorted(set(samples["versions_behind"].tolist()), key=abs)
    groups = [_Group.of(lag, samples.where(samples["versions_behind"] == lag)) for lag in lags]
    nearest, farthest = groups[0], groups[-1]
    names = [f"{group.behind:g} behind" if group.behind else "fresh" for group in groups]
    listed = ", ".join(f"{name} {group.k3:.2g}" for name, group in zip(names[:MAX_LISTED], groups, strict=False))
    total = sum(group.num_tokens for group in groups)
    share = sum(group.num_tokens for group in groups if group.behind) / total
    evidence = f"{share:.0%} of the tokens were sampled with other weights than the trainer's; k3 by version: {listed}"
    excess = _share_above(nearest.k3, groups)
    if farthest.k3 > GROWTH * nearest.k3 and _is_more(farthest, nearest):
        return Finding(confidence="likely", evidence=evidence, k3_share=excess)
    is_few = total < MIN_TOKENS and nearest.k3 > 0.0
    # What gives so much with fresh weights.
    usual = ("kernels in bfloat16 of a pretrained model, the usual case",) if nearest.k3 < PRETRAINED_K3 else ()
    precision = "lower precision on one side" if nearest.k3 < QUANTISED_K3 else OTHER_PRECISION
    if nearest.behind and (is_few or nearest.k3 > KERNEL_K3):
        return Finding(
            confidence="possible",
            evidence=f"{evidence}; no fresh token tells which it is",
            k3_share=1.0,
            is_up_to=True,
            alternatives=("other kernels",) if is_few else (*usual, precision),
        )
    return None


def _share_above(floor: float, groups: Sequence[_Group | _Step]) -> float:
    """Share of k3 that groups have above a floor."""
    total = sum(group.k3 * group.num_tokens for group in groups)
    above = sum(max(group.k3 - floor, 0.0) * group.num_tokens for group in groups)
    return above / total if total else math.nan


def _is_more(more: _Group, less: _Group) -> bool:
    """Whether the means are apart by more than chance; of a side that is one response only where it is equal."""
    if not less.k3 and not less.behind:
        # Chance of tokens that are all equal, if as many differed as in the other group; half of them at least do.
        return bool(less.num_tokens * math.log(0.5) < math.log(MAX_CHANCE))
    sides = (more.log_gaps, less.log_gaps)
    variance = sum(float(side.var()) / len(side) if len(side) > 1 else math.inf for side in sides)
    return float(sides[0].mean() - sides[1].mean()) > GROWTH_ERRORS * math.sqrt(variance)


class _Step(NamedTuple):
    name: str
    num_tokens: float
    k3: float
    typical: float


def _by_step(samples: Samples, measured: Measured) -> Finding | None:
    typical = measured.typical_gaps or {}
    numbers = {step: number for number, step in enumerate(dict.fromkeys(samples.steps))}
    index = torch.tensor([numbers[step] for step in samples.steps], dtype=torch.int64)
    counts, k3s = (torch.bincount(index, samples[name], minlength=1).tolist() for name in ("num_tokens", "k3"))
    steps = [
        _Step(name, counts[number], k3s[number] / counts[number], typical.get(name, math.nan))
        for name, number in numbers.items()
        if counts[number] >= MIN_TOKENS
    ]
    if len(steps) < 2:
        return None
    steps.sort(key=lambda step: (not step.name.isdecimal(), step.name.zfill(20)))
    floor = min(steps, key=lambda step: step.k3)
    most = sorted(step.k3 for step in steps)[len(steps) // 2]
    set_apart = of_weights(measured)
    for evidence, usual, alternatives in (
        (_returns(steps, floor), floor.k3, ()),
        (_drifts(steps), steps[0].k3, ("a mismatch that training itself lets grow",)),
        (_jumps(steps, most), most, ()),
        (set_apart, floor.k3, ()),
    ):
        if evidence:
            return Finding(
                confidence="possible",
                evidence=evidence + _agree(samples),
                k3_share=_share_above(usual, steps),
                alternatives=(*alternatives, *((f"another text, or {MIXED_UP}",) if set_apart else ())),
            )
    return None


def _returns(steps: list[_Step], floor: _Step) -> str:
    """Evidence that k3 rises and comes back to its floor: a sync of the weights, and what was sampled until the next.

    Few tokens, as other experts or sentinels, raise k3 too, but not what is typical of a token.
    """
    fresh, has_risen, highest = list[str](), True, floor.k3
    for step in steps:
        if step.k3 <= GROWTH * floor.k3 and has_risen:
            fresh, has_risen = [*fresh, step.name], False
        elif step.k3 > max(RISE * floor.k3, KERNEL_K3) and step.typical > TYPICAL_RISE * floor.typical:
            has_risen, highest = True, max(highest, step.k3)
    if len(fresh) < 2:
        return ""
    period = _period(fresh)
    when = f"every {period} steps, as with a weight sync every {period} steps" if period else "and rises again"
    listed = ", ".join(fresh[:MAX_LISTED]) + (", ..." if len(fresh) > MAX_LISTED else "")
    return f"k3 rises to {highest:.2g} and returns to its floor of {floor.k3:.2g} {when} (from step {listed})"


def _drifts(steps: list[_Step]) -> str:
    """Evidence that k3 rises from step to step, as where weights are never synced: precision does not change."""
    rises = [later.k3 > earlier.k3 for earlier, later in pairwise(steps)]
    if len(steps) < MIN_DRIFTING or sum(rises) < DRIFTING * len(rises):
        return ""
    first, last = steps[0], steps[-1]
    # One jump is no drift.
    jump = max(later.k3 / earlier.k3 if earlier.k3 else math.inf for earlier, later in pairwise(steps))
    is_large = last.k3 > max(RISE * first.k3, KERNEL_K3) and last.k3 > GROWTH * first.k3 * jump
    if not is_large or not last.typical > TYPICAL_RISE * first.typical:
        return ""
    return (
        f"k3 rises from {first.k3:.2g} in step {first.name} to {last.k3:.2g} in step {last.name}, in {sum(rises)} of "
        f"{len(rises)} steps: as where weights are never synced, and not as of a precision, which does not change"
    )


def _period(fresh: list[str]) -> int:
    """The steps from each to the next, 0 where they are few or differ."""
    if len(fresh) < 3 or not all(name.isdecimal() for name in fresh):
        return 0
    periods = {int(later) - int(earlier) for earlier, later in pairwise(fresh)}
    return periods.pop() if len(periods) == 1 else 0


def _jumps(steps: list[_Step], usual: float) -> str:
    """Evidence that a few steps differ far more than most."""
    if len(steps) < 3:
        return ""
    jumps = {step.name: step.k3 for step in steps if step.k3 > max(RISE * usual, KERNEL_K3)}
    listed = ", ".join([*jumps][:MAX_LISTED])
    return f"in step {listed} k3 is {max(jumps.values()):.2g}, in most steps {usual:.2g}" if jumps else ""


def _by_size(samples: Samples, measured: Measured) -> Finding | None:
    """A mean difference that no kernels give."""
    tokens = measured.tokens
    gap = tokens.gap_rest / tokens.num_rest if tokens.num_rest else 0.0
    if gap <= MAX_MEAN_ABS_DIFF or measured.explained > MAX_EXPLAINED:
        return None
    return Finding(
        confidence="possible",
        evidence=f"the log-probs differ by {gap:.2g} nats per token on average, more than {MAX_MEAN_ABS_DIFF:g} and "
        f"far more than kernels gave in any model of ours (at most 0.1 in bfloat16){_agree(samples)}",
        k3_share=1.0 - measured.explained,
        is_up_to=True,
        alternatives=(
            OTHER_PRECISION,
            "another prompt, chat template or context",
            "penalties or a logits processor of the engine",
            "top-p or top-k that cut off much",
            *more_words(measured),
        ),
    )
