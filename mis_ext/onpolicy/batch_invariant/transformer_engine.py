"""Modules of Transformer Engine: their kernels are reached past torch's operators, so the mode refuses them by name."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from mis_ext.onpolicy.batch_invariant.overrides import OperatorOverrides

__all__ = ["refuse_among", "refuse_calls"]

_PACKAGE = "transformer_engine"


def refuse_among(model: nn.Module) -> None:
    """Refuse a model that has a module of Transformer Engine, with the module's path.

    Raises:
        NotImplementedError: The first such module, or the model is one.
    """
    for path, module in model.named_modules():
        kind: Any = type(module)
        if _is_of_transformer_engine(kind):
            raise NotImplementedError(_message(kind, path))


def refuse_calls() -> AbstractContextManager[Any]:
    """A block in which this process refuses such modules when they are called in the mode.

    Torch asks before the call of every module, which takes a microsecond: only where Transformer Engine is imported.
    """
    return register_module_forward_pre_hook(_refuse) if _PACKAGE in sys.modules else nullcontext()


def _refuse(module: nn.Module, args: tuple[Any, ...]) -> None:
    # The hook is the process's, the mode is its thread's.
    kind: Any = type(module)
    if _is_of_transformer_engine(kind) and OperatorOverrides.is_on():
        raise NotImplementedError(_message(kind))


@cache
def _is_of_transformer_engine(kind: Any) -> bool:
    """By a base too: the modules of Megatron-Core's specification derive from Transformer Engine's."""
    return any(base.__module__.split(".")[0] == _PACKAGE for base in kind.__mro__)


def _message(kind: type[nn.Module], path: str = "") -> str:
    where = f"{path}, a" if path else "a"
    return (
        f"{where} {kind.__name__}, runs kernels of Transformer Engine, which have no batch-invariant form here: build "
        "the model of torch's modules (Megatron-Core: get_gpt_decoder_block_spec with use_transformer_engine=False; a "
        "local layer spec alone gets Transformer Engine's final norm), or take Megatron-Core's own mode for these "
        "modules, enable_batch_invariant_mode, on both sides and without this one"
    )
