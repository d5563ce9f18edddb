# SPDX-License-Identifier: Apache-2.0
"""Does the mismatch of an fp8 engine grow in training, as that of int4 weights does?

Fixed before the first run. Qwen2.5-Coder-1.5B-Instruct trains as in ``collapse_correction``: the same rate (3e-6),
questions, and sampling seeds. The engine multiplies in fp8, or has weights rounded to e4m3, without a correction and
with token TIS at a cap of 2.

Primary outcome, of the two runs of an engine without a correction: the growth of k3, the mean of the ten steps up to
step 130 over the mean of the first ten. By step 130 it was 6.1 to 19.1 in six runs with int4 weights, 1.6 to 2.0 in
six with int4 weights and token TIS, and 0.8 to 1.1 in six with bf16 (mean 0.95, standard deviation 0.14). k3 grows if
both runs have at least 1.6. It does not grow if both have at most 1.35, about three standard deviations above bf16.
Otherwise the question is not resolved. If a run was not seen to step 130, both are compared at the last step that
both saw, 100 at the least. Secondary, without a test: whether the guide's alert fired, the reward of rollouts over
the last ten steps, and the trainer policy, which transformers evaluates in bf16 at steps 0, 40, 80, 120, and 150.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from evidence.results import Results
from evidence.study import NONE, Study

from .collapse import COLLAPSE_STUDIES, CORRECTION, ENGINES, WINDOW, alert_at
from .group import PretrainedGroup, runs_of
from .studies import token_tis

FP8, SMOKE = "fp8_training", "fp8_smoke"
ENGINE_NAMES = {"fp8_products": "fp8 matmuls", "e4m3_weights": "e4m3 weights"}
JUDGED_AT, FEWEST_STEPS = 130, 100
GROWS, STABLE = 1.6, 1.35

Rows = Sequence[dict[str, Any]]


def _arm(setting: str) -> PretrainedGroup:
    (study,) = (study for study in COLLAPSE_STUDIES if study.name == CORRECTION)
    like = next(group for group in study.groups if group.name.startswith(f"{CORRECTION}_int4-"))
    assert isinstance(like, PretrainedGroup)
    changes = {"num_steps": 151, "last_fall": 0, "stops_collapsed": False, "dump_steps": (0,)}
    # An engine that multiplies in fp8 cannot evaluate the weights of the trainer, and transformers is slower.
    changes |= {"evaluates_in_engine": False, "eval_interval": 40, "methods": (NONE, token_tis(2.0)), "seeds": (1, 2)}
    return replace(like, name=f"{FP8}_{setting}", engine=ENGINES[setting][0], **changes)


_RUNS = runs_of([_arm(setting) for setting in ENGINE_NAMES])
FP8_STUDIES = (
    Study(
        name=SMOKE,
        question="Does a step with an fp8 engine run on this machine?",
        groups=(replace(_RUNS[0], name=_RUNS[0].name.replace(FP8, SMOKE), num_steps=1),),
    ),
    Study(name=FP8, question="Does the mismatch of an fp8 engine grow in training?", groups=_RUNS),
)


def growth(rows: Rows, step: int = JUDGED_AT) -> float:
    """k3 over the ten steps up to a step, as a multiple of the first ten."""
    return mean_of(rows[: step + 1][-WINDOW:], "k3") / mean_of(rows[:WINDOW], "k3")


def growth_error(rows: Rows, step: int = JUDGED_AT) -> float:
    """The standard error of a growth, from the scatter of the steps in its two windows."""
    windows = ([row["k3"] for row in part] for part in (rows[: step + 1][-WINDOW:], rows[:WINDOW]))
    relative = [statistics.stdev(window) / statistics.mean(window) / WINDOW**0.5 for window in windows]
    return growth(rows, step) * math.hypot(*relative)


def verdict(runs: Sequence[Rows]) -> str:
    """What the uncorrected runs of one engine say by the rule above."""
    step = judged_at(runs)
    if step < FEWEST_STEPS:
        return f"not judged: it takes two runs of {FEWEST_STEPS} steps"
    grown = [growth(rows, step) for rows in runs]
    word = "grows" if min(grown) >= GROWS else "does not grow" if max(grown) <= STABLE else "is not resolved"
    return f"k3 {word}: times {' and '.join(f'{value:.2f}' for value in grown)} by step {step}"


def judged_at(runs: Sequence[Rows]) -> int:
    """The last step that both uncorrected runs of an engine saw, 130 at most; 0 if there are not two."""
    return min(JUDGED_AT, *(rows[-1]["step"] for rows in runs)) if len(runs) == 2 else 0


def report(results: Results) -> str:
    """A line per run, and what those without a correction say."""
    lines = [
        f"| engine, method, seed | last step | k3, first ten steps | growth by step {JUDGED_AT} | and by the last step "
        "| alert | reward of rollouts, first and last ten steps | trainer policy at steps 0, 40, 80, 120, 150 "
        "| s a step |",
        "|---" * 9 + "|",
    ]
    uncorrected: dict[str, list[Rows]] = {}
    for group, rows in seen(results):
        name = ENGINE_NAMES[group.condition.removeprefix(f"{FP8}_")]
        method, seed = group.run
        if method == NONE:
            uncorrected.setdefault(name, []).append(rows)
        alert = alert_at([row["k3"] for row in rows])
        own = ", ".join(f"{row['own_reward']:.3f}" for row in rows if "own_reward" in row)
        reward = f"{mean_of(rows[:WINDOW], 'reward'):.3f}, {mean_of(rows[-WINDOW:], 'reward'):.3f}"
        cells = [f"{name}, {method.name}, {seed}", str(rows[-1]["step"]), f"{mean_of(rows[:WINDOW], 'k3'):.2e}"]
        grown = "" if rows[-1]["step"] < JUDGED_AT else f"{growth(rows):.2f} ± {growth_error(rows):.2f}"
        cells += [
            grown,
            f"{growth(rows, rows[-1]['step']):.2f}",
            "no" if alert is None else f"step {alert}",
            reward,
            own,
        ]
        lines.append(f"| {' | '.join(cells)} | {mean_of(rows, 'seconds'):.1f} |")
    return "\n".join([*lines, "", *(f"**{name}: {verdict(runs)}.**" for name, runs in uncorrected.items())])


def seen(results: Results) -> list[tuple[PretrainedGroup, Rows]]:
    """The runs that have any steps, finished or not, one engine after the other."""
    unfinished, _ = results.unfinished(_RUNS)
    groups = sorted(_RUNS, key=lambda group: list(ENGINE_NAMES).index(group.condition.removeprefix(f"{FP8}_")))
    found = ((group, where) for group in groups for where in (results, unfinished) if where.is_done(group))
    return [(group, where.rows(group)) for group, where in found]


def mean_of(rows: Rows, name: str) -> float:
    """Over the steps."""
    return sum(row[name] for row in rows) / len(rows)
