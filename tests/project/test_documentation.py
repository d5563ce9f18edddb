# SPDX-License-Identifier: Apache-2.0
"""What is generated from the rows stands in the pages as it would be generated today; examples load and run.

`python tests/project/test_documentation.py` writes it there.
"""

import importlib.util
import json
import re
import sys
import unicodedata
import warnings
from functools import partial
from pathlib import Path

import pytest
import yaml

import mis_ext
import mis_ext.tools.cli
from mis_ext.files import PresetRemarks, preset_remarks
from mis_ext.keys.rows import CORRECTION_ROWS, GROUP_ROWS, LOSS_ROWS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path[:0] = [str(DOCS), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

from documented_tables import (  # noqa: E402
    METRIC_GROUPS,
    Table,
    bounds_table,
    causes_table,
    keys_table,
    methods_table,
    metrics_table,
    statistics_table,
)
from public_names import public_names  # noqa: E402
from rows import for_each  # noqa: E402
from trained_pairs import never_table, pairs_table, plants_table  # noqa: E402

PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")))


def presets_table() -> Table:
    """List the presets with two of their remarks; `mis-ext presets NAME` prints the source."""
    rows = ((f"`{name}`", *preset_remarks(name)[:2]) for name in mis_ext.list_presets())
    return Table(("preset", *PresetRemarks._fields[:2]), tuple(rows))


API = {
    "correction": ("mis_ext",),
    "methods": ("mis_ext.methods",),
    "onpolicy": ("mis_ext.onpolicy",),
    "report": ("mis_ext.tools.report", "mis_ext.tools.diagnosis", "mis_ext.tools.dumps"),
    "rollout": ("mis_ext.rollout",),
}
"""The packages of each page of the API."""


def names_table(package: str) -> Table:
    """The public names of a package, with links to their sources; on the site these lead to the entries below."""
    names = public_names(package)
    links = {each: f"[`{each.name}`](../../../{each.path.as_posix()})" for each in names}
    if package == "mis_ext":
        rows = [(f"{link} `{each.parameters}`".removesuffix(" ``"), each.summary) for each, link in links.items()]
        return Table(("name", "description"), tuple(rows))
    # Most names of the others are looked up by those who know the module: the site has a description of each.
    modules: dict[str, list[str]] = {}
    for each, link in links.items():
        modules.setdefault(each.module.removeprefix(f"{package}."), []).append(link)
    return Table(("module", "names"), tuple((f"`{module}`", ", ".join(found)) for module, found in modules.items()))


TABLES = {
    "keys": (DOCS / "reference" / "configuration.md", partial(keys_table, *CORRECTION_ROWS)),
    "keys of prompts": (DOCS / "reference" / "configuration.md", partial(keys_table, *GROUP_ROWS)),
    "keys of the loss": (DOCS / "reference" / "policy_loss_keys.md", partial(keys_table, *LOSS_ROWS)),
    **{
        f"metrics of {group}": (DOCS / "reference" / "metrics.md", partial(metrics_table, group))
        for group in METRIC_GROUPS
    },
    "statistics": (DOCS / "reference" / "method.md", statistics_table),
    "bounds": (DOCS / "reference" / "method.md", bounds_table),
    "methods": (DOCS / "reference" / "methods.md", methods_table),
    "causes": (DOCS / "reference" / "report_causes.md", causes_table),
    "plants": (ROOT / "lab" / "evidence" / "diagnosis.md", plants_table),
    "pairs": (ROOT / "lab" / "evidence" / "diagnosis.md", pairs_table),
    "pairs left out": (ROOT / "lab" / "evidence" / "diagnosis.md", never_table),
    "presets": (DOCS / "reference" / "presets.md", presets_table),
    **{
        f"names of {package}": (DOCS / "reference" / "api" / f"{page}.md", partial(names_table, package))
        for page, packages in API.items()
        for package in packages
    },
}


def section(name: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- {name}: generated -->\n).*?(<!-- end of {name} -->)", re.DOTALL)


@pytest.mark.parametrize("name", TABLES)
def test_a_page_holds_the_table_of_today(name) -> None:
    page, table = TABLES[name]
    found = section(name).search(page.read_text(encoding="utf-8"))
    assert found is not None, f"{page.name} has no table of {name}"
    # Blank lines around it: Markdown joins a table to a comment that touches it.
    assert found.group(0).split("\n", 1)[1].rsplit("<!--", 1)[0] == f"\n{table().markdown()}\n", (
        "run: python tests/project/test_documentation.py"
    )


def test_the_dashboard_shows_metrics_that_the_hook_logs() -> None:
    dashboard = json.loads((DOCS / "guide" / "grafana.json").read_text(encoding="utf-8"))
    shown = re.findall(r"train_(mis_\w+)", " ".join(each["targets"][0]["expr"] for each in dashboard["panels"]))
    assert len(shown) == 2
    assert {*shown} <= {*mis_ext.preset("mis").metric_names}


def blocks(language: str) -> list:
    """The blocks of each page, as parameters of a test that name page and line."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in fence.finditer(text):
            line = text.count("\n", 0, block.start()) + 1
            found.append(pytest.param(block[1], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


@pytest.mark.parametrize("block", blocks("yaml"))
def test_every_yaml_block_loads(block) -> None:
    assert isinstance(mis_ext.config_from_mapping(yaml.safe_load(block)), mis_ext.CorrectionConfig)


@pytest.mark.parametrize("block", blocks("python"))
def test_every_python_block_runs(block, monkeypatch) -> None:
    if "toy_moe" in block:
        if not all(importlib.util.find_spec(name) for name in ("megatron", "transformers")):
            pytest.skip("needs what requirements/example.txt installs")
        monkeypatch.syspath_prepend(ROOT / "examples")
    # A block that stands for itself has no name from elsewhere.
    with warnings.catch_warnings():
        if "toy_moe" in block:
            # Of Megatron-Core itself.
            warnings.simplefilter("ignore")
        exec(compile(block, "block", "exec"), {"__name__": "block"})


NAMED = re.compile(r"`((?:tests|mis_ext|examples|lab|yaml|docs|correction|report)/[\w/.-]+\.(?:py|sh|md|yaml))`")


@for_each("page", PAGES)
def test_files_that_a_page_names_are_there(page) -> None:
    named = NAMED.findall(page.read_text(encoding="utf-8"))
    assert [path for path in named if not (ROOT / path).exists() and not (ROOT / "mis_ext" / path).exists()] == []


FENCED = re.compile(r"^```.*?^```$|<!--.*?-->", re.DOTALL | re.MULTILINE)
NAMED_PLACE = re.compile(r'<a id="([^"]+)"></a>')
LINKED = re.compile(r'\]\(([^)\s]+)\)|(?:src|href)="([^"]+)"')
LINKING = (*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted((ROOT / "lab").rglob("*.md")))


def shown(page: Path) -> str:
    """The text of a page without blocks of code and comments."""
    return FENCED.sub("", page.read_text(encoding="utf-8"))


def headings(text: str) -> list[str]:
    """As a reader sees them: links by their text, code and emphasis without their marks."""
    lines = re.findall(r"^#{1,6} +(.*)$", text, re.MULTILINE)
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line).replace("`", "").replace("*", "").strip() for line in lines]


def anchors_on_github(text: str) -> set[str]:
    """Lower case, without punctuation, a hyphen for each space; the second of the same name ends in -1."""
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(text)]
    return {*numbered(slugs, "-"), *NAMED_PLACE.findall(text)}


def anchors_on_the_site(text: str) -> set[str]:
    """The same in ASCII, with one hyphen for several spaces or hyphens; the second of the same name ends in _1."""
    ascii_only = [unicodedata.normalize("NFKD", each).encode("ascii", "ignore").decode() for each in headings(text)]
    slugs = [re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", each).strip().lower()) for each in ascii_only]
    return {*numbered(slugs, "_"), *NAMED_PLACE.findall(text)}


def numbered(slugs: list[str], mark: str) -> list[str]:
    before = [slugs[:place].count(slug) for place, slug in enumerate(slugs)]
    return [f"{slug}{mark}{count}" if count else slug for slug, count in zip(slugs, before, strict=True)]


@for_each("page", LINKING)
def test_links_lead_to_files_and_to_anchors_on_github_and_on_the_site(page) -> None:
    """MkDocs checks the site too; GitHub nobody. It shows the attribute list of a heading as text."""
    text = shown(page)
    assert re.findall(r"^#.*\{.*\}$", text, re.MULTILINE) == []
    for target in (first or second for first, second in LINKED.findall(text)):
        if re.match(r"https?:|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), target
        if anchor:
            there = shown(file)
            assert anchor in anchors_on_github(there), f"{target}: not on GitHub"
            assert anchor in anchors_on_the_site(there), f"{target}: not on the site"


def test_old_addresses_lead_to_pages_and_to_places_in_them() -> None:
    lines = (DOCS / "moved.txt").read_text(encoding="utf-8").splitlines()
    for new in (line.split()[1] for line in lines if not line.startswith("#")):
        path, _, anchor = new.partition("#")
        assert (DOCS / path).is_file(), new
        # A redirect that leads to another one has the place in its own line.
        assert not anchor or anchor in anchors_on_the_site(shown(DOCS / path)), new


def test_the_version_and_the_badges_are_true() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == mis_ext.__version__
    assert f"version = {{{mis_ext.__version__}}}" in (ROOT / "README.md").read_text()
    assert f"## {mis_ext.__version__}\n" in (ROOT / "CHANGELOG.md").read_text()
    oldest = re.search(r'requires-python = ">=(.*)"', project)[1]
    assert f"{oldest} or newer" in (DOCS / "images" / "python.svg").read_text()
    assert 'license = "Apache-2.0"' in project
    assert "Apache 2.0" in (DOCS / "images" / "license.svg").read_text()


def main() -> None:
    """Write the tables of today into their pages."""
    for name, (page, table) in TABLES.items():
        text = page.read_text(encoding="utf-8")
        text = section(name).sub(lambda found, table=table: f"{found[1]}\n{table().markdown()}\n{found[2]}", text)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
