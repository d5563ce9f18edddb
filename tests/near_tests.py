# SPDX-License-Identifier: Apache-2.0
"""Which test files see a module of the package: by what they import, and by the names of functions.

    python -m pytest $(python tests/near_tests.py mis_ext/correction/weights.py)

It prints the nearest first.
"""

import argparse
import ast
import re
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import NamedTuple


class _File(NamedTuple):
    """A file of tests, with the modules that it or its helpers name."""

    modules: frozenset[str]
    text: str


class NearTests:
    """The test files that are near a module of a checkout.

    Args:
        root: The checkout, with a folder of the package and a folder ``tests``.
        package: Name of the package.
    """

    def __init__(self, root: Path, package: str) -> None:
        self._package = package
        self._path_of = {module_of(path.relative_to(root)): path for path in (root / package).rglob("*.py")}
        self._importers: dict[str, set[str]] = defaultdict(set)
        for module, path in self._path_of.items():
            for other in self._named_in(path):
                self._importers[other].add(module)
        helpers = {path.stem: path for path in (root / "tests").rglob("*.py")}
        self._files = {}
        for path in helpers.values():
            if path.stem.startswith("test_"):
                modules = frozenset().union(*(self._named_in(file) for file in _with_helpers(path, helpers)))
                self._files[path.relative_to(root).as_posix()] = _File(modules, path.read_text(encoding="utf-8"))

    def files(self, path: str, scopes: tuple[str, ...], *, through: int = 1, fewest: int = 10) -> dict[str, int]:
        """Test files that may see a change, with their distance.

        Args:
            path: The file that changes.
            scopes: The classes and functions around the change. A file that names one of them is nearer by a step.
            through: A file is near if it names the module (0), one that imports it (1), and so on.
            fewest: Where the near ones are fewer files, one step more counts.
        """
        near, distance = {module_of(Path(path))}, {}
        for step in range(len(self._path_of)):
            for file, test in self._files.items():
                if test.modules & near:
                    distance.setdefault(file, step)
            if step >= through and len(distance) >= fewest:
                break
            near = set().union(*(self._importers[module] for module in near))
        # Short names are words of everything.
        names = "|".join(name for name in scopes if len(name.strip("_")) > 5)
        for file, test in self._files.items():
            if names and re.search(rf"\b({names})\b", test.text):
                distance[file] = distance.get(file, through) - 1
        return distance

    def size(self, file: str) -> float:
        """Of a test file, in thousands of characters: about the seconds that it takes. More if it says so."""
        text = self._files[file].text
        return len(text) / 1000 + 60 * bool(re.search(r"mark\.(slow|distributed)", text))

    def _named_in(self, path: Path) -> set[str]:
        """Modules that a file imports, or names anywhere, as in ``importorskip("package.module")``."""
        text = path.read_text(encoding="utf-8")
        dotted = re.findall(rf"\b{self._package}(?:\.\w+)+", text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == self._package:
                dotted += [f"{node.module}.{alias.name}" for alias in node.names]
        found = set()
        for each in dotted:
            module = self._package
            for name in each.split(".")[1:]:
                module = self._defines(module, name)
            found.add(module)
        return found - {self._package}

    def _defines(self, module: str, name: str) -> str:
        """The module that defines a name of a module, which may have it from another."""
        if f"{module}.{name}" in self._path_of:
            return f"{module}.{name}"
        source = self._exports(module).get(name)
        return self._defines(source, name) if source in self._path_of and source != module else module

    @cache  # noqa: B019
    def _exports(self, module: str) -> dict[str, str]:
        path = self._path_of[module]
        if path.name != "__init__.py":
            return {}
        imports = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        return {alias.name: node.module or "" for node in imports for alias in node.names}


def module_of(path: Path) -> str:
    """``a/b.py`` and ``a/b/__init__.py`` are both ``a.b``."""
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _with_helpers(path: Path, helpers: dict[str, Path]) -> set[Path]:
    found, new = set(), {path}
    while new:
        found |= new
        words = {
            name for file in new for name in re.findall(r"^ *(?:from|import) (\w+)", file.read_text("utf-8"), re.M)
        }
        new = {helpers[name] for name in words if name in helpers} - found
    return found


def main() -> None:
    """Print the test files that are near a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="a file of the package, such as mis_ext/correction/weights.py")
    path, root = parser.parse_args().path.resolve(), Path(__file__).parents[1]
    if not path.is_file() or not path.is_relative_to(root / "mis_ext"):
        parser.error(f"{path} is no file of {root / 'mis_ext'}")
    near = NearTests(root, "mis_ext").files(path.relative_to(root).as_posix(), ())
    print("\n".join(sorted(near, key=lambda file: (near[file], file))))


if __name__ == "__main__":
    main()
