# SPDX-License-Identifier: Apache-2.0
"""Names for Miles' Megatron trainer, which imports every way to send weights to an engine, used or not.

One of them needs Mooncake, and classes that only Miles' own SGLang has. Nothing here does anything.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# Module to names that the released SGLang lacks.
MISSING = {
    "sglang.srt.distributed.parallel_state": ("ParallelismContext", "RankParallelismConfig"),
    "sglang.srt.model_loader.parameter_mapper": ("ParameterMapper",),
    "mooncake": (),
    "mooncake.engine": ("TransferEngine",),
}


def complete(module: ModuleType) -> None:
    """Add the names that a module lacks."""
    for name in MISSING[module.__name__]:
        if not hasattr(module, name):
            setattr(module, name, type(name, (), {}))


class Completed(Loader):
    """Loads a module as ``loader`` does, or an empty one, and adds what it lacks."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        return self.loader.create_module(spec) if self.loader is not None else None

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader, and more."""
        if self.loader is not None:
            self.loader.exec_module(module)
        complete(module)


class Finder(MetaPathFinder):
    """Finds the modules of `MISSING`, whether they are there or not."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of the other finders, completed; of an empty package where they find none."""
        if name not in MISSING:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None) or ModuleSpec(name, None, is_package=True)
        spec.loader = Completed(spec.loader)
        return spec


def install() -> None:
    """Add what is missing, and only that, once it is imported: SGLang looks for a GPU when it is."""
    for name in MISSING.keys() & sys.modules.keys():
        complete(sys.modules[name])
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())
