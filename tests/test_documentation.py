"""What is generated from the rows stands in the pages as it would be generated today; examples load and run.

`python tests/test_documentation.py` writes it there.
"""

import ast
import builtins
import re
from pathlib import Path

import pytest
import torch
import yaml

import mis_ext
from mis_ext.correction.formula import Formula
from mis_ext.correction.tables import bounds_table, metrics_table, statistics_table
from mis_ext.methods.table import methods_table
from mis_ext.rollout import SamplingParameters, define_log_probs

README = Path(__file__).parents[1] / "README.md"
CONTRIBUTING = README.with_name("CONTRIBUTING.md")
PAGES = (README, CONTRIBUTING)
TABLES = {
    "metrics": (README, metrics_table),
    "statistics": (README, statistics_table),
    "bounds": (README, bounds_table),
    "methods": (CONTRIBUTING, methods_table),
}


def section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- end of {name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_a_page_holds_the_table_of_today(name) -> None:
    page, table = TABLES[name]
    found = section(name).search(page.read_text(encoding="utf-8"))
    assert found is not None, f"{page.name} has no table of {name}"
    assert found.group(0).split("\n", 1)[1].rsplit("<!--", 1)[0] == table().markdown(), (
        "run: python tests/test_documentation.py"
    )


def blocks(language: str) -> list[str]:
    found = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    return [block for page in PAGES for block in found.findall(page.read_text(encoding="utf-8"))]


def given() -> dict[str, object]:
    """What the examples may name without saying where it comes from."""
    old = torch.tensor([[-0.5, -1.0, -2.0, -0.25]] * 3)
    batch = {"old": old, "rollout": old - 0.01, "mask": torch.ones(3, 4), "group": None, "policy_loss": old}
    return {
        **batch,
        "mis_ext": mis_ext,
        "Formula": Formula,
        "SamplingParameters": SamplingParameters,
        "define_log_probs": define_log_probs,
    }


def is_self_contained(block: str) -> bool:
    nodes = [*ast.walk(ast.parse(block))]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    own |= {
        alias.asname or alias.name
        for node in nodes
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    }
    is_elided = any(isinstance(node, ast.Constant) and node.value is ... for node in nodes)
    return not is_elided and {node.id for node in names} <= own | given().keys() | vars(builtins).keys()


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_yaml_example_loads(block) -> None:
    assert isinstance(mis_ext.config_from_mapping(yaml.safe_load(block)), mis_ext.CorrectionConfig)


EXAMPLES = [block for block in blocks("python") if is_self_contained(block)]


@pytest.mark.parametrize("block", EXAMPLES)
def test_every_self_contained_python_example_runs(block) -> None:
    exec(block, given())


def test_examples_are_found() -> None:
    assert len(blocks("yaml")) >= 2
    assert len(EXAMPLES) >= 3


def main() -> None:
    """Write the tables of today into their pages."""
    for name, (page, table) in TABLES.items():
        text = page.read_text(encoding="utf-8")
        text = section(name).sub(lambda found, table=table: f"{found[1]}{table().markdown()}{found[2]}", text)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
