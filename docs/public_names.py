# SPDX-License-Identifier: Apache-2.0
"""The public names of a package, from its source: nothing is imported."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")


class PublicName(NamedTuple):
    """A public name of a package, the module that defines it, the first sentence about it, its parameters if called."""

    name: str
    module: str
    summary: str
    parameters: str

    @property
    def path(self) -> Path:
        """Of the source, from the root."""
        return _source(self.module).relative_to(ROOT)


def public_names(package: str) -> list[PublicName]:
    """As the ``TYPE_CHECKING`` branch of the package imports them, by a name of their own; or those in ``__all__``."""
    tree = _tree(package)
    public = next((ast.literal_eval(node.value) for node in tree.body if _assigns(node, "__all__")), ())
    imports = [(node.module, alias) for node in _imports(tree) for alias in node.names]
    module_of = {alias.name: module for module, alias in imports if alias.asname or alias.name in public}
    found = {name: _origin(module, name) for name, module in module_of.items()}
    return [
        PublicName(name, module, _summary(_tree(module), name), _parameters(_tree(module), name))
        for name, module in found.items()
    ]


def _origin(module: str, name: str) -> str:
    """The module that defines a name which a package only hands on."""
    if _source(module).name != "__init__.py":
        return module
    found = [node.module for node in _imports(_tree(module)) if name in {alias.name for alias in node.names}]
    return _origin(found[0], name) if found else module


def _summary(tree: ast.Module, name: str) -> str:
    """The first sentence of a docstring, as Markdown; of a constant the string below it."""
    for node, below in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            text = ast.get_docstring(node)
        elif _assigns(node, name) and isinstance(below, ast.Expr):
            text = ast.literal_eval(below.value)
        else:
            continue
        sentence = re.split(r"(?<=\.)\s|\n\n", text or "", maxsplit=1)[0]
        return ROLE.sub(r"`\1`", " ".join(sentence.split()).replace("``", "`").rstrip("."))
    raise ValueError(f"{name}: a public name without a docstring, or one that is no function, class or assignment")


def _parameters(tree: ast.Module, name: str) -> str:
    """The parameters of a function without their types; empty for anything else."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            for each in ast.walk(node.args):
                if isinstance(each, ast.arg):
                    each.annotation = None
            return f"({ast.unparse(node.args)})"
    return ""


def _source(module: str) -> Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _tree(module: str) -> ast.Module:
    return ast.parse(_source(module).read_text(encoding="utf-8"))


def _imports(tree: ast.Module) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]


def _assigns(node: ast.stmt, name: str) -> bool:
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return isinstance(targets[0], ast.Name) and targets[0].id == name
