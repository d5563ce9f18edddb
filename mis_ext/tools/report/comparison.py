"""Two runs side by side: by how much their numbers differ, whether that is more than noise, and their causes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mis_ext.jsonable import to_jsonable
from mis_ext.tools.diagnosis.cause import Confidence
from mis_ext.tools.report.noise import (
    MIN_PROMPTS,
    Estimate,
    Interval,
    digits,
    interval_of_difference,
    interval_of_ratio,
)
from mis_ext.tools.report.run import Run
from mis_ext.tools.report.summary import Mismatch

Kind = Literal["ratio", "difference"]
Verdict = Literal["equal", "noise", "higher", "lower", "unknown"]
"""Of the first run: equal to the last digit; inside the interval; outside of it; nothing is known of the noise."""


class _Row(NamedTuple):
    name: str
    kind: Kind
    error: str | None = None


_ROWS = (
    _Row("k3", "ratio", "k3_error"),
    _Row("abs_mean", "ratio", "abs_mean_error"),
    _Row("k1", "difference", "k1_error"),
    _Row("reward", "difference", "reward_error"),
    _Row("mean_length", "ratio", "mean_length_error"),
    _Row("reverse_k3", "ratio"),
    _Row("abs_p99", "ratio"),
    _Row("abs_max", "ratio"),
    _Row("total_variation", "ratio"),
    _Row("ratio_mean", "difference"),
    _Row("ess_token", "difference"),
    _Row("ess_sequence", "difference"),
    _Row("k_hat", "difference"),
    _Row("zero_share", "difference"),
)
"""What is compared, and how: numbers above 0 by their ratio, shares and what may be below 0 by their difference."""


@dataclass(frozen=True)
class Compared:
    """A number of :class:`~mis_ext.tools.report.Mismatch` in two runs.

    Attributes:
        name: Of the number.
        first: In the first run.
        second: In the second.
        kind: What ``change`` is: ``first / second`` or ``first - second``. Without a number above 0 on both sides it is
            the difference.
        change: NaN where a number was not measured.
        interval: Of ``change``, 95 %; NaN where nothing is known of the noise.
        verdict: Whether the two differ by more than noise.
    """

    name: str
    first: float
    second: float
    kind: Kind
    change: float
    interval: Interval
    verdict: Verdict


@dataclass(frozen=True)
class Found:
    """A cause as a run shows it: how sure, and its share of k3."""

    confidence: Confidence
    k3_share: float
    is_up_to: bool


@dataclass(frozen=True)
class ComparedCause:
    """A likely cause in two runs; None where a run does not show it."""

    cause: str
    title: str
    first: Found | None
    second: Found | None


@dataclass(frozen=True, eq=False)
class Comparison:
    """A run beside another one, ``other``, which a report calls B; the first is A.

    Attributes:
        other: The second run.
        headline: What became of k3, in a sentence.
        notes: What to think of before the difference is believed.
        numbers: In the order to be shown.
        causes: Those of the first run, then those of the second alone.
    """

    other: Run
    headline: str
    notes: tuple[str, ...]
    numbers: tuple[Compared, ...]
    causes: tuple[ComparedCause, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON, the second run in full."""
        names = ("headline", "notes", "numbers", "causes")
        return {name: to_jsonable(getattr(self, name)) for name in names} | self.other.to_dict()


def compared(first: Run, second: Run) -> Comparison:
    """Two runs side by side; they are taken as independent of each other."""
    numbers = tuple(_compared(row, first.summary.overall, second.summary.overall) for row in _ROWS)
    return Comparison(
        other=second,
        headline=_in_words(next(each for each in numbers if each.name == "k3")),
        notes=tuple(_notes(first, second)),
        numbers=numbers,
        causes=tuple(_causes(first, second)),
    )


def _compared(row: _Row, first: Mismatch, second: Mismatch) -> Compared:
    ours, theirs = (_estimate(row, each) for each in (first, second))
    kind: Kind = row.kind if ours.value > 0.0 and theirs.value > 0.0 else "difference"
    if kind == "ratio":
        change, interval, neutral = ours.value / theirs.value, interval_of_ratio(ours, theirs), 1.0
    else:
        change, interval, neutral = ours.value - theirs.value, interval_of_difference(ours, theirs), 0.0
    verdict: Verdict
    if ours.value == theirs.value:
        verdict = "equal"
    elif not interval.is_known:
        verdict = "unknown"
    elif interval.low <= neutral <= interval.high:
        verdict = "noise"
    else:
        verdict = "higher" if change > neutral else "lower"
    return Compared(row.name, ours.value, theirs.value, kind, change, interval, verdict)


def _estimate(row: _Row, mismatch: Mismatch) -> Estimate:
    error = math.nan if row.error is None else getattr(mismatch, row.error)
    return Estimate(getattr(mismatch, row.name), error, mismatch.num_prompts)


def _in_words(k3: Compared) -> str:
    if k3.verdict == "equal":
        return f"k3 of A is that of B: {k3.first:.3g} per token."
    said = f"k3 of A is {k3.first:.3g} per token, that of B {k3.second:.3g}"
    if k3.kind == "ratio":
        said = f"k3 of A is {digits(k3.change)} times that of B"
    if k3.verdict == "unknown":
        return f"{said}. Whether that is more than noise is not known: it takes {MIN_PROMPTS} prompts of either run."
    judged = "not more than noise" if k3.verdict == "noise" else "more than noise"
    return f"{said}: {judged} (95 % interval of the {k3.kind}: {k3.interval})."


def _notes(first: Run, second: Run) -> Iterator[str]:
    steps, others = ({*run.summary.steps} for run in (first, second))
    if steps != others:
        yield (
            f"A has {_counted(steps - others)} that B has not, B {_counted(others - steps)} that A has not. A mismatch "
            "often changes with the steps: compare equal ones."
        )
    for name, run in (("A", first), ("B", second)):
        overall = run.summary.overall
        if overall.num_prompts >= overall.num_sequences:
            yield f"No two responses of {name} are known to share a prompt. If some do, the intervals are too narrow."
        if not run.diagnoses:
            yield f"{name} has too few tokens to name a cause."


def _counted(steps: set[str]) -> str:
    return f"{len(steps)} step{'' if len(steps) == 1 else 's'}"


def _causes(first: Run, second: Run) -> Iterator[ComparedCause]:
    ours, theirs = ({each.cause: each for each in run.diagnoses} for run in (first, second))
    for cause in {**ours, **theirs}:
        found = [
            None if cause not in run else Found(run[cause].confidence, run[cause].k3_share, run[cause].is_up_to)
            for run in (ours, theirs)
        ]
        title = (ours.get(cause) or theirs[cause]).title
        yield ComparedCause(cause, title, *found)
