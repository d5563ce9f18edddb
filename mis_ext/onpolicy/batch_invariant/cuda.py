"""Batch-invariant products, sums of rows, attention and row reductions on CUDA, in Triton."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad

from mis_ext.onpolicy.batch_invariant import triton_attention
from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing
from mis_ext.onpolicy.batch_invariant.triton_matmul import addmm, bmm, mm
from mis_ext.onpolicy.batch_invariant.triton_mixtures import add_rows_, grouped_rows, grouped_sums
from mis_ext.onpolicy.batch_invariant.triton_reductions import (
    log_softmax,
    log_softmax_backward,
    logsumexp,
    mean,
    rms_norm,
    softmax,
    softmax_backward,
    sum,
)

__all__ = [
    "add_rows_",
    "addmm",
    "attention_backward",
    "attention_forward",
    "bmm",
    "grouped_rows",
    "grouped_sums",
    "log_softmax",
    "log_softmax_backward",
    "logsumexp",
    "mean",
    "mm",
    "rms_norm",
    "softmax",
    "softmax_backward",
    "sum",
]


# Values need not be as wide as keys, as in DeepSeek-V3. The kernels take one width: zeros make them equal.
def attention_forward(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    """:func:`.triton_attention.attention_forward` with ``value [U, G, V]`` and an output ``[T, H, V]``."""
    width = max(key.shape[-1], value.shape[-1])
    query, key, wide_value = (_widened(x, width) for x in (query, key, value))
    output, lse = triton_attention.attention_forward(query, key, wide_value, packing)
    return _narrowed(output, value), lse


def attention_backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, packing: Packing
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`.triton_attention.attention_backward` for a ``value [U, G, V]``."""
    width = max(key.shape[-1], value.shape[-1])
    grad, wide_query, wide_key, wide_value, out = (_widened(x, width) for x in (grad_output, query, key, value, output))
    grads = triton_attention.attention_backward(grad, wide_query, wide_key, wide_value, out, lse, packing)
    return _narrowed(grads[0], query), _narrowed(grads[1], key), _narrowed(grads[2], value)


def _widened(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else pad(x, (0, width - x.shape[-1]))


def _narrowed(x: Tensor, like: Tensor) -> Tensor:
    return x[..., : like.shape[-1]].contiguous()
