# SPDX-License-Identifier: Apache-2.0
"""The pictures that people see first: what stale weights do to training, and what healthy and sick runs look like."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .outcomes import Condition
from .pictures import draw_rewards, save
from .pretrained.studies import PRETRAINED_STUDIES
from .results import Results

STALE = "pretrained_stale_4"
CURVES = {
    "none": ("no correction", "black"),
    "token_tis": ("mis_ext, yaml/mis.yaml", "C1"),
}


def report(results: Results, output: Path) -> None:
    """Write ``front.png``, once every method of `CURVES` has a run."""
    pretrained = [g for study in PRETRAINED_STUDIES for g in study.groups if results.is_done(g)]
    rows = [row for g in pretrained if g.condition == STALE for row in results.rows(g)]
    trained = Condition.of_rows(STALE, rows)
    if not CURVES.keys() <= trained.curves.keys():
        print(f"front: {STALE} lacks one of {', '.join(CURVES)}")
        return
    figure, axis = plt.subplots(figsize=(7.5, 3.2), constrained_layout=True)
    rewards = {
        label: (color, [curves["own_reward"] for curves in trained.curves[method].values()])
        for method, (label, color) in CURVES.items()
    }
    draw_rewards(axis, rewards, title="SmolLM2-135M, samples 4 updates old")
    save(figure, output / "front.png", dpi=120)
    print(output / "front.png")


SHOWN = {
    "healthy": ("pretrained_fresh_e4m3_cache", "healthy: fp8 cache, fresh weights"),
    "stale": ("pretrained_stale_8", "sick: weights 8 updates old"),
    "behind": ("pretrained_precision_fp16_trainer", "sick: trainer in fp16, engine in bf16"),
}
CURVES_OF_A_DASHBOARD = {"k3": "mis_k3_kl", "grad_norm": "gradient norm", "reward": "reward of rollouts"}
LIMIT = {"k3": 0.07}
"""Of SmolLM2 with an fp8 engine: docs/guide/watch.md."""


def dashboards(results: Results, first_look: Path, output: Path) -> None:
    """Write ``dashboards.png``: runs without a correction, each seed a line; the last is the first look at Qwen2.5."""
    done = [g for study in PRETRAINED_STUDIES for g in study.groups if results.is_done(g)]
    runs: dict[str, dict[object, list[dict[str, float]]]] = {}
    for condition, title in SHOWN.values():
        of_seed = runs.setdefault(title, {})
        for row in (
            row for g in done if g.condition == condition for row in results.rows(g) if row["method"] == "none"
        ):
            of_seed.setdefault(row["seed"], []).append(row)
    look = [json.loads(line) for line in first_look.read_text(encoding="utf-8").splitlines()]
    runs["sick: e4m3 cache, Qwen2.5 at 1e-5"] = {0: [r for r in look if (r["engine"], r["method"]) == ("e4m3", "none")]}
    if missing := [title for title, seeds in runs.items() if not any(seeds.values())]:
        print(f"dashboards: nothing ran of {', '.join(missing)}")
        return
    figure, axes = plt.subplots(
        len(CURVES_OF_A_DASHBOARD), len(runs), figsize=(13, 6.4), sharex="col", constrained_layout=True
    )
    for column, (title, seeds) in enumerate(runs.items()):
        for line, (name, label) in enumerate(CURVES_OF_A_DASHBOARD.items()):
            axis = axes[line, column]
            for rows in seeds.values():
                rows = sorted(rows, key=lambda row: row["step"])
                axis.plot(
                    [row["step"] for row in rows], [row[name] for row in rows], color="C0", linewidth=1, alpha=0.7
                )
            if name in LIMIT:
                axis.axhline(LIMIT[name], color="C3", linewidth=1, linestyle="--")
                axis.set(yscale="log", ylim=(1e-4, 3))
            elif name == "grad_norm":
                axis.set(yscale="log", ylim=(0.1, 20))
            else:
                axis.set(ylim=(0, 1))
            if column == 0:
                axis.set(ylabel=label)
        axes[0, column].set_title(title, fontsize=9)
        axes[-1, column].set(xlabel="step")
    save(figure, output / "dashboards.png")
    print(output / "dashboards.png")
