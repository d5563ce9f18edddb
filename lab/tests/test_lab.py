# SPDX-License-Identifier: Apache-2.0
"""The page of the lab has a command for each of its programs."""

import re
from fnmatch import fnmatch
from pathlib import Path

LAB = Path(__file__).parents[1]
# Parts of pack_transformer_engine.sh, which calls one and packs the other.
PARTS = {"keep_architecture.py", "unpack_transformer_engine.sh"}


def programs() -> list[Path]:
    """What says how it is called: Python with a main, and scripts that are not sourced."""
    python = [path for path in LAB.glob("*/*.py") if "__main__" in path.read_text(encoding="utf-8")]
    scripts = [path for path in LAB.glob("*/*.sh") if path.read_text(encoding="utf-8").startswith("#!")]
    return [path for path in (*python, *scripts) if path.parent.name != "tests" and path.name not in PARTS]


def test_each_program_has_its_command_on_the_page() -> None:
    page = (LAB / "README.md").read_text(encoding="utf-8")
    named = {Path(found).name for found in re.findall(r"[\w/*]+\.(?:py|sh)", page)}
    assert len(programs()) > 30
    assert [path.name for path in programs() if not any(fnmatch(path.name, name) for name in named)] == []
    # Several of these have one name.
    recorders = [path.relative_to(LAB.parent) for path in LAB.glob("peers/*/*.py") if "__main__" in path.read_text()]
    assert len(recorders) > 7
    assert [path for path in recorders if str(path) not in page] == []
