# SPDX-License-Identifier: Apache-2.0
"""How far trainer and engine are apart with nothing aligned, with one piece left out, and with everything aligned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
from evidence.pictures import save
from matplotlib.axes import Axes

DTYPES = ("bfloat16", "float32")
# Of Okabe and Ito: told apart by everybody, and by their forms in gray.
COLORS, MARKERS = {"bfloat16": "#0072B2", "float32": "#D55E00"}, {"bfloat16": "o", "float32": "s"}
EXACT = 1e-10
"""Where an exact 0 stands on the logarithmic axis."""
ALIGNED, STALE = "all aligned", "the same, stale weights"
NUMBER = re.compile(r"\d\.\d+e-\d+|\d\.\d+|\d+")
TITLES = {
    "engine's attention": "all but the engine's attention",
    "trainer's attention": "all but the trainer's attention",
    "norm rounding": "all but the rounding of norms",
    "rotary frequencies in float32": "all but the rotary frequencies",
    "fixed-tile matmuls": "all but fixed-tile matmuls",
    "log-prob formula": "all but the log-prob formula",
}


class Difference(NamedTuple):
    """The mean difference of all sampled tokens in nats: the smallest and the largest of the rollouts."""

    row: str
    dtype: str
    low: float
    high: float


def read_differences(results: Path) -> list[Difference]:
    """What the tables of the H200 say of a random model in transformers, from top to bottom.

    Args:
        results: The page of measurements.
    """
    page = results.read_text(encoding="utf-8").split("### On one H200")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    whole = {dtype: row for dtype in DTYPES for row in rows if row[:2] == ["transformers", dtype]}
    found = [_difference("nothing aligned", dtype, whole[dtype][2].split(";")[1]) for dtype in DTYPES]
    for name, *cells in rows:
        if name.startswith("transformers, "):
            title = TITLES[name.removeprefix("transformers, ")]
            # "tokens, mean", or a bare 0.
            found += [_difference(title, dtype, cells[n].split(", ")[-1]) for n, dtype in enumerate(DTYPES)]
    found += [_difference(ALIGNED, dtype, whole[dtype][3].split(" on all")[0]) for dtype in DTYPES]
    stale = [re.findall(r"mean (\d\.\d)", whole[dtype][4])[0] for dtype in DTYPES]
    return found + [_difference(STALE, *each) for each in zip(DTYPES, stale, strict=True)]


def read_pretrained(results: Path) -> list[Difference]:
    """What the table of the H100 says of a pretrained model in SGLang, from top to bottom.

    Args:
        results: The page of measurements.
    """
    page = results.read_text(encoding="utf-8").split("### A pretrained model on one H100")[1].split("\n###")[0]
    table = [[cell.strip(" *") for cell in line.strip("|").split("|")] for line in page.splitlines() if line[:1] == "|"]
    titles = {"nothing": "nothing aligned", "all": ALIGNED, "all, but the last weights did not arrive": STALE}
    return [_difference(titles.get(row[0], row[0]), "bfloat16", row[5]) for row in table[2:]]


def draw_engines(differences: list[Difference], path: Path) -> None:
    """Draw them on a logarithmic axis with a place for exactly 0."""
    rows = list(dict.fromkeys(each.row for each in differences))
    figure, axis = plt.subplots(figsize=(7, 4.4), constrained_layout=True)
    axis.axvspan(EXACT / 10, EXACT * 10, color="0.92", linewidth=0)
    axis.axhspan(*(rows.index(ALIGNED) + end for end in (-0.45, 0.45)), color="#F0E442", alpha=0.45, linewidth=0)
    for each in differences:
        _draw(axis, rows.index(each.row), each)
    axis.text(EXACT, -0.75, "exactly 0", ha="center", va="bottom", fontsize=12)
    axis.set(xscale="log", xlim=(EXACT / 10, 30), ylim=(len(rows) - 0.4, -0.6))
    axis.set_xticks([1e-8, 1e-6, 1e-4, 1e-2, 1])
    axis.set_yticks(range(len(rows)), rows, fontsize=12)
    axis.get_yticklabels()[rows.index(ALIGNED)].set_fontweight("bold")
    axis.tick_params(axis="x", labelsize=12)
    axis.grid(axis="x", color="0.85", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.set_xlabel("trainer against engine, mean difference of a log-prob, nats", fontsize=12, loc="right")
    dtypes = list(dict.fromkeys(each.dtype for each in differences))
    handles = [plt.Line2D([], [], linestyle="", marker=MARKERS[d], color=COLORS[d], markersize=9) for d in dtypes]
    axis.legend(handles, dtypes, loc="center", bbox_to_anchor=(0.45, 0.67), fontsize=12, framealpha=1)
    save(figure, path)


def _draw(axis: Axes, place: int, found: Difference) -> None:
    height = place + (-0.14 if found.dtype == DTYPES[0] else 0.14)
    ends = [max(found.low, EXACT), max(found.high, EXACT)]
    style = {"color": COLORS[found.dtype], "marker": MARKERS[found.dtype], "markersize": 9}
    axis.plot(ends, [height, height], linewidth=3, markeredgecolor="white", **style)


def _difference(row: str, dtype: str, text: str) -> Difference:
    numbers = [float(number) for number in NUMBER.findall(text)]
    return Difference(row, dtype, min(numbers), max(numbers))
