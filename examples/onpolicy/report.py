# SPDX-License-Identifier: Apache-2.0
"""Output of the demonstration: one JSON line per result, tables, and a plot."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from rich import box
from rich.console import Console
from rich.table import Table

plt.switch_backend("agg")

Row = dict[str, Any]

NUMBERS = ("tokens", "nonzero", "mean", "max", "max ULP", "k3")
EXACT_FLOOR = 1e-9
"""The position of an exact 0 on a logarithmic axis."""


class ResultsFile:
    """Writes rows as JSON lines immediately, so that an interrupted run loses nothing."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w")
        self.rows: list[Row] = []

    def add(self, **row: Any) -> Row:
        """Append a row."""
        self.rows.append(row)
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        return row


def print_tables(rows: list[Row], console: Console) -> None:
    """Print steps, ablation and costs, if measured."""
    steps = [row for row in rows if row["kind"] == "step"]
    table = _table("Every sampled token, trainer against engine", "engine", "dtype", "aligned", "step")
    for name in NUMBERS:
        table.add_column(name, justify="right")
    table.add_column("verdict")
    for row in steps:
        table.add_row(row["engine"], row["dtype"], row["aligned"], str(row["step"]), *_numbers(row), row["verdict"])
    console.print(table)

    ablation = [row for row in rows if row["kind"] == "ablation"]
    if ablation:
        table = _table("One piece omitted", "engine", "dtype", "omitted")
        for name in NUMBERS:
            table.add_column(name, justify="right")
        table.add_column("the recorder says")
        for row in ablation:
            table.add_row(row["engine"], row["dtype"], row["left_out"], *_numbers(row), row["culprit"])
        console.print(table)

    stale = [row for row in rows if row["kind"] == "stale"]
    for row in stale:
        console.print(
            f"A forgotten weight sync ({row['engine']}, {row['dtype']}): {row['verdict']}, mean {row['mean']:.2g}; "
            f"hint: {row['hint']}"
        )

    costs = [row for row in rows if row["kind"] == "cost"]
    if costs:
        table = _table("Forward and backward of the trainer", "dtype", "aligned")
        table.add_column("seconds", justify="right")
        table.add_column("ratio to off", justify="right")
        for row in costs:
            table.add_row(row["dtype"], row["aligned"], f"{row['seconds']:.3f}", f"{row['ratio']:.2f}")
        console.print(table)
    for (engine, dtype), (off, on) in _generation_seconds(steps).items():
        console.print(f"Generation ({engine}, {dtype}): {off:.2f} s off, {on:.2f} s on, ratio {on / off:.2f} (medians)")


def plot(rows: list[Row], path: Path) -> None:
    """Draw the mean difference of all comparisons, on a logarithmic axis with a position for exactly 0."""
    bars = [(_label(row), row["dtype"], row["mean"]) for row in rows if row["kind"] in ("step", "ablation", "stale")]
    labels = [*dict.fromkeys(label for label, _, _ in bars)]
    dtypes = [*dict.fromkeys(dtype for _, dtype, _ in bars)]
    figure, axis = plt.subplots(figsize=(10, 0.28 * len(labels) * len(dtypes) + 1.5), layout="constrained")
    height = 0.8 / len(dtypes)
    for index, dtype in enumerate(dtypes):
        worst = {label: max((m for x, d, m in bars if (x, d) == (label, dtype)), default=None) for label in labels}
        places = [place + index * height for place, label in enumerate(labels) if worst[label] is not None]
        means = [mean for mean in worst.values() if mean is not None]
        axis.barh(places, [max(mean, EXACT_FLOOR) for mean in means], height=height, label=dtype)
        for place, mean in zip(places, means, strict=True):
            axis.text(
                max(mean, EXACT_FLOOR) * 1.3, place, f"{mean:.1e}" if mean else "exactly 0", va="center", fontsize=8
            )
    axis.set_xscale("log")
    axis.set_xlim(EXACT_FLOOR / 2, 1e3)
    axis.set_yticks([place + 0.4 - height / 2 for place in range(len(labels))], labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("mean |log-prob of the trainer - log-prob of the engine| over all sampled tokens, nats")
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def _label(row: Row) -> str:
    what = {
        "step": f"aligned: {row.get('aligned')}",
        "ablation": f"without {row.get('left_out')}",
        "stale": "all aligned, a weight sync forgotten",
    }
    return f"{row['engine']}, {what[row['kind']]}"


def _numbers(row: Row) -> list[str]:
    numbers = [str(row["tokens"]), str(row["nonzero"]), f"{row['mean']:.2g}", f"{row['max']:.2g}", str(row["max_ulp"])]
    return [*numbers, f"{row['k3']:.2g}"]


def _generation_seconds(steps: list[Row]) -> dict[tuple[str, str], tuple[float, float]]:
    """Medians by (engine, dtype) of off and on, if both were measured."""
    seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in steps:
        of_pair = seconds.setdefault((row["engine"], row["dtype"]), {})
        of_pair.setdefault(row["aligned"], []).append(row["generate_seconds"])
    return {
        key: (statistics.median(found["nothing"]), statistics.median(found["all"]))
        for key, found in seconds.items()
        if found.keys() >= {"nothing", "all"}
    }


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
