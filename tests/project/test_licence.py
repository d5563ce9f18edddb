# SPDX-License-Identifier: Apache-2.0
"""Every source file says its licence, in one line, so that a file that somebody copies still says it.

`python tests/project/test_licence.py` writes the line where it is missing.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LICENCE = re.search(r'^license = "(.*)"$', (ROOT / "pyproject.toml").read_text(encoding="utf-8"), re.MULTILINE)[1]
LINE = f"SPDX-License-Identifier: {LICENCE}"
COMMENTS = {".py": "# {}", ".sh": "# {}", "": "# {}", ".js": "// {}", ".css": "/* {} */", ".html": "{{# {} #}}"}
"""By the end of a file's name; what is in .ci has none."""
FOLDERS = (".ci", "docs", "examples", "lab", "mis_ext", "tests")


def sources() -> Iterator[Path]:
    yield from (ROOT / "conftest.py", ROOT / "setup.py")
    for folder in FOLDERS:
        yield from (path for path in (ROOT / folder).rglob("*") if path.is_file() and path.suffix in COMMENTS)


def head(text: str) -> tuple[str, str]:
    """What must be the first line, and the rest."""
    first, newline, rest = text.partition("\n")
    return (first + newline, rest) if first.startswith("#!") else ("", text)


def lacks(path: Path) -> bool:
    return not head(path.read_text(encoding="utf-8"))[1].startswith(COMMENTS[path.suffix].format(LINE) + "\n")


def write(path: Path) -> None:
    first, rest = head(path.read_text(encoding="utf-8"))
    path.write_text(f"{first}{COMMENTS[path.suffix].format(LINE)}\n{rest}", encoding="utf-8")


def test_every_source_file_says_its_licence() -> None:
    found = [*sources()]
    assert len(found) > 700
    assert {path.suffix for path in found} == {*COMMENTS}
    assert [str(path.relative_to(ROOT)) for path in found if lacks(path)] == [], "python tests/project/test_licence.py"


@pytest.mark.parametrize("name", ["new.py", "new.sh", "new.js", "new.css", "new.html", "new"])
def test_the_line_is_written_once_and_below_what_must_be_first(tmp_path, name) -> None:
    path = tmp_path / name
    path.write_text("#!/usr/bin/env bash\nrest\n")
    assert lacks(path)
    write(path)
    assert not lacks(path)
    first, line, rest = path.read_text().splitlines()
    assert (first, rest) == ("#!/usr/bin/env bash", "rest")
    assert LINE in line


if __name__ == "__main__":
    for each in filter(lacks, sources()):
        write(each)
