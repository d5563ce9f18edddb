# SPDX-License-Identifier: Apache-2.0
"""Switch a correction on when the alert fires: the pilot, which chooses the learning rate, and what it decides.

Fixed before the first run. int4 weights without a correction, and bf16 without mismatch, two seeds that no earlier
study used, at a learning rate of 4e-6. k3 follows the sum of learning rates. At 3e-6 the alert fired after 100 to 112
steps in six of six runs, a sum of 3.0e-4 to 3.4e-4, which 4e-6 reaches after 75 to 85 steps. The trainer policy of bf16
had 0.81 there in the end; at 5e-6 it had 0.57 and 0.68 after 65 steps (means of four evaluations).

The pilot passes if the alerts of both int4 runs fire before step 100, and if every mean of the last four sampled
evaluations of both bf16 runs is above 0.75 from step 100 on, as far as the run was seen. It fails as soon as one of
these is known not to hold; then forks wait for another pilot. A run that was seen to less than its alert, or to less
than step 100, has not decided. Greedy evaluations, speed and memory are reported and decide nothing.

If it passes, forks follow: from the state at the alert two continuations of 70 steps, without a correction and with
token TIS at a cap of 2. Primary outcome: the trainer policy in the end, mean of the last four evaluations, greedy and
sampled, paired.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from evidence.results import Results
from evidence.study import Study

from .collapse import COLLAPSE_STUDIES, CORRECTION, alert_at
from .group import PretrainedGroup, runs_of

PILOT = "alert_pilot"
RATE = 4e-6
# Alerts before this step, own policies from it on.
DECIDES_AT, LOWEST, LAST = 100, 0.75, 4


def _arm(engine: str) -> PretrainedGroup:
    (study,) = (study for study in COLLAPSE_STUDIES if study.name == CORRECTION)
    like = next(group for group in study.groups if group.name.startswith(f"{CORRECTION}_{engine}-"))
    assert isinstance(like, PretrainedGroup)
    changes = {"num_steps": 151, "last_fall": 0, "evaluates_greedily": True, "keeps_alert": True, "dump_steps": (0,)}
    return replace(like, name=f"{PILOT}_{engine}", learning_rate=RATE, seeds=(11, 12), **changes)


def _smoke(group: PretrainedGroup) -> PretrainedGroup:
    return replace(group, name=f"alert_smoke_{group.name.split('_')[-1]}", num_steps=1, seeds=(0,), keeps_alert=False)


_ARMS = [_arm("int4"), _arm("bf16")]
FORK_STUDIES = (
    Study(
        name="alert_smoke",
        question="Does everything of the pilot run on this machine?",
        groups=runs_of([_smoke(arm) for arm in _ARMS]),
    ),
    Study(
        name=PILOT,
        question="At a rate of 4e-6, do int4 runs alert before step 100 while bf16 keeps its own policy?",
        groups=runs_of(_ARMS),
    ),
)

Rows = Sequence[dict[str, Any]]


def report(results: Results) -> str:
    """What the pilot decides as far as it ran: a table, and the verdict."""
    (study,) = (study for study in FORK_STUDIES if study.name == PILOT)
    unfinished, begun = results.unfinished(study.groups)
    lines = [
        "| run | steps | s a step | k3, first ten and last five | alert | trainer policy, last four: sampled, greedy "
        f"| lowest from step {DECIDES_AT} on |",
        "|---" * 7 + "|",
    ]
    verdicts = []
    for group in study.groups:
        assert isinstance(group, PretrainedGroup)
        is_done = results.is_done(group)
        rows = (results if is_done else unfinished).rows(group) if is_done or group in begun else []
        lines += [_line(group, rows)] if rows else []
        verdicts.append(verdict(group, rows))
    return "\n".join([*lines, "", f"**{decision(verdicts)}**"])


def decision(verdicts: Sequence[bool | None]) -> str:
    """Of all runs: one that fails decides, and all have to pass."""
    if False in verdicts:
        return f"The pilot fails at {RATE:g}."
    return f"The pilot passes at {RATE:g}." if all(verdicts) else "The pilot has not decided."


def verdict(group: PretrainedGroup, rows: Rows) -> bool | None:
    """Whether a run fulfils the condition of its arm; None: it was not seen to the step at which it is known."""
    if group.engine.weights != "auto":
        fired = alert_at([row["k3"] for row in rows])
        if fired is not None:
            return fired < DECIDES_AT
        return False if len(rows) >= DECIDES_AT else None
    means = lasting(rows)
    return bool(min(means) > LOWEST) if means else None


def lasting(rows: Rows, name: str = "own_reward") -> list[float]:
    """Means of the last four evaluations, at every evaluation from the deciding step on."""
    found = [(row["step"], row[name]) for row in rows if name in row]
    values = [value for _, value in found]
    return [
        float(np.mean(values[max(0, end - LAST) : end]))
        for end, (step, _) in enumerate(found, start=1)
        if step >= DECIDES_AT
    ]


def _line(group: PretrainedGroup, rows: Rows) -> str:
    k3 = [row["k3"] for row in rows]
    own = (
        f"{np.mean([row[name] for row in rows if name in row][-LAST:]):.3f}" for name in ("own_reward", "own_greedy")
    )
    means = lasting(rows)
    cells = (
        group.name.removeprefix(f"{PILOT}_").removesuffix("-none"),
        str(len(rows)),
        f"{np.median([row['seconds'] for row in rows]):.1f}",
        f"{np.mean(k3[:10]):.1e}, {np.mean(k3[-5:]):.1e}",
        str(alert_at(k3)),
        ", ".join(own),
        f"{min(means):.3f}" if means else "",
    )
    return f"| {' | '.join(cells)} |"
