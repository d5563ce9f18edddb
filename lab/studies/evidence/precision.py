# SPDX-License-Identifier: Apache-2.0
"""The picture of fp16 and dithered weights: on both sides, with weights of bf16, and in the trainer alone."""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt

from .outcomes import Condition
from .pictures import draw_rewards, save
from .pretrained.studies import PRETRAINED_STUDIES
from .results import Results

STUDIES = ("pretrained_precision", "pretrained_small_updates")
# By learning rate: condition, method, label, color.
CURVES = {
    "1e-5": (
        ("pretrained_precision_bf16", "none", "both in bf16", "black"),
        ("pretrained_precision_fp16", "none", "both in fp16", "C0"),
        ("pretrained_precision_bf16_dithered", "none", "both in bf16, dithered", "C4"),
        ("pretrained_precision_fp16_rounded_weights", "none", "both in fp16, weights rounded to bf16", "C2"),
        ("pretrained_precision_fp16_trainer", "none", "trainer in fp16, engine in bf16", "C3"),
        ("pretrained_precision_fp16_trainer", "token_tis", "the same with token TIS", "C1"),
    ),
    "1e-6": (
        ("pretrained_small_updates_bf16", "none", "both in bf16", "black"),
        ("pretrained_precision_fp16_lr1e-06", "none", "both in fp16", "C0"),
        ("pretrained_small_updates_bf16_dithered", "none", "both in bf16, dithered", "C4"),
    ),
}


def report(results: Results, output: Path) -> None:
    """Write ``fp16.png``, once every curve has a run."""
    rows: dict[str, list[dict[str, object]]] = {}
    for group in (group for study in PRETRAINED_STUDIES if study.name in STUDIES for group in study.groups):
        if results.is_done(group):
            rows.setdefault(group.condition, []).extend(results.rows(group))
    found = {name: Condition.of_rows(name, of_name).curves for name, of_name in rows.items()}
    missing = [name for curves in CURVES.values() for name, method, *_ in curves if method not in found.get(name, ())]
    if missing:
        print(f"fp16: nothing ran of {', '.join(dict.fromkeys(missing))}")
        return
    figure, axes = plt.subplots(1, len(CURVES), figsize=(10, 3.8), constrained_layout=True)
    for axis, (rate, curves) in zip(axes, CURVES.items(), strict=True):
        rewards = {
            label: (color, [curves["own_reward"] for curves in found[name][method].values()])
            for name, method, label, color in curves
        }
        draw_rewards(axis, rewards, title=f"SmolLM2-135M, fresh weights, learning rate {rate}")
    save(figure, output / "fp16.png", dpi=120)
    print(output / "fp16.png")
