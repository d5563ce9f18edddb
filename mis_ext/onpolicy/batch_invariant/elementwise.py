"""Elementwise functions on a CPU, where a number's bits depend on its operands and not on where it lies.

torch computes whole vectors with other instructions than the elements that are left over at the end of each thread's
share, so silu, gelu, pow and others round differently there. Here operands lie one after the other in memory and are
filled up until nothing is left over, however many threads there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

# What torch computes at once is at most two registers of 512 bits, with 16-bit numbers.
_VECTOR = 64
# The least share of a thread. Gelu takes as many threads as there are once it has more elements than a number.
_SHARE, _SHARE_OF_GELU = 1 << 15, 1 << 14
_GELU = frozenset({aten.gelu.default, aten.gelu_backward.default})


def compute(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What ``func`` returns, or writes into its first argument or ``out``; a tensor in the layout that torch gives it.

    Raises:
        NotImplementedError: ``func`` writes, and has no form that does not.
    """
    if func._schema.is_mutable:
        return _write(func, *args, **kwargs)
    args = _without_mean(func, *args)
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    # One without dimensions stays as it is beside others: torch takes it for a Python number.
    operands = [x for x in tensors if x.dim() > 0] or tensors
    shape, strides, fits = _layout(operands)
    numel = math.prod(shape)
    is_gelu = func in _GELU
    whole = _whole(numel, is_gelu)
    if fits and whole == numel:
        return func(*args, **kwargs)

    def call(function: Any, change: Callable[[Tensor], Tensor], **more: Tensor) -> Any:
        changed = {id(x): change(x) for x in operands}
        named = {name: changed.get(id(x), x) for name, x in kwargs.items()}
        return function(*(changed.get(id(x), x) for x in args), **named, **more)

    into_given = _form(func, with_out=True) if fits and whole else None
    if into_given is None:
        length = filled(numel, is_gelu=is_gelu)
        results = call(func, lambda x: _flat(x, shape, strides, length))
        if isinstance(results, Tensor):
            return _unflat(results, shape, strides)
        return tuple(_unflat(x, shape, strides) for x in results)
    # What is whole stays where it is.
    num_left = numel - whole
    rest = call(func, lambda x: _flat(x.view(-1)[whole:], (num_left,), (1,), filled(num_left, is_gelu=is_gelu)))
    result = rest.new_empty(shape)
    call(into_given, lambda x: x.view(-1)[:whole], out=result.view(-1)[:whole])
    result.view(-1)[whole:] = rest[:num_left]
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
    if x.device.type != "cpu" or x.dim() == 0 or x.shape[dim] % 2:
        return func(x, dim)
    halves = x.chunk(2, dim)
    shape, strides, _ = _layout([*halves])
    length = filled(halves[0].numel())
    return _unflat(func(torch.cat([_flat(half, shape, strides, length) for half in halves]), 0), shape, strides)


def glu_backward(func: Any, grad: Tensor, x: Tensor, dim: int) -> Any:
    """Stands in for ``aten.glu_backward``, in the same way."""
    if x.device.type != "cpu" or x.dim() == 0 or x.shape[dim] % 2:
        return func(grad, x, dim)
    halves = x.chunk(2, dim)
    shape, strides, _ = _layout([*halves])
    length = filled(halves[0].numel())
    flat = func(_flat(grad, shape, strides, length), torch.cat([_flat(y, shape, strides, length) for y in halves]), 0)
    return torch.cat([_unflat(half, shape, strides) for half in flat.chunk(2)], dim)


def filled(numel: int, *, is_gelu: bool = False) -> int:
    """The least number of elements, not less than ``numel``, of which every thread computes whole vectors."""
    while missing := -numel % _multiple(numel, is_gelu):
        numel += missing
    return numel


def _whole(numel: int, is_gelu: bool) -> int:
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
    result = compute(functional, *args, **kwargs)
    if out is None:
        into: Tensor = args[0]
        return into.copy_(result)
    return out.resize_(result.shape).copy_(result)


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
