# SPDX-License-Identifier: Apache-2.0
"""What a mixture of experts needs besides plain products: those of groups of rows, sums of rows, and an order of ties.

A token has the same bits, whichever other tokens its experts get: a row of a grouped product has those of its own
product with the matrix of its expert, a token's experts are added up in the order in which they lie, and of equal
scores the first comes first.
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
    """``aten._grouped_mm`` with the bits of ``a[rows] @ b[group]``: a row's depend on it and its group's matrix alone.

    Args:
        func: The operator.
        a: ``[M, K]``, or ``[G, M, K]``.
        b: ``[K, N]``, or ``[G, K, N]``.
        offs: ``[G]`` int32, where the groups end along the dimension that the factor without G shares with the result;
            None if both have G. Rows and columns after the last group are zeros.
        bias: None.
        out_dtype: None, or the dtype of the factors.
    """
    if a.dim() == b.dim() == 2:
        # The gradient of the experts' matrices, a sum over the tokens of a group.
        return func(a, b, offs, bias, out_dtype)
    if bias is not None or out_dtype not in (None, a.dtype):
        raise NotImplementedError(f"{func} in the mode takes no bias and no out_dtype but {a.dtype}, got {out_dtype}")
    _check_groups(a, b, offs)
    products = devices.products_on(a)
    if offs is None:
        return products.bmm(a, b)
    if a.dim() == 3 and b.dim() == 2:
        return products.grouped_rows(b.t(), a.transpose(1, 2), offs).t()
    return products.grouped_rows(a, b, offs)


def _check_groups(a: Tensor, b: Tensor, offs: Tensor | None) -> None:
    if a.dtype != b.dtype:
        raise RuntimeError(f"the factors of a grouped product must have one dtype, got {a.dtype} and {b.dtype}")
    groups = {x.shape[0] for x in (a, b) if x.dim() == 3} | (set() if offs is None else {len(offs)})
    fits = a.shape[-1] == b.shape[-2] and len(groups) == 1 and (2 in (a.dim(), b.dim())) == (offs is not None)
    if not fits or (offs is not None and offs.dtype != torch.int32):
        shapes = [None if x is None else [*x.shape] for x in (a, b, offs)]
        raise RuntimeError(
            f"a grouped product takes [M, K] or [G, M, K], [K, N] or [G, K, N], and int32 offs [G] unless both have G, "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )


# torch adds rows of one destination in an order that depends on the other rows: by atomic additions on CUDA, and on a
# CPU where threads share the work. Here it is the order in which they lie; 16-bit numbers are summed in float32, and
# rounded once.
def index_add(func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, *, alpha: float = 1) -> Tensor:
    """``aten.index_add`` and ``aten.index_add_``."""
    out = _output(func, x, source)
    target, rows = (t.view(1) if t.dim() == 0 else t.movedim(dim, 0) for t in (out, source))
    index = index.reshape(-1)
    if rows.shape != (len(index), *target.shape[1:]):
        raise RuntimeError(f"index_add takes a row for each index: got {[*index.shape]}, {dim}, {[*source.shape]}")
    _add(target, [index], rows if alpha == 1 else rows * alpha)
    return out


def scatter_add(func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    """``aten.scatter_add`` and ``aten.scatter_add_``."""
    if index.dim() == 0 or index.dim() != x.dim() or index.dim() != source.dim():
        return func(x, dim, index, source)  # type: ignore[no-any-return]
    dim = dim % x.dim()
    others = [axis for axis in range(x.dim()) if axis != dim]
    fits_source = all(n <= m for n, m in zip(index.shape, source.shape, strict=True))
    if not fits_source or any(index.shape[axis] > x.shape[axis] for axis in others):
        raise RuntimeError(f"scatter_add got an index {[*index.shape]}, {[*x.shape]} and {[*source.shape]}")
    out = _output(func, x, source)
    source = source[tuple(slice(length) for length in index.shape)]
    if index.numel() and all(
        index.shape[axis] == x.shape[axis] and (index.stride(axis) == 0 or x.shape[axis] == 1) for axis in others
    ):
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
    """``aten.index_put`` and its other names; the gradient of ``x[index]`` is one."""
    if not accumulate or all(index is None or index.dtype in _MASKS for index in indices):
        # Of a mask, no place is named twice.
        return func(x, indices, values, accumulate, *more)  # type: ignore[no-any-return]
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    if dims[-1] - dims[0] >= len(dims) or any(index is not None and index.dtype in _MASKS for index in indices):
        raise NotImplementedError(f"{func} has no batch-invariant form here for masks beside indices, and for gaps")
    out = _output(func, x, values)
    others = [dim for dim in range(x.dim()) if dim not in dims]
    places = torch.broadcast_tensors(*(i.to(x.device) for i in indices if i is not None))  # type: ignore[no-untyped-call]
    # Counted from the front.
    places = [torch.where(n < 0, n + x.shape[dim], n) for dim, n in zip(dims, places, strict=True)]
    lengths, num_dims, first = [x.shape[dim] for dim in others], places[0].dim(), dims[0]
    values = values.to(x.device).expand(*lengths[:first], *places[0].shape, *lengths[first:])
    values = values.movedim(tuple(range(first, first + num_dims)), tuple(range(num_dims)))
    _add(out.permute(*dims, *others), places, values)
    return out


def _output(func: Any, x: Tensor, source: Tensor) -> Tensor:
    """The tensor to add to: for a function in place that of the caller."""
    if x.dtype != source.dtype:
        raise RuntimeError(f"{func} adds numbers of one dtype, got {x.dtype} and {source.dtype}")
    return x if func._schema.is_mutable else x.clone(memory_format=torch.contiguous_format)


def _add(out: Tensor, places: Sequence[Tensor], source: Tensor) -> None:
    """Add ``source[n]`` to ``out[places[0][n], places[1][n], ...]``, one n after the other.

    Args:
        out: ``[D0, D1, ..., *rest]``, changed in place.
        places: Indices by each of the first dimensions, which broadcast to N, one or several dimensions.
        source: ``[*N, *rest]``.
    """
    leading = out.shape[: len(places)]
    for index, length in zip(places, leading, strict=True):
        _check_range(index, length)
    if source.numel() == 0:
        return
    index = places[0].long()
    for place, length in zip(places[1:], leading[1:], strict=True):
        index = index * length + place
    num_dims, packed = index.dim(), out.contiguous()
    rows = source.reshape(index.numel(), math.prod(source.shape[num_dims:]))
    devices.products_on(out).add_rows_(packed.view(math.prod(leading), rows.shape[1]), index.reshape(-1), rows)
    if packed is not out:
        out.copy_(packed)


def _check_range(index: Tensor, length: int) -> None:
    is_inside = (index >= 0) & (index < length)
    if index.is_cuda:
        torch._assert_async(is_inside.all(), f"an index is not in [0, {length})")
    elif not is_inside.all():
        raise IndexError(f"index {int(index[~is_inside][0])} is not in [0, {length})")


def sort(
    func: Any, x: Tensor, dim: int = -1, descending: bool = False, *, stable: bool | None = True
) -> tuple[Tensor, Tensor]:
    """Stands in for ``aten.sort``: always stable, so the first of equal values comes first."""
    return x.sort(dim=dim, descending=descending, stable=True)


def topk(
    func: Any, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """``aten.topk``, always sorted: of equal numbers at the border, those with the lowest places are taken.

    A row with equal numbers is one in which torch may choose by the other rows, and two engines differently.
    """
    if x.dim() == 0:
        return func(x, k, dim, largest, sorted)  # type: ignore[no-any-return]
    if not 0 <= k <= x.shape[dim]:
        raise RuntimeError(f"topk takes k in [0, {x.shape[dim]}], got {k}")
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
}
OVERRIDES[aten._grouped_mm.default] = grouped_mm

OVERRIDES_OF_LIBRARIES = {"transformers::grouped_mm_fallback": grouped_mm}
"""Operators that would hide their products from the mode, by name: their library may come later, or never."""
