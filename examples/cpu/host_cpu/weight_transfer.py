"""Names for Miles' Megatron trainer, which imports every way to send weights to an engine, used or not.

One of them needs Mooncake, and classes that only Miles' own SGLang has. Nothing here does anything.
"""

import importlib
import sys
from types import ModuleType

# Module to names that the released SGLang lacks.
MISSING = {
    "sglang.srt.distributed.parallel_state": ("ParallelismContext", "RankParallelismConfig"),
    "sglang.srt.model_loader.parameter_mapper": ("ParameterMapper",),
    "mooncake": (),
    "mooncake.engine": ("TransferEngine",),
}


def install() -> None:
    """Add what is missing, and only that."""
    for name, classes in MISSING.items():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            module = sys.modules[name] = ModuleType(name)
            module.__path__ = []
        for each in classes:
            if not hasattr(module, each):
                setattr(module, each, type(each, (), {}))
