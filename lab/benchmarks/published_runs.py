# SPDX-License-Identifier: Apache-2.0
"""A table and a picture of training runs of slime's fork Miles that others published.

    git clone https://github.com/littlemex/distributed-ai
    python lab/benchmarks/published_runs.py distributed-ai

The runs are Qwen3-4B against an engine with a cache in e5m2, without and with a correction. What they show and
what they do not is in lab/evidence/published.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import mean, median, stdev

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "lab" / "studies"))

import matplotlib  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from evidence.pictures import save  # noqa: E402

RUNS = Path("2026-07-19-miles-training-inference-mismatch/3.test_cases/pytorch/miles/docs/results")
SEEDS = (42, 123, 1234)
ARMS = {"disease": ("no correction", "black"), "cure": ("token mask, veto, normalised", "C1")}
REWARD, KL, NORM = "rollout/raw_reward", "train/mis_kl", "train/grad_norm"
NUM_LAST = 5
# A gradient norm so many times the median of its first steps is a warning.
UNUSUAL_NORM = 3

Curves = dict[str, dict[str, list[list[float]]]]


def read(checkout: Path) -> Curves:
    """The curves of each seed, by arm and metric.

    Raises:
        ValueError: A curve has gaps, or another length than that of the first seed.
    """
    curves: Curves = {arm: {metric: [] for metric in (REWARD, KL, NORM)} for arm in ARMS}
    for seed in SEEDS:
        path = checkout / RUNS / f"e1_seed{seed}.json"
        found = json.loads(path.read_text(encoding="utf-8"))
        for arm, by_metric in curves.items():
            for metric, of_seeds in by_metric.items():
                by_step = {int(step): value for step, value in found[arm][metric].items()}
                if sorted(by_step) != list(range(len(of_seeds[0]) if of_seeds else len(by_step))):
                    raise ValueError(f"{path}: {arm}, {metric}: steps {sorted(by_step)}")
                of_seeds.append([by_step[step] for step in sorted(by_step)])
    return curves


def table(curves: Curves) -> str:
    """Markdown: each seed's mean of the first and of the last steps, and its largest values."""
    lines = [
        f"| | seed | reward, first {NUM_LAST} steps | last {NUM_LAST} | `mis_kl`, step 0 | last {NUM_LAST} | largest "
        f"| gradient norm, largest | above {UNUSUAL_NORM} times its first median at step |",
        "|---" * 9 + "|",
    ]
    for arm, (label, _) in ARMS.items():
        rows = zip(SEEDS, curves[arm][REWARD], curves[arm][KL], curves[arm][NORM], strict=True)
        for seed, reward, kl, norm in rows:
            first, last = mean(reward[:NUM_LAST]), mean(reward[-NUM_LAST:])
            limit = UNUSUAL_NORM * median(norm[:NUM_LAST])
            warned = next((str(step) for step, value in enumerate(norm) if value > limit), "never")
            lines.append(
                f"| {label} | {seed} | {first:.2f} | {last:.2f} | {kl[0]:.3f} | {mean(kl[-NUM_LAST:]):.2g} "
                f"| {max(kl):.2g} | {max(norm):.2g} | {warned} |"
            )
    ends = {arm: [mean(reward[-NUM_LAST:]) for reward in curves[arm][REWARD]] for arm in ARMS}
    gains = [cure - disease for disease, cure in zip(*ends.values(), strict=True)]
    # Student's t for two degrees of freedom.
    half = 4.303 * stdev(gains) / len(gains) ** 0.5
    gain = mean(gains)
    lines += [
        "",
        f"Last {NUM_LAST} steps, corrected minus not, by seed: {gain:+.2f} [{gain - half:+.2f}, {gain + half:+.2f}]",
    ]
    return "\n".join(lines)


def draw(curves: Curves, path: Path) -> None:
    """Reward and KL by step, each seed a line."""
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True)
    for arm, (label, color) in ARMS.items():
        for axis, metric in zip(axes, (REWARD, KL), strict=True):
            for index, curve in enumerate(curves[arm][metric]):
                axis.plot(curve, color=color, linewidth=1.2, label=label if index == 0 else None)
    axes[0].set(title="reward of the rollout", xlabel="step", ylim=(0, 1))
    axes[1].set(title="mis_kl, nats per token", xlabel="step", yscale="log")
    axes[0].legend(loc="lower left", fontsize=9)
    save(figure, path)


def main() -> None:
    """Print the table, draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkout", type=Path, help="of github.com/littlemex/distributed-ai")
    parser.add_argument("--picture", type=Path, default=ROOT / "benchmarks" / "evidence" / "published.png")
    arguments = parser.parse_args()
    curves = read(arguments.checkout)
    head = subprocess.run(
        ["git", "-C", str(arguments.checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    print(table(curves))
    print(f"\n{head.stdout.strip() or 'not a git checkout'}")
    draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
