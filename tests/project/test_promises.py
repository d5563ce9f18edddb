# SPDX-License-Identifier: Apache-2.0
"""The page of promises names files and tests that exist."""

import ast
import re
from pathlib import Path

from rows import for_each

ROOT = Path(__file__).parents[2]
ROWS = [
    tuple(cell.strip() for cell in line.strip("|\n").split("|"))
    # Behind them stand the changes that were drawn.
    for line in (ROOT / "docs" / "promises.md").read_text(encoding="utf-8").split("## Changes drawn")[0].splitlines()
    if line.startswith("|") and not line.startswith(("|---", "| promise "))
]


@for_each("row", ROWS)
def test_the_test_and_the_file_of_a_promise_are_there(row) -> None:
    _, test, change = row
    path, _, name = re.fullmatch(r"`(tests/[\w/]+/test_\w+\.py)(::)?(\w*)`", test).groups()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert name in tests if name else tests
    for file in re.findall(r"`([\w/]+\.(?:py|yaml|md))`", change):
        assert (ROOT / file).is_file() or (ROOT / "mis_ext" / file).is_file()


def test_the_page_has_its_promises() -> None:
    assert len(ROWS) >= 30
    assert len({promise for promise, _, _ in ROWS}) == len(ROWS)
