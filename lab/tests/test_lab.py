# SPDX-License-Identifier: Apache-2.0
"""The page of the lab has a command for each of its programs."""

import re
from fnmatch import fnmatch
from pathlib import Path

LAB = Path(__file__).parents[1]
PAGES = sorted((LAB / "evidence").glob("*.md"))
# Of a PNG whose colors are a palette: a third of the size.
PALETTE = 3


def programs() -> list[Path]:
    """What says how it is called: Python with a main, and scripts that are not sourced."""
    python = [path for path in LAB.glob("*/*.py") if "__main__" in path.read_text(encoding="utf-8")]
    scripts = [path for path in LAB.glob("*/*.sh") if path.read_text(encoding="utf-8").startswith("#!")]
    return [path for path in (*python, *scripts) if path.parent.name != "tests"]


def test_each_program_has_its_command_on_the_page() -> None:
    page = (LAB / "README.md").read_text(encoding="utf-8")
    named = {Path(found).name for found in re.findall(r"[\w/*]+\.(?:py|sh)", page)}
    assert len(programs()) > 20
    assert [path.name for path in programs() if not any(fnmatch(path.name, name) for name in named)] == []
    # Several of these have one name.
    recorders = [path.relative_to(LAB.parent) for path in LAB.glob("peers/*/*.py") if "__main__" in path.read_text()]
    assert len(recorders) == 5
    assert [path for path in recorders if str(path) not in page] == []


def test_pictures_of_the_repository_have_a_palette() -> None:
    pictures = [*LAB.rglob("*.png"), *(LAB.parent / "docs").rglob("*.png")]
    assert len(pictures) > 40
    assert [path.name for path in pictures if path.read_bytes()[25] != PALETTE] == []


def test_a_page_of_the_evidence_has_one_picture_of_its_own() -> None:
    shown = {path.name: re.findall(r"^!\[[^\]]*\]\((\w+\.png)\)", path.read_text(), re.MULTILINE) for path in PAGES}
    assert {name: found for name, found in shown.items() if len(found) > 1} == {}
