# SPDX-License-Identifier: Apache-2.0
"""Switch a correction on when the alert fires: pairs of runs that fork from one state.

Fixed before the first run. A run with int4 weights and no correction trains until the alert of the guide fires. Its
state at that step is saved. It goes on without a correction for 70 steps; a second run begins from the saved state,
with the same questions and sampling seeds, and token TIS at a cap of 2.

The learning rate is 3e-6. The pilot at 4e-6 failed, because runs with bf16 weights lost their trainer policy too
(lab/evidence/collapse_runs.md). At 3e-6 six earlier runs of each arm ran: all int4 runs alerted, after 100 to 112
steps, and bf16 kept a trainer policy of 0.81 on average. A run that has not alerted by step 130 ends there, without a
pair, and is counted.

Twelve pairs, seeds 21 to 32, the lowest first, whatever comes. Primary outcome: the trainer policy on held-out
questions, mean of the last four evaluations that both runs of a pair have, of the sampled and the greedy reward; TIS
minus none, tested by the exact permutation of signs, two-sided at 0.05, when all pairs have run or no GPU time is left.
With a standard deviation of 0.12 between pairs, twelve see a difference of 0.11 with a power of 0.8. A pair counts if
both runs were seen for 50 steps after the alert. Secondary: collapsed or not by the rule of :mod:`.collapse` (McNemar's
exact test), k3 in the last ten steps. Between pairs the results are read, and decide nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from evidence.results import Results
from evidence.study import NONE, Study

from .collapse import COLLAPSE_STUDIES, CORRECTION, alert_at, collapsed_at
from .group import PretrainedGroup, runs_of
from .studies import token_tis

FORKS, SMOKE = "alert_forks", "alert_smoke"
SEEDS = tuple(range(21, 33))
STEPS_AFTER, FEWEST_AFTER, LATEST_ALERT, LAST = 70, 50, 130, 4

Rows = Sequence[dict[str, Any]]


def _runs() -> tuple[PretrainedGroup, ...]:
    """For each seed the run without a correction, and the one that forks from it."""
    (study,) = (study for study in COLLAPSE_STUDIES if study.name == CORRECTION)
    like = next(group for group in study.groups if group.name.startswith(f"{CORRECTION}_int4-"))
    assert isinstance(like, PretrainedGroup)
    changes = {"num_steps": LATEST_ALERT + STEPS_AFTER + 1, "last_fall": 0, "stops_collapsed": False}
    changes |= {"evaluates_greedily": True, "dump_steps": (0,), "steps_after_alert": STEPS_AFTER, "seeds": SEEDS}
    runs = runs_of([replace(like, name=FORKS, methods=(NONE, token_tis(2.0)), **changes)])
    first = {group.run[1]: group.name for group in runs if group.run[0] == NONE}
    return tuple(group if group.run[0] == NONE else replace(group, forks_from=first[group.run[1]]) for group in runs)


_RUNS = _runs()
FORK_STUDIES = (
    Study(
        name=SMOKE,
        question="Does everything of the forks run on this machine?",
        groups=tuple(
            replace(group, name=group.name.replace(FORKS, SMOKE), num_steps=1, steps_after_alert=0, forks_from="")
            for group in _RUNS[:2]
        ),
    ),
    Study(
        name=FORKS,
        question="Does token TIS, switched on when the alert fires, keep the trainer policy of an int4 run?",
        groups=_RUNS,
    ),
)


@dataclass(frozen=True)
class Pair:
    """Two runs from one state.

    Attributes:
        seed: Of both.
        alert: The step at which the alert fired.
        before: Trainer policy, mean of the last four evaluations up to the alert.
        none, tis: Trainer policy without and with token TIS, mean of the last four evaluations that both have.
        steps: Seen of both after the alert.
        fell: Whether the trainer policy collapsed, without and with token TIS.
        k3: Of the last ten steps, without and with token TIS.
    """

    seed: int
    alert: int
    before: float
    none: float
    tis: float
    steps: int
    fell: tuple[bool, bool]
    k3: tuple[float, float]

    @property
    def counts(self) -> bool:
        """Whether it was seen for long enough."""
        return self.steps >= FEWEST_AFTER


def pair_of(seed: int, none: Rows, tis: Rows) -> Pair | None:
    """A pair, as far as both runs were seen; None without an alert, or before an evaluation after it."""
    alert = alert_at([row["k3"] for row in none])
    if alert is None or not tis:
        return None
    last = min(none[-1]["step"], tis[-1]["step"])
    start = [row for row in none if row["step"] <= alert]
    runs = [[row for row in rows if alert < row["step"] <= last] for rows in (none, tis)]
    own = [_own(rows)[-LAST:] for rows in runs]
    if not own[0]:
        return None
    fell = [_has_fallen([*start, *rows]) for rows in runs]
    k3 = [float(np.mean([row["k3"] for row in rows[-10:]])) for rows in runs]
    values = [float(np.mean(values)) for values in (_own(start)[-LAST:], *own)]
    return Pair(seed, alert, *values, last - alert, (fell[0], fell[1]), (k3[0], k3[1]))


def _own(rows: Rows) -> list[float]:
    """The trainer policy at each evaluation: mean of the sampled and the greedy reward."""
    return [(row["own_reward"] + row["own_greedy"]) / 2 for row in rows if "own_reward" in row]


def _has_fallen(rows: Rows) -> bool:
    series = {row["step"]: row["own_reward"] for row in rows if "own_reward" in row}
    return collapsed_at([*series], [*series.values()]) is not None


def sign_test(differences: Sequence[float]) -> float:
    """Two-sided p of the exact permutation of signs of paired differences."""
    found = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in _signs(len(differences))]
    return sum(value >= found - 1e-12 for value in sums) / len(sums)


def _signs(number: int) -> list[tuple[int, ...]]:
    return list(product((1, -1), repeat=number))


def so_far(results: Results) -> str:
    """What the pairs say together."""
    return report(results).splitlines()[-1].strip("*")


def report(results: Results) -> str:
    """The pairs so far: a table, and what they say together."""
    unfinished, _ = results.unfinished(_RUNS)
    lines = [
        "| seed | alert at step | steps after it | trainer policy at the alert | in the end: none | token TIS "
        "| difference | k3 in the end: none, token TIS | collapsed: none, token TIS |",
        "|---" * 9 + "|",
    ]
    pairs, waiting = [], []
    for none, tis in zip(_RUNS[::2], _RUNS[1::2], strict=True):
        seen = [_rows(group, results, unfinished) for group in (none, tis)]
        pair = pair_of(none.run[1], *seen)
        if pair is None:
            waiting += [f"seed {none.run[1]}: {len(seen[0])} steps, no pair"] if seen[0] else []
            continue
        pairs.append(pair)
        words = ["yes" if fell else "no" for fell in pair.fell]
        cells = [pair.seed, pair.alert, pair.steps, *(f"{value:.3f}" for value in (pair.before, pair.none, pair.tis))]
        cells += [f"{pair.tis - pair.none:+.3f}", ", ".join(f"{value:.1e}" for value in pair.k3), ", ".join(words)]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", *waiting, *([""] if waiting else []), conclusion(pairs)])


def conclusion(pairs: Sequence[Pair]) -> str:
    """What the pairs that count say, and the test. Until the last of them it decides nothing."""
    counted = [pair.tis - pair.none for pair in pairs if pair.counts]
    if not counted:
        return "No pair counts yet."
    said = f"{len(counted)} of {len(SEEDS)} pairs: token TIS minus none {np.mean(counted):+.3f} on average"
    said += f", {min(counted):+.3f} to {max(counted):+.3f}"
    least = 2 ** (1 - len(counted))
    return f"**{said}, p = {sign_test(counted):.2g} (at least {least:.2g} with {len(counted)} pairs).**"


def _rows(group: PretrainedGroup, results: Results, unfinished: Results) -> Rows:
    for where in (results, unfinished):
        if where.is_done(group):
            return where.rows(group)
    return []
