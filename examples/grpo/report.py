# SPDX-License-Identifier: Apache-2.0
"""Output of a run: metrics as JSON lines, a plot, a table, and a progress bar."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
from matplotlib.ticker import LogLocator, NullFormatter
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

plt.switch_backend("agg")

Row = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel of the plot: title, metrics with labels, and scale of the axis."""

    title: str
    series: dict[str, str]
    scale: str = "linear"


PANELS = {
    "A": Panel(
        title="mean reward",
        series={"rollout/reward": "of the engine's responses", "eval/reward": "of the trainer's policy, held out"},
    ),
    "B": Panel(title="KL(behavior | proximal), k3", series={"train/mis_k3_kl": "k3"}, scale="log"),
    "C": Panel(
        title="effective sample size / samples",
        series={"train/mis_ess_ratio_seq": "sequences", "train/mis_ess_ratio_token": "tokens"},
    ),
    "D": Panel(title="kept tokens", series={"train/mis_kept_token_fraction": "kept"}),
    "E": Panel(title="|log-prob difference|", series={"train/mis_logprob_abs_diff": "mean"}, scale="log"),
}


class MetricsLog:
    """Writes one JSON object per step to a file immediately, so that an interrupted run loses nothing."""

    def __init__(self, path: Path, *, first_step: int) -> None:
        """Continue ``path`` at ``first_step``. Lines of later steps, which will be repeated, are dropped."""
        kept = [row for row in read_metrics(path) if row["step"] < first_step] if first_step else []
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a")

    def write(self, row: Row) -> None:
        """Append one step."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[Row]:
    """Read all complete lines of a metrics file; a missing file has no lines."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def plot(rows: list[Row], path: Path) -> None:
    """Draw the five panels over the steps."""
    figure, axes = plt.subplot_mosaic("AA;BC;DE", figsize=(11, 9), layout="constrained")
    for key, panel in PANELS.items():
        axis = axes[key]
        measured = {name: label for name, label in panel.series.items() if any(name in row for row in rows)}
        for name, label in measured.items():
            points = [(row["step"], row[name]) for row in rows if name in row]
            axis.plot(*zip(*points, strict=True), label=label)
        axis.set_title(panel.title, loc="left", fontsize=11)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        if not measured:
            axis.text(0.5, 0.5, "not measured in this run", ha="center", transform=axis.transAxes, color="gray")
        elif panel.scale == "log":
            axis.set_yscale("log")
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:.0e}")
            axis.yaxis.set_minor_formatter(NullFormatter())
        else:
            axis.ticklabel_format(useOffset=False)
        if len(measured) > 1:
            axis.legend(frameon=False)
    axes["A"].set_ylim(0, 1.02)
    # If nothing is rejected, do not show rounding errors.
    lowest = min(0.9, axes["D"].get_ylim()[0])
    axes["D"].set_ylim(lowest, 1 + 0.05 * (1 - lowest))
    figure.savefig(path, dpi=130)
    plt.close(figure)


def summary_table(rows: list[Row]) -> Table:
    """Show the first and last steps of every metric side by side."""
    # Metrics that are not measured in every step have fewer values.
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    window = max(1, min(10, len(rows) // 4))
    table = Table(title=f"{len(rows)} steps; first and last: means over {window}", box=box.SIMPLE)
    table.add_column("metric")
    for heading in ("first", "last", "min", "max"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name in names:
        values = [row[name] for row in rows if name in row]
        ends = fmean(values[:window]), fmean(values[-window:])
        table.add_row(name.removeprefix("train/"), *(f"{value:.4g}" for value in (*ends, min(values), max(values))))
    return table


class ProgressDisplay:
    """A progress bar on a terminal, else occasional plain lines; nothing unless ``enabled``."""

    _MAX_LINES = 20

    def __init__(self, console: Console, *, enabled: bool) -> None:
        self._console = console
        self._enabled = enabled
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not (enabled and console.is_terminal),
        )

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start_phase(self, name: str, *, total: int, completed: int = 0) -> Callable[[str], None]:
        """Show a new phase of the run. Call the result after each step with the text to show next to the bar."""
        task = self._progress.add_task(name, total=total, completed=completed, status="")
        every = max(1, total // self._MAX_LINES)
        done = completed

        def advance(status: str) -> None:
            nonlocal done
            done += 1
            self._progress.update(task, advance=1, status=status)
            if self._enabled and not self._console.is_terminal and (done % every == 0 or done == total):
                self._console.print(f"{name} {done}/{total}  {status}", highlight=False)

        return advance
