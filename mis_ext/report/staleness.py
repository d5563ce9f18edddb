"""Weights of other steps: by the recorded versions, by steps in which k3 returns to its floor, or by size alone.

Numbers from runs of examples/train_grpo.py with ``--update-weights-interval 4``: right after a sync k3 is 4e-5 to
7e-5, a step later 10 to 4,000 times that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import pairwise

from torch import Tensor

from mis_ext.correction.suspicions import MAX_MEAN_ABS_DIFF
from mis_ext.report.engine_causes import KERNEL_K3, QUANTISED_K3
from mis_ext.report.finding import MIN_TOKENS, Case, Confidence, Diagnosis
from mis_ext.report.sequences import Sequences
from mis_ext.report.summary import Group, Mismatch

GROWTH, GROWTH_ERRORS, MIN_GAP = 3.0, 4.0, 1e-12
RISE, TYPICAL_RISE = 10.0, 2.0
MAX_LISTED = 5
ADVICE = (
    "Sync the weights before sampling, or correct: token TIS gained 0.08 to 0.34 of reward with stale weights "
    "(benchmarks/evidence/staleness.md)."
)


def stale(case: Case) -> Iterator[Diagnosis]:
    """Weights of other steps. What versions say is not guessed from steps and sizes."""
    groups = sorted(case.summary.by_version, key=lambda group: abs(group.low))
    if any(group.low for group in groups):
        yield from _by_version(groups, case.sequences)
        return
    steps = {name: step for name, step in case.summary.steps.items() if step.num_tokens >= MIN_TOKENS}
    evidence = _returns(steps) or _jumps(steps)
    if evidence:
        yield _diagnosis("possible", "weights of an earlier step, in some steps", evidence)
    elif case.summary.overall.abs_mean > MAX_MEAN_ABS_DIFF:
        evidence = f"a mean difference of {case.summary.overall.abs_mean:.2g} nats is far more than kernels give"
        yield _diagnosis("possible", "weights of another step, or another context", evidence)


def _by_version(groups: list[Group], sequences: Sequences) -> Iterator[Diagnosis]:
    """Tokens of the farthest versions differ more than those of the nearest; ``groups`` come nearest first."""
    nearest, farthest = groups[0], groups[-1]
    title = "weights of an earlier step"
    listed = ", ".join(f"{group.name if group.low else 'fresh'} {group.k3:.2g}" for group in groups[:MAX_LISTED])
    share = sum(group.num_tokens for group in groups if group.low) / sum(group.num_tokens for group in groups)
    evidence = f"{share:.0%} of the tokens were sampled with other weights than the trainer's; k3 by version: {listed}"
    if farthest.k3 > GROWTH * nearest.k3 and _is_more(*(_log_gaps(group, sequences) for group in (farthest, nearest))):
        yield _diagnosis("likely", title, evidence)
    elif nearest.low and nearest.k3 > QUANTISED_K3:
        yield _diagnosis("likely", title, f"{evidence}, more than precision explains")
    elif nearest.low and nearest.k3 > KERNEL_K3:
        title += ", or lower precision on one side"
        yield _diagnosis("possible", title, f"{evidence}; no fresh token tells which it is")


def _log_gaps(group: Group, sequences: Sequences) -> Tensor:
    """Log of the mean ``|d|`` of each response of a group: unlike k3, few tokens do not decide it."""
    chosen = sequences.where((sequences["versions_behind"] == group.low) & sequences.measured)
    return (chosen["gap"] / chosen["num_valid"]).clamp_min(MIN_GAP).log()


def _is_more(more_S: Tensor, less_S: Tensor) -> bool:
    """Whether the means are apart by more than chance; not if a side is one response."""
    variance = sum(float(side.var()) / len(side) if len(side) > 1 else math.inf for side in (more_S, less_S))
    return float(more_S.mean() - less_S.mean()) > GROWTH_ERRORS * math.sqrt(variance)


def _returns(steps: Mapping[str, Mismatch]) -> str:
    """Evidence that k3 rises and comes back to its floor: a sync of the weights, and what was sampled until the next.

    Few tokens, as other experts or sentinels, raise k3 too, but not what is typical of a token.
    """
    ordered = sorted(steps.items(), key=lambda step: (not step[0].isdecimal(), step[0].zfill(20)))
    floor = min((step for _, step in ordered), key=lambda step: step.k3, default=None)
    if floor is None:
        return ""
    fresh, has_risen, highest = list[str](), True, floor.k3
    for name, step in ordered:
        if step.k3 <= GROWTH * floor.k3 and has_risen:
            fresh, has_risen = [*fresh, name], False
        elif _is_risen(step, floor):
            has_risen, highest = True, max(highest, step.k3)
    if len(fresh) < 2:
        return ""
    period = _period(fresh)
    when = f"every {period} steps, as with a weight sync every {period} steps" if period else "and rises again"
    listed = ", ".join(fresh[:MAX_LISTED]) + (", ..." if len(fresh) > MAX_LISTED else "")
    return f"k3 rises to {highest:.2g} and returns to its floor of {floor.k3:.2g} {when} (from step {listed})"


def _is_risen(step: Mismatch, floor: Mismatch) -> bool:
    return step.k3 > max(RISE * floor.k3, KERNEL_K3) and step.abs_p50 > TYPICAL_RISE * floor.abs_p50


def _period(fresh: list[str]) -> int:
    """The steps from each to the next, 0 where they are few or differ."""
    if len(fresh) < 3 or not all(name.isdecimal() for name in fresh):
        return 0
    periods = {int(later) - int(earlier) for earlier, later in pairwise(fresh)}
    return periods.pop() if len(periods) == 1 else 0


def _jumps(steps: Mapping[str, Mismatch]) -> str:
    """Evidence that a few steps differ far more than most."""
    if len(steps) < 3:
        return ""
    usual = sorted(step.k3 for step in steps.values())[len(steps) // 2]
    jumps = {name: step.k3 for name, step in steps.items() if step.k3 > max(RISE * usual, KERNEL_K3)}
    listed = ", ".join([*jumps][:MAX_LISTED])
    return f"in step {listed} k3 is {max(jumps.values()):.2g}, in most steps {usual:.2g}" if jumps else ""


def _diagnosis(confidence: Confidence, title: str, evidence: str) -> Diagnosis:
    return Diagnosis("stale_weights", confidence, title, evidence, ADVICE)
