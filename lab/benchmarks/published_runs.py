# SPDX-License-Identifier: Apache-2.0
"""A table and a picture of training runs of slime's fork Miles that others published.

    git clone https://github.com/littlemex/distributed-ai
    git -C distributed-ai show d6cb9c6:2026-07-19-miles-training-inference-mismatch/experiment/h200_results/\
fsx_extracted/aug_per_step_10runs.json > steps.json   # of its branch talk/beyond-network-slides
    python lab/benchmarks/published_runs.py distributed-ai --steps steps.json

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
import numpy as np  # noqa: E402
from evidence.pictures import save  # noqa: E402
from evidence.pretrained.alert import HIGHEST, TIMES  # noqa: E402
from evidence.pretrained.collapse import WINDOW  # noqa: E402
from evidence.pretrained.collapse_runs import SMOOTH  # noqa: E402

RUNS = Path("2026-07-19-miles-training-inference-mismatch/3.test_cases/pytorch/miles/docs/results")
SEEDS = (42, 123, 1234)
ARMS = {"disease": ("no correction", "black"), "cure": ("token mask, veto, normalized", "C1")}
# Runs by step: the learning rate is 1e-5 unless the name has another.
MORE = {
    "pt_e5m2_collapse_train": "no correction, 1234 again",
    "ctl_bf16_lr1e5": "cache in bf16, no correction, 1234",
    "pt_e5m2_train": "no correction, rate 1e-6",
    "pt_bf16_train": "cache in bf16, no correction, rate 1e-6",
}
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


def read_steps(path: Path) -> dict[str, tuple[list[float], list[float]]]:
    """KL and reward by step of each run that the checkout's curves do not have."""
    found = json.loads(path.read_text(encoding="utf-8"))
    values = {run: {name: [row["value"] for row in found[run][name]] for name in (KL, REWARD)} for run in MORE}
    return {label: (values[run][KL], values[run][REWARD]) for run, label in MORE.items()}


def alerts(runs: dict[str, tuple[list[float], list[float]]]) -> str:
    """Markdown: where the alert of the guide fires, and where the reward is lost, means of so many steps."""
    lines = [
        f"| run | steps | `mis_kl`, first {WINDOW} steps | above {TIMES:g} times that at step | above {HIGHEST:g} "
        "| reward, highest and last | stays below half of its highest from step |",
        "|---" * 7 + "|",
    ]
    for run, (kl, reward) in runs.items():
        start, (means, rewards) = (
            mean(kl[:WINDOW]),
            (np.convolve(x, np.ones(SMOOTH) / SMOOTH, "valid") for x in (kl, reward)),
        )
        # Not among the first steps, which give the usual value.
        crossed = [_first(means[WINDOW:] > line, WINDOW + SMOOTH - 1) for line in (TIMES * start, HIGHEST)]
        crossed = crossed if len(kl) >= WINDOW + SMOOTH else ["too short"] * len(crossed)
        lost = rewards < np.maximum.accumulate(rewards) / 2
        stays = _first(np.logical_and.accumulate(lost[::-1])[::-1], SMOOTH - 1)
        cells = run, str(len(kl)), f"{start:.2g}", *crossed, f"{rewards.max():.2f}, {rewards[-1]:.2f}", stays
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _first(is_true: np.ndarray, offset: int) -> str:
    return str(int(is_true.argmax()) + offset) if is_true.any() else "never"


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
    parser.add_argument("--steps", type=Path, help="aug_per_step_10runs.json: more runs for the table of the alert")
    parser.add_argument("--picture", type=Path, default=ROOT / "lab" / "evidence" / "published.png")
    arguments = parser.parse_args()
    curves = read(arguments.checkout)
    head = subprocess.run(
        ["git", "-C", str(arguments.checkout), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    print(table(curves))
    runs = {
        f"{label}, {seed}": (kl, reward)
        for arm, (label, _) in ARMS.items()
        for seed, kl, reward in zip(SEEDS, curves[arm][KL], curves[arm][REWARD], strict=True)
    }
    print("\n" + alerts(runs | (read_steps(arguments.steps) if arguments.steps else {})))
    print(f"\n{head.stdout.strip() or 'not a git checkout'}")
    draw(curves, arguments.picture)


if __name__ == "__main__":
    main()
