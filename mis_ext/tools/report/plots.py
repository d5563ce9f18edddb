# SPDX-License-Identifier: Apache-2.0
"""Pictures of a run: where the engines differ, what each configuration would do, and how another run compares.

For print and for colour-blind readers: every line has dashes and a marker of its own.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mis_ext.tools.explain.law import GaussianLaw
from mis_ext.tools.report.findings import Findings
from mis_ext.tools.report.noise import Estimate, interval_of
from mis_ext.tools.report.summary import Group, Mismatch
from mis_ext.tools.report.tally import BANDS, LOG_PROB_WIDTH, LOWEST_LOG_PROB, PER_DECADE, size_edges
from mis_ext.tools.report.whole_report import Report

K3, LOG_RATIO, KEPT, ESS, LEARNING_RATE = "#0072B2", "#D55E00", "#009E73", "#A03C82", "#806000"
"""A quantity has its colour in all pictures. Where one is shown twice, the second is lighter."""
LIGHTER_K3, LIGHTER_RATIO, LIGHTER_KEPT, GREY = "#56A8D8", "#F0A070", "#66C2A5", "#595959"
SIZE = 5.2, 3.4
FEWEST_STEPS = 2
"""Of a picture over steps."""
_COARSE = PER_DECADE // 10
_BEYOND, _NUM_POINTS = 3.0, 60
"""How far the law is drawn beyond the lengths of the data, and with how many points."""
_STYLES = (("A", K3, "o", "-"), ("B", LIGHTER_K3, "s", "--"))
_APART = 0.08
"""Half of the distance of the two markers of a step, in steps: bars that lie on each other cannot be read."""


class Picture(NamedTuple):
    """A picture: the stem of its file, a title, what it says in words, and how to draw it."""

    name: str
    title: str
    text: str
    draw: Callable[[Any], None]


def pictures(report: Report) -> list[Picture]:
    """The pictures of a report, without those for which it has too few data."""
    rows = [
        (
            "log_ratio",
            "Size of the difference",
            "Tokens by |log ratio|, both axes logarithmic. A straight tail to the right is a heavy tail.",
            _histogram,
        ),
        (
            "density",
            "Behavior against proximal probability",
            "Tokens by both probabilities. On the diagonal trainer and engine agree.",
            _density,
        ),
        (
            "probability",
            "By probability",
            "Mean |log ratio| by decile of the engine's probability, and the share of k3 that the decile carries.",
            _probability,
        ),
        ("position", "By position in the response", "Mean |log ratio| and k3 by position.", _position),
        (
            "acceptance",
            "The length trap",
            "Share of sequences that a band accepts, by length. Dashed line: independent Gaussian differences.",
            _acceptance,
        ),
        (
            "what_if",
            "What each configuration would do",
            "Tokens kept, effective sample size and mean factor on the gradient; 1 is no correction.",
            _what_if,
        ),
    ]
    if len(report.summary.steps) >= FEWEST_STEPS:
        rows.append(("steps", "Over steps", "k3 and mean |log ratio| of each step.", _steps))
    return [Picture(name, title, text, partial(draw, report=report)) for name, title, text, draw in rows]


def comparison_pictures(report: Report) -> list[Picture]:
    """The picture of a comparison; none without another run."""
    if report.against is None:
        return []
    runs: tuple[Findings, Findings] = (report, report.against.other)
    if all(len(run.summary.steps) >= FEWEST_STEPS for run in runs):
        text = "k3 of each step, of A and of B. Bars are 95 % intervals over the prompts of the step."
        return [Picture("against", "A and B over steps", text, partial(_steps_of_two, runs=runs))]
    text = "k3 by position in the response, of A and of B, without an interval: the table says what is noise."
    return [Picture("against", "A and B by position", text, partial(_positions_of_two, runs=runs))]


class Drawing(NamedTuple):
    """A picture as the bytes of two files: for the page, and to be put elsewhere."""

    svg: bytes
    png: bytes


def drawings(report: Report) -> dict[str, Drawing]:
    """Each picture of a report by its name, that of a comparison too."""
    return {picture.name: drawn(picture) for picture in (*pictures(report), *comparison_pictures(report))}


def _histogram(axes: Any, report: Report) -> None:
    edges = size_edges()[::_COARSE]
    for side, name, color, style in ((0, "trainer lower", LOG_RATIO, "-"), (1, "trainer higher", LIGHTER_RATIO, "--")):
        counts = report.summary.sizes[side].view(-1, _COARSE).sum(1).tolist()
        axes.stairs([count or math.nan for count in counts], edges, label=name, color=color, linestyle=style, lw=1.6)
    used = report.summary.sizes.sum(0).view(-1, _COARSE).sum(1).nonzero().flatten().tolist()
    if used:
        axes.set_xlim(edges[used[0]], edges[used[-1] + 1])
    scale = "log" if used else "linear"
    axes.set(xscale=scale, yscale=scale, xlabel="|log ratio| (nats)", ylabel="tokens")
    axes.legend(frameon=False)


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


def _probability(axes: Any, report: Report) -> None:
    rows = report.summary.by_probability
    places = [row.low + 0.05 for row in rows]
    axes.bar(
        places, [row.k3_share for row in rows], width=0.085, color=LIGHTER_K3, label="share of k3", hatch="//", ec=K3
    )
    axes.set(xlabel="probability of the engine", ylabel="share of k3", ylim=(0, None))
    other = axes.twinx()
    other.plot(places, [row.mean_abs_difference for row in rows], color=LOG_RATIO, marker="s", label="mean |log ratio|")
    other.set(ylabel="mean |log ratio| (nats)", ylim=(0, None))
    other.grid(visible=False)
    other.spines.right.set_visible(True)
    handles = [handle for each in (axes, other) for handle in each.get_legend_handles_labels()[0]]
    axes.legend(handles, [handle.get_label() for handle in handles], frameon=False)


def _position(axes: Any, report: Report) -> None:
    rows = report.summary.by_position
    places = _middles(rows)
    gaps = [row.mean_abs_difference or math.nan for row in rows]
    axes.plot(places, gaps, color=LOG_RATIO, marker="s", linestyle="--", label="mean |log ratio|")
    axes.plot(places, [row.k3 or math.nan for row in rows], color=K3, marker="o", label="k3")
    axes.set(xscale="log", xlabel="position in the response", ylabel="nats")
    logarithmic(axes, rows)
    axes.legend(frameon=False)


def _middles(rows: Iterable[Group]) -> list[float]:
    """Of octaves of positions, on a logarithmic axis."""
    return [math.sqrt((row.low + 1) * (row.high + 1)) for row in rows]


def _acceptance(axes: Any, report: Report) -> None:
    rows = report.summary.by_length
    lengths = [row.mean_length for row in rows]
    shortest, longest = (min(lengths) / _BEYOND, max(lengths) * _BEYOND) if lengths else (1.0, 1.0)
    drawn_at = [max(1.0, shortest * (longest / shortest) ** (step / _NUM_POINTS)) for step in range(_NUM_POINTS + 1)]
    for (name, band), color, marker in zip(BANDS.items(), (KEPT, LIGHTER_KEPT), ("o", "s"), strict=True):
        law = [GaussianLaw(report.summary.overall.k3, length).acceptance(band) for length in drawn_at]
        axes.plot(lengths, [row.accepted[name] for row in rows], color=color, marker=marker, label=name)
        axes.plot(drawn_at, law, color=color, linestyle="--", lw=1)
    axes.set(xscale="log", xlabel="tokens of the response", ylabel="share accepted", ylim=(-0.03, 1.05))
    axes.legend(frameon=False, title="dashed: Gaussian law", title_fontsize=8)


def _what_if(axes: Any, report: Report) -> None:
    rows = report.recommendation.ranking[::-1]
    places = range(len(rows))
    for name, key, color, marker, shift in (
        ("tokens kept", "kept_tokens", KEPT, "o", 0.2),
        ("effective sample size", "ess", ESS, "s", 0.0),
        ("mean factor on the gradient", "learning_rate", LEARNING_RATE, "^", -0.2),
    ):
        values = [getattr(row.outcome, key) for row in rows]
        axes.plot(values, [place + shift for place in places], marker, color=color, label=name, ms=5)
    axes.axvline(1.0, color=GREY, lw=0.8, linestyle=":")
    axes.set_yticks([*places], [Path(row.name).name[:28] for row in rows])
    axes.set(xlabel="share, or factor", xlim=(-0.03, None))
    axes.get_figure().legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3, columnspacing=1.0)


def _steps(axes: Any, report: Report) -> None:
    steps = report.summary.steps
    places = range(len(steps))
    axes.plot(places, [step.k3 or math.nan for step in steps.values()], color=K3, marker="o", label="k3")
    gaps = [step.abs_mean or math.nan for step in steps.values()]
    axes.plot(places, gaps, color=LOG_RATIO, marker="s", linestyle="--", label="mean |log ratio|")
    stride = max(1, len(steps) // 10)
    axes.set_xticks([*places][::stride], [*steps][::stride])
    axes.set(xlabel="step", ylabel="nats")
    logarithmic(axes, steps.values())
    axes.legend(frameon=False)


def _steps_of_two(axes: Any, runs: tuple[Findings, Findings]) -> None:
    # Numbers in their order, then names in theirs.
    names = sorted(
        {step for run in runs for step in run.summary.steps},
        key=lambda step: (0, int(step), step) if step.isdecimal() else (1, 0, step),
    )
    for (name, color, marker, line), run, shift in zip(_STYLES, runs, (-_APART, _APART), strict=True):
        steps = run.summary.steps
        places = [place + shift for place, step in enumerate(names) if step in steps]
        rows = [_bar(steps[step]) for step in names if step in steps]
        values, below, above = ([row[part] for row in rows] for part in range(3))
        shape = {"color": color, "marker": marker, "linestyle": line, "ms": 4, "capsize": 3, "lw": 1.2}
        axes.errorbar(places, values, [below, above], label=name, **shape)
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


def _positions_of_two(axes: Any, runs: tuple[Findings, Findings]) -> None:
    for (name, color, marker, line), run in zip(_STYLES, runs, strict=True):
        rows = run.summary.by_position
        k3s = [row.k3 or math.nan for row in rows]
        axes.plot(_middles(rows), k3s, color=color, marker=marker, linestyle=line, label=name)
    axes.set(xscale="log", xlabel="position in the response", ylabel="k3 (nats per token)")
    logarithmic(axes, [row for run in runs for row in run.summary.by_position])
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


def logarithmic(axes: Any, rows: Iterable[Group | Mismatch]) -> None:
    """A logarithmic axis, but not for equal engines, which have nothing that it could show."""
    from matplotlib.ticker import LogFormatterSciNotation

    if any(row.k3 > 0.0 for row in rows):
        axes.set_yscale("log")
        # Within two decades the ticks between powers of ten need numbers too.
        axes.yaxis.set_minor_formatter(LogFormatterSciNotation(minor_thresholds=(2.0, 0.6)))
