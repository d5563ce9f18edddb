# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run: both probabilities, and k3 over steps.

For print and for colour-blind readers: every line has dashes and a marker of its own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from mis_ext.tools.report.findings import Findings
from mis_ext.tools.report.tally import LOG_PROB_WIDTH, LOWEST_LOG_PROB
from mis_ext.tools.report.whole_report import Report

GREY = "#595959"
SIZE = 5.2, 3.4
FEWEST_STEPS = 2
"""Of a picture over steps."""
_STYLES = (("A", "#0072B2", "o", "-"), ("B", "#56A8D8", "s", "--"))


class Picture(NamedTuple):
    """A picture: the stem of its file, a title, what it says in words, and how to draw it."""

    name: str
    title: str
    text: str
    draw: Callable[[Any], None]


def pictures(report: Report) -> list[Picture]:
    """The pictures of a report, without those for which it has too few data."""
    text = "Tokens by both probabilities. On the diagonal trainer and engine agree."
    found = [Picture("density", "Behavior against proximal probability", text, partial(_density, report=report))]
    if any(len(run.summary.steps) >= FEWEST_STEPS for run in _runs(report)):
        title, text = ("Over steps", "") if report.against is None else ("A and B over steps", ", of A and of B")
        found.append(Picture("steps", title, f"k3 of each step{text}.", partial(_steps, report=report)))
    return found


def _runs(report: Report) -> tuple[Findings, ...]:
    return (report,) if report.against is None else (report, report.against.other)


class Drawing(NamedTuple):
    """A picture as the bytes of two files: for the page, and to be put elsewhere."""

    svg: bytes
    png: bytes


def drawings(report: Report) -> dict[str, Drawing]:
    """Each picture of a report by its name."""
    return {picture.name: drawn(picture) for picture in pictures(report)}


def _density(axes: Any, report: Report) -> None:
    from matplotlib.colors import LogNorm

    counts = report.summary.density
    used = counts.sum(0) + counts.sum(1)
    first = int(used.nonzero()[0]) if bool(used.any()) else 0
    edges = [LOWEST_LOG_PROB + LOG_PROB_WIDTH * index for index in range(first, len(counts) + 1)]
    shown = counts[first:, first:].masked_fill(counts[first:, first:] == 0, math.nan)
    top = max(float(counts.max()), 2.0)
    mesh = axes.pcolormesh(edges, edges, shown.T.tolist(), norm=LogNorm(1, top), cmap="cividis_r", rasterized=True)
    axes.plot(edges, edges, color=GREY, lw=0.8, linestyle=":")
    ticks = [tick for tick in range(-12, 1, 2) if tick >= edges[0]]
    labels = [f"{math.exp(tick):.0e}" if tick < -2 else f"{math.exp(tick):.2g}" for tick in ticks]
    axes.set_xticks(ticks, labels, rotation=30)
    axes.set_yticks(ticks, labels)
    axes.set(xlabel="probability of the engine (behavior)", ylabel="of the trainer (proximal)")
    axes.get_figure().colorbar(mesh, ax=axes, label="tokens")


def _steps(axes: Any, report: Report) -> None:
    from matplotlib.ticker import LogFormatterSciNotation

    runs = _runs(report)
    # Numbers in their order, then names in theirs.
    names = sorted(
        {step for run in runs for step in run.summary.steps},
        key=lambda step: (0, int(step), step) if step.isdecimal() else (1, 0, step),
    )
    for (name, color, marker, line), run in zip(_STYLES, runs, strict=False):
        steps = run.summary.steps
        places = [place for place, step in enumerate(names) if step in steps]
        k3s = [steps[step].k3 or math.nan for step in names if step in steps]
        axes.plot(places, k3s, color=color, marker=marker, linestyle=line, label=name)
    stride = max(1, len(names) // 10)
    axes.set_xticks([*range(len(names))][::stride], names[::stride])
    axes.set(xlabel="step", ylabel="k3 (nats per token)")
    shown = [step.k3 for run in runs for step in run.summary.steps.values() if step.k3 > 0.0]
    # Equal engines have nothing that a logarithmic axis could show.
    if shown:
        axes.set_yscale("log")
        # A decade at least, so that steps that are alike look so.
        middle = math.sqrt(min(shown) * max(shown))
        axes.set_ylim(min(0.8 * min(shown), middle / 3.2), max(1.25 * max(shown), middle * 3.2))
        # Within two decades the ticks between powers of ten need numbers too.
        axes.yaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(2.0, 0.6)))
    if len(runs) > 1:
        axes.legend(frameon=False)


def drawn(picture: Picture) -> Drawing:
    """A picture as both files."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    style: dict[str, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#dddddd",
        "axes.axisbelow": True,
        "svg.hashsalt": picture.name,
    }
    with matplotlib.rc_context(style):
        figure = Figure(figsize=SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.set_title(picture.title, loc="left", fontsize=10, fontweight="bold")
        picture.draw(axes)
        svg, png = io.BytesIO(), io.BytesIO()
        figure.savefig(svg, format="svg", dpi=150, metadata={"Date": None})
        # It is laid out now: to do that again is half of the time of a drawing.
        figure.set_layout_engine("none")
        figure.savefig(png, format="png", dpi=150)
    return Drawing(svg.getvalue(), png.getvalue())
