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

from mis_ext import BOUNDS, Weight  # noqa: E402

LOW, HIGH, END = 0.5, 2.0, 3.0
DECISIONS = {
    "Do you want a published method?": "mis_loss_method: NAME",
    "Do you want no clip?": "mis_loss_mode: reinforce",
    "Several optimizer steps\nwithout a scoring pass?": "mis_loss_mode: bypass",
    "One optimizer step per rollout,\nin slime?": "mis_loss_proximal: current",
}
"""Questions in their order, and the keys of the full policy loss if the answer is yes."""


def draw_bounds(path: Path) -> None:
    """Draw the weight against the ratio, for each mode, and what a mode rejects."""
    ratios = torch.linspace(0.01, END, 600)
    figure, axes = plt.subplots(1, len(BOUNDS), figsize=(10, 2.9), sharey=True, constrained_layout=True)
    for axis, (mode, bound) in zip(axes, BOUNDS.items(), strict=True):
        edges = ({"low": LOW} if bound.has_low else {}) | ({"high": HIGH} if bound.has_high else {})
        weights = Weight(mode=mode, **edges).bounded(ratios.log())
        if bound.rejects:
            weights[(ratios < LOW) | (ratios > HIGH)] = math.nan
            for begin, end in ((0.0, LOW), (HIGH, END)):
                axis.axvspan(begin, end, color="C3", alpha=0.15, linewidth=0)
            axis.text((HIGH + END) / 2, 0.2, "rejected", ha="center", color="C3", fontsize=9)
        axis.plot(ratios, ratios, ":", color="0.6", linewidth=1)
        axis.plot(ratios, weights, color="C0", linewidth=2.4)
        axis.set(title=mode, xlabel="ratio", xlim=(0, END), ylim=(0, END), aspect="equal")
    axes[0].set_ylabel("weight")
    save(figure, path)


def draw_decision(path: Path) -> None:
    """Draw which keys of the full policy loss to use."""
    figure, axis = plt.subplots(figsize=(8, 4.2), constrained_layout=True)
    axis.set(xlim=(0, 10), ylim=(-0.6, len(DECISIONS) + 0.4))
    axis.axis("off")
    text = {"ha": "center", "va": "center", "fontsize": 10}
    arrow = {"arrowstyle": "->", "color": "0.4"}
    for row, (question, keys) in enumerate(DECISIONS.items()):
        height = len(DECISIONS) - row
        below = "baseline, the default" if row == len(DECISIONS) - 1 else ""
        axis.annotate("", (6, height), (4.6, height), arrowprops=arrow)
        axis.annotate("", (2.3, height - 0.68), (2.3, height - 0.25), arrowprops=arrow)
        axis.text(2.3, height, question, bbox={"boxstyle": "round,pad=0.4", "fc": "#eef", "ec": "#447"}, **text)
        axis.text(8, height, keys, bbox={"boxstyle": "round,pad=0.4", "fc": "#efe", "ec": "#474"}, **text)
        axis.text(5.3, height + 0.14, "yes", color="0.4", ha="center", fontsize=9)
        axis.text(2.5, height - 0.52, "no", color="0.4", fontsize=9)
        axis.text(
            2.3, height - 1, below, bbox={"boxstyle": "round", "fc": "#efe", "ec": "#474"} if below else None, **text
        )
    save(figure, path)


def draw_k3(path: Path) -> None:
    """Draw k3, the absolute difference, and the distance of the ratio from 1 against ``d`` of a token."""
    d = torch.linspace(-2, 2, 400)
    figure, axis = plt.subplots(figsize=(6, 3.2), constrained_layout=True)
    axis.plot(d, d.exp() - 1 - d, linewidth=2.4, label="k3 = exp d - 1 - d")
    axis.plot(d, d.abs(), "--", linewidth=1.6, label="|d|")
    axis.plot(d, d.exp() - 1, ":", linewidth=1.6, label="ratio - 1 = exp d - 1")
    axis.set(xlabel="d = trainer log-prob - engine log-prob, nats", xlim=(-2, 2), ylim=(-1, 4.5))
    axis.axhline(0, color="0.6", linewidth=0.8)
    axis.legend(fontsize=9)
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
    draw_k3(images / "k3.png")
    draw_decision(images / "policy_loss.png")
    results = ROOT / "lab" / "RESULTS.md"
    draw_engines(read_differences(results), images / "true_on_policy.png")
    draw_engines(read_pretrained(results), images / "true_on_policy_pretrained.png")
    draw_tokens(images / "on_policy_tokens.png")
    draw_scoring(ROOT / "lab" / "benchmarks" / "results" / "scoring.json", images / "scoring.png")
    draw_slime(ROOT / "lab" / "real_stack" / "slime_gpu.json", images / "slime.png")
