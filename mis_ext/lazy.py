# SPDX-License-Identifier: Apache-2.0
"""Packages that load a module when one of its names is first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, whose ``__name__`` is given.

    Its names and their modules are the imports under ``if TYPE_CHECKING:`` in its source. So type checkers and lazy
    loading use the same list.
    """
    namespace = vars(sys.modules[package])
    if not namespace["__file__"].endswith(".py"):
        raise ImportError(
            f"{package} reads its names, and Triton its kernels, from source: install it with its .py files"
        )
    source = namespace["__loader__"].get_data(namespace["__file__"]).decode()
    # Each import has its own line: from MODULE import NAME as NAME. Importing a parser would take longer than the
    # package.
    lines = [line.split() for line in source.splitlines() if line.startswith("    from ")]
    module_of = {name: module for _, module, _, name, _, _ in lines}

    def get(name: str) -> Any:
        if f"{package}.{name}" in module_of.values():
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Stored as a global, so that the next use is fast.
        namespace[name] = getattr(import_module(module_of[name]), name)
        return namespace[name]

    def list_names() -> list[str]:
        return sorted({*namespace, *module_of})

    return get, list_names, sorted(module_of)
