# SPDX-License-Identifier: Apache-2.0
"""Rows and single values on a CPU: the same bits in any batch, any layout and with any number of threads.

torch computes whole vectors with different instructions than the remaining elements at the end of each thread's share,
so silu, gelu, pow and others round differently there. This module makes the operands of an elementwise function
contiguous, pads them to whole vectors, and passes pieces that one thread computes. Also, torch sums columns in a
different order than rows, and splits a sum with a single result. So rows are contiguous here, and there are at least
two.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# torch processes at most two registers of 512 bits at once, with 16-bit values.
_VECTOR = 64
# Larger pieces would be split between threads, for gelu first.
_PIECE = 1 << 14


def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute ``func`` (also in place), in the layout of the first operand with the shape of the result."""
    if func._schema.is_mutable:
        return args[0].copy_(elementwise(functional(func), *args, **kwargs))
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    # A tensor without dimensions does not change: torch treats it like a Python number.
    operands = [x for x in tensors if x.dim() > 0] or tensors
    shape = torch.broadcast_shapes(*(x.shape for x in operands))  # type: ignore[no-untyped-call]
    numel = math.prod(shape)
    pieces = {id(x): _pieces(x, shape) for x in operands}

    def piece(place: int) -> Tensor:
        chosen = [pieces[id(x)][place] if id(x) in pieces else x for x in (*args, *kwargs.values())]
        result: Tensor = func(*chosen[: len(args)], **dict(zip(kwargs, chosen[len(args) :], strict=True)))
        return result

    flat = torch.cat([piece(place) for place in range(len(pieces[id(operands[0])]))])
    result = flat[:numel].view(shape)
    like = next((x for x in operands if x.shape == shape), result)
    return result if like.is_contiguous() else torch.empty_like(like, dtype=result.dtype).copy_(result)


def _pieces(x: Tensor, shape: torch.Size) -> tuple[Tensor, ...]:
    numel = math.prod(shape)
    if x.shape == shape and x.is_contiguous() and numel % _VECTOR == 0:
        flat = x.view(-1)
    else:
        flat = x.new_ones(-(-numel // _VECTOR) * _VECTOR)
        flat[:numel].view(shape).copy_(x)
    return flat.split(_PIECE)  # type: ignore[no-any-return, no-untyped-call]


@cache
def functional(func: Any) -> Any:
    """``aten.exp.default`` for ``aten.exp_.default`` and for itself; None for a form with an ``out`` argument."""
    if not func._schema.is_mutable:
        return func if len(func._schema.returns) == 1 else None
    name = func.overloadpacket.__name__
    is_in_place = name.endswith("_") and len(func._schema.returns) == 1
    return getattr(getattr(aten, name[:-1], None), func._overloadname, None) if is_in_place else None


def sum(rows: Tensor, *, is_mean: bool) -> Tensor:
    """Sum, or mean, of contiguous rows ``[..., E]``; torch would split a single row between threads."""
    flat = rows.view(-1, rows.shape[-1])
    flat = flat.expand(2, -1) if len(flat) == 1 else flat
    result = flat.mean(1) if is_mean else flat.sum(1)
    return result[: rows.shape[:-1].numel()].clone().view(rows.shape[:-1])


# Bits of a share of a softmax: 2**20 shares fit into 63 bits.
_SHARE_BITS = 42
_PART = 1 << 16


def softmax(rows: Tensor, dtype: torch.dtype, *, is_log: bool) -> Tensor:
    """Softmax of contiguous rows ``[..., E]``, or its logarithm; columns at -infinity change no bit at any position.

    The shares are added as integers, so the order does not matter. An attention sink comes after all keys, including
    masked keys, so its position in the sum varies.
    """
    out, num_columns = torch.empty_like(rows, dtype=dtype), rows.shape[-1]
    # A few rows at a time, so that the data stays in the cache.
    size = max(1, _PART // num_columns)
    for start in range(0, out.numel() // num_columns, size):
        into, scores = (y.view(-1, num_columns)[start : start + size] for y in (out, rows))
        scores = scores if scores.dtype == torch.float64 else scores.float()
        highest = scores.amax(-1, keepdim=True)
        shares: Tensor = elementwise(aten.exp.default, scores - highest)
        # If the highest score is NaN or infinite, all shares are NaN.
        total = torch.where(highest.isfinite(), _exact_sum(shares), torch.nan)
        into.copy_(scores - highest - elementwise(aten.log.default, total) if is_log else shares / total)
    return out


def _exact_sum(shares: Tensor) -> Tensor:
    """``[..., 1]``: the exact sum of values from -1 to 1."""
    scaled = shares * 2.0**_SHARE_BITS
    whole = scaled.to(torch.int64)
    total = whole.sum(-1, keepdim=True).to(shares.dtype) * 2.0**-_SHARE_BITS
    if shares.dtype == torch.float64:
        rest = (scaled - whole) * 2.0**_SHARE_BITS
        total += rest.to(torch.int64).sum(-1, keepdim=True) * 4.0**-_SHARE_BITS
    return total
