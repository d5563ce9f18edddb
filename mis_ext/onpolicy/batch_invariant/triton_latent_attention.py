"""Attention on CUDA whose values are not as wide as its keys, as in DeepSeek-V3: zeros make them equal."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from mis_ext.onpolicy.batch_invariant import triton_attention
from mis_ext.onpolicy.batch_invariant.packing import Packing


def attention_forward(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """:func:`.triton_attention.attention_forward` with ``value [U, G, V]`` and an output ``[T, H, V]``."""
    width = _common_width(key, value)
    wide_query, wide_key, wide_value = (_widened(x, width) for x in (query, key, value))
    output, lse = triton_attention.attention_forward(wide_query, wide_key, wide_value, packing)
    return _narrowed(output, value), lse


def attention_backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, packing: Packing
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`.triton_attention.attention_backward` for a ``value [U, G, V]``."""
    width = _common_width(key, value)
    wide_query, wide_key, wide_value = (_widened(x, width) for x in (query, key, value))
    grads = triton_attention.attention_backward(
        _widened(grad_output, width), wide_query, wide_key, wide_value, _widened(output, width), lse, packing
    )
    return _narrowed(grads[0], query), _narrowed(grads[1], key), _narrowed(grads[2], value)


def _common_width(key: Tensor, value: Tensor) -> int:
    return max(key.shape[-1], value.shape[-1])


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _narrowed(x: Tensor, like: Tensor) -> Tensor:
    return x[..., : like.shape[-1]].contiguous()
