# SPDX-License-Identifier: Apache-2.0
"""When would an alert on k3 have fired? Every run of a pretrained model whose k3 was kept by step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from evidence.results import Results
from evidence.study import NONE, Study

from .collapse import HIGHEST, SMOOTH, TIMES, WINDOW
from .collapse_runs import LAST, own_rewards, runs_seen

SMOLLM2, METHODS = "pretrained_", (NONE.name, "token_tis")
_HEAD = """# When would an alert on k3 have fired?

`python lab/studies/evidence.py alert`, from the results that are here; nothing runs.

k3 is smoothed over {smooth} steps. *Rise*: its highest mean over that of the first {window} steps. *Trainer policy*:
the trainer's own reward on held-out questions, mean of the last {last} evaluations. Both from the lowest run to the
highest.

## Runs on which the limits were chosen

Every study of SmolLM2-135M-Instruct whose runs have {shortest} steps and more, and the
[ladder](collapse_runs.md#the-ladder-of-mismatch-without-a-correction) of Qwen2.5-Coder-1.5B-Instruct
(`collapse_ladder`); without a correction (`none`), and with token TIS.

"""
_LATER = """
## Runs that came later

[int4 and bf16](collapse.md) with Qwen2.5-Coder-1.5B-Instruct, all arms: {hits} of {uncorrected} runs with int4 weights
and no correction crossed a limit, and {false} of the {others} others did. [Published
runs](published.md#the-alert-on-these-runs) of Qwen3-4B are a second test.

"""
_COLUMNS = (
    f"| runs | method | number | k3, first {WINDOW} steps | rise | rise above {TIMES:g} | k3 above {HIGHEST:g} "
    "| trainer policy |\n|---|---|---|---|---|---|---|---|\n"
)


def report(ladder: Study, correction: Study, results: Results, folder: Path) -> None:
    """Write ``alert.md``."""
    small = ((name, results.rows_of(name)) for name in results.names() if name.startswith(SMOLLM2))
    runs = [(name.partition("-seed")[0], rows[0]["method"], rows) for name, rows in small]
    chosen = [run for run in (*runs, *_runs_of(ladder, results)) if run[1] in METHODS]
    later = _runs_of(correction, results)
    fired = [(run[:2] == (f"{correction.name}_int4", NONE.name), is_fired(run[2])) for run in later]
    uncorrected, others = ([does for is_one, does in fired if is_one == asked] for asked in (True, False))
    text = _HEAD.format(window=WINDOW, smooth=SMOOTH, last=LAST, shortest=WINDOW + SMOOTH)
    text += _COLUMNS + "".join(f"{row}\n" for row in table(chosen))
    text += _LATER.format(hits=sum(uncorrected), uncorrected=len(uncorrected), false=sum(others), others=len(others))
    text += _COLUMNS + "".join(f"{row}\n" for row in table(later))
    (folder / "alert.md").write_text(text, encoding="utf-8")


def _runs_of(study: Study, results: Results) -> list[tuple[str, str, Sequence[Mapping[str, Any]]]]:
    seen = runs_seen(study.with_more(results.names()), results)
    return [(group.condition, group.run[0].name, rows) for group, rows in seen]


def is_fired(steps: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a run crossed one of the limits."""
    k3 = [row["k3"] for row in steps]
    means = np.convolve(k3[WINDOW:], np.ones(SMOOTH) / SMOOTH, "valid")
    return bool((means > min(TIMES * float(np.mean(k3[:WINDOW])), HIGHEST)).any())


def table(runs: Iterable[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """A row for each condition and method, of the steps of each run."""
    found: dict[tuple[str, str], list[tuple[list[float], float]]] = defaultdict(list)
    for condition, method, steps in runs:
        k3 = [row["k3"] for row in steps]
        # An aligned engine has none.
        if len(k3) >= WINDOW + SMOOTH and all(k3[:WINDOW]):
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
