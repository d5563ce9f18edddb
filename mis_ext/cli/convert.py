"""``mis-ext convert``: keys of ours that do what a file of another framework says."""

from __future__ import annotations

import argparse
from typing import Any

from mis_ext.cli.result import Result


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``convert`` to the subcommands of ``mis-ext``."""
    parser = subparsers.add_parser(
        "convert",
        help="converts the options of another framework to a YAML file of mis_ext with the same weights and masks",
        description="Reads a configuration of verl: the .hydra/config.yaml of a run, what its command prints with "
        "--cfg job, or its rollout_correction alone. Prints the YAML file of mis_ext with the same weights and masks. "
        "Options without a counterpart are refused.",
    )
    parser.add_argument("framework", choices=("verl",), help="the framework of the options")
    parser.add_argument("file", metavar="FILE", help="its configuration, as YAML")
    parser.set_defaults(run=run, shown_with=())


def run(arguments: argparse.Namespace) -> Result:
    """Convert the file."""
    from mis_ext.hosts.verl_options import WHOLE_CONFIGURATION, convert_verl, dtype_remarks, options_in
    from mis_ext.keys.given import read_keys

    try:
        content = read_keys(arguments.file)
    except ValueError as error:
        raise ValueError(f"{error}. {WHOLE_CONFIGURATION}") from None
    keys, remarks = convert_verl(options_in(content))
    lines = ["From verl's rollout_correction; for MIS_EXT_KEYS.", *remarks, *dtype_remarks(content)]
    result = {"framework": arguments.framework, "file": arguments.file, "keys": keys, "remarks": lines}
    return Result(result, lambda: _show(keys, lines))


def _show(keys: dict[str, Any], remarks: list[str]) -> None:
    import yaml

    for remark in remarks:
        print(f"# {remark}")
    print(yaml.safe_dump(keys, sort_keys=False, default_flow_style=None, width=120), end="")
