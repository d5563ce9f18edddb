# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: a new one for each run, and none is replaced unasked. Needs no package."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

RUNS = Path("runs")


def refuse_to_replace(args: argparse.Namespace) -> None:
    """Refuse a folder that holds a run which nobody said to replace, and to go on where there is nothing to go on from.

    Raises:
        ValueError: With what to do instead.
    """
    folder = args.output_dir or (_last(args.rollout_engine) if args.resume else None)
    if args.resume and (folder is None or not (folder / "checkpoint.pt").exists()):
        where = folder or RUNS / f"grpo_{args.rollout_engine}_*"
        raise ValueError(f"--resume: {where} has no checkpoint (checkpoint.pt) to go on from")
    metrics = folder and folder / "metrics.jsonl"
    if metrics and not (args.resume or args.overwrite) and metrics.exists() and "\n" in metrics.read_text():
        raise ValueError(
            f"{folder} holds a run: go on with it (--resume), replace its metrics, plot and checkpoint (--overwrite), "
            "or choose another folder (--output-dir; without it each run gets a new one)"
        )


def make_output_dir(args: argparse.Namespace) -> Path:
    """Return the folder that the flags name, or that of the last run to go on with or to replace, or a new one."""
    last = _last(args.rollout_engine)
    folder = args.output_dir or (last if args.resume or args.overwrite else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    number = 1 if last is None else _number(last) + 1
    while True:
        folder = RUNS / f"grpo_{args.rollout_engine}_{number}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            # Another run that was started just now has it.
            number += 1
        else:
            return folder


def _last(engine: str) -> Path | None:
    """The folder of this engine with the largest number."""
    named = (path for path in RUNS.glob(f"grpo_{engine}_*") if re.fullmatch(r"\d+", path.name.rpartition("_")[2]))
    return max(named, key=_number, default=None)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
