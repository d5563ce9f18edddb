# SPDX-License-Identifier: Apache-2.0
"""Features that the frameworks need from SGLang 0.5.17, but that it lacks.

Miles' Megatron trainer imports every way to send weights to an engine, used or not. One of them needs Mooncake, and
classes that only Miles' own SGLang has: names here, which do nothing. Both hosts assign to a field of `ServerArgs` that
are final what stands there already, before they start an engine; the older SGLang of their images lets them. And around
new weights Miles calls two endpoints, which SGLang 0.5.23 has, for quantized weights.
"""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

# Module to names that the released SGLang lacks.
MISSING = {
    "sglang.srt.distributed.parallel_state": ("ParallelismContext", "RankParallelismConfig"),
    "sglang.srt.model_loader.parameter_mapper": ("ParameterMapper",),
    "mooncake": (),
    "mooncake.engine": ("TransferEngine",),
}
ENGINE = "sglang.srt.entrypoints.engine"


def complete(module: ModuleType) -> None:
    """Add the names that a module lacks."""
    for name in MISSING[module.__name__]:
        if not hasattr(module, name):
            setattr(module, name, type(name, (), {}))


def complete_engine(module: Any) -> None:
    """Let a host start this SGLang, and Miles send it weights that are not quantized."""
    original = module.ServerArgs.__setattr__

    def set_what_differs(self: Any, name: str, value: Any) -> None:
        if name not in vars(self) or vars(self)[name] != value:
            original(self, name, value)

    module.ServerArgs.__setattr__ = set_what_differs
    for name in ("begin_weight_update", "end_weight_update"):
        if hasattr(module.SGLangEngine, name) and not hasattr(importlib.import_module(ENGINE).Engine, name):
            setattr(module.SGLangEngine, name, lambda self, **_: None)


class Completed(Loader):
    """Loads a module as ``loader`` does, or an empty one, and completes it."""

    def __init__(self, loader: Any, completions: Sequence[Callable[[ModuleType], None]]) -> None:
        self.loader, self.completions = loader, completions

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Like the other loader."""
        return self.loader.create_module(spec) if self.loader is not None else None

    def exec_module(self, module: ModuleType) -> None:
        """Like the other loader, with additions."""
        if self.loader is not None:
            self.loader.exec_module(module)
        for completion in self.completions:
            completion(module)


class Finder(MetaPathFinder):
    """Finds modules, whether they are there or not, each with what completes it once it is loaded."""

    def __init__(self) -> None:
        self.completions: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Of the other finders, completed; of an empty package where they find none."""
        if name not in self.completions:
            return None
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None) or ModuleSpec(name, None, is_package=True)
        spec.loader = Completed(spec.loader, self.completions[name])
        return spec


FINDER = Finder()


def find(completions: Mapping[str, Callable[[ModuleType], None]]) -> None:
    """Complete these modules when they are imported."""
    for name, completion in completions.items():
        known = FINDER.completions.setdefault(name, [])
        if completion not in known:
            known.append(completion)
    if FINDER not in sys.meta_path:
        sys.meta_path.insert(0, FINDER)


def install_engine() -> None:
    """Complete the engines that a host starts, once they are imported."""
    hosts = [host for host in ("slime", "miles") if find_spec(host) is not None]
    find({f"{host}.backends.sglang_utils.sglang_engine": complete_engine for host in hosts})


def install() -> None:
    """Add what Miles misses, and only that, once it is imported: SGLang looks for a GPU when it is."""
    install_engine()
    for name in MISSING.keys() & sys.modules.keys():
        complete(sys.modules[name])
    find(dict.fromkeys(MISSING, complete))
