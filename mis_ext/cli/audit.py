"""``mis-ext audit``: the exactness audit of dumped log-probs."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mis_ext.cli.command import Result, grid, watch

if TYPE_CHECKING:
    from mis_ext.dumps import Dumps
    from mis_ext.onpolicy.audit.audit_report import AuditReport

_MIN_FILES_FOR_PROGRESS = 4
_COLORS = {
    "EXACT": "green",
    "EXACT_UP_TO_SIGNED_ZERO": "green",
    "DIFFERENT": "red",
    "UNPROVED": "yellow",
    "INVALID": "magenta",
}


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext audit``."""
    parser = subparsers.add_parser(
        "audit",
        help="do trainer and engine give every token the same log-prob, bit for bit?",
        description=(
            "Compares the log-probs of trainer and engine, bit for bit. Files of all ranks: .pt of --dump-details or "
            "--save-debug-train-data; or .jsonl, one sample per line, with log_probs, rollout_log_probs, "
            "loss_mask, ... Equal log-probs alone prove nothing: one side may be a copy of the other. They are "
            "UNPROVED until --provenance, --engine-records or --control says where they come from. Exit code: 0 exact; "
            "1 different, unproved or invalid; 2 a file cannot be read."
        ),
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="dumps of one or more rollouts")
    parser.add_argument(
        "--provenance",
        choices=("decode", "prefill", "unknown"),
        default="unknown",
        help="you state where the rollout log-probs come from. decode: recorded while sampling. prefill: the engine "
        "scored the finished text again",
    )
    parser.add_argument(
        "--engine-records",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="files that the engine's side wrote before training (--save-debug-rollout-data of slime and Miles). They "
        "show that the rollout log-probs are the engine's",
    )
    parser.add_argument(
        "--control",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="dumps of a control run: the same code, but trainer and engine must differ, for example without a weight "
        "sync. They show that neither side is a copy of the other",
    )
    parser.add_argument(
        "--train-weight-version",
        metavar="VERSION",
        help="version of the weights with which the trainer scored, if the files do not have it. It is compared with "
        "the engine's weight_versions",
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="also read .pt files that hold more than tensors. Such a file can run any code: use only files you trust",
    )
    parser.set_defaults(run=run, shown_with=("rich",))


def run(parsed: argparse.Namespace) -> Result:
    """Audit the files; the exit code is 0 if they passed, else 1."""
    from mis_ext.onpolicy.audit.dumps import audit_dumps

    groups = {name: getattr(parsed, name) for name in ("files", "engine_records", "control")}
    opened = {name: paths and _open(paths, trust_pickle=parsed.trust_pickle) for name, paths in groups.items()}
    report = audit_dumps(
        opened.pop("files"),
        **opened,
        provenance=parsed.provenance,
        train_weight_version=parsed.train_weight_version,
    )
    files = {name: [str(path) for path in paths or ()] for name, paths in groups.items()}
    return Result(files | report.to_dict(), lambda: _show(report), 0 if report.passed else 1)


def _open(paths: list[Path], *, trust_pickle: bool) -> Dumps:
    from mis_ext.dumps import Dumps

    # What cannot be used has a verdict of its own here.
    return Dumps(
        paths, trust_pickle=trust_pickle, need_tokens=False, watch=partial(watch, min_files=_MIN_FILES_FOR_PROGRESS)
    )


def _show(report: AuditReport) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(report.verdict.value, style=f"bold {_COLORS[report.verdict.value]}"))
    console.print(grid(report.rows()))
    if report.num_active_tokens:
        table = Table("probability", "tokens", "different", "mean", "max", title="by rollout probability")
        for row in report.decile_rows():
            table.add_row(*row)
        console.print(table)
