# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: a new one by default; an existing run is replaced only on request. Needs no package."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

RUNS = Path("runs")


def refuse_to_replace(args: argparse.Namespace) -> None:
    """Raise an error for a folder with a run without --overwrite or --resume, and for --resume without a checkpoint.

    Raises:
        ValueError: With the options to use instead.
    """
    folder = args.output_dir or (_last(args.rollout_engine) if args.resume else None)
    if args.resume and (folder is None or not (folder / "checkpoint.pt").exists()):
        where = folder or RUNS / f"grpo_{args.rollout_engine}_*"
        raise ValueError(f"--resume: {where} has no checkpoint (checkpoint.pt) to continue from")
    metrics = folder and folder / "metrics.jsonl"
    if metrics and not (args.resume or args.overwrite) and metrics.exists() and "\n" in metrics.read_text():
        raise ValueError(
            f"{folder} has a run: continue it (--resume), replace its metrics, plot and checkpoint (--overwrite), or "
            "choose another folder (--output-dir; without it each run gets a new one)"
        )


def make_output_dir(args: argparse.Namespace) -> Path:
    """Return the folder of the flags, the folder of the last run to continue or replace, or a new folder."""
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
            # Another run has just created this folder.
            number += 1
        else:
            return folder


def _last(engine: str) -> Path | None:
    """The folder with the largest number for this engine."""
    named = (path for path in RUNS.glob(f"grpo_{engine}_*") if re.fullmatch(r"\d+", path.name.rpartition("_")[2]))
    return max(named, key=_number, default=None)


def _number(folder: Path) -> int:
    return int(folder.name.rpartition("_")[2])
