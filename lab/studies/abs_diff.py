# SPDX-License-Identifier: Apache-2.0
"""Relate the mean absolute log-prob difference to k3 on every recorded run of a pretrained model.

    python lab/studies/abs_diff.py > lab/evidence/abs_diff.md

slime and Miles log the difference as ``train_rollout_logprob_abs_diff`` in every run, mis_ext or not.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from evidence.archives import Archives

FOLDER = Path(__file__).parents[1] / "evidence" / "results"
MODELS = {"pretrained_": "SmolLM2-135M", "collapse_": "Qwen2.5-Coder-1.5B"}
WINDOW, SMOOTH = 10, 5
OF_K3, OF_DIFFERENCE = (5.0, 0.1), (2.0, 0.3)
"""The alerts: a multiple of the first WINDOW steps, and a limit. The second one was chosen on these runs."""
HEAD = """# From train_rollout_logprob_abs_diff to mis_k3_kl

`python lab/studies/abs_diff.py > lab/evidence/abs_diff.md` makes this page from the stored results.

slime and Miles log `train_rollout_logprob_abs_diff`, the mean of $|d|$, without mis_ext. `mis_k3_kl` is the mean of
$e^d - 1 - d$. Each row has the steps of all runs of one condition. The *quotient* is k3 divided by the squared mean
difference: 5 %, median, and 95 % of the steps.

"""


def steps_of(name: str, archives: Archives) -> np.ndarray:
    """``[N, 2]``: k3 and mean absolute difference of each step that has both."""
    found = [(row["k3"], row["abs_diff"]) for row in archives.rows(name) if row.get("k3") and row.get("abs_diff")]
    return np.array(found).reshape(-1, 2)


def fires(values: np.ndarray, times: float, highest: float) -> bool:
    """Compare the mean over SMOOTH steps with that of the first WINDOW."""
    means = np.convolve(values[WINDOW:], np.ones(SMOOTH) / SMOOTH, "valid")
    return bool((means > min(times * float(values[:WINDOW].mean()), highest)).any())


def row_of(condition: str, runs: Iterable[np.ndarray]) -> str:
    """Write the row of one condition."""
    k3, size = np.concatenate([*runs]).T
    low, middle, high = np.quantile(k3 / size**2, (0.05, 0.5, 0.95))
    numbers = f"{len(k3)} | {np.median(size):.2g} | {np.median(k3):.1e} | {low:.1f}, {middle:.1f}, {high:.1f}"
    return f"| `{condition}` | {numbers} |"


def main() -> None:
    """Print the page."""
    archives = Archives(FOLDER)
    runs = defaultdict(list)
    for name in archives.names():
        model = next((text for start, text in MODELS.items() if name.startswith(start)), None)
        if model and len(steps := steps_of(name, archives)) >= WINDOW + SMOOTH:
            runs[model, re.sub("-seed.*", "", name)].append(steps)
    print(HEAD, end="")
    for model in MODELS.values():
        print(f"## {model}\n\n| runs | steps | mean difference | k3 | quotient |\n|---|---|---|---|---|")
        print("\n".join(row_of(condition, found) for (of, condition), found in runs.items() if of == model), end="\n\n")
    every = [run for found in runs.values() for run in found]
    k3, size = np.concatenate(every).T
    share = np.mean(k3 >= 0.8 * size**2)
    print(f"## Rules\n\nOf {len(every)} runs with {len(k3)} steps:\n")
    print(f"- k3 is at least 0.8 times the square of the mean difference in {share:.1%} of the steps.")
    print(
        "- The alert on k3 is the five-step mean above {:g} times that of the first ten steps, or above {:g}.".format(
            *OF_K3
        )
    )
    print(
        "  The same alert on the mean difference has {:g} times and {:g}, chosen on these runs.\n".format(
            *OF_DIFFERENCE
        )
    )
    head = f"runs | quotient, first {WINDOW} steps | alert on k3 | alert on the difference: of these | in others"
    print(f"| model | {head} |\n{'|---' * 6}|")
    for model in MODELS.values():
        of_model = [run for (of, _), found in runs.items() if of == model for run in found]
        pairs = [(fires(run[:, 0], *OF_K3), fires(run[:, 1], *OF_DIFFERENCE)) for run in of_model]
        both, missed, more = (pairs.count(pair) for pair in ((True, True), (True, False), (False, True)))
        print(f"| {model} | {len(of_model)} | {quotients(of_model)} | {both + missed} | {both} | {more} |")


def quotients(runs: Iterable[np.ndarray]) -> str:
    """5 %, median, and 95 % of the first steps."""
    k3, size = np.concatenate([run[:WINDOW] for run in runs]).T
    return ", ".join(f"{value:.1f}" for value in np.quantile(k3 / size**2, (0.05, 0.5, 0.95)))


if __name__ == "__main__":
    main()
