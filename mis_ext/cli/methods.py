"""``mis-ext methods``: published methods, their formulas, and what is said about them."""

from __future__ import annotations

import argparse

from mis_ext.cli.result import Result


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``methods`` to the subcommands of ``mis-ext``."""
    parser = subparsers.add_parser(
        "methods",
        help="published methods: formula, source, when to use, what speaks against it",
        description="Lists the methods. With NAME it describes that method.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a method of the list")
    parser.add_argument(
        "--yaml",
        action="store_true",
        help="print a file that runs NAME: with the hook if it can, else with the policy loss of mis_ext",
    )
    parser.set_defaults(run=run, shown_with=())


def run(arguments: argparse.Namespace) -> Result:
    """The list, or one method with the file that runs it."""
    from mis_ext.keys.presets import method_yaml
    from mis_ext.methods import METHODS, find_method
    from mis_ext.methods.published import SYMBOLS
    from mis_ext.methods.table import describe_method, list_methods, method_facts

    if arguments.name is None:
        if arguments.yaml:
            raise ValueError("--yaml needs the NAME of a method")
        methods = [method_facts(row) for row in METHODS.values()]
        return Result({"methods": methods, "symbols": SYMBOLS}, lambda: print(list_methods()))
    row = find_method(arguments.name)
    file = method_yaml(row)
    content = method_facts(row) | {"yaml": file, "symbols": SYMBOLS}
    return Result(content, lambda: print(file, end="") if arguments.yaml else print(describe_method(row)))
