"""``mis-ext presets``: the YAML files that ship, which a wheel keeps out of sight."""

from __future__ import annotations

import argparse


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``presets`` to the subcommands of ``mis-ext``."""
    parser = subparsers.add_parser(
        "presets",
        help="the YAML files that ship: what each does, when to take it",
        description="Lists the presets. With NAME it prints the file of that one, for --custom-config-path.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a preset of the list")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the list, or one file as it is; the exit code."""
    from mis_ext.columns import hanging
    from mis_ext.preset_files import list_presets, preset_remarks, preset_text

    if arguments.name is not None:
        print(preset_text(arguments.name), end="")
        return 0
    for name in list_presets():
        remarks = preset_remarks(name)
        print(name)
        print(hanging("  What: ", remarks.what))
        print(hanging("  When: ", remarks.when))
    print("\nmis-ext presets NAME prints the file, mis-ext explain NAME what to expect of it.")
    return 0
