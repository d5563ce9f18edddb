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
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

aten = torch.ops.aten

# What torch computes at once is at most two registers of 512 bits, with 16-bit numbers.
_VECTOR = 64
# The least share of a thread. Gelu takes as many threads as there are once it has more elements than a number.
_SHARE, _SHARE_OF_GELU = 1 << 15, 1 << 14
_GELU = frozenset({aten.gelu.default, aten.gelu_backward.default})


def elementwise(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``func`` returns, or writes into its first argument or ``out``; in the layout that torch gives it."""
    if func._schema.is_mutable:
        return _write(func, *args, **kwargs)
    args = _without_mean(func, *args)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    # One without dimensions stays as it is beside others: torch takes it for a Python number.
    operands = [x for x in tensors if x.dim() > 0] or tensors
    shape, strides, fits = _layout(operands)
    numel, is_gelu = math.prod(shape), func in _GELU
    num_whole = _whole(numel, is_gelu=is_gelu)
    if fits and num_whole == numel:
        return func(*args, **kwargs)

    def call(function: Any, change: Callable[[Tensor], Tensor], **more: Tensor) -> Any:
        changed = {id(x): change(x) for x in operands}
        named = {name: changed.get(id(x), x) for name, x in kwargs.items()}
        return function(*(changed.get(id(x), x) for x in args), **named, **more)

    into_given = _form(func, with_out=True) if fits and num_whole else None
    if into_given is None:
        length = filled(numel, is_gelu=is_gelu)
        results = call(func, lambda x: _flat(x, shape, strides, length))
        if isinstance(results, Tensor):
            return _unflat(results, shape, strides)
        return tuple(_unflat(x, shape, strides) for x in results)
    # What is whole stays where it is.
    num_left = numel - num_whole
    length = filled(num_left, is_gelu=is_gelu)
    rest = call(func, lambda x: _flat(x.view(-1)[num_whole:], (num_left,), (1,), length))
    result = rest.new_empty(shape)
    call(into_given, lambda x: x.view(-1)[:num_whole], out=result.view(-1)[:num_whole])
    result.view(-1)[num_whole:] = rest[:num_left]
    return result


def _without_mean(func: Any, *args: Any) -> tuple[Any, ...]:
    """Of the gradient of a mean, the arguments for that of a sum: what fills a vector up is not counted."""
    names = [argument.name for argument in func._schema.arguments]
    if "reduction" not in names:
        return args
    place = names.index("reduction")
    # Mean is 1, and sum 2; torch leaves out trailing arguments that are the default, as this one's mean is.
    args = (*args, *(argument.default_value for argument in func._schema.arguments[len(args) : place + 1]))
    return (args[0] / args[1].numel(), *args[1:place], 2, *args[place + 1 :]) if args[place] == 1 else args


def glu(func: Any, x: Tensor, dim: int = -1) -> Any:
    """Stands in for ``aten.glu``: as an elementwise function of the two halves, each filled up to whole vectors."""
    return func(x, dim) if _is_no_pair(x, dim) else _of_halves(func, x, dim)[0]


def glu_backward(func: Any, grad: Tensor, x: Tensor, dim: int) -> Any:
    """Stands in for ``aten.glu_backward``, in the same way."""
    return func(grad, x, dim) if _is_no_pair(x, dim) else torch.cat(_of_halves(func, x, dim, grad), dim)


def _is_no_pair(x: Tensor, dim: int) -> bool:
    return x.device.type != "cpu" or x.dim() == 0 or x.shape[dim] % 2 == 1


def _of_halves(func: Any, x: Tensor, dim: int, *grad: Tensor) -> list[Tensor]:
    halves = x.chunk(2, dim)
    shape, strides, _ = _layout([*halves])
    length = filled(halves[0].numel())
    *before, first, second = (_flat(y, shape, strides, length) for y in (*grad, *halves))
    flat = func(*before, torch.cat([first, second]), 0)
    return [_unflat(part, shape, strides) for part in flat.chunk(1 + len(grad))]


def filled(numel: int, *, is_gelu: bool = False) -> int:
    """The least number of elements, not less than ``numel``, of which every thread computes whole vectors."""
    while missing := -numel % _multiple(numel, is_gelu):
        numel += missing
    return numel


def _whole(numel: int, *, is_gelu: bool) -> int:
    """The largest number of elements, not above ``numel``, of which every thread computes whole vectors."""
    while left := numel % _multiple(numel, is_gelu):
        numel -= left
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


def _write(func: Any, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Tensor:
    functional = _form(func, with_out=False)
    if functional is None:
        raise NotImplementedError(f"{func} has no batch-invariant form here: take the one that returns a new tensor")
    result = elementwise(functional, *args, **kwargs)
    into: Tensor = args[0] if out is None else out.resize_(result.shape)
    return into.copy_(result)


@cache
def _form(func: Any, *, with_out: bool) -> Any:
    """``aten.exp.default`` for ``aten.exp_.default`` and ``aten.exp.out``, or ``aten.exp.out`` for both; or None."""

    def signature(overload: Any) -> list[tuple[str, str]]:
        return [(x.name, str(x.type)) for x in overload._schema.arguments if x.name != "out"]

    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"), None)
    for overload in (getattr(packet, name) for name in packet.overloads()) if packet else ():
        if overload._schema.is_mutable == with_out and signature(overload) == signature(func):
            return overload
    return None


# A sum of fewer numbers is never cut.
_LONG = 1 << 15
# Of these torch computes a single number in another way.
_ANOTHER_WAY_ALONE = frozenset({aten.std.correction, aten.var.correction})


def is_over_rows(x: Tensor, dim: int | Sequence[int] | None) -> bool:
    """Whether the reduction is over the last dimension, or leaves one before it; any other is over the batch.

    So a sum of ``[experts, tokens, width]`` over the experts is about tokens, and one over experts and tokens is not.
    """
    dims, last = _dims(x, dim), x.dim() - 1
    return bool(dims) and (dims == [last] or not {*range(last)} <= {*dims})


def _rows(x: Tensor, dim: int | Sequence[int]) -> Tensor:
    """``[..., E]``, contiguous: the dimensions of the reduction made one, the last."""
    dims = _dims(x, dim)
    moved = x if dims == [x.dim() - 1] else x.movedim(dims, [*range(-len(dims), 0)]).flatten(-len(dims))
    return moved.contiguous()


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    dims = [] if dim is None else [dim] if isinstance(dim, int) else dim
    return sorted(axis % x.dim() for axis in dims) if x.dim() else []


def reduce(func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """What ``func`` returns, an operator with arguments ``dim`` and ``keepdim``.

    Raises:
        NotImplementedError: It reduces rows on CUDA, where no order is known.
    """
    names = [argument.name for argument in func._schema.arguments[1:]]
    given = dict(zip(names, args, strict=False)) | kwargs
    dim = given.get("dim")
    if x.numel() == 0 or dim is None or not is_over_rows(x, dim):
        return func(x, *args, **kwargs)
    if x.is_cuda:
        raise NotImplementedError(f"{func} of a row has no batch-invariant form on cuda: take means and sums")
    is_safe = x.numel() > x.shape[-1] or (x.numel() < _LONG and func not in _ANOTHER_WAY_ALONE)
    if is_safe and x.is_contiguous() and _dims(x, dim) == [x.dim() - 1]:
        return func(x, *args, **kwargs)
    rows = _rows(x, dim)
    shape = rows.shape[:-1]
    rows = rows.view(-1, rows.shape[-1])
    is_alone = len(rows) == 1 and (rows.numel() >= _LONG or func in _ANOTHER_WAY_ALONE)
    if is_alone:
        rows = rows.expand(2, -1)
    keeps = given.get("keepdim", False)
    given |= {"dim": 1 if isinstance(dim, int) else [1]} | ({"keepdim": False} if "keepdim" in names else {})

    def finish(result: Tensor) -> Tensor:
        result = (result[:1].clone() if is_alone else result).view(shape)
        for axis in _dims(x, dim) if keeps else ():
            result = result.unsqueeze(axis)
        return result

    return tree_map_only(Tensor, finish, func(rows, **given))


# Of a share of a softmax: 2**20 of them fit into 63 bits.
_SHARE_BITS = 42
MOST_COLUMNS = 1 << 20
_PART = 1 << 16


def softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """``aten._softmax``; columns at -infinity change no bit, wherever they are.

    The shares are added up as integers, in which no order matters: an attention sink comes after the keys, masked ones
    too, so nothing else gives it one place in the sum.
    """
    if x.dim() == 0 or x.numel() == 0:
        return torch._softmax(x, dim, half_to_float)
    if x.shape[dim] > MOST_COLUMNS:
        raise NotImplementedError(f"batch-invariant softmax takes at most {MOST_COLUMNS} columns, got {x.shape[dim]}")

    def normalize(scores: Tensor) -> Tensor:
        highest = scores.amax(-1, keepdim=True)
        shares: Tensor = elementwise(aten.exp.default, scores - highest)
        # Without a number, or with an infinite one, all shares are NaN.
        return shares / torch.where(highest.isfinite(), _exact_sum(shares), torch.nan)

    return _part_by_part(normalize, dim, torch.float32 if half_to_float else x.dtype, x)


def softmax_backward(func: Any, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """``aten._softmax_backward_data``; columns whose share is 0 change no bit, wherever they are.

    The products of shares and gradients are added up as integers, in units of the largest.
    """
    if output.dim() == 0 or output.numel() == 0 or output.shape[dim] > MOST_COLUMNS:
        return func(grad, output, dim, input_dtype)  # type: ignore[no-any-return]

    def differentiate(share: Tensor, slope: Tensor) -> Tensor:
        return (slope - _sum_of_any_order(share * slope)) * share

    return _part_by_part(differentiate, dim, input_dtype, output, grad)


def _part_by_part(compute: Callable[..., Tensor], dim: int, dtype: torch.dtype, *tensors: Tensor) -> Tensor:
    """What ``compute`` makes of rows over ``dim``, some at a time, so that what a part needs stays in the cache."""
    rows = [_rows(x, dim) for x in tensors]
    out, num_columns = torch.empty_like(rows[0], dtype=dtype), rows[0].shape[-1]
    size = max(1, _PART // num_columns)
    for start in range(0, out.numel() // num_columns, size):
        into, *parts = (x.view(-1, num_columns)[start : start + size] for x in (out, *rows))
        into.copy_(compute(*(part if part.dtype == torch.float64 else part.float() for part in parts)))
    return out.movedim(-1, dim).contiguous()


def log_softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Any:
    """Stands in for ``aten._log_softmax``: over contiguous rows, so strides change no bit."""
    if x.dim() == 0 or x.numel() == 0:
        return func(x, dim, half_to_float)
    rows = _rows(x, dim)
    return func(rows, rows.dim() - 1, half_to_float).movedim(-1, dim).contiguous()


def _sum_of_any_order(rows: Tensor) -> Tensor:
    """``[..., 1]``; numbers are rounded to a unit that the row shares, far below the last bit of its largest."""
    largest = rows.abs().amax(-1, keepdim=True)
    # A power of two, so dividing by it rounds nothing.
    unit = (largest / torch.frexp(largest).mantissa).nan_to_num(1.0).clamp(2.0**-120, 2.0**120)
    return torch.where(largest.isfinite(), _exact_sum(rows / unit) * unit, torch.nan)


def _exact_sum(shares: Tensor) -> Tensor:
    """``[..., 1]`` of numbers from -1 to 1."""
    scaled = shares * 2.0**_SHARE_BITS
    whole = scaled.to(torch.int64)
    total = whole.sum(-1, keepdim=True).to(shares.dtype) * 2.0**-_SHARE_BITS
    if shares.dtype == torch.float64:
        rest = (scaled - whole) * 2.0**_SHARE_BITS
        total += rest.to(torch.int64).sum(-1, keepdim=True) * 4.0**-_SHARE_BITS
    return total
