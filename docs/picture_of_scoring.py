# SPDX-License-Identifier: Apache-2.0
"""What a whole loss costs in the hosts' own code and with ours: milliseconds and memory, from one recorded run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
from evidence.pictures import save
from matplotlib.axes import Axes

GIB = 2.0**30
# Of Okabe and Ito; light and dark also in gray.
OTHERS, OURS = "#B8B8B8", "#0072B2"
NAMES = {"miles": "Miles", "slime": "slime"}
LOSSES = {
    "its own loss, no correction": "own loss, no correction",
    "its own loss, its example": "own loss, its example",
    "its own loss, hook of mis_ext": "own loss, hook of mis_ext",
    "policy_loss, fused": "policy_loss, fused",
    "policy_loss, fused, in place": "policy_loss, fused, in place",
}
"""What is shown, and how it is called."""


class Panel(NamedTuple):
    """A problem of part A, what is shown of it, and how many of that a unit of the axis is."""

    problem: str
    key: str
    unit: float
    title: str


PANELS = (
    Panel("8x2048:151936:float32", "median_s", 1e-3, "milliseconds: 8 x 2,048,\nvocabulary 151,936"),
    Panel("8x2048:151936:float32", "peak_bytes", GIB, "GiB above the logits:\nthe same"),
    Panel("64x2048:64:float32", "median_s", 1e-3, "milliseconds: 64 x 2,048,\nvocabulary 64"),
)


class Bar(NamedTuple):
    """One number of a panel."""

    host: str
    loss: str
    value: float


def read_bars(record: Path, panel: Panel) -> list[Bar]:
    """What the panel shows, host by host; rows that were not measured on a GPU have no memory and are refused.

    Args:
        record: ``--json`` of ``lab/benchmarks/bench_scoring.py``.
        panel: The problem and the number.
    """
    rows: list[dict[str, Any]] = json.loads(record.read_text())["A"]
    of_problem = [row for row in rows if row["problem"] == panel.problem and row["contender"] in LOSSES]
    missing = [row["contender"] for row in of_problem if row.get(panel.key) is None]
    if missing or not of_problem:
        raise ValueError(f"{record}: no {panel.key} of {panel.problem} for {', '.join(missing) or 'any loss'}")
    return [Bar(row["host"], LOSSES[row["contender"]], row[panel.key] / panel.unit) for row in of_problem]


def draw_scoring(record: Path, path: Path) -> None:
    """Draw bars of the hosts' own losses in gray, of ours in blue."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(11, 4.6), sharey=True, constrained_layout=True)
    for axis, panel in zip(axes, PANELS, strict=True):
        _draw(axis, read_bars(record, panel), panel.title)
    save(figure, path)


def _draw(axis: Axes, bars: list[Bar], title: str) -> None:
    hosts = list(dict.fromkeys(bar.host for bar in bars))
    # A gap between hosts.
    heights = [index + 0.7 * hosts.index(bar.host) for index, bar in enumerate(bars)]
    colors = [OURS if bar.loss.startswith("policy_loss") else OTHERS for bar in bars]
    drawn = axis.barh(heights, [bar.value for bar in bars], color=colors, height=0.75)
    # No zero where something is there.
    labels = [
        f"{bar.value:,.0f}" if bar.value >= 20.0 else f"{bar.value:.{1 if bar.value >= 1.0 else 2}f}" for bar in bars
    ]
    axis.bar_label(drawn, labels, padding=3, fontsize=11)
    names = [f"{NAMES[bar.host]}: {bar.loss}" for bar in bars]
    axis.set_yticks(heights, names, fontsize=11)
    axis.set(ylim=(heights[-1] + 0.6, -0.6), xlim=(0.0, 1.2 * max(bar.value for bar in bars)))
    axis.set_title(title, fontsize=11, loc="left")
    axis.tick_params(axis="x", labelsize=10)
    axis.grid(axis="x", color="0.88", linewidth=0.7)
    axis.set_axisbelow(True)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
