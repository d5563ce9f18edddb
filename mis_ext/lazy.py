"""Packages that load a module when one of its names is first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, names_of: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package.

    Args:
        package: Its ``__name__``.
        names_of: For each module, without the name of the package, the names that the package takes from it.
    """
    module_of = {name: f"{package}.{module}" for module, names in names_of.items() for name in names}
    namespace = vars(sys.modules[package])

    def get(name: str) -> Any:
        if name in names_of:
            return import_module(f"{package}.{name}")
        if name not in module_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        # Kept, so that the next use costs what any other global costs.
        namespace[name] = getattr(import_module(module_of[name]), name)
        return namespace[name]

    def list_names() -> list[str]:
        return sorted({*namespace, *module_of})

    return get, list_names
