# SPDX-License-Identifier: Apache-2.0
"""Rows and single numbers on a CPU: the same bits in any batch, any layout and with any number of threads.

torch computes whole vectors with other instructions than the elements that are left over at the end of each thread's
share, so silu, gelu, pow and others round differently there. Here the operands of an elementwise function lie one after
the other in memory and are filled up until nothing is left over, however many threads there are. And torch adds up
columns in another order than rows, and cuts a sum whose only result is one number in two. Here rows are contiguous, and
a long one is never alone.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# What torch computes at once is at most two registers of 512 bits, with 16-bit numbers.
_VECTOR = 64
# The least share of a thread. Gelu takes as many threads as there are once it has more elements than a number.
_SHARE, _SHARE_OF_GELU = 1 << 15, 1 << 14


def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``func`` returns, or writes into its first argument; in the layout that torch gives it."""
    if func._schema.is_mutable:
        return args[0].copy_(elementwise(functional(func), *args, **kwargs))
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    # One without dimensions stays as it is beside others: torch takes it for a Python number.
    operands = [x for x in tensors if x.dim() > 0] or tensors
    shape, strides, fits = _layout(operands)
    numel = math.prod(shape)
    length = filled(numel, is_gelu=func is aten.gelu.default)
    if fits and length == numel:
        return func(*args, **kwargs)
    flat = {id(x): _flat(x, shape, strides, length) for x in operands}
    named = {name: flat.get(id(x), x) for name, x in kwargs.items()}
    return _unflat(func(*(flat.get(id(x), x) for x in args), **named), shape, strides)


@cache
def functional(func: Any) -> Any:
    """``aten.exp.default`` for ``aten.exp_.default`` and itself; None for a form that writes elsewhere."""
    if not func._schema.is_mutable:
        return func if len(func._schema.returns) == 1 else None
    name = func.overloadpacket.__name__
    is_in_place = name.endswith("_") and len(func._schema.returns) == 1
    return getattr(getattr(aten, name[:-1], None), func._overloadname, None) if is_in_place else None


def filled(numel: int, *, is_gelu: bool = False) -> int:
    """The least number of elements, not less than ``numel``, of which every thread computes whole vectors."""
    while missing := -numel % _multiple(numel, is_gelu):
        numel += missing
    return numel


def _multiple(numel: int, is_gelu: bool) -> int:
    num_threads = torch.get_num_threads()
    if is_gelu:
        return _VECTOR * (num_threads if numel > _SHARE_OF_GELU else 1)
    return _VECTOR * max(1, min(num_threads, -(-numel // _SHARE)))


def _layout(operands: list[Tensor]) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Shape and strides of the result, and whether all operands have them already."""
    first = operands[0]
    shape, strides = first.shape, first.stride()
    if all(x.shape == shape and x.stride() == strides for x in operands) and first.is_contiguous():
        return shape, strides, True
    shape = torch.broadcast_shapes(*(x.shape for x in operands))  # type: ignore[no-untyped-call]
    largest = next((x for x in operands if x.shape == shape), None)
    like = torch.empty(shape, device="meta") if largest is None else torch.empty_like(largest, device="meta")
    return shape, like.stride(), False


def _flat(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], length: int) -> Tensor:
    flat = x.new_empty(length)
    flat.as_strided(shape, strides).copy_(x)
    flat[math.prod(shape) :] = 1
    return flat


def _unflat(flat: Tensor, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(shape, strides, dtype=flat.dtype).copy_(flat.as_strided(shape, strides))


def sum(rows: Tensor, *, is_mean: bool) -> Tensor:
    """Sum, or mean, of contiguous rows ``[..., E]``; torch would share out a single one between threads."""
    flat = rows.view(-1, rows.shape[-1])
    flat = flat.expand(2, -1) if len(flat) == 1 else flat
    result = flat.mean(1) if is_mean else flat.sum(1)
    return result[: rows.shape[:-1].numel()].clone().view(rows.shape[:-1])


# Of a share of a softmax: 2**20 of them fit into 63 bits.
_SHARE_BITS = 42
_PART = 1 << 16


def softmax(rows: Tensor, dtype: torch.dtype, *, is_log: bool) -> Tensor:
    """Softmax of contiguous rows ``[..., E]``, or its logarithm; columns at -infinity change no bit, wherever they are.

    The shares are added up as integers, in which no order matters: an attention sink comes after the keys, masked ones
    too, so nothing else gives it one place in the sum.
    """
    out, num_columns = torch.empty_like(rows, dtype=dtype), rows.shape[-1]
    # Some at a time, so that what a part needs stays in the cache.
    size = max(1, _PART // num_columns)
    for start in range(0, out.numel() // num_columns, size):
        into, scores = (y.view(-1, num_columns)[start : start + size] for y in (out, rows))
        scores = scores if scores.dtype == torch.float64 else scores.float()
        highest = scores.amax(-1, keepdim=True)
        shares: Tensor = elementwise(aten.exp.default, scores - highest)
        # Without a number, or with an infinite one, all shares are NaN.
        total = torch.where(highest.isfinite(), _exact_sum(shares), torch.nan)
        into.copy_(scores - highest - elementwise(aten.log.default, total) if is_log else shares / total)
    return out


def _exact_sum(shares: Tensor) -> Tensor:
    """``[..., 1]`` of numbers from -1 to 1."""
    scaled = shares * 2.0**_SHARE_BITS
    whole = scaled.to(torch.int64)
    total = whole.sum(-1, keepdim=True).to(shares.dtype) * 2.0**-_SHARE_BITS
    if shares.dtype == torch.float64:
        rest = (scaled - whole) * 2.0**_SHARE_BITS
        total += rest.to(torch.int64).sum(-1, keepdim=True) * 4.0**-_SHARE_BITS
    return total
