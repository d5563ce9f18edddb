# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant execution: a mode in which the bits of a row depend only on the row, not on the rest of the batch.

``overrides`` replaces torch's operators, and decides which operators pass and which are refused. ``attention``,
``mixtures`` and ``cpu_rows`` compute. ``devices`` selects ``cpu`` or ``cuda``. ``packed_sequences`` describes the
layout of sequences on both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, wraps
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from mis_ext.onpolicy.batch_invariant.attention import attention
from mis_ext.onpolicy.batch_invariant.devices import check_device_type, rms_norm
from mis_ext.onpolicy.batch_invariant.overrides import FunctionOverrides, OperatorOverrides

__all__ = ["attention", "batch_invariant_forward", "batch_invariant_mode", "is_batch_invariant", "rms_norm"]

_TRANSFORMER_ENGINE = "transformer_engine"
_MEGATRON_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


@contextmanager
def batch_invariant_mode() -> Iterator[None]:
    """Make the computations of this thread batch-invariant, on a CPU and on CUDA, or refuse them by name.

    Matmuls use tiles of a fixed shape, ``scaled_dot_product_attention`` fixed blocks, and ``softmax`` an exact sum.
    ``log_softmax``, sums and means of rows use a fixed order per row. On a CPU elementwise functions use whole vectors.
    ``topk`` selects the first of equal scores, and rows with the same destination are added in their order in memory.
    All other computing operators raise an error; ``overrides.py`` has the lists. A matmul with a bias is rounded, then
    added to the bias and rounded again, so that engines with and without a fused addition agree. The idea is from He et
    al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.

    Gradients are correct, but not batch-invariant. An expert that drops tokens above a capacity depends on the batch.

    The mode applies only to the thread that entered it, and nested blocks have no effect. Use
    :func:`batch_invariant_forward` for an engine with its own threads, and for gradient checkpointing: torch hides
    attention from the mode in the recomputation of a backward pass, which is an error. Compiled code
    (``torch.compile``, captured graphs, custom kernels) does not change. A module of Transformer Engine is refused by
    name if Transformer Engine is imported before the block begins; direct calls of its functions are not detected.

    Raises:
        RuntimeError: There is a CUDA device without usable Triton, or Megatron-Core's own batch-invariant mode is on.
            Then the mode is not enabled.
        NotImplementedError: The block calls an operator without a batch-invariant form here, or a module of Transformer
            Engine.
    """
    with ExitStack() as overrides:
        if not is_batch_invariant():
            _check_environment()
            if _TRANSFORMER_ENGINE in sys.modules:
                # Torch calls this hook before every module, which takes a microsecond.
                overrides.enter_context(register_module_forward_pre_hook(_refuse_transformer_engine))
        # In a backward pass torch disables one of the two, and its threads inherit the modes of their caller.
        if not FunctionOverrides.is_on():
            overrides.enter_context(FunctionOverrides())
        if not OperatorOverrides.is_on():
            overrides.enter_context(OperatorOverrides())  # type: ignore[no-untyped-call]
        yield


def is_batch_invariant() -> bool:
    """Return True if matmuls and attention that are called from here use :func:`batch_invariant_mode`."""
    return FunctionOverrides.is_on() and OperatorOverrides.is_on()


def _check_environment() -> None:
    if torch.cuda.is_available():
        check_device_type("cuda")
    megatron = sys.modules.get(_MEGATRON_KERNELS)
    if megatron is not None and megatron.is_batch_invariant_mode_enabled():
        raise RuntimeError(
            "Megatron-Core's batch-invariant mode is on, and would override the same operators: turn it off"
        )


@contextmanager
def batch_invariant_forward(*modules: nn.Module) -> Iterator[None]:
    """Run the forwards of these modules in :func:`batch_invariant_mode`, in any thread.

    This includes their inner modules: gradient checkpointing calls some of them again in the backward pass, which may
    be after the whole forward, and in a thread of autograd.

    Args:
        *modules: The ``forward`` of each module and inner module is wrapped, and restored after the block. A copy that
            is made in the block keeps its wrapper.
    """
    with ExitStack() as stack:
        for module in dict.fromkeys(inner for outer in modules for inner in outer.modules()):
            stack.callback(_restore_forward, module, vars(module).get("forward"))
            module.forward = _in_mode(module, module.forward)
        yield


def _in_mode(module: nn.Module, forward: Callable[..., Any]) -> MethodType:
    """A method, so that a deep copy of the module gets its own."""
    function = forward.__func__ if getattr(forward, "__self__", None) is module else None  # type: ignore[attr-defined]

    @wraps(function or forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Most modules are called inside the mode already. This check is on the critical path of a decode step.
        with nullcontext() if is_batch_invariant() else batch_invariant_mode():
            return function(self, *args, **kwargs) if function else forward(*args, **kwargs)

    return MethodType(wrapped, module)


def _restore_forward(module: nn.Module, own_forward: Callable[..., Any] | None) -> None:
    if own_forward is None:
        del module.forward
    else:
        module.forward = own_forward


def _refuse_transformer_engine(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse Transformer Engine's modules by name, because their kernels bypass torch's operators."""
    # The hook applies to the process, but the mode only to its thread.
    kind: Any = type(module)
    if OperatorOverrides.is_on() and _is_transformer_engine(kind):
        raise NotImplementedError(
            f"a {kind.__name__} runs kernels of Transformer Engine, which have no batch-invariant form here: build "
            "the model from torch's modules (Megatron-Core: get_gpt_decoder_block_spec with "
            "use_transformer_engine=False; a local layer spec alone gets Transformer Engine's final norm), or use "
            "Megatron-Core's own mode for them, enable_batch_invariant_mode, on both sides instead of this mode"
        )


@cache
def _is_transformer_engine(kind: Any) -> bool:
    """Also by base class: the modules of Megatron-Core's specification derive from Transformer Engine's."""
    return any(base.__module__.split(".")[0] == _TRANSFORMER_ENGINE for base in kind.__mro__)
