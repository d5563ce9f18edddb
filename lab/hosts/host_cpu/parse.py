# SPDX-License-Identifier: Apache-2.0
"""Gives launches to a host's own parser: ``python -m host_cpu.parse HOST ANSWERS.json < LAUNCHES.json``.

Reads a list of whole command lines. Writes every option that a parser of the framework knows, and for each command line
the flags that the framework would silently drop, and the values of the other flags.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from . import device


class Watcher:
    """Notes the options of every parser that is used while it watches."""

    def __init__(self) -> None:
        self.destinations: dict[str, str] = {}

    def __enter__(self) -> "Watcher":
        self._original = argparse.ArgumentParser.parse_known_args

        def noting(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
            for option, action in parser._option_string_actions.items():
                self.destinations[option] = action.dest
            return self._original(parser, *args, **kwargs)

        argparse.ArgumentParser.parse_known_args = noting  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        argparse.ArgumentParser.parse_known_args = self._original  # type: ignore[method-assign]


def main() -> None:
    """Parse every command line with the framework's ``parse_args``, which reads ``--custom-config-path`` files too."""
    host, out = sys.argv[1], Path(sys.argv[2])
    device.install()
    arguments = importlib.import_module(f"{host}.utils.arguments")
    answers = []
    with Watcher() as watcher:
        for words in json.load(sys.stdin):
            sys.argv = ["train.py", *words]
            args = vars(arguments.parse_args())
            flags = [word for word in words if word.startswith("--")]
            known = {flag: watcher.destinations[flag] for flag in flags if flag in watcher.destinations}
            answers.append(
                {
                    "dropped": [flag for flag in flags if flag not in known],
                    "read": {flag: repr(args.get(name)) for flag, name in known.items()},
                }
            )
        # slime has its own parser for SGLang's options, and does not use it when it only trains.
        if hasattr(arguments, "sglang_parse_args"):
            sys.argv = ["train.py"]
            arguments.sglang_parse_args()
    out.write_text(json.dumps({"options": sorted(watcher.destinations), "answers": answers}))


if __name__ == "__main__":
    main()
