"""The picture on the front page: what stale weights do to training, without a correction and with one."""

from __future__ import annotations

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
