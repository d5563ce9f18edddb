"""A whole report: of files, with configurations to try, another run beside it, and what moves with the mismatch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mis_ext.files import regular_file
from mis_ext.jsonable import to_jsonable
from mis_ext.tools.dumps import Dumps
from mis_ext.tools.report.comparison import Comparison, compared
from mis_ext.tools.report.recommendation import Candidate, Recommendation, no_correction, recommend
from mis_ext.tools.report.run import NUM_WORST, Collector, Run, run_of

FORMAT = 1
"""Version of the format of ``summary.json``."""


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


@dataclass(frozen=True, eq=False)
class Report(Run):
    """Everything that is shown of a run: what to do, and where it stands beside another one."""

    recommendation: Recommendation
    indicators: tuple[Indicator, ...]
    against: Comparison | None

    def to_dict(self) -> dict[str, Any]:
        """Every number, for JSON: NaN is None, a number beyond all bounds a string."""
        return {
            "format": FORMAT,
            **super().to_dict(),
            "recommendation": to_jsonable(self.recommendation),
            "indicators": to_jsonable(self.indicators),
            "against": None if self.against is None else self.against.to_dict(),
        }


def report_of(
    dumps: Dumps,
    candidates: Sequence[Candidate],
    *,
    sources: Iterable[str] = (),
    num_worst: int = NUM_WORST,
    pool: Executor | None = None,
    logged: Mapping[str, Mapping[str, float]] | None = None,
    against: Run | None = None,
) -> Report:
    """The report of dumps.

    Args:
        dumps: The files.
        candidates: What to try, besides no correction.
        sources: What to call the files.
        num_worst: How many tokens and samples are listed.
        pool: See :class:`~mis_ext.tools.report.run.Collector`.
        logged: Numbers that the run logged, by name and step, to hold against k3.
        against: Another run, to stand beside this one.

    Raises:
        OSError: A file cannot be opened.
        ValueError: A file cannot be read, or there is no usable token.
    """
    candidates = [no_correction(), *candidates]
    collector = Collector(
        {each.name: each.config for each in candidates},
        methods={each.name: each.method for each in candidates},
        num_worst=num_worst,
        pool=pool,
    )
    run = run_of(dumps, collector, sources=sources)
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
        against=None if against is None else compared(run, against),
    )


def indicators(k3: Mapping[str, float], others: Mapping[str, Mapping[str, float]]) -> list[Indicator]:
    """The series that have a number in at least 8 of the steps, the strongest first.

    Args:
        k3: By step, in order.
        others: Further series by name.
    """
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
    """Numbers by name and step, from JSON lines that a run logged: an object with a step per line.

    Raises:
        OSError: The file cannot be opened.
        ValueError: A line is no object with a step.
    """
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
