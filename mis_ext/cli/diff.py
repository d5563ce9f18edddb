"""``mis-ext diff``: where two recordings of the same tokens differ."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mis_ext import onpolicy
from mis_ext.cli.command import Result
from mis_ext.files import printable

if TYPE_CHECKING:
    from rich.table import Table

_SIDE = "a saved recording, or a directory of SGLang dumper files"


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``diff`` to the subcommands of ``mis-ext``."""
    parser = subparsers.add_parser(
        "diff",
        help="the first module at which two recordings differ, bit for bit",
        description="Compares two recordings of the same tokens, bit for bit. Names the first module, in A's order of "
        "execution, at which they differ, and the position. A PATTERN is a shell pattern of module names, such as "
        "'*.mlp'. Exit code: 0 equal, 1 not, 2 wrong usage.",
    )
    parser.add_argument("a", metavar="A", type=Path, help=_SIDE)
    parser.add_argument("b", metavar="B", type=Path, help=_SIDE)
    parser.add_argument(
        "--map",
        metavar="FILE",
        type=Path,
        help="YAML or JSON file: names of modules in A, and their names in B. {layer} stands for one part of a name",
    )
    for flag, what in {
        "missing": "modules that may be on one side only",
        "rows": "modules for which one side may have rows that the other side lacks",
        "dtype": "modules whose dtypes may differ; their values must still be equal",
        "shape": "modules whose rows may differ in size; these are not compared",
    }.items():
        parser.add_argument(
            f"--allow-{flag}", metavar="PATTERN", action="append", default=[], help=f"{what}; repeatable"
        )
    for side, what in {"": "SGLang request", "-a": "SGLang request of A", "-b": "SGLang request of B"}.items():
        parser.add_argument(
            f"--request{side}", metavar="ID", action="append", help=f"{what} of sequence 0, 1, ...; repeatable"
        )
    parser.set_defaults(run=run, shown_with=("rich",))


def run(arguments: argparse.Namespace) -> Result:
    """Compare the recordings; the exit code is 0 if they are equal, else 1."""
    requests_a, requests_b = (own or arguments.request for own in (arguments.request_a, arguments.request_b))
    if len(requests_a or ()) != len(requests_b or ()) and arguments.a.is_dir() and arguments.b.is_dir():
        raise ValueError(f"give as many requests of A as of B, got {requests_a} and {requests_b}")
    comparison = onpolicy.compare(
        _read(arguments.a, requests_a),
        _read(arguments.b, requests_b),
        names=onpolicy.NameMap.load(arguments.map) if arguments.map else None,
        allow_missing=arguments.allow_missing,
        allow_rows=arguments.allow_rows,
        allow_dtype=arguments.allow_dtype,
        allow_shape=arguments.allow_shape,
    )
    return Result(_content(comparison), lambda: _show(comparison), 0 if comparison.passed else 1)


def _content(comparison: onpolicy.Comparison) -> dict[str, Any]:
    found = asdict(comparison)
    for module in found["modules"]:
        for row in ("first", "culprit_row"):
            module[row] = module[row] and module[row]._asdict()
    first = comparison.first_divergent
    return {
        "verdict": comparison.verdict,
        "first_divergent": first and first.name,
        "culprits": [module.name for module in comparison.culprits],
        **found,
    }


def _read(path: Path, requests: list[str] | None) -> onpolicy.Recording:
    return onpolicy.read_sglang_dumps(path, requests=requests) if path.is_dir() else onpolicy.Recording.load(path)


def _show(comparison: onpolicy.Comparison) -> None:
    from rich.console import Console

    console = Console()
    if comparison.modules:
        console.print(_table(comparison))
    console.print(comparison.summary(), markup=False, highlight=False, soft_wrap=True)


def _table(comparison: onpolicy.Comparison) -> Table:
    from rich.table import Column, Table
    from rich.text import Text

    name = Column("module", overflow="fold")
    table = Table(name, "rows", "differing", "first", "max abs", "max ULP", "inputs")
    for module in comparison.modules:
        names = module.name if module.name == module.other else f"{module.name}\n{module.other}"
        inputs = {True: "equal", False: "differ", None: "unknown"}[module.inputs_equal]
        if module.is_culprit:
            inputs = f"equal{module.inputs_besides()}"
        cells = [
            names,
            str(module.num_rows),
            str(module.num_differing),
            f"{module.first.sequence}:{module.first.position}" if module.first else "",
            f"{module.max_abs:.3g}" if module.num_differing else "",
            str(module.max_ulp) if module.num_differing else "",
            f"{inputs} <- culprit" if module.is_culprit else inputs,
        ]
        style = "bold red" if module.is_culprit else "yellow" if module.num_differing else ""
        table.add_row(*(Text(printable(cell)) for cell in cells), style=style)
    return table
