# SPDX-License-Identifier: Apache-2.0
"""MkDocs hooks: pages from elsewhere in the repository, formulas without JavaScript, API pages of public names."""

from __future__ import annotations

import html
import json
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files
from public_names import public_names

ROOT = Path(__file__).parents[1]
PAGES = {
    "../README.md": "index.md",
    "../lab/README.md": "lab.md",
    "../lab/MODELS.md": "zoo.md",
    "../lab/RESULTS.md": "results.md",
    "../CHANGELOG.md": "changes.md",
    "../SECURITY.md": "security.md",
}
"""Pages that have another name in the site, most of them from elsewhere in the repository."""
FOLDERS = {
    "../lab/evidence/": "evidence/",
    "../lab/real_stack/": "real_stack/",
    "../lab/benchmarks/results/": "results/",
}
LINK = re.compile(r"\]\((\.\.?/[^)#\s]+|[^):#\s]+\.(?:md|png|svg))")
FILE = re.compile(r"\[([^\]]+)\]\(([^)#:\s]+)\)")
"""A link with a path alone: to a file of the repository that the site does not have, it becomes text."""
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)
CELL = re.compile(r"<(t[dh])\b.*?</\1>", re.DOTALL)
TABLE = re.compile(r"<table>.*?</table>", re.DOTALL)
HEAD = re.compile(r"<th\b[^>]*>(.*?)</th>", re.DOTALL)
ROW = re.compile(r"<tr>.*?</tr>", re.DOTALL)
LONG_NAME = re.compile(r"(?<=<code>)[\w.-]{14,}(?=</code>)")
SPHINX_ROLE = re.compile(r":(?:func|class|mod|meth|attr|data):<code>(~?)([\w.]+)</code>")
API = re.compile(r"^<!-- api: (mis_ext[\w.]*) -->$", re.MULTILINE)
IN_SOURCE = re.compile(r"\[`(\w+)`\]\((?:\.\./)+(mis_ext/[\w/]+?)(?:/__init__)?\.py\)")
"""A public name that leads to its source in the repository: here it leads to its entry."""
MOVED = dict(
    line.split()
    for line in (ROOT / "docs" / "moved.txt").read_text(encoding="utf-8").splitlines()
    if not line.startswith("#")
)
"""Pages and places in them that had another address."""
REDIRECT = """<!doctype html>
<meta charset="utf-8"><title>This page has moved</title>
<p>This page has moved: <a href="{new}">{new}</a></p>
<script>
const to = {places}, place = location.hash.slice(1);
location.replace(place in to ? to[place] : to[""].split("#")[0] + location.hash);
</script>
"""
FURTHER = "Reference"
"""The part of the navigation for pages that `nav` does not list."""


def on_config(config: Any) -> Any:
    """Add pages that the navigation does not list."""
    named = set(re.findall(r"[\w/]+\.md", str(config.nav)))
    (part,) = [part[FURTHER] for part in config.nav if FURTHER in part]
    pages = (page.relative_to(ROOT / "docs").as_posix() for page in sorted((ROOT / "docs").rglob("*.md")))
    part += [page for page in pages if page not in named and page not in PAGES]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the repository's pages, with their pictures."""
    for path, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str((ROOT / "docs" / path).resolve())))
    for folder, name in FOLDERS.items():
        for path in sorted((ROOT / "docs" / folder).resolve().iterdir()):
            if path.suffix in (".md", ".png"):
                files.append(File.generated(config, name + path.name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links between files of the repository at their pages, and fill in the API."""
    origin = _in_repository(page.file.src_uri)
    folder = posixpath.dirname(page.file.src_uri)

    def to_page(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), found[1]))
        return f"]({posixpath.relpath(_in_site(target), folder or '.')}"

    def without_file(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), found[2]))
        # The paths are relative to `docs/`, whose other files are in the site.
        is_elsewhere = target.startswith("../") and not target.endswith((".md", ".png", ".svg"))
        return found[1] if is_elsewhere and (ROOT / "docs" / target).exists() else found[0]

    markdown = IN_SOURCE.sub(lambda found: f"[`{found[1]}`][{found[2].replace('/', '.')}.{found[1]}]", markdown)
    return API.sub(lambda found: _directives(found[1]), LINK.sub(to_page, FILE.sub(without_file, markdown)))


def on_page_content(content: str, **_: Any) -> str:
    """Turn formulas into MathML and the roles of docstrings into links, and let long names break in tables."""
    content = FORMULA.sub(_mathml, content)
    content = CELL.sub(lambda cell: LONG_NAME.sub(_breakable, cell[0]), content)
    content = TABLE.sub(_labeled, content)
    return SPHINX_ROLE.sub(_reference, content)


def on_post_build(config: Any) -> None:
    """Leave a page at each old address that leads to the new one; a place in the page may have gone elsewhere."""
    for old in MOVED:
        page = Path(config.site_dir) / _html(old)
        if "#" not in old and not page.exists():
            of_page = {each.partition("#")[2]: new for each, new in MOVED.items() if each.partition("#")[0] == old}
            folder = posixpath.dirname(old) or "."
            to = {place: posixpath.relpath(_html(new), folder) for place, new in of_page.items()}
            page.parent.mkdir(parents=True, exist_ok=True)
            page.write_text(REDIRECT.format(new=to[""], places=json.dumps(to)), encoding="utf-8")


def _html(address: str) -> str:
    """Return the address of a page, or of a place in it, as HTML."""
    page, mark, place = address.partition("#")
    return _in_site(page).replace(".md", ".html") + mark + place


def _in_repository(name: str) -> str:
    """Return the path of a page of the site, relative to `docs/`."""
    for folder, shown in FOLDERS.items():
        if name.startswith(shown):
            return folder + name.removeprefix(shown)
    return {shown: path for path, shown in PAGES.items()}.get(name, name)


def _in_site(path: str) -> str:
    """Return the path of a file in the site, given its path relative to `docs/`."""
    for folder, name in FOLDERS.items():
        if path.startswith(folder):
            return name + path.removeprefix(folder)
    path = path.removeprefix("../docs/")
    return PAGES.get(path, path)


def _mathml(found: re.Match[str]) -> str:
    formula = convert(html.unescape(found[2]), display="block" if found[1] == "div" else "inline")
    return f'<{found[1]} class="math">{formula}</{found[1]}>'


def _labeled(table: re.Match[str]) -> str:
    """Label each cell with the name of its column, which a phone shows above it."""
    heads = [
        html.escape(html.unescape(re.sub(r"<[^>]*>", "", head)).strip(), quote=True) for head in HEAD.findall(table[0])
    ]

    def label(row: re.Match[str]) -> str:
        names = iter(heads)
        return re.sub(r"<td\b", lambda cell: f'{cell[0]} data-label="{next(names, "")}"', row[0])

    return ROW.sub(label, table[0])


def _breakable(name: re.Match[str]) -> str:
    return re.sub(r"[_.]|(?<=\w)-", r"\g<0><wbr>", name[0])


def _reference(found: re.Match[str]) -> str:
    name = found[2].rpartition(".")[2] if found[1] else found[2]
    return f'<autoref identifier="{found[2]}" optional><code>{name}</code></autoref>'


def _directives(package: str) -> str:
    """Return a directive of mkdocstrings for each public name of a package."""
    return "\n\n".join(f"::: {each.module}.{each.name}" for each in public_names(package))
