"""The picture on the front page: how far SGLang is from its trainer, and what stale weights do to training."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from .mismatch import Streams, of_groups
from .outcomes import Condition
from .pictures import draw_rewards, save
from .pretrained.studies import PRETRAINED_STUDIES
from .results import Results
from .studies import STUDIES

PRETRAINED = "pretrained_floor_lr1e-05"
# By condition, from the top.
ENGINES = {
    PRETRAINED: "pretrained, bf16",
    "atlas_bf16": "tiny model, bf16",
    "atlas_deterministic": "bf16, deterministic",
    "atlas_int8_products": "int8 products",
    "atlas_fp8_products": "fp8 products",
    "atlas_cache_e4m3": "fp8 cache, e4m3",
    "atlas_cache_e5m2": "fp8 cache, e5m2",
}
STALE = "pretrained_stale_4"
CURVES = {
    "none": ("no correction", "black"),
    "bypass": ("bypass", "C0"),
    "token_tis": ("token TIS (yaml/mis.yaml)", "C1"),
}


def report(results: Results, output: Path) -> None:
    """Write ``front.png``, once the atlas is complete and every method of `CURVES` has a run."""
    pretrained = [g for study in PRETRAINED_STUDIES for g in study.groups if results.is_done(g)]
    rows = [row for g in pretrained if g.condition == STALE for row in results.rows(g)]
    trained = Condition.of_rows(STALE, rows)
    if not all(results.is_done(g) for g in STUDIES["atlas"].groups) or not CURVES.keys() <= trained.curves.keys():
        print(f"front: the study atlas is not complete, or {STALE} lacks one of {', '.join(CURVES)}")
        return
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    measured = [g for g in (*STUDIES["atlas"].groups, *pretrained) if g.condition in ENGINES]
    _draw_mismatch(left, {name: steps["step0"] for name, steps in of_groups(measured, results).items()})
    rewards = {
        label: (color, [curves["own_reward"] for curves in trained.curves[method].values()])
        for method, (label, color) in CURVES.items()
    }
    draw_rewards(right, rewards, title="SmolLM2-135M, weights 4 steps old")
    save(figure, output / "front.png", dpi=120)
    print(output / "front.png")


def _draw_mismatch(axis: Axes, measured: dict[str, list[Streams]]) -> None:
    """Quantiles of the ratio's distance from 1, of every sampled token."""
    counts = set()
    shown = [name for name in reversed(ENGINES) if name in measured]
    for index, name in enumerate(shown):
        pieces, label = measured[name], ENGINES[name]
        counts.add(sum(int(piece.mask.any(-1).sum()) for piece in pieces))
        log_ratio = np.concatenate([piece.log_ratio[piece.mask] for piece in pieces])
        distance = np.sort(np.abs(log_ratio.astype(np.float64)))
        mean, rare, largest = distance.mean(), np.quantile(distance, 0.99), distance[-1]
        axis.plot([mean, largest], [index, index], color="0.75", linewidth=3, zorder=0)
        for value, marker, color in ((mean, "o", "C0"), (rare, "D", "C1"), (largest, "X", "C3")):
            axis.plot(value, index, marker, color=color, markersize=7)
        axis.annotate(label, (mean, index), xytext=(-10, -3), textcoords="offset points", ha="right", fontsize=9)
    for name, marker, color in (("mean", "o", "C0"), ("1 % of tokens beyond", "D", "C1"), ("largest", "X", "C3")):
        axis.plot([], [], marker, color=color, label=name)
    axis.legend(fontsize=8, loc="upper center", ncols=3)
    axis.set(
        title=f"SGLang against its trainer, {' to '.join(map(str, sorted(counts)))} responses each",
        xlabel="difference of the log-probs of a token, nats",
        xscale="log",
        xlim=(3e-5, 20),
        ylim=(-0.7, len(shown) + 0.2),
        yticks=[],
    )
