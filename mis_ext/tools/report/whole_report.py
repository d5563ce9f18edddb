# SPDX-License-Identifier: Apache-2.0
"""The whole report: findings, configurations, and the comparison with another run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Literal

from mis_ext.files import to_jsonable
from mis_ext.tools.diagnosis.cause import Diagnosis
from mis_ext.tools.dumps import Dumps
from mis_ext.tools.report.findings import NUM_WORST, Collector, Findings, read_findings
from mis_ext.tools.report.noise import (
    MIN_PROMPTS,
    Estimate,
    Interval,
    digits,
    interval_of_difference,
    interval_of_ratio,
)
from mis_ext.tools.report.recommendation import Candidate, Recommendation, no_correction, recommend

FORMAT = 2
"""Version of the format of ``summary.json``."""

# --- two runs side by side: by how much their numbers differ, and their causes

Kind = Literal["ratio", "difference"]
_COMPARED: dict[str, tuple[Kind, str | None]] = {
    "k3": ("ratio", "k3_error"),
    "abs_mean": ("ratio", "abs_mean_error"),
    "reward": ("difference", "reward_error"),
    "mean_length": ("ratio", "mean_length_error"),
    "abs_p99": ("ratio", None),
    "abs_max": ("ratio", None),
    "ratio_mean": ("difference", None),
    "ess_token": ("difference", None),
    "ess_sequence": ("difference", None),
    "k_hat": ("difference", None),
}
"""Compared values: positive ones by ratio, shares and others by difference; with the field of their standard error."""


@dataclass(frozen=True)
class ComparedNumber:
    """A number of :class:`~mis_ext.tools.report.Mismatch` in two runs.

    Attributes:
        name: Name of the number.
        first: Value in the first run.
        second: Value in the second run.
        kind: Whether ``change`` is ``first / second`` or ``first - second``. It is the difference unless both numbers
            are above 0.
        change: NaN if a number was not measured.
        interval: The 95 % interval of ``change``; NaN if the noise is unknown.
    """

    name: str
    first: float
    second: float
    kind: Kind
    change: float
    interval: Interval


@dataclass(frozen=True)
class ComparedCause:
    """A likely cause in two runs; None if a run does not show it."""

    cause: str
    title: str
    first: Diagnosis | None
    second: Diagnosis | None


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Comparison of a run, A in the report, with another run ``other``, B in the report.

    Attributes:
        other: The second run.
        headline: The change of k3 in one sentence.
        notes: Limits of the comparison.
        numbers: Numbers in display order.
        causes: Causes of the first run, then those of only the second run.
    """

    other: Findings
    headline: str
    notes: tuple[str, ...]
    numbers: tuple[ComparedNumber, ...]
    causes: tuple[ComparedCause, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all content for JSON, including the second run in full."""
        names = ("headline", "notes", "numbers", "causes")
        return {name: to_jsonable(getattr(self, name)) for name in names} | self.other.to_dict()


def side_by_side(first: Findings, second: Findings) -> SideBySide:
    """Compare two runs, which are assumed to be independent."""
    numbers = tuple(_compared(name, first, second) for name in _COMPARED)
    return SideBySide(
        other=second,
        headline=_in_words(numbers[0]),
        notes=tuple(_notes(first, second)),
        numbers=numbers,
        causes=tuple(_causes(first, second)),
    )


def _compared(name: str, first: Findings, second: Findings) -> ComparedNumber:
    kind, error = _COMPARED[name]
    ours, theirs = (
        Estimate(getattr(each, name), math.nan if error is None else getattr(each, error), each.num_prompts)
        for each in (first.summary.overall, second.summary.overall)
    )
    if kind == "ratio" and ours.value > 0.0 and theirs.value > 0.0:
        change, interval = ours.value / theirs.value, interval_of_ratio(ours, theirs)
    else:
        kind = "difference"
        change, interval = ours.value - theirs.value, interval_of_difference(ours, theirs)
    return ComparedNumber(name, ours.value, theirs.value, kind, change, interval)


def _in_words(k3: ComparedNumber) -> str:
    if k3.first == k3.second:
        return f"k3 is equal in A and B: {k3.first:.3g} per token."
    said = f"k3 of A is {k3.first:.3g} per token, that of B {k3.second:.3g}"
    if k3.kind == "ratio":
        said = f"k3 of A is {digits(k3.change)} times that of B"
    if not k3.interval.is_known:
        return f"{said}. An interval takes {MIN_PROMPTS} prompts of either run."
    return f"{said} (95 % interval of the {k3.kind}: {k3.interval})."


def _notes(first: Findings, second: Findings) -> Iterator[str]:
    steps, others = ({*run.summary.steps} for run in (first, second))
    if steps != others:
        alone, other_alone = (
            f"{len(each)} step{'' if len(each) == 1 else 's'}" for each in (steps - others, others - steps)
        )
        yield (
            f"A has {alone} that B has not, B {other_alone} that A has not. A mismatch often changes with the steps: "
            "compare equal ones."
        )
    for name, run in (("A", first), ("B", second)):
        overall = run.summary.overall
        if overall.num_prompts >= overall.num_sequences:
            yield f"No two responses of {name} are known to share a prompt. If some do, the intervals are too narrow."
        if not run.diagnoses:
            yield f"{name} has too few tokens to name a cause."


def _causes(first: Findings, second: Findings) -> Iterator[ComparedCause]:
    ours, theirs = ({each.cause: each for each in run.diagnoses} for run in (first, second))
    for cause in {**ours, **theirs}:
        title = (ours.get(cause) or theirs[cause]).title
        yield ComparedCause(cause, title, ours.get(cause), theirs.get(cause))


# --- all of it


@dataclass(frozen=True, eq=False)
class Report(Findings):
    """The content of a report: findings, recommendation, and the comparison with another run."""

    recommendation: Recommendation
    against: SideBySide | None

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON, with None for NaN and a string for infinity."""
        return {
            "format": FORMAT,
            **super().to_dict(),
            "recommendation": to_jsonable(self.recommendation),
            "against": None if self.against is None else self.against.to_dict(),
        }


def make_report(
    dumps: Dumps,
    candidates: Sequence[Candidate],
    *,
    sources: Iterable[str] = (),
    num_worst: int = NUM_WORST,
    pool: Executor | None = None,
    against: Findings | None = None,
) -> Report:
    """Make the report of dumps."""
    candidates = [no_correction(), *candidates]
    collector = Collector(
        {each.name: each.config for each in candidates},
        methods={each.name: each.method for each in candidates},
        num_worst=num_worst,
        pool=pool,
    )
    run = read_findings(dumps, collector, sources=sources)
    return Report(
        **vars(run),
        recommendation=recommend(candidates, collector.outcomes(), run.summary, run.diagnoses),
        against=None if against is None else side_by_side(run, against),
    )
