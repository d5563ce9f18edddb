# SPDX-License-Identifier: Apache-2.0
"""A table of the first look at a model of 1.5 billion weights: one run each, before any study of it.

    python lab/benchmarks/first_look.py

What ran, and what it can say, is in lab/evidence/README.md ("Another model family").
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from statistics import mean

ROWS = Path(__file__).parents[1] / "evidence" / "first_look.jsonl"
"""A line per step of each run: its engine, its method, and numbers of the rollout."""
NUMBERS = {"reward": ".2f", "k3": ".1g", "grad_norm": ".2g", "length": ".0f"}
STEPS = 8


def main() -> None:
    """Print means over STEPS steps, a row for each run."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    starts = range(0, 48, STEPS)
    print("| engine, method | number |", " | ".join(f"{start}-{start + STEPS - 1}" for start in starts), "|")
    print("|---" * (2 + len(starts)) + "|")
    for run, of_run in groupby(rows, key=lambda row: f"{row['engine']}, {row['method']}"):
        steps = {row["step"]: row for row in of_run}
        for number, form in NUMBERS.items():
            cells = []
            for start in starts:
                values = [steps[step][number] for step in range(start, start + STEPS) if step in steps]
                cells.append(f"{mean(values):{form}}" if len(values) == STEPS else "")
            print(f"| {run} | {number} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
