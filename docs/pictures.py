# SPDX-License-Identifier: Apache-2.0
"""Draw the pictures of these pages: what the code computes, and what the `lab` has measured.

python docs/pictures.py
"""

import json
import math
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in ("docs", "lab/studies", "tests/support"))]

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


def draw_slime(record: Path, path: Path) -> None:
    """Draw reward and k3 of the runs of unmodified slime that made all of their 20 rollouts."""
    runs = {run["name"]: run for run in json.loads(record.read_text())}
    figure, axes = plt.subplots(1, 2, figsize=(9, 2.9), constrained_layout=True)
    for name, label in {"whole": "three flags, 40 metrics", "whole_loss": "policy_loss, 9 metrics"}.items():
        run = runs[f"{name}, TE, H100"]
        for axis, kind, key in zip(axes, ("rollouts", "steps"), ("rollout/raw_reward", "train/mis_k3_kl"), strict=True):
            values = [values[key] for _, values in sorted(run[kind].items(), key=lambda item: int(item[0]))]
            axis.plot(range(len(values)), values, linewidth=2, label=label)
    axes[0].set(title="reward", xlabel="rollout", ylim=(0, None), xticks=range(0, 20, 5))
    axes[1].set(title="k3 of SGLang and Megatron, nats", xlabel="rollout", ylim=(0, None), xticks=range(0, 20, 5))
    axes[0].legend(fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    images = ROOT / "docs" / "images"
    draw_bounds(images / "bounds.png")
    results = ROOT / "lab" / "RESULTS.md"
    draw_engines(read_differences(results), images / "true_on_policy.png")
    draw_engines(read_pretrained(results), images / "true_on_policy_pretrained.png")
    draw_tokens(images / "on_policy_tokens.png")
    draw_scoring(ROOT / "lab" / "benchmarks" / "results" / "scoring.json", images / "scoring.png")
    draw_slime(ROOT / "lab" / "real_stack" / "slime_gpu.json", images / "slime.png")
