# SPDX-License-Identifier: Apache-2.0
"""Records ``names.txt`` again: what slime, Miles and Megatron-LM may have on the ``args`` that they hand us.

The hosts' code is not part of this repository. With a clone of each, from the repository's root:

    python lab/peers/host_flags/record.py --slime ~/slime --miles ~/miles --megatron ~/Megatron-LM

A name is an option of any of their parsers, a field of a dataclass of settings of which Megatron-LM or Miles makes
options, or an attribute that they read of their ``args``. SGLang's own options have a prefix in both hosts.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

SETTINGS = re.compile(r"(Config|Args)$")
FILE = Path(__file__).resolve().parents[3] / "tests" / "data" / "host_flags" / "names.txt"
REVISIONS = {
    "slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "miles": "31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
    "megatron": "d98e8a64ddf34856e74b24714e3bedb2f5a39553",
}
"""Revisions of the packages with these names."""


def names_of(source: str) -> Iterator[str]:
    """The names in one file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", None) == "add_argument":
            options = [each.value for each in node.args if isinstance(each, ast.Constant)]
            named = [each.value for each in node.keywords if each.arg == "dest"]
            options += [each.value for each in named if isinstance(each, ast.Constant)]
            yield from (str(each).lstrip("-").replace("-", "_") for each in options)
        elif isinstance(node, ast.ClassDef) and SETTINGS.search(node.name):
            fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            yield from (each.id for each in fields if isinstance(each, ast.Name))
    for attribute, quoted in re.findall(r"\bargs\.([a-z]\w*)|(?:get|set|has)attr\(\w*args, \"(\w+)\"", source):
        yield attribute or quoted


def sources(clone: Path, host: str) -> Iterator[str]:
    """The text of every Python file of a host's package."""
    git = ["git", "-C", str(clone)]
    listed = subprocess.run(
        [*git, "ls-tree", "-r", "--name-only", REVISIONS[host], host], check=True, capture_output=True, text=True
    ).stdout
    for path in listed.splitlines():
        # Megatron-LM's environments of reinforcement learning have files of their own.
        if path.endswith(".py") and not path.startswith("megatron/rl/"):
            shown = [*git, "show", f"{REVISIONS[host]}:{path}"]
            yield subprocess.run(shown, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Write the names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slime", type=Path, required=True)
    parser.add_argument("--miles", type=Path, required=True)
    parser.add_argument("--megatron", type=Path, required=True)
    clones = vars(parser.parse_args())
    names = {name for host in REVISIONS for source in sources(clones[host], host) for name in names_of(source)}
    text = textwrap.fill(" ".join(sorted(name for name in names if name.isidentifier() and len(name) > 1)), 120)
    FILE.write_text(f"{text}\n")


if __name__ == "__main__":
    main()
