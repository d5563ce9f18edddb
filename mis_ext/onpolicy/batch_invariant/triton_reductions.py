# SPDX-License-Identifier: Apache-2.0
"""Softmax, mean, sum and RMSNorm on CUDA with a fixed order per row: one program per row, in blocks from left to right.

Each lane of a block sums its own column of the blocks, and the lanes are summed last. So the order of additions depends
only on the width of a row. For the same reason only softmax, whose sum is over integers, is specialized for alignment,
which changes the assignment of lanes to threads.

float32, bfloat16 and float16; sums and exponentials are float32 within a row.
"""

# Annotations must not be strings here, because kernel() searches for those of compile-time arguments.
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mis_ext.onpolicy.batch_invariant import cpu
from mis_ext.scoring.launch import Launcher, kernel, launching_on

# Scale of a share of a softmax: 2**20 shares fit into 63 bits.
SHARE = tl.constexpr(2.0**42)


@triton.jit
def softmax_kernel(x, out, num_columns, IS_LOG: tl.constexpr, BLOCK: tl.constexpr):
    """Softmax of contiguous rows ``[R, num_columns]``, or its logarithm; columns at minus infinity change no bit.

    The shares are added as integers, so neither the order nor the width of a block matters. Sums of floats would depend
    on them: masked keys before or between other keys, as with padding on the left or an attention sink, move a share to
    another lane.
    """
    first = tl.program_id(0).to(tl.int64) * num_columns
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + first + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, value, propagate_nan=tl.PropagateNan.ALL)
    # The integer sum is never NaN. A row with a NaN is treated like a row with an infinity.
    row_highest = tl.max(tl.where(highest != highest, float("inf"), highest), 0)
    is_finite = tl.abs(row_highest) < float("inf")
    origin = tl.where(is_finite, row_highest, 0.0)
    total = tl.zeros([BLOCK], tl.int64)
    last = (num_columns - 1) // BLOCK * BLOCK
    for start in range(0, num_columns, BLOCK):
        # Backward, because the last values are still in the cache.
        column = last - start + tl.arange(0, BLOCK)
        value = tl.load(x + first + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        total += (tl.exp(value - origin) * SHARE).to(tl.int64)
    row_total = tl.where(is_finite, tl.sum(total, 0).to(tl.float32) / SHARE, float("nan"))
    log_total = tl.log(row_total)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < num_columns
        value = tl.load(x + first + column, mask=is_column, other=0.0, eviction_policy="evict_first")
        value = value.to(tl.float32) - origin
        result = value - log_total if IS_LOG else tl.exp(value) / row_total
        tl.store(out + first + column, result.to(out.dtype.element_ty), mask=is_column, eviction_policy="evict_first")


@kernel
def sum_kernel(x, out, num_columns, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Sum, or mean, of contiguous rows ``[R, num_columns]``: ``out [R]``, rounded once.

    A row is never split between two programs, for any length and number of rows.
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * num_columns + column, mask=column < num_columns, other=0.0).to(tl.float32)
    result = tl.sum(total, 0)
    if IS_MEAN:
        # Triton's own division may not be correctly rounded.
        result = tl.math.div_rn(result, num_columns.to(tl.float32))
    tl.store(out + row, result.to(out.dtype.element_ty))


@kernel
def rms_norm_kernel(x, weight, out, eps, num_columns, BLOCK: tl.constexpr):
    """Divide contiguous rows by their root mean square, round to the dtype of ``x``, then multiply by the weight.

    Engines round at different steps. This is the order of Llama and Qwen in transformers.
    """
    first = tl.program_id(0).to(tl.int64) * num_columns
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + first + column, mask=column < num_columns, other=0.0).to(tl.float32)
        squares += value * value
    scale = tl.rsqrt(tl.math.div_rn(tl.sum(squares, 0), num_columns.to(tl.float32)) + eps)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < num_columns
        value = tl.load(x + first + column, mask=is_column, other=0.0).to(tl.float32) * scale
        gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
        result = value.to(x.dtype.element_ty).to(tl.float32) * gain
        tl.store(out + first + column, result.to(out.dtype.element_ty), mask=is_column)


BLOCK = 2048
_NARROWEST = 128

# The width of its blocks changes no bit. 32 warps load more bytes of a wide row at a time.
_softmax = Launcher(softmax_kernel)
_WIDE_BYTES, _WIDE_BLOCK = 1 << 16, 16_384


def softmax(rows: Tensor, dtype: torch.dtype, *, is_log: bool) -> Tensor:
    """Softmax of contiguous rows ``[..., E]`` of at most 2**20 numbers, or its logarithm."""
    out, num_columns = torch.empty_like(rows, dtype=dtype), rows.shape[-1]
    is_wide = num_columns * rows.element_size() > _WIDE_BYTES
    block = _WIDE_BLOCK if is_wide else _block(num_columns)
    with launching_on(rows):
        options = {"num_warps": max(block // 512, 4)}
        _softmax(rows.shape[:-1].numel(), (rows, out), (num_columns,), {"IS_LOG": is_log, "BLOCK": block}, options)
    return out


def sum(rows: Tensor, *, is_mean: bool) -> Tensor:
    """Sum, or mean, of contiguous rows ``[..., E]``, rounded once from a float32 sum; one program per row."""
    out = torch.empty(rows.shape[:-1], dtype=rows.dtype, device=rows.device)
    _launch(_sum, (rows, out), (), IS_MEAN=is_mean)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`.devices.rms_norm`, differentiable: the quotient is float32, rounded to the dtype of ``x``.

    It is multiplied in the wider of the two dtypes, which is the dtype of the result.
    """
    normed: Tensor = _RMSNorm.apply(x, weight, float(eps))  # type: ignore[no-untyped-call]
    return normed


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        x, weight = x.contiguous(), weight.contiguous()
        out = torch.empty_like(x, dtype=torch.promote_types(x.dtype, weight.dtype))
        _launch(_rms_norm, (x, weight, out), (eps,))
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = (saved.detach().requires_grad_() for saved in ctx.saved_tensors)
        with torch.enable_grad():
            normed = cpu.rms_norm(x, weight, ctx.eps)
        return (*torch.autograd.grad(normed, (x, weight), grad), None)


_sum, _rms_norm = map(Launcher, (sum_kernel, rms_norm_kernel))


def _block(num_columns: int) -> int:
    return min(max(1 << (num_columns - 1).bit_length(), _NARROWEST), BLOCK)


def _launch(kernel: Launcher, tensors: tuple[Tensor, ...], numbers: tuple[float, ...], **constants: Any) -> None:
    rows = tensors[0]
    num_columns = rows.shape[-1]
    constants["BLOCK"] = _block(num_columns)
    with launching_on(rows):
        kernel(rows.shape[:-1].numel(), tensors, (*numbers, num_columns), constants, {})
