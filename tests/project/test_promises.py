# SPDX-License-Identifier: Apache-2.0
"""The page of promises names files and tests that exist."""

import ast
import re
from pathlib import Path

from rows import for_each

ROOT = Path(__file__).parents[2]


def rows(page: str, start: str, end: str, head: str) -> list[tuple[str, ...]]:
    """Of the tables of a part of a page, without their heads."""
    part = (ROOT / page).read_text(encoding="utf-8").partition(start)[2].partition(end)[0]
    return [
        tuple(cell.strip() for cell in line.strip("|\n").split("|"))
        for line in part.splitlines()
        if line.startswith("|") and not line.startswith(("|---", head))
    ]


PROMISES = rows("docs/promises.md", "## The correction\n", "## Changes drawn", "| promise ")
CHANGES = rows("lab/RESULTS.md", "\n## Changes by hand\n", "\n## ", "| test ")


@for_each("row", PROMISES)
def test_the_test_of_a_promise_is_there(row) -> None:
    _, test = row
    path, _, name = re.fullmatch(r"`(tests/[\w/]+/test_\w+\.py)(::)?(\w*)`", test).groups()
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    assert name in tests if name else tests


def test_each_was_broken_once_in_a_file_that_is_there() -> None:
    assert [test for test, _ in CHANGES] == [test for _, test in PROMISES]
    files = [file for _, change in CHANGES for file in re.findall(r"`([\w/]+\.(?:py|yaml|md))`", change)]
    assert [file for file in files if not (ROOT / file).is_file() and not (ROOT / "mis_ext" / file).is_file()] == []


def test_the_page_has_its_promises() -> None:
    assert len(PROMISES) >= 30
    assert len({promise for promise, _ in PROMISES}) == len(PROMISES)
