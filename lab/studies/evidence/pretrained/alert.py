# SPDX-License-Identifier: Apache-2.0
"""When would an alert on k3 have fired? Every run of a pretrained model whose k3 was kept by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.results import Results
from evidence.study import NONE, Study

from .collapse import HIGHEST, LADDER, SMOOTH, TIMES, WINDOW, alert_at
from .collapse_runs import LAST, own_rewards, runs_seen

SMOLLM2, METHODS = "pretrained_", (NONE.name, "token_tis")
# An engine that is behind, and weights four and eight updates stale.
UNHEALTHY = {"pretrained_precision_fp16_trainer", "pretrained_stale_4", "pretrained_stale_8"}
OLD, UNCORRECTED = ("pretrained_stale_4", "pretrained_stale_8"), (NONE.name, "none, again")
TINY = "staleness_1"
# How far the last evaluation, or the last ten steps, may end below the best.
HARM = 0.1
_HEAD = """# When would an alert on k3 have fired?

`python lab/studies/evidence.py alert` makes this page from the stored results.

k3 is smoothed over {smooth} steps. *Rise* is its highest mean divided by that of the first {window} steps. *Trainer
policy* is its reward on held-out questions, mean of the last {last} evaluations. Both columns have the lowest and the
highest run.

## Runs on which the limits were chosen

The table has every study of SmolLM2-135M-Instruct whose runs have at least {shortest} steps, and the
[ladder](collapse_runs.md#the-ladder-of-mismatch-without-a-correction) of Qwen2.5-Coder-1.5B-Instruct
(`collapse_ladder`), without a correction (`none`) and with token TIS.

{healthy} of these runs have a healthy engine and weights at most one update stale: {small} of SmolLM2, {large} of
Qwen2.5 in bf16. {fired} of them crossed a limit. {repeats} of the {healthy} repeat another run and have the same k3 in
the first {shortest} steps, so {different} are different runs.

"""
_OLD = """
**Weights four and eight updates stale, no correction** (`none`, and the same again). {failed} of {old} runs failed:
their last evaluation is more than {harm:g} below their best. The limit of {highest:g} alone fires in {found} of the
{failed}, and in {false} others. This limit was chosen on these runs.

**The tiny model** is not in the table, and the rule does not fit it. With [weights one update stale](staleness.md), the
mean of {smooth} steps exceeds {highest:g} within the first {window} steps in {early} of {tiny} runs (all eight
methods), and later in the others. {unharmed} of the {tiny} end at most {harm:g} below their best {window} steps. The
rule, which begins at step {window}, fires in {alerts} runs, of which {alarms} are unharmed.
"""
_LATER = """
## Runs that came later

[Qwen2.5-Coder-1.5B-Instruct with int4 and bf16](collapse.md), all arms. {hits} of {uncorrected} runs with int4 weights
and no correction crossed a limit, and {false} of the {others} others did. The limits were fixed before these runs began
(revision abba27e5). The runs are new, but model, questions, and engines are those of the ladder. The mean of {last}
evaluations was {before} at the alert and {after} at the end. [Published runs](published.md#the-alert-on-these-runs) of
Qwen3-4B are a second test.

"""
_COLUMNS = (
    f"| runs | method | count | k3, first {WINDOW} steps | rise | rise above {TIMES:g} | k3 above {HIGHEST:g} "
    "| trainer policy |\n|---|---|---|---|---|---|---|---|\n"
)

Steps = Sequence[Mapping[str, Any]]


def report(ladder: Study, correction: Study, results: Results, folder: Path) -> None:
    """Write ``alert.md``."""
    small = [
        (name.partition("-seed")[0], rows[0]["method"], rows)
        for name in results.names()
        if name.startswith(SMOLLM2) and (rows := results.rows_of(name))
    ]
    chosen = [run for run in (*small, *_runs_of(ladder, results)) if run[1] in METHODS and _is_seen(run[2])]
    later = _runs_of(correction, results)
    sizes = {"smooth": SMOOTH, "window": WINDOW, "last": LAST, "shortest": WINDOW + SMOOTH}
    text = _HEAD.format(**sizes, **_healthy(chosen))
    text += _COLUMNS + "".join(f"{row}\n" for row in table(chosen))
    old = [rows for condition, method, rows in small if condition in OLD and method in UNCORRECTED]
    text += _OLD.format(**sizes, harm=HARM, highest=HIGHEST, **_failures(old), **_tiny(results.rows_of(TINY)))
    text += _LATER.format(**sizes, **_hits(later, f"{correction.name}_int4"))
    text += _COLUMNS + "".join(f"{row}\n" for row in table(later))
    (folder / "alert.md").write_text(text, encoding="utf-8")


def _healthy(runs: Sequence[tuple[str, str, Steps]]) -> dict[str, int]:
    """How many runs have a healthy engine and weights at most one update stale, and how many of these differ."""
    healthy = [
        run for run in runs if (run[0].startswith(SMOLLM2) and run[0] not in UNHEALTHY) or run[0] == f"{LADDER}_bf16"
    ]
    small = sum(condition.startswith(SMOLLM2) for condition, *_ in healthy)
    different = len({tuple(row["k3"] for row in rows[: WINDOW + SMOOTH]) for *_, rows in healthy})
    return {
        "healthy": len(healthy),
        "small": small,
        "large": len(healthy) - small,
        "fired": sum(is_fired(rows) for *_, rows in healthy),
        "repeats": len(healthy) - different,
        "different": different,
    }


def _failures(runs: Sequence[Steps]) -> dict[str, int]:
    """For uncorrected runs with stale weights: how many failed, and in how many the fixed limit fires."""
    failed = [max(own) - own[-1] > HARM for own in map(own_rewards, runs)]
    fired = [bool(_means(rows)[WINDOW:].max() > HIGHEST) for rows in runs]
    found = sum(np.logical_and(failed, fired))
    return {"old": len(runs), "failed": sum(failed), "found": found, "false": sum(fired) - found}


def _tiny(rows: Steps) -> dict[str, int]:
    """For the runs of the tiny model: how many have a high k3 at once, how many end well, and where the rule fires."""
    runs: dict[tuple[str, int], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        runs[row["method"], row["seed"]].append(row)
    rewards = [_means(of_run, "reward", WINDOW) for of_run in runs.values()]
    unharmed = [bool(means.max() - means[-1] <= HARM) for means in rewards]
    alerts = [*map(is_fired, runs.values())]
    return {
        "tiny": len(runs),
        "early": sum(bool((_means(of_run)[: WINDOW + 1 - SMOOTH] > HIGHEST).any()) for of_run in runs.values()),
        "unharmed": sum(unharmed),
        "alerts": sum(alerts),
        "alarms": sum(np.logical_and(alerts, unharmed)),
    }


def _hits(runs: Sequence[tuple[str, str, Steps]], worst: str) -> dict[str, Any]:
    """In how many runs of the later study the alert fires, and what the trainer policy of those is worth."""
    uncorrected = [rows for condition, method, rows in runs if (condition, method) == (worst, NONE.name)]
    others = [rows for condition, method, rows in runs if (condition, method) != (worst, NONE.name)]
    ends = []
    for rows in uncorrected:
        alert = alert_at([row["k3"] for row in rows])
        own = own_rewards([row for row in rows if alert is not None and row["step"] <= alert])
        ends += [(np.mean(own[-LAST:]), np.mean(own_rewards(rows)[-LAST:]))] if own else []
    before, after = (f"{min(values):.2f} to {max(values):.2f}" for values in zip(*ends, strict=True))
    hits, false = (sum(map(is_fired, part)) for part in (uncorrected, others))
    return {
        "hits": hits,
        "uncorrected": len(uncorrected),
        "false": false,
        "others": len(others),
        "before": before,
        "after": after,
    }


def _runs_of(study: Study, results: Results) -> list[tuple[str, str, Steps]]:
    seen = runs_seen(study.with_more(results.names()), results)
    return [(group.condition, group.run[0].name, rows) for group, rows in seen]


def _means(steps: Steps, name: str = "k3", number: int = SMOOTH) -> NDArray[np.float64]:
    """Of so many steps, from the first that has as many."""
    return np.convolve([row[name] for row in steps], np.ones(number) / number, "valid")


def _is_seen(steps: Steps) -> bool:
    """Whether it is long enough for an alert, and has a k3: an aligned engine has none."""
    return len(steps) >= WINDOW + SMOOTH and all(row["k3"] for row in steps[:WINDOW])


def is_fired(steps: Steps) -> bool:
    """Whether a run crossed one of the limits."""
    return alert_at([row["k3"] for row in steps]) is not None


def table(runs: Iterable[tuple[str, str, Steps]]) -> list[str]:
    """A row for each condition and method, of the steps of each run."""
    found: dict[tuple[str, str], list[tuple[list[float], float]]] = defaultdict(list)
    for condition, method, steps in runs:
        k3 = [row["k3"] for row in steps]
        found[condition, method].append((k3, float(np.mean(own_rewards(steps)[-LAST:]))))
    return [row_of(*key, *zip(*of_condition, strict=True)) for key, of_condition in found.items()]


def row_of(condition: str, method: str, k3: Sequence[Sequence[float]], own: Sequence[float]) -> str:
    """Of the runs of one condition."""
    means = [np.convolve(run[WINDOW:], np.ones(SMOOTH) / SMOOTH, "valid") for run in k3]
    starts = [float(np.mean(run[:WINDOW])) for run in k3]
    rises = [float(mean.max()) / start for mean, start in zip(means, starts, strict=True)]
    above = sum(rise > TIMES for rise in rises), sum(bool(mean.max() > HIGHEST) for mean in means)
    numbers = (
        f"{np.mean(starts):.1e}",
        f"{min(rises):.1f} to {max(rises):.1f}",
        *(f"{count} of {len(k3)}" for count in above),
        f"{min(own):.2f} to {max(own):.2f}",
    )
    return f"| {' | '.join((f'`{condition}`', method, str(len(k3)), *numbers))} |"
