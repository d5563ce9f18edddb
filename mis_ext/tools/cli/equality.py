# SPDX-License-Identifier: Apache-2.0
"""``mis-ext audit`` and ``mis-ext diff``: are trainer and engine bitwise equal, and where do they first differ?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mis_ext import onpolicy
from mis_ext.files import to_jsonable
from mis_ext.tools.cli.command import Result, show, show_grid, show_table, watch

if TYPE_CHECKING:
    from mis_ext.onpolicy.audit.audit_report import AuditReport

_COLORS = {
    "EXACT": "green",
    "DIFFERENT": "red",
    "UNPROVED": "yellow",
    "INVALID": "magenta",
}


def add_audit(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext audit``."""
    parser = subparsers.add_parser(
        "audit",
        help="check that trainer and engine log-probs are equal bit for bit",
        description=(
            "Compare the log-probs of trainer and engine bit for bit. Pass the files of all ranks: .pt files of "
            "--dump-details or --save-debug-train-data, or .jsonl files with one sample per line (log_probs, "
            "rollout_log_probs, loss_mask, ...). Equal log-probs are UNPROVED without --engine-records, because one "
            "side may be a copy of the other. Exit code: 0 exact; 1 different, unproved, or invalid; 2 a file cannot "
            "be read."
        ),
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="dumps of one or more rollouts")
    parser.add_argument(
        "--engine-records",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="files that the engine side wrote before training (--save-debug-rollout-data of slime and Miles). They "
        "show that the rollout log-probs come from the engine",
    )
    parser.add_argument(
        "--trust-pickle",
        action="store_true",
        help="also read .pt files that contain more than tensors. Such a file can run any code: use only files you "
        "trust",
    )
    parser.set_defaults(run=run_audit, shown_with=("rich",))


def run_audit(parsed: argparse.Namespace) -> Result:
    """Audit the files. The exit code is 0 if they passed, else 1."""
    from mis_ext.onpolicy.audit.log_probs import audit_dumps
    from mis_ext.tools.dumps import Dumps

    # Do not skip unusable samples: the audit has a verdict for them.
    options: dict[str, Any] = {"trust_pickle": parsed.trust_pickle, "need_tokens": False, "watch": watch}
    records = Dumps(parsed.engine_records, **options) if parsed.engine_records else None
    report = audit_dumps(Dumps(parsed.files, **options), engine_records=records)
    files = {name: [*map(str, getattr(parsed, name) or [])] for name in ("files", "engine_records")}
    return Result(files | report.to_dict(), lambda: _show_audit(report), 0 if report.passed else 1)


def _show_audit(report: AuditReport) -> None:
    show(report.verdict.value, f"bold {_COLORS[report.verdict.value]}")
    show_grid(report.rows())


_SIDE = "a saved recording, or a directory of SGLang dumper files"


def add_diff(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext diff``."""
    parser = subparsers.add_parser(
        "diff",
        help="find the first module at which two recordings differ",
        description="Compare two recordings of the same tokens bit for bit. Print the first module, in A's order of "
        "execution, at which they differ, and the position. A PATTERN is a shell pattern of module names, such as "
        "'*.mlp'. Exit code: 0 equal, 1 not, 2 wrong usage.",
    )
    parser.add_argument("a", metavar="A", type=Path, help=_SIDE)
    parser.add_argument("b", metavar="B", type=Path, help=_SIDE)
    parser.add_argument(
        "--map",
        metavar="FILE",
        type=Path,
        help="YAML or JSON file: names of modules in A and their names in B. {layer} matches one part of a name",
    )
    parser.add_argument(
        "--allow",
        metavar="PATTERN",
        action="append",
        default=[],
        help="modules that may be on one side only, or may have different rows, dtypes, or sizes; values that both "
        "sides have must still be equal. Repeatable",
    )
    for side, what in {"": "SGLang request", "-a": "SGLang request of A", "-b": "SGLang request of B"}.items():
        parser.add_argument(
            f"--request{side}",
            metavar="ID",
            action="append",
            help=f"id of the {what} of sequence 0, 1, ...; repeatable",
        )
    parser.set_defaults(run=run_diff, shown_with=("rich",))


def run_diff(arguments: argparse.Namespace) -> Result:
    """Compare the recordings. The exit code is 0 if they are equal, else 1."""
    requests_a, requests_b = (own or arguments.request for own in (arguments.request_a, arguments.request_b))
    if len(requests_a or ()) != len(requests_b or ()) and arguments.a.is_dir() and arguments.b.is_dir():
        raise ValueError(f"pass as many requests of A as of B, got {requests_a} and {requests_b}")
    comparison = onpolicy.compare(
        _read(arguments.a, requests_a),
        _read(arguments.b, requests_b),
        names=onpolicy.NameMap.load(arguments.map) if arguments.map else None,
        allow=arguments.allow,
    )
    first = comparison.first_divergent
    content = {
        "verdict": comparison.verdict,
        "first_divergent": first and first.name,
        "culprits": [module.name for module in comparison.culprits],
        **to_jsonable(comparison),
    }
    return Result(content, lambda: _show_comparison(comparison), 0 if comparison.passed else 1)


def _read(path: Path, requests: list[str] | None) -> onpolicy.Recording:
    return onpolicy.read_sglang_dumps(path, requests=requests) if path.is_dir() else onpolicy.Recording.load(path)


def _show_comparison(comparison: onpolicy.Comparison) -> None:
    rows, styles = [], []
    for module in comparison.modules:
        inputs = {True: "equal", False: "differ", None: "unknown"}[module.inputs_equal]
        if module.is_culprit:
            inputs = f"equal{module.inputs_besides()} <- culprit"
        rows.append(
            (
                module.name if module.name == module.other else f"{module.name}\n{module.other}",
                str(module.num_rows),
                str(module.num_differing),
                f"{module.first.sequence}:{module.first.position}" if module.first else "",
                f"{module.max_abs:.3g}" if module.num_differing else "",
                str(module.max_ulp) if module.num_differing else "",
                inputs,
            )
        )
        styles.append("bold red" if module.is_culprit else "yellow" if module.num_differing else "")
    if rows:
        show_table(("module", "rows", "differing", "first", "max abs", "max ULP", "inputs"), rows, styles=styles)
    show(comparison.summary())
