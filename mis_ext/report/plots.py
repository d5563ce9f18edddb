"""Pictures of a run: where the engines differ, and what each configuration would do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from mis_ext.explain.law import GaussianLaw
from mis_ext.report.comparison_plot import comparison_pictures
from mis_ext.report.drawing import BLUE, FEWEST_STEPS, GREEN, GREY, K3, LOG_RATIO, ORANGE, Picture, drawn, logarithmic
from mis_ext.report.sequences import BANDS
from mis_ext.report.tally import LOG_PROB_WIDTH, LOWEST_LOG_PROB, PER_DECADE, size_edges
from mis_ext.report.whole_report import Report

_COARSE = PER_DECADE // 10
_BEYOND, _NUM_POINTS = 3.0, 60
"""How far the law is drawn beyond the lengths of the data, and with how many points."""


def pictures(report: Report) -> list[Picture]:
    """The pictures of a report, without those for which it has too few data."""
    summary = report.summary
    found = [
        Picture(
            "log_ratio",
            "Size of the difference",
            "Tokens by |log ratio|, both axes logarithmic. A straight tail to the right is a heavy tail.",
            lambda axes: _histogram(axes, report),
        ),
        Picture(
            "density",
            "Behavior against proximal probability",
            "Tokens by both probabilities. On the diagonal trainer and engine agree.",
            lambda axes: _density(axes, report),
        ),
        Picture(
            "probability",
            "By probability",
            "Mean |log ratio| by decile of the engine's probability, and the share of k3 that the decile carries.",
            lambda axes: _probability(axes, report),
        ),
        Picture(
            "position",
            "By position in the response",
            "Mean |log ratio| and k3 by position.",
            lambda axes: _position(axes, report),
        ),
        Picture(
            "acceptance",
            "The length trap",
            "Share of sequences that a band accepts, by length. Dashed line: independent Gaussian differences.",
            lambda axes: _acceptance(axes, report),
        ),
        Picture(
            "what_if",
            "What each configuration would do",
            "Tokens kept, effective sample size and effective learning rate; 1 is no correction.",
            lambda axes: _what_if(axes, report),
        ),
    ]
    if len(summary.steps) >= FEWEST_STEPS:
        found.append(
            Picture("steps", "Over steps", "k3 and mean |log ratio| of each step.", lambda axes: _steps(axes, report))
        )
    return found


def write_pictures(report: Report, folder: Path) -> list[Path]:
    """Write a PNG of each picture, that of a comparison too; the paths."""
    paths = []
    for picture in (*pictures(report), *comparison_pictures(report)):
        paths.append(folder / f"{picture.name}.png")
        paths[-1].write_bytes(drawn(picture, file_format="png"))
    return paths


def _histogram(axes: Any, report: Report) -> None:
    edges = size_edges()[::_COARSE]
    for side, name, color, style in ((0, "trainer lower", BLUE, "-"), (1, "trainer higher", ORANGE, "--")):
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
        places, [row.k3_share for row in rows], width=0.085, color="#9ecae1", label="share of k3", hatch="//", ec=K3
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
    places = [math.sqrt((row.low + 1) * (row.high + 1)) for row in rows]
    gaps = [row.mean_abs_difference or math.nan for row in rows]
    axes.plot(places, gaps, color=LOG_RATIO, marker="s", linestyle="--", label="mean |log ratio|")
    axes.plot(places, [row.k3 or math.nan for row in rows], color=K3, marker="o", label="k3")
    axes.set(xscale="log", xlabel="position in the response", ylabel="nats")
    logarithmic(axes, rows)
    axes.legend(frameon=False)


def _acceptance(axes: Any, report: Report) -> None:
    rows = report.summary.by_length
    lengths = [row.mean_length for row in rows]
    shortest, longest = (min(lengths) / _BEYOND, max(lengths) * _BEYOND) if lengths else (1.0, 1.0)
    drawn_at = [max(1.0, shortest * (longest / shortest) ** (step / _NUM_POINTS)) for step in range(_NUM_POINTS + 1)]
    for (name, band), color, marker in zip(BANDS.items(), (BLUE, ORANGE), ("o", "s"), strict=True):
        law = [GaussianLaw(report.summary.overall.k3, length).acceptance(band) for length in drawn_at]
        axes.plot(lengths, [row.accepted[name] for row in rows], color=color, marker=marker, label=name)
        axes.plot(drawn_at, law, color=color, linestyle="--", lw=1)
    axes.set(xscale="log", xlabel="tokens of the response", ylabel="share accepted", ylim=(-0.03, 1.05))
    axes.legend(frameon=False, title="dashed: Gaussian law", title_fontsize=8)


def _what_if(axes: Any, report: Report) -> None:
    rows = report.recommendation.ranking[::-1]
    places = range(len(rows))
    for name, key, color, marker, shift in (
        ("tokens kept", "kept_tokens", BLUE, "o", 0.2),
        ("effective sample size", "ess", ORANGE, "s", 0.0),
        ("effective learning rate", "learning_rate", GREEN, "^", -0.2),
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
