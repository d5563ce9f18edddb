"""k3 of two runs in one picture: by step, or by position where a run has one step alone."""

from __future__ import annotations

import math
from typing import Any

from mis_ext.report.drawing import BLUE, FEWEST_STEPS, ORANGE, Picture, logarithmic
from mis_ext.report.noise import Estimate, interval_of
from mis_ext.report.run import Run
from mis_ext.report.summary import Mismatch, Summary
from mis_ext.report.whole_report import Report

_STYLES = (("A", BLUE, "o", "-"), ("B", ORANGE, "s", "--"))
_APART = 0.08
"""Half of the distance of the two markers of a step, in steps: bars that lie on each other cannot be read."""


def comparison_pictures(report: Report) -> list[Picture]:
    """The picture of a comparison; none without another run."""
    if report.against is None:
        return []
    runs: tuple[Run, Run] = (report, report.against.other)
    if all(len(run.summary.steps) >= FEWEST_STEPS for run in runs):
        text = "k3 of each step, of A and of B. Bars are 95 % intervals over the prompts of the step."
        return [Picture("against", "A and B over steps", text, lambda axes: _steps(axes, runs))]
    text = "k3 by position in the response, of A and of B, without an interval: the table says what is noise."
    return [Picture("against", "A and B by position", text, lambda axes: _positions(axes, runs))]


def _steps(axes: Any, runs: tuple[Run, Run]) -> None:
    names = _in_order({step for run in runs for step in run.summary.steps})
    for (name, color, marker, line), run, shift in zip(_STYLES, runs, (-_APART, _APART), strict=True):
        steps = run.summary.steps
        places = [place + shift for place, step in enumerate(names) if step in steps]
        rows = [_bar(steps[step]) for step in names if step in steps]
        values, below, above = ([row[part] for row in rows] for part in range(3))
        axes.errorbar(
            places,
            values,
            [below, above],
            color=color,
            marker=marker,
            linestyle=line,
            ms=4,
            capsize=3,
            lw=1.2,
            label=name,
        )
    stride = max(1, len(names) // 10)
    axes.set_xticks([*range(len(names))][::stride], names[::stride])
    axes.set(xlabel="step", ylabel="k3 (nats per token)")
    logarithmic(axes, [step for run in runs for step in run.summary.steps.values()])
    axes.legend(frameon=False)


def _bar(step: Mismatch) -> tuple[float, float, float]:
    """k3, and how far its interval reaches below and above; a logarithmic axis has no place for 0."""
    if not step.k3 > 0.0:
        return math.nan, 0.0, 0.0
    interval = interval_of(Estimate(step.k3, step.k3_error, step.num_prompts))
    return (step.k3, step.k3 - interval.low, interval.high - step.k3) if interval.is_known else (step.k3, 0.0, 0.0)


def _in_order(steps: set[str]) -> list[str]:
    return sorted(steps, key=lambda step: (0, int(step), step) if step.isdecimal() else (1, 0, step))


def _positions(axes: Any, runs: tuple[Run, Run]) -> None:
    summaries: list[Summary] = [run.summary for run in runs]
    for (name, color, marker, line), summary in zip(_STYLES, summaries, strict=True):
        rows = summary.by_position
        places = [math.sqrt((row.low + 1) * (row.high + 1)) for row in rows]
        axes.plot(places, [row.k3 or math.nan for row in rows], color=color, marker=marker, linestyle=line, label=name)
    axes.set(xscale="log", xlabel="position in the response", ylabel="k3 (nats per token)")
    logarithmic(axes, [row for summary in summaries for row in summary.by_position])
    axes.legend(frameon=False)
