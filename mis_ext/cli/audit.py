"""``mis-ext audit``: the exactness audit of dumped log-probs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mis_ext.dumps import Dumps
    from mis_ext.onpolicy.audit.report import AuditReport

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
        help="are the trainer's log-probs the bits that the engine sampled with?",
        description=(
            "Compares the log-probs of both engines bit by bit. Files: .pt of slime's --save-debug-train-data or of "
            "Miles' --dump-details (where each rank wrote a file: those of all ranks), or .jsonl with log_probs, "
            "rollout_log_probs, loss_mask, ... of one sample per line. A copy has the same bits as two engines that "
            "agree: without --provenance, --engine-records or --control equal log-probs are UNPROVED. Exit code: 0 "
            "exact, 1 different, unproved or invalid, 2 unreadable."
        ),
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here too")
    parser.add_argument(
        "--provenance",
        choices=("decode", "prefill", "unknown"),
        default="unknown",
        help="you state how the rollout log-probs came about: recorded while sampling, or by scoring the finished text "
        "again",
    )
    parser.add_argument(
        "--engine-records",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="what the engine's side recorded before training (the hosts' --save-debug-rollout-data): shows that the "
        "rollout log-probs are the engine's",
    )
    parser.add_argument(
        "--control",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a run of the same code in which the engines must differ, such as one with a forgotten weight sync: shows "
        "that no stream is filled in from the other",
    )
    parser.add_argument(
        "--train-weight-version",
        metavar="VERSION",
        help="with which the trainer scored, for files that do not say; compared with the engine's weight_versions",
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="read .pt files that hold more than tensors; this can run any code that is in them",
    )
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Audit the files, show the report; 0 if it passed, else 1."""
    # Before the work: the report is shown with it.
    _require_rich()
    from mis_ext.onpolicy.audit.dumps import audit_dumps

    groups = {name: getattr(parsed, name) for name in ("files", "engine_records", "control")}
    opened = {name: paths and _open(paths, trust_pickle=parsed.trust_pickle) for name, paths in groups.items()}
    report = audit_dumps(
        opened.pop("files"),
        **opened,
        provenance=parsed.provenance,
        train_weight_version=parsed.train_weight_version,
    )
    _show(report)
    if parsed.json is not None:
        files = {name: [str(path) for path in paths or ()] for name, paths in groups.items()}
        parsed.json.write_text(json.dumps(files | report.to_dict(), indent=2, allow_nan=False) + "\n")
    return 0 if report.passed else 1


def _require_rich() -> None:
    try:
        import rich  # noqa: F401
    except ImportError as error:
        raise OSError("mis-ext audit needs rich: pip install mis_ext[cli]") from error


def _open(paths: list[Path], *, trust_pickle: bool) -> Dumps:
    from rich.console import Console
    from rich.progress import track

    from mis_ext.dumps import Dumps

    def watch(paths: Sequence[Path]) -> Iterable[Path]:
        few = len(paths) < _MIN_FILES_FOR_PROGRESS
        return track(paths, "reading", console=Console(stderr=True), transient=True, disable=few)

    # What cannot be used has a verdict of its own here.
    return Dumps(paths, trust_pickle=trust_pickle, need_tokens=False, watch=watch)


def _show(report: AuditReport) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(report.verdict.value, style=f"bold {_COLORS[report.verdict.value]}"))
    console.print(_grid(report.rows()))
    if report.num_active_tokens:
        table = Table("probability", "tokens", "different", "mean", "max", title="by rollout probability")
        for row in report.decile_rows():
            table.add_row(*row)
        console.print(table)


def _grid(rows: list[tuple[str, str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        # Text, because names of files may hold what rich would read as markup.
        grid.add_row(Text(name, style="dim"), Text(value))
    return grid
