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

from .collapse import WINDOW
from .collapse_runs import LAST, SMOOTH, own_rewards, runs_seen

TIMES, HIGHEST = 5.0, 0.1
"""An alert: a mean of ``SMOOTH`` steps above so many times that of the first ``WINDOW``; or above so much."""
SMOLLM2, METHODS = "pretrained_", (NONE.name, "token_tis")
_HEAD = """# When would an alert on k3 have fired?

`python lab/studies/evidence.py alert`, from the results that are here; nothing runs.

Every study of SmolLM2-135M-Instruct whose runs have {window} steps and more, and the
[ladder](collapse_runs.md#the-ladder-of-mismatch-without-a-correction) of
Qwen2.5-Coder-1.5B-Instruct (`collapse_ladder`); without a correction (`none`), and with token TIS. k3 is smoothed over
{smooth} steps. *Rise*: its highest mean over that of the first {window} steps. *Own policy*: the trainer's own reward
on held-out questions, mean of the last {last} evaluations. Both from the lowest run to the highest.

| runs | method | number | k3, first {window} steps | rise | rise above {times:g} | k3 above {highest:g} | own policy |
|---|---|---|---|---|---|---|---|
"""


def report(ladder: Study, results: Results, folder: Path) -> None:
    """Write ``alert.md``."""
    small = ((name, results.rows_of(name)) for name in results.names() if name.startswith(SMOLLM2))
    runs = [(name.partition("-seed")[0], rows[0]["method"], rows) for name, rows in small]
    seen = runs_seen(ladder.with_more(results.names()), results)
    runs += [(group.condition, group.run[0].name, rows) for group, rows in seen]
    head = _HEAD.format(window=WINDOW, smooth=SMOOTH, last=LAST, times=TIMES, highest=HIGHEST)
    (folder / "alert.md").write_text(head + "".join(f"{row}\n" for row in table(runs)), encoding="utf-8")


def table(runs: Iterable[tuple[str, str, Sequence[Mapping[str, Any]]]]) -> list[str]:
    """A row for each condition and method, of the steps of each run."""
    found: dict[tuple[str, str], list[tuple[list[float], float]]] = defaultdict(list)
    for condition, method, steps in runs:
        k3 = [row["k3"] for row in steps]
        # An aligned engine has none.
        if method in METHODS and len(k3) >= WINDOW + SMOOTH and all(k3[:WINDOW]):
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
