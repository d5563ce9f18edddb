# SPDX-License-Identifier: Apache-2.0
"""Runs of the collapse studies: their rows, what became of them, which number warned, and their picture."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.pictures import plt, save
from evidence.results import Results
from evidence.study import NONE, Study

from .collapse import SMOOTH, WINDOW, has_collapsed, is_over
from .group import PretrainedGroup

EVIDENCE = Path(__file__).parents[3] / "evidence"
STOPPED = EVIDENCE / "collapse_stopped.jsonl"
"""Every step of runs whose machine had to be given back; their state did not come back, so they begin again."""
# Evaluations of a mean: the last ones.
LAST = 4
# What is a warning: a number, its limit in words, and the limit of means of ``SMOOTH`` steps, given the first steps.
Limit = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]
WARNINGS: tuple[tuple[str, str, Limit], ...] = (
    ("k3", "k3 above 3 times its start", lambda means, first: means > 3 * first.mean()),
    ("ess_sequence", "sequence ESS below 0.2", lambda means, first: means < 0.2),
    ("grad_norm", "gradient norm above 3 times its first median", lambda means, first: means > 3 * np.median(first)),
    ("entropy", "entropy above 1.5 times its start", lambda means, first: means > 1.5 * first.mean()),
    ("length", "length above 1.25 times its start", lambda means, first: means > 1.25 * first.mean()),
)

Runs = list[tuple[PretrainedGroup, list[dict[str, Any]]]]


def runs_seen(study: Study, results: Results) -> Runs:
    """Steps of finished runs, and of those that were stopped, in the study's order."""
    unfinished, stopped = results.unfinished(study.groups)
    earlier = earlier_runs()
    found: Runs = []
    for group in study.groups:
        assert isinstance(group, PretrainedGroup)
        if results.is_done(group):
            found.append((group, results.rows(group)))
        elif group in stopped:
            found.append((group, unfinished.rows(group)))
        elif group.name in earlier:
            found.append((group, earlier[group.name]))
    return found


def earlier_runs(prefix: str = "") -> dict[str, list[dict[str, Any]]]:
    """Steps of stopped runs whose names begin so, by what follows."""
    runs = groupby(read_lines(STOPPED), key=itemgetter("run"))
    return {name.removeprefix(prefix): [*rows] for name, rows in runs if name.startswith(prefix)}


def mean_of(rows: Sequence[dict[str, Any]], name: str) -> float:
    """Over the steps."""
    return float(np.mean([row[name] for row in rows]))


def own_rewards(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Rewards of the trainer policy, by evaluation."""
    return [row["own_reward"] for row in rows if "own_reward" in row]


def first_crossing(values: Sequence[float], limit: Limit) -> int | None:
    """The last of the first steps whose mean is beyond a limit."""
    means = np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid")
    is_beyond = limit(means, np.asarray(values[:WINDOW]))
    return int(is_beyond.argmax()) + SMOOTH - 1 if is_beyond.any() else None


def draw(study: Study, runs: Runs, path: Path) -> None:
    """Every seed: the trainer policy, rollouts and k3."""
    panels = {
        "own_reward": "trainer policy, held-out questions",
        "reward": "rollouts, means of 10",
        "k3": "k3, means of 10",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(14, 4), constrained_layout=True)
    arms = list(dict.fromkeys(arm_of(study, group) for group, _ in runs))
    for group, rows in runs:
        arm = arm_of(study, group)
        look = {"color": f"C{arms.index(arm)}", "linestyle": "-" if group.seeds == (1,) else "--"}
        for axis, name in zip(axes, panels, strict=True):
            steps = [row["step"] for row in rows if name in row]
            values = [row[name] for row in rows if name in row]
            if name != "own_reward":
                steps, values = steps[WINDOW - 1 :], np.convolve(values, np.ones(WINDOW) / WINDOW, "valid").tolist()
            axis.plot(steps, values, linewidth=1.4, **look)
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        axis.set(title=title, xlabel="step", yscale="log" if name == "k3" else "linear")
    for color, arm in enumerate(arms):
        axes[0].plot([], color=f"C{color}", label=arm)
    # Within a panel it would hide a curve.
    figure.legend(title="dashed: later seeds", loc="outside lower center", ncols=len(arms))
    save(figure, path)


def label_of(study: Study, group: PretrainedGroup) -> str:
    """Its arm and seed."""
    return f"{arm_of(study, group)}, {group.run[1]}"


def arm_of(study: Study, group: PretrainedGroup) -> str:
    """Engine and method."""
    engine, method = group.condition.removeprefix(f"{study.name}_"), group.run[0]
    return engine if method == NONE else f"{engine}, {method.name}"


def steps_seen(group: PretrainedGroup, rows: Sequence[dict[str, Any]]) -> str:
    """Of its steps, and why not all."""
    if len(rows) == group.num_steps:
        return str(len(rows))
    if group.last_fall and is_over(group, rows):
        return str(len(rows))
    return f"{len(rows)} of {group.num_steps}, {'ended' if has_collapsed(rows) else 'stopped'}"


def ends_of(rows: Sequence[dict[str, Any]], name: str, form: str) -> str:
    """Means of the first and of the last ten steps."""
    return " to ".join(f"{mean_of(part, name):{form}}" for part in (rows[:WINDOW], rows[-WINDOW:]))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """A row each."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
