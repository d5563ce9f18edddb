# SPDX-License-Identifier: Apache-2.0
"""Keys and values rounded like in the engine's cache, so that the trainer scores with the engine's values.

An 8-bit KV cache rounds every key and value. The trainer has no cache. If it rounds them too, it attends to the same
values as an engine that is otherwise aligned. The gradient ignores the rounding ("Estimating or Propagating Gradients
Through Stochastic Neurons for Conditional Computation", arXiv 1308.3432: the straight-through estimator).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

DTYPES = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Names as in SGLang and vLLM. Without scales, like SGLang unless a file provides them."""


def simulate_kv_cache(model: Module | Sequence[Module], dtype: str, *, queries: bool = False) -> ExitStack:
    """Make a Megatron-Core model round keys and values to a dtype, and back, before every attention.

    The inputs of attention are rounded (after norm and rotation, elementwise), so rounding is the same for any tensor
    and context parallelism. It also applies to Transformer Engine's attention, but was not tested with it.

    Use it for an engine that is otherwise aligned, whose attention computes in the model's dtype and reads prompts from
    the cache too. With other engines it can increase the mismatch: SGLang's Triton attention reads the keys of a prompt
    before it rounds them, and also rounds queries and attention weights during decoding.

    Args:
        model: A Megatron-Core model, or this rank's model chunks. Layers of multi-token prediction are not changed.
        dtype: The dtype of the engine's cache: ``fp8_e4m3`` or ``fp8_e5m2``.
        queries: Round queries too, as FlashAttention 3 does in SGLang (``--attention-backend fa3``).

    Returns:
        Its ``close()``, or the end of a ``with`` block, restores the model.

    Raises:
        ValueError: The dtype is unknown, or the model has no attention, has a cache of latents (MLA), or already
            rounds.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be {' or '.join(DTYPES)}")
    chunks = [model] if isinstance(model, Module) else list(model)
    layers = {
        name: module
        for chunk in chunks
        for name, module in chunk.named_modules()
        if hasattr(module, "core_attention") and "mtp" not in name.split(".")
    }
    if not layers:
        raise ValueError("no layer has a core_attention: not a Megatron-Core model with attention")
    for name, layer in layers.items():
        if getattr(getattr(layer, "config", None), "multi_latent_attention", False):
            raise ValueError(f"{name}: the cache of multi-latent attention (MLA) holds latents, not keys and values")
        if any(getattr(hook, "func", None) is _round for hook in layer.core_attention._forward_pre_hooks.values()):
            raise ValueError(f"{name}: the model already simulates a cache: remove that first")
    rounding, handles = partial(_round, _NAMES if queries else _NAMES[1:], DTYPES[dtype]), ExitStack()
    for layer in layers.values():
        handles.callback(layer.core_attention.register_forward_pre_hook(rounding, with_kwargs=True).remove)
    return handles


_NAMES = ("query", "key", "value")


def _round(
    which: Sequence[str], dtype: torch.dtype, module: Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Round the selected query, key and value before a core attention gets them."""

    def rounded(name: str, x: Any) -> Any:
        return _StraightThrough.apply(x, dtype) if name in which else x  # type: ignore[no-untyped-call]

    first = map(rounded, _NAMES, inputs)
    return (*first, *inputs[len(_NAMES) :]), {name: rounded(name, x) for name, x in named.items()}


class _StraightThrough(torch.autograd.Function):
    """Rounds to a dtype and back; the gradient does not change."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
