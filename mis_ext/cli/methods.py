"""``mis-ext methods``: published methods, their formulas, and what is said about them."""

from __future__ import annotations

import argparse


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``methods`` to the subcommands of ``mis-ext``."""
    parser = subparsers.add_parser(
        "methods",
        help="published methods: formula, source, when to use, what speaks against it",
        description="Lists the methods. With NAME it says what is known about that one.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a method of the list")
    parser.add_argument(
        "--yaml",
        action="store_true",
        help="print a file that runs NAME: the hook's where it can do it, else a whole loss",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list, or one method, or its file; the exit code."""
    from mis_ext.methods import find_method
    from mis_ext.methods.table import describe_method, list_methods

    if arguments.yaml:
        from mis_ext.presets import method_yaml

        if arguments.name is None:
            raise ValueError("--yaml needs the NAME of a method")
        print(method_yaml(find_method(arguments.name)), end="")
    else:
        print(list_methods() if arguments.name is None else describe_method(find_method(arguments.name)))
    return 0
