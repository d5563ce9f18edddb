"""What is generated from the rows stands in the README as it would be generated today.

`python tests/test_documentation.py` writes it there.
"""

import re
from pathlib import Path

import pytest

from mis_ext.correction.tables import bounds_table, metrics_table, statistics_table

README = Path(__file__).parents[1] / "README.md"
TABLES = {"metrics": metrics_table, "statistics": statistics_table, "bounds": bounds_table}


def section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- end of {name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_the_readme_holds_the_table_of_today(name) -> None:
    found = section(name).search(README.read_text(encoding="utf-8"))
    assert found is not None, f"README.md has no table of {name}"
    assert found.group(0).split("\n", 1)[1].rsplit("<!--", 1)[0] == TABLES[name]().markdown(), (
        "run: python tests/test_documentation.py"
    )


def main() -> None:
    """Write the tables of today into the README."""
    text = README.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        text = section(name).sub(lambda found, table=table: f"{found[1]}{table().markdown()}{found[2]}", text)
    README.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
