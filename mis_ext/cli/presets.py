"""``mis-ext presets``: the YAML files that ship, which a wheel keeps out of sight."""

from __future__ import annotations

import argparse

from mis_ext.cli.result import Result


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``presets`` to the subcommands of ``mis-ext``."""
    parser = subparsers.add_parser(
        "presets",
        help="the YAML files of mis_ext: what each does, and when to use it",
        description="Lists the presets. With NAME it prints the file of that one, for --custom-config-path.",
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="a preset of the list")
    parser.set_defaults(run=run, shown_with=())


def run(arguments: argparse.Namespace) -> Result:
    """The list, or one file."""
    from mis_ext.keys.preset_files import list_presets, preset_remarks, preset_text

    if arguments.name is not None:
        file = preset_text(arguments.name)
        remarks = preset_remarks(arguments.name)._asdict()
        return Result({"name": arguments.name, **remarks, "yaml": file}, lambda: print(file, end=""))
    presets = [{"name": name, **preset_remarks(name)._asdict()} for name in list_presets()]
    return Result({"presets": presets}, lambda: _show(presets))


def _show(presets: list[dict[str, str]]) -> None:
    from mis_ext.columns import hanging

    for each in presets:
        print(each["name"])
        print(hanging("  What: ", each["what"]))
        print(hanging("  When: ", each["when"]))
    print("\nmis-ext presets NAME prints the file, mis-ext explain NAME its effect.")
