# SPDX-License-Identifier: Apache-2.0
"""Functions for MoE models: matmuls of groups of rows, sums of rows, and the order of ties.

A token has the same bits for any other tokens of its experts. A row of a grouped matmul equals its separate matmul with
the matrix of its expert. A token's experts are added in their order in memory. Of equal scores, the first comes first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mis_ext.onpolicy.batch_invariant import devices

aten = torch.ops.aten

_MASKS = (torch.bool, torch.uint8)


def grouped_mm(
    func: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """``aten._grouped_mm`` of ``a [M, K]`` and ``b [G, K, N]``, bitwise equal to ``a[rows] @ b[group]``.

    Groups of rows end at ``offs [G]``, int32. Rows after the last group are zeros. The gradient of the experts'
    matrices, a matmul of two matrices, is torch's own.
    """
    if a.dim() == b.dim() == 2:
        return func(a, b, offs, bias, out_dtype)
    fits = (a.dim(), b.dim()) == (2, 3) and a.shape[1] == b.shape[1] and a.dtype == b.dtype
    has_groups = offs is not None and offs.shape == b.shape[:1] and offs.dtype == torch.int32
    if not fits or not has_groups or bias is not None or out_dtype not in (None, a.dtype):
        raise RuntimeError(
            f"{func} in the mode supports only [M, K] and [G, K, N] of the same dtype, int32 offs [G], and no bias or "
            f"other out_dtype, got {[*a.shape]} of {a.dtype}, {[*b.shape]} of {b.dtype} and {out_dtype}"
        )
    return devices.kernels_on(a).grouped_rows(a, b, offs)


# torch adds rows of the same destination in an order that depends on the other rows: by atomic additions on CUDA, and
# with several threads on a CPU. Here they are added in their order in memory; 16-bit values are summed in float32, and
# rounded once.
def index_add(func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """``aten.index_add`` and ``aten.index_add_``."""
    out, rows = _output(func, x, source), source.movedim(dim, 0)
    _add(out.movedim(dim, 0), [index.reshape(-1)], rows if alpha == 1 else rows * alpha)
    return out


def scatter_add(func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``aten.scatter_add`` and ``aten.scatter_add_``; whole rows are added if each row has only one index."""
    out, dim = _output(func, x, source), dim % x.dim()
    source = source[tuple(slice(length) for length in index.shape)]
    others = [axis for axis in range(x.dim()) if axis != dim]
    if index.numel() and all(index.shape[axis] == x.shape[axis] and index.stride(axis) == 0 for axis in others):
        for axis in reversed(others):
            index = index.select(axis, 0)
        _add(out.movedim(dim, 0), [index], source.movedim(dim, 0))
    else:
        places = [
            index if axis == dim else torch.arange(length, device=x.device).view(-1, *[1] * (x.dim() - 1 - axis))
            for axis, length in enumerate(index.shape)
        ]
        _add(out, places, source)
    return out


def index_put(
    func: Any, x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, *more: Any
) -> Tensor:
    """``aten.index_put`` and its other names; the gradient of ``x[index]`` uses it."""
    if not accumulate or all(index is None or index.dtype in _MASKS for index in indices):
        # A mask has no duplicate positions.
        return func(x, indices, values, accumulate, *more)  # type: ignore[no-any-return]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if dims[-1] - dims[0] >= len(dims) or any(index is not None and index.dtype in _MASKS for index in indices):
        raise NotImplementedError(
            f"{func} has no batch-invariant form here for masks together with indices, and for gaps"
        )
    out, first, end = _output(func, x, values), dims[0], dims[-1] + 1
    places = torch.broadcast_tensors(*(i.to(x.device) for i in indices if i is not None))  # type: ignore[no-untyped-call]
    # Convert negative indices.
    places = [torch.where(n < 0, n + x.shape[dim], n) for dim, n in zip(dims, places, strict=True)]
    values = values.to(x.device).expand(*x.shape[:first], *places[0].shape, *x.shape[end:])
    moved = [*range(first, first + places[0].dim())], [*range(places[0].dim())]
    _add(out.movedim(dims, [*range(len(dims))]), places, values.movedim(*moved))
    return out


def _output(func: Any, x: Tensor, source: Tensor) -> Tensor:
    """The tensor to add to: the caller's own for an in-place function."""
    if x.dtype != source.dtype:
        raise RuntimeError(f"{func} needs values of the same dtype, got {x.dtype} and {source.dtype}")
    return x if func._schema.is_mutable else x.clone(memory_format=torch.contiguous_format)


def _add(out: Tensor, places: Sequence[Tensor], source: Tensor) -> None:
    """Add ``source[n]`` to ``out[places[0][n], places[1][n], ...]`` for each n in order.

    Args:
        out: ``[D0, D1, ..., *rest]``, changed in place.
        places: Indices into each of the first dimensions, which broadcast to N (one or several dimensions).
        source: ``[*N, *rest]``.
    """
    leading = out.shape[: len(places)]
    for index, length in zip(places, leading, strict=True):
        is_inside = (index >= 0) & (index < length)
        if index.is_cuda:
            torch._assert_async(is_inside.all(), f"an index is not in [0, {length})")
        elif not is_inside.all():
            raise IndexError(f"index {int(index[~is_inside][0])} is not in [0, {length})")
    if source.numel() == 0:
        return
    index = places[0].long()
    for place, length in zip(places[1:], leading[1:], strict=True):
        index = index * length + place
    num_dims, packed = index.dim(), out.contiguous()
    rows = source.reshape(index.numel(), math.prod(source.shape[num_dims:]))
    devices.kernels_on(out).add_rows_(packed.view(math.prod(leading), rows.shape[1]), index.reshape(-1), rows)
    if packed is not out:
        out.copy_(packed)


def sort(func: Any, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = True) -> Any:
    """``aten.sort``: always stable, so the first of equal values comes first."""
    return x.sort(dim=dim, descending=descending, stable=True)


def topk(func: Any, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """``aten.topk``, always sorted: of equal values at the border, those with the lowest indices are selected.

    For equal values, torch's choice may depend on other rows, and may differ between engines.
    """
    ordered, places = x.sort(dim=dim, descending=largest, stable=True)
    return ordered.narrow(dim, 0, k).contiguous(), places.narrow(dim, 0, k).contiguous()


OVERRIDES: dict[Any, Callable[..., Any]] = {
    aten.index_add.default: index_add,
    aten.index_add_.default: index_add,
    aten.scatter_add.default: scatter_add,
    aten.scatter_add_.default: scatter_add,
    aten.index_put.default: index_put,
    aten.index_put_.default: index_put,
    aten._index_put_impl.default: index_put,
    aten._index_put_impl_.default: index_put,
    aten.topk.default: topk,
    aten.sort.default: sort,
    aten.sort.stable: sort,
    aten._grouped_mm.default: grouped_mm,
}

OVERRIDES_OF_LIBRARIES = {"transformers::grouped_mm_fallback": grouped_mm}
"""Operators that would hide their matmuls from the mode, by name, as their library may be imported later or never."""
