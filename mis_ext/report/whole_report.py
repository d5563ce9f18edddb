"""A whole report: of files, with configurations to try."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mis_ext.dumps import Dumps
from mis_ext.jsonable import to_jsonable
from mis_ext.keys.preset_files import list_presets, preset_path
from mis_ext.keys.presets import Spelt, method_yaml, read_file, read_method
from mis_ext.loss.objective import objective_of
from mis_ext.methods.catalogue import find_method
from mis_ext.methods.first_update import equivalent_correction
from mis_ext.report.collector import NUM_WORST, Collector
from mis_ext.report.comparison import Comparison, compared
from mis_ext.report.indicators import Indicator, indicators
from mis_ext.report.recommendation import Candidate, Recommendation, no_correction, recommend
from mis_ext.report.run import Run, run_of
from mis_ext.report.summary import Summary

FORMAT = 1
"""Version of the format of ``summary.json``."""


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
        pool: See :class:`~mis_ext.report.collector.Collector`.
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
    return Report(
        **vars(run),
        recommendation=recommend(candidates, collector.outcomes(), run.summary, run.diagnoses),
        indicators=tuple(_indicators(run.summary, logged or {})),
        against=None if against is None else compared(run, against),
    )


def _indicators(summary: Summary, logged: Mapping[str, Mapping[str, float]]) -> list[Indicator]:
    steps = summary.steps.items()
    own = {name: {step: getattr(found, name) for step, found in steps} for name in ("reward", "mean_length")}
    return indicators({step: found.k3 for step, found in steps}, own | {**logged})


def preset_candidates(names: Iterable[str] | None = None) -> list[Candidate]:
    """Presets by name; by default all that correct, each point once."""
    found: list[Candidate] = []
    # The default first: of two names of one point its own is the one to see.
    for name in sorted(list_presets(), key=lambda name: name != "mis") if names is None else names:
        candidate = dataclasses.replace(file_candidate(preset_path(name)), name=name)
        is_new = all(candidate.config != other.config for other in found)
        if names is not None or (is_new and not candidate.config.metrics_only):
            found.append(candidate)
    return found


def file_candidate(path: Path) -> Candidate:
    """The candidate that a YAML file describes, with the warnings that reading it gave.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no configuration, or names a method that looks at what a dump does not hold.
        TypeError: A value has the wrong type.
    """
    return _candidate(str(path), read_file(path), path.read_text(encoding="utf-8"))


def method_candidate(name: str) -> Candidate:
    """The candidate that is a published method with its defaults, by the file that runs it.

    Raises:
        ValueError: There is no such method, or a dump does not hold what it looks at.
    """
    row = find_method(name)
    return _candidate(f"method {name}", read_method(row), method_yaml(row))


def _candidate(name: str, spelt: Spelt, yaml: str) -> Candidate:
    if spelt.loss is None or spelt.loss.method is None:
        return Candidate(name, spelt.config, yaml, spelt.said)
    method = objective_of(spelt.loss).method
    if "reference" in method.policies:
        raise ValueError(f"{name}: it compares with the reference policy, whose log-probs a dump does not hold")
    if method.needs_state_values:
        raise ValueError(f"{name}: it weighs the values of states, which a dump does not hold")
    # What the hook could do too has its exact numbers, its gates by name, and its traps.
    config = equivalent_correction(spelt.config, method)
    if config is not None:
        return Candidate(name, config, yaml, spelt.said)
    return Candidate(name, spelt.config, yaml, spelt.said, method)
