# SPDX-License-Identifier: Apache-2.0
"""Keys and values as the engine's cache holds them, so that the trainer scores with what the engine computed with.

A cache of 8 bits rounds every key and value. The trainer has no cache. If it rounds them too, it attends to the same
numbers as an engine that is aligned in all else. The gradient passes the rounding as if it were not there ("Estimating
or Propagating Gradients Through Stochastic Neurons for Conditional Computation", arXiv 1308.3432: the straight-through
estimator).
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
"""As SGLang and vLLM spell them; without scales, which is what SGLang does unless a file has some."""


def simulate_kv_cache(model: Module | Sequence[Module], dtype: str, *, queries: bool = False) -> ExitStack:
    """Let a Megatron-Core model round keys and values to a dtype, and back, before every attention.

    They are rounded as the attention gets them (normed, rotated, by element), so in the same way under any tensor and
    context parallelism. It also applies to Transformer Engine's attention, with which it was not tested.

    For an engine that is aligned in all else, whose attention computes in the model's dtype and reads prompts from the
    cache too. With others it can make the mismatch larger: SGLang's Triton attention reads the keys of a prompt before
    it rounds them, and rounds queries and the attention's weights as well while it decodes.

    Args:
        model: A Megatron-Core model, or this rank's model chunks. Layers of multi-token prediction stay as they are.
        dtype: Of the engine's cache: ``fp8_e4m3`` or ``fp8_e5m2``.
        queries: Round queries too, as FlashAttention 3 does in SGLang (``--attention-backend fa3``).

    Returns:
        Its ``close()``, or the end of a ``with`` block, lets the model compute as before.

    Raises:
        ValueError: An unknown dtype, a model without attention, with a cache of latents (MLA), or that rounds already.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: a cache is simulated in {' or '.join(DTYPES)}")
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
            raise ValueError(f"{name}: the model simulates a cache already: remove that first")
    rounding, handles = partial(_round, _NAMES if queries else _NAMES[1:], DTYPES[dtype]), ExitStack()
    for layer in layers.values():
        handles.callback(layer.core_attention.register_forward_pre_hook(rounding, with_kwargs=True).remove)
    return handles


_NAMES = ("query", "key", "value")


def _round(
    which: Sequence[str], dtype: torch.dtype, module: Module, inputs: tuple[Any, ...], named: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Round these of the query, key and value of a core attention, before it gets them."""

    def rounded(name: str, x: Any) -> Any:
        return _StraightThrough.apply(x, dtype) if name in which else x  # type: ignore[no-untyped-call]

    first = map(rounded, _NAMES, inputs)
    return (*first, *inputs[len(_NAMES) :]), {name: rounded(name, x) for name, x in named.items()}


class _StraightThrough(torch.autograd.Function):
    """To a dtype and back; the gradient as it comes."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype).to(values.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None
