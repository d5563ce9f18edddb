# SPDX-License-Identifier: Apache-2.0
"""Names for Miles' Megatron trainer, which imports every way to send weights to an engine, used or not.

One of them needs Mooncake, and classes that only Miles' own SGLang has. Nothing here does anything.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
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
    """Loads a module as ``loader`` does, or an empty one, and completes it."""

    def __init__(self, loader: Any, completion: Callable[[ModuleType], None]) -> None:
        self.loader, self.completion = loader, completion

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the other loader."""
        return self.loader.create_module(spec) if self.loader is not None else None

    def exec_module(self, module: ModuleType) -> None:
        """As the other loader, and more."""
        if self.loader is not None:
            self.loader.exec_module(module)
        self.completion(module)


class Finder(MetaPathFinder):
    """Finds modules, whether they are there or not, each with what completes it once it is loaded."""

    def __init__(self, completions: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self.completions = completions

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of the other finders, completed; of an empty package where they find none."""
        if name not in self.completions:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None) or ModuleSpec(name, None, is_package=True)
        spec.loader = Completed(spec.loader, self.completions[name])
        return spec


def install() -> None:
    """Add what is missing, and only that, once it is imported: SGLang looks for a GPU when it is."""
    for name in MISSING.keys() & sys.modules.keys():
        complete(sys.modules[name])
    find(dict.fromkeys(MISSING, complete))


def find(completions: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Complete these modules when they are imported; once in a process."""
    if not any(
        isinstance(finder, Finder) and finder.completions.keys() == completions.keys() for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, Finder(completions))
