# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant execution: the mode, in which a row's bits depend on the row, and not on what else is in the batch.

It puts ``overrides`` in the place of torch's operators, which also says what passes and what is refused:
``attention``, ``mixtures`` and ``cpu_rows`` compute. ``devices`` chooses the arithmetic, of ``cpu`` or of ``cuda``;
``packed_sequences`` says how sequences lie, on both.
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
    """Make what this thread computes batch-invariant, on a CPU and on CUDA, or refuse it by name.

    Products use tiles of a fixed shape, ``scaled_dot_product_attention`` fixed blocks, ``softmax`` an exact sum;
    ``log_softmax``, sums and means of rows take one order per row. On a CPU elementwise functions take whole vectors.
    Of equal scores ``topk`` takes the first, and rows of one destination are added in the order in which they lie. All
    else that computes is an error; ``overrides.py`` has the lists. A product with a bias is rounded, then added to the
    bias and rounded again, so engines that fuse the addition and engines that do not agree. The idea is that of He et
    al., "Defeating Nondeterminism in LLM Inference", Thinking Machines Lab, 2025.

    Gradients are right, and not batch-invariant. An expert that drops tokens at a capacity depends on the batch.

    The mode belongs to the thread that entered it, and a block inside of another changes nothing. For an engine with
    threads of its own use :func:`batch_invariant_forward`, and for gradient checkpointing too: torch hides attention
    from the mode in what a backward pass computes again, where it is an error. Compiled code (``torch.compile``,
    captured graphs, custom kernels) runs as it was compiled. A module of Transformer Engine is refused by name, if
    Transformer Engine is imported when the block begins; its functions, called without a module, are not seen.

    Raises:
        RuntimeError: A CUDA device without usable Triton, or Megatron-Core's own batch-invariant mode is on; nothing is
            enabled then.
        NotImplementedError: In the block, an operator that has no batch-invariant form here, or a call of a module of
            Transformer Engine.
    """
    with ExitStack() as overrides:
        if not is_batch_invariant():
            _check_environment()
            if _TRANSFORMER_ENGINE in sys.modules:
                # Torch asks before the call of every module, which takes a microsecond.
                overrides.enter_context(register_module_forward_pre_hook(_refuse_transformer_engine))
        # In a backward pass torch takes away one of the two, and its threads begin with what their caller had.
        if not FunctionOverrides.is_on():
            overrides.enter_context(FunctionOverrides())
        if not OperatorOverrides.is_on():
            overrides.enter_context(OperatorOverrides())  # type: ignore[no-untyped-call]
        yield


def is_batch_invariant() -> bool:
    """Return True if matmuls and attention called from here are those of :func:`batch_invariant_mode`."""
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
    """Run the forwards of these modules in :func:`batch_invariant_mode`, in whichever thread they are called.

    The modules inside of them too: gradient checkpointing calls some of those again in the backward pass, which may be
    after the forward of the whole, and in a thread of autograd.

    Args:
        *modules: Each, and each module inside, gets a wrapper around its ``forward``, and its own one back after the
            block. A copy made in the block keeps its wrapper.
    """
    with ExitStack() as stack:
        for module in dict.fromkeys(inner for outer in modules for inner in outer.modules()):
            stack.callback(_restore_forward, module, vars(module).get("forward"))
            module.forward = _in_mode(module, module.forward)
        yield


def _in_mode(module: nn.Module, forward: Callable[..., Any]) -> MethodType:
    """A method, because a deep copy of the module then gets one of its own."""
    function = forward.__func__ if getattr(forward, "__self__", None) is module else None  # type: ignore[attr-defined]

    @wraps(function or forward)
    def wrapped(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Most modules are called by one that has entered the mode, and a decode step waits for this.
        with nullcontext() if is_batch_invariant() else batch_invariant_mode():
            return function(self, *args, **kwargs) if function else forward(*args, **kwargs)

    return MethodType(wrapped, module)


def _restore_forward(module: nn.Module, own_forward: Callable[..., Any] | None) -> None:
    if own_forward is None:
        del module.forward
    else:
        module.forward = own_forward


def _refuse_transformer_engine(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Refuse its modules by name: they reach their kernels past torch's operators."""
    # The hook is the process's, the mode is its thread's.
    kind: Any = type(module)
    if OperatorOverrides.is_on() and _is_transformer_engine(kind):
        raise NotImplementedError(
            f"a {kind.__name__}, runs kernels of Transformer Engine, which have no batch-invariant form here: "
            "build the model of torch's modules (Megatron-Core: get_gpt_decoder_block_spec with "
            "use_transformer_engine=False; a local layer spec alone gets Transformer Engine's final norm), or take "
            "Megatron-Core's own mode for them, enable_batch_invariant_mode, on both sides without this one"
        )


@cache
def _is_transformer_engine(kind: Any) -> bool:
    """By a base too: the modules of Megatron-Core's specification derive from Transformer Engine's."""
    return any(base.__module__.split(".")[0] == _TRANSFORMER_ENGINE for base in kind.__mro__)
