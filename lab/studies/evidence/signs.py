# SPDX-License-Identifier: Apache-2.0
"""Which number of the first steps goes with a shortfall of training without correction."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from scipy import stats

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .outcomes import Condition, last_quarter
from .pictures import save
from .results import Results
from .studies import STUDIES

FIRST_STEPS = slice(0, 10)
CLEAN = "staleness_0"
SIGNS = {
    "k3": "k3, nats",
    "abs_diff": "mean abs d, nats",
    "ess_sequence": "ESS of sequences",
    "above_2": "share of ratios above 2",
    "below_half": "share of ratios below 1/2",
    "ratio_max": "largest ratio",
    "grad_norm": "gradient norm",
}


def report(results: Results, output: Path) -> None:
    """Write ``signs.md`` and its plot, once the studies of staleness and of noise are complete."""
    groups = [group for name in ("staleness", "noise") for group in STUDIES[name].groups]
    if not all(results.is_done(group) for group in groups):
        print("signs: the studies staleness and noise are not complete")
        return
    conditions = {group.condition: Condition.of_rows(group.name, results.rows(group)) for group in groups}
    clean = conditions[CLEAN]
    end = last_quarter(groups[0].num_steps)
    base = clean.base
    runs = [
        (name, curves, float(np.mean(clean.curves[base][seed]["reward"][end]) - np.mean(curves["reward"][end])))
        for name, condition in conditions.items()
        for seed, curves in condition.curves[base].items()
        if name != CLEAN
    ]
    shortfall = [short for _, _, short in runs]
    lines = [
        "# Which number of the first ten steps goes with a later shortfall?",
        "",
        "`python lab/studies/evidence.py report`.",
        f"{len(runs)} runs without correction, stale or with noise.",
        "Each is against the fresh run without noise and with its seed.",
        "Shortfall: how much less reward in the last quarter. Sign: the mean over the first ten steps.",
        "Rank correlation (Spearman) over runs. Runs of one setting are alike, so there are fewer cases than runs.",
        "Nothing here says which number rises first within a run.",
        "",
        "| sign | rank correlation with the shortfall | within stale runs | within noisy runs |",
        "|---|---|---|---|",
    ]
    figure, axes = plt.subplots(1, len(SIGNS), figsize=(3.2 * len(SIGNS), 3.6), sharey=True, constrained_layout=True)
    for axis, (sign, label) in zip(axes, SIGNS.items(), strict=True):
        values = [float(np.mean(curves[sign][FIRST_STEPS])) for _, curves, _ in runs]
        cells = [f"{stats.spearmanr(values, shortfall).statistic:+.2f}"]
        for kind in ("staleness", "noise"):
            chosen = [i for i, (name, _, _) in enumerate(runs) if name.startswith(kind)]
            part = stats.spearmanr([values[i] for i in chosen], [shortfall[i] for i in chosen])
            cells.append(f"{part.statistic:+.2f}")
            axis.scatter([values[i] for i in chosen], [shortfall[i] for i in chosen], s=12, label=kind)
        lines.append(f"| {label} | {' | '.join(cells)} |")
        axis.set(xlabel=label, xscale="linear" if sign == "ess_sequence" else "symlog")
        if sign in ("k3", "abs_diff", "above_2", "below_half"):
            axis.set_xscale("log")
    axes[0].set_ylabel("shortfall of the reward")
    axes[0].legend(fontsize=7)
    save(figure, output / "signs.png")
    lines += ["", "![signs](signs.png)"]
    (output / "signs.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(output / "signs.md")
