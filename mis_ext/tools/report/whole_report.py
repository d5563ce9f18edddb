# SPDX-License-Identifier: Apache-2.0
"""A whole report: of files, with configurations to try, another run beside it, and what moves with the mismatch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mis_ext.files import regular_file, to_jsonable
from mis_ext.tools.diagnosis.cause import Confidence
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

FORMAT = 1
"""Version of the format of ``summary.json``."""

# --- two runs side by side: by how much their numbers differ, whether that is more than noise, and their causes

Kind = Literal["ratio", "difference"]
Verdict = Literal["equal", "noise", "higher", "lower", "unknown"]
"""Of the first run: equal to the last digit; inside the interval; outside of it; nothing is known of the noise."""

_COMPARED: dict[str, tuple[Kind, str | None]] = {
    "k3": ("ratio", "k3_error"),
    "abs_mean": ("ratio", "abs_mean_error"),
    "k1": ("difference", "k1_error"),
    "reward": ("difference", "reward_error"),
    "mean_length": ("ratio", "mean_length_error"),
    "reverse_k3": ("ratio", None),
    "abs_p99": ("ratio", None),
    "abs_max": ("ratio", None),
    "total_variation": ("ratio", None),
    "ratio_mean": ("difference", None),
    "ess_token": ("difference", None),
    "ess_sequence": ("difference", None),
    "k_hat": ("difference", None),
    "zero_share": ("difference", None),
}
"""What is compared, and how: numbers above 0 by their ratio, shares and what may be below 0 by their difference; and
which number is its standard error."""


@dataclass(frozen=True)
class ComparedNumber:
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
class SideBySide:
    """A run beside another one, ``other``, which a report calls B; the first is A.

    Attributes:
        other: The second run.
        headline: What became of k3, in a sentence.
        notes: What to think of before the difference is believed.
        numbers: In the order to be shown.
        causes: Those of the first run, then those of the second alone.
    """

    other: Findings
    headline: str
    notes: tuple[str, ...]
    numbers: tuple[ComparedNumber, ...]
    causes: tuple[ComparedCause, ...]

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON, the second run in full."""
        names = ("headline", "notes", "numbers", "causes")
        return {name: to_jsonable(getattr(self, name)) for name in names} | self.other.to_dict()


def side_by_side(first: Findings, second: Findings) -> SideBySide:
    """Two runs side by side; they are taken as independent of each other."""
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
        change, interval, neutral = ours.value / theirs.value, interval_of_ratio(ours, theirs), 1.0
    else:
        kind = "difference"
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
    return ComparedNumber(name, ours.value, theirs.value, kind, change, interval, verdict)


def _in_words(k3: ComparedNumber) -> str:
    if k3.verdict == "equal":
        return f"k3 of A is that of B: {k3.first:.3g} per token."
    said = f"k3 of A is {k3.first:.3g} per token, that of B {k3.second:.3g}"
    if k3.kind == "ratio":
        said = f"k3 of A is {digits(k3.change)} times that of B"
    if k3.verdict == "unknown":
        return f"{said}. Whether that is more than noise is not known: it takes {MIN_PROMPTS} prompts of either run."
    judged = "not more than noise" if k3.verdict == "noise" else "more than noise"
    return f"{said}: {judged} (95 % interval of the {k3.kind}: {k3.interval})."


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
        found = [
            None if cause not in run else Found(run[cause].confidence, run[cause].k3_share, run[cause].is_up_to)
            for run in (ours, theirs)
        ]
        title = (ours.get(cause) or theirs[cause]).title
        yield ComparedCause(cause, title, *found)


# --- what moves with k3

MIN_STEPS, MAX_LAG = 8, 5
STEP_KEYS = ("step", "rollout_id", "rollout/step", "train/step")


@dataclass(frozen=True)
class Indicator:
    """How a series goes with k3.

    Attributes:
        name: Of the series.
        lag: Steps by which k3 is ahead of it, where they go together best; below 0 it is behind.
        correlation: Spearman's, there.
        correlation_now: The same without lag.
        num_steps: That were compared.
    """

    name: str
    lag: int
    correlation: float
    correlation_now: float
    num_steps: int


def indicators(k3: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> list[Indicator]:
    """The series that have a number in at least 8 of the steps, the strongest first."""
    found = []
    for name, series in others.items():
        both = [step for step in k3 if math.isfinite(k3[step]) and math.isfinite(series.get(step, math.nan))]
        ours, theirs = (torch.tensor([each[step] for step in both], dtype=torch.float64) for each in (k3, series))
        if len(both) < MIN_STEPS:
            continue
        by_lag = {lag: _at_lag(ours, theirs, lag) for lag in range(-MAX_LAG, MAX_LAG + 1)}
        known = {lag: value for lag, value in by_lag.items() if not math.isnan(value)}
        if known:
            # Of equally strong ones the nearest.
            lag = max(known, key=lambda lag: (round(abs(known[lag]), 6), -abs(lag)))
            found.append(Indicator(name, lag, known[lag], by_lag[0], len(both)))
    return sorted(found, key=lambda each: -abs(each.correlation))


def read_series(path: Path) -> dict[str, dict[str, float]]:
    """Numbers by name and step, from JSON lines that a run logged: an object with a step per line."""
    series: dict[str, dict[str, float]] = {}
    for number, line in enumerate(regular_file(path).read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            for name, step, value in _numbers(line, f"{path}, line {number}"):
                series.setdefault(name, {})[step] = value
    return series


def _numbers(line: str, place: str) -> Iterator[tuple[str, str, float]]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    key = next((key for key in STEP_KEYS if isinstance(row, dict) and key in row), None)
    if key is None:
        raise ValueError(f"{place}: not an object with one of {', '.join(STEP_KEYS)}")
    for name, value in row.items():
        if name != key and isinstance(value, (int, float)) and not isinstance(value, bool):
            try:
                yield name, str(row[key]), float(value)
            except OverflowError:
                raise ValueError(f"{place}: {name} is beyond all numbers of 64 bits") from None


def _at_lag(ours: Tensor, theirs: Tensor, lag: int) -> float:
    first, second = (ours[: len(ours) - lag], theirs[lag:]) if lag >= 0 else (ours[-lag:], theirs[: len(theirs) + lag])
    if len(first) < MIN_STEPS - MAX_LAG:
        return math.nan
    ranks = torch.stack([_ranks(first), _ranks(second)])
    if bool((ranks.std(1) == 0).any()):
        return math.nan
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    """Equal values share the middle of their ranks."""
    is_below = (values[:, None] > values[None, :]).sum(1)
    is_equal = (values[:, None] == values[None, :]).sum(1)
    return is_below.double() + (is_equal + 1) / 2.0


# --- all of it


@dataclass(frozen=True, eq=False)
class Report(Findings):
    """Everything that is shown of a run: what to do, and where it stands beside another one."""

    recommendation: Recommendation
    indicators: tuple[Indicator, ...]
    against: SideBySide | None

    def to_dict(self) -> dict[str, Any]:
        """Every number, for JSON: NaN is None, a number beyond all bounds a string."""
        return {
            "format": FORMAT,
            **super().to_dict(),
            "recommendation": to_jsonable(self.recommendation),
            "indicators": to_jsonable(self.indicators),
            "against": None if self.against is None else self.against.to_dict(),
        }


def make_report(
    dumps: Dumps,
    candidates: Sequence[Candidate],
    *,
    sources: Iterable[str] = (),
    num_worst: int = NUM_WORST,
    pool: Executor | None = None,
    logged: Mapping[str, Mapping[str, float]] | None = None,
    against: Findings | None = None,
) -> Report:
    """The report of dumps."""
    candidates = [no_correction(), *candidates]
    collector = Collector(
        {each.name: each.config for each in candidates},
        methods={each.name: each.method for each in candidates},
        num_worst=num_worst,
        pool=pool,
    )
    run = read_findings(dumps, collector, sources=sources)
    own = {
        name: {step: getattr(found, name) for step, found in run.summary.steps.items()}
        for name in ("reward", "mean_length")
    }
    return Report(
        **vars(run),
        recommendation=recommend(candidates, collector.outcomes(), run.summary, run.diagnoses),
        indicators=tuple(
            indicators({step: found.k3 for step, found in run.summary.steps.items()}, own | {**(logged or {})})
        ),
        against=None if against is None else side_by_side(run, against),
    )
