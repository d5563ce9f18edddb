# SPDX-License-Identifier: Apache-2.0
"""``mis-ext check-packing``: does a sequence read its neighbours in a packed row?"""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mis_ext.tools.cli.command import Result, require, show, show_table

if TYPE_CHECKING:
    from mis_ext.onpolicy.packing import PackedFunction, PackingReport

_FUNCTION = (
    "FUNCTION is the dotted path of a function without arguments that returns score(ids_T, lengths): the model as your "
    "trainer calls it on packed sequences. It gets token ids [T] and the length of each sequence, and returns logits "
    "[T, V], or the log-prob of each token [T]. mis_ext.onpolicy has packed_transformers(model) and "
    "packed_megatron(model)."
)


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext check-packing``."""
    parser = subparsers.add_parser(
        "check-packing",
        help="check that responses in a packed row do not read each other",
        description=(
            "Score sequences of random tokens alone and packed, with your model function, and "
            "report which differ by more than rounding, and from which position. Exit code: 0 none differs; 1 some "
            "differ; 2 wrong usage, or the function fails."
        ),
        epilog=_FUNCTION,
    )
    parser.add_argument("function", nargs="?", metavar="FUNCTION", help="such as my_model.load")
    parser.add_argument(
        "--transformers", type=Path, metavar="PATH", help="instead: a folder with a transformers causal language model"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of that model")
    parser.add_argument("--device", default="cpu", help="of that model, such as cuda (default: cpu)")
    parser.add_argument(
        "--lengths", metavar="N,N,...", help="tokens of each sequence, at least 2 each (default: five, 3 to 64)"
    )
    parser.add_argument("--vocabulary", type=int, default=256, metavar="N", help="ids are below N (default: 256)")
    parser.set_defaults(run=run, shown_with=("rich",))


def run(parsed: argparse.Namespace) -> Result:
    """Check the function; the exit code is 0 if packing changes nothing but rounding, else 1."""
    import torch

    from mis_ext.onpolicy.packing import DEFAULT_LENGTHS, check_packing

    if (parsed.function is None) == (parsed.transformers is None):
        raise ValueError("give either FUNCTION or --transformers PATH")
    lengths = [int(each) for each in parsed.lengths.split(",")] if parsed.lengths else [*DEFAULT_LENGTHS]
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(parsed.vocabulary, (length,), generator=generator) for length in lengths]
    report = check_packing(_found(parsed.function) if parsed.function else _loaded(parsed), ids)
    content: dict[str, Any] = {"passed": report.passed, "found": report.explain(), "report": report}
    return Result(content, lambda: _show(report), 0 if report.passed else 1)


def _found(path: str) -> PackedFunction:
    # As `python -m` has it.
    sys.path.insert(0, os.getcwd())
    module, _, name = path.rpartition(".")
    try:
        make = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} names no function: {error}") from error
    score: PackedFunction = make()
    return score


def _loaded(parsed: argparse.Namespace) -> PackedFunction:
    require("transformers")
    import transformers

    from mis_ext.onpolicy.packing import packed_transformers

    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_pretrained(str(parsed.transformers), dtype=parsed.dtype, local_files_only=True)
    return packed_transformers(model.to(parsed.device).eval())


def _show(report: PackingReport) -> None:
    show("PASSED" if report.passed else "FAILED", "bold green" if report.passed else "bold red")
    show(report.explain())
    show(f"rounding {report.rounding:.2g} nats, allowed {report.allowed:.2g}")
    rows = [
        (
            *(str(each.index), str(each.length), f"{each.max_abs_diff:.2g}"),
            "-" if each.first_position is None else f"{each.first_position} to {each.last_position}",
        )
        for each in report.sequences
    ]
    show_table(("sequence", "tokens", "largest difference", "positions"), rows, numbers_right=True)
