"""Draw the pictures of these pages: what the code computes, and what `benchmarks/RESULTS.md` has measured.

python docs/pictures.py
"""

import math
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in ("docs", "examples", "tests"))]

import matplotlib.pyplot as plt  # noqa: E402
from evidence.pictures import save  # noqa: E402
from picture_of_engines import draw_engines, read_differences, read_pretrained  # noqa: E402
from picture_of_scoring import draw_scoring  # noqa: E402
from picture_of_tokens import draw_tokens  # noqa: E402

from mis_ext import BOUNDS  # noqa: E402

LOW, HIGH, END = 0.5, 2.0, 3.0


def draw_bounds(path: Path) -> None:
    """Draw the weight against the ratio, for each mode, and what a mode rejects."""
    ratios = torch.linspace(0.01, END, 600)
    figure, axes = plt.subplots(1, len(BOUNDS), figsize=(10, 2.9), sharey=True, constrained_layout=True)
    for axis, bound in zip(axes, BOUNDS.values(), strict=True):
        weights = bound.weight(ratios.log(), math.log(LOW), math.log(HIGH))
        if bound.rejects:
            weights[(ratios < LOW) | (ratios > HIGH)] = math.nan
            for begin, end in ((0.0, LOW), (HIGH, END)):
                axis.axvspan(begin, end, color="C3", alpha=0.15, linewidth=0)
            axis.text((HIGH + END) / 2, 0.2, "rejected", ha="center", color="C3", fontsize=9)
        axis.plot(ratios, ratios, ":", color="0.6", linewidth=1)
        axis.plot(ratios, weights, color="C0", linewidth=2.4)
        axis.set(title=bound.name, xlabel="ratio", xlim=(0, END), ylim=(0, END), aspect="equal")
    axes[0].set_ylabel("weight")
    save(figure, path)


if __name__ == "__main__":
    images = ROOT / "docs" / "images"
    draw_bounds(images / "bounds.png")
    results = ROOT / "benchmarks" / "RESULTS.md"
    draw_engines(read_differences(results), images / "true_on_policy.png")
    draw_engines(read_pretrained(results), images / "true_on_policy_pretrained.png")
    draw_tokens(images / "on_policy_tokens.png")
    draw_scoring(ROOT / "benchmarks" / "results" / "scoring.json", images / "scoring.png")
