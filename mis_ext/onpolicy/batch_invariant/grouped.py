"""Products of groups of rows, each with the matrix of its group, as the experts of a mixture need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mis_ext.onpolicy.batch_invariant import kernels

aten = torch.ops.aten


def grouped_mm(
    func: Any,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """``aten._grouped_mm`` with the bits of ``a[rows] @ b[group]``: a row's depend on it and its group's matrix alone.

    Args:
        func: The operator.
        a: ``[M, K]``, or ``[G, M, K]``.
        b: ``[K, N]``, or ``[G, K, N]``.
        offs: ``[G]`` int32, where the groups end along the dimension that the factor without G shares with the result;
            if neither has G, along K, and the result is ``[G, M, N]``; None if both have. Rows and columns after the
            last group are zeros.
        bias: None.
        out_dtype: None, or the dtype of the factors.

    Raises:
        RuntimeError: Shapes, dtypes or offsets do not fit.
        NotImplementedError: A bias, or another dtype of the result.
    """
    if bias is not None or out_dtype not in (None, a.dtype):
        raise NotImplementedError(f"{func} in the mode takes no bias and no out_dtype but {a.dtype}, got {out_dtype}")
    _check(a, b, offs)
    if offs is None:
        return kernels.of(a).bmm(a, b)
    if a.dim() == 3 and b.dim() == 2:
        return _grouped_rows(b.t(), a.transpose(1, 2), offs).t()
    return _grouped_rows(a, b, offs) if b.dim() == 3 else _grouped_sums(a, b, offs)


def _check(a: Tensor, b: Tensor, offs: Tensor | None) -> None:
    if a.dtype != b.dtype:
        raise RuntimeError(f"the factors of a grouped product must have one dtype, got {a.dtype} and {b.dtype}")
    is_matrix = 2 in (a.dim(), b.dim())
    fits = {a.dim(), b.dim()} <= {2, 3} and a.shape[-1] == b.shape[-2] and is_matrix == (offs is not None)
    groups = {x.shape[0] for x in (a, b) if x.dim() == 3}
    if offs is not None:
        fits = fits and offs.dim() == 1 and offs.dtype == torch.int32
        groups.add(offs.shape[0])
    if not fits or (groups and len(groups) != 1):
        shapes = [None if x is None else [*x.shape] for x in (a, b, offs)]
        raise RuntimeError(
            f"a grouped product takes [M, K] or [G, M, K], [K, N] or [G, K, N], and int32 offs [G] unless both have G, "
            f"got {shapes[0]}, {shapes[1]} and {shapes[2]}"
        )


def _grouped_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if a.is_cuda:
        from mis_ext.onpolicy.batch_invariant import cuda

        return cuda.grouped_rows(a, b, ends)
    out = a.new_zeros(a.shape[0], b.shape[2])
    for group, (begin, end) in enumerate(_spans(ends, a.shape[0])):
        if begin < end:
            out[begin:end] = kernels.of(a).mm(a[begin:end], b[group])
    return out


def _grouped_sums(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    if a.is_cuda:
        from mis_ext.onpolicy.batch_invariant import cuda

        return cuda.grouped_sums(a, b, ends)
    products = [kernels.of(a).mm(a[:, begin:end], b[begin:end]) for begin, end in _spans(ends, b.shape[0])]
    return torch.stack(products) if products else a.new_zeros(0, a.shape[0], b.shape[1])


def _spans(ends: Tensor, length: int) -> list[tuple[int, int]]:
    stops = ends.tolist()
    starts = [0, *stops][:-1]
    if any(not 0 <= start <= stop <= length for start, stop in zip(starts, stops, strict=True)):
        raise RuntimeError(f"offs must not decrease, within [0, {length}], got {stops}")
    return list(zip(starts, stops, strict=True))


# Torch 2.6 has none yet.
OVERRIDES: dict[Any, Callable[..., Any]] = (
    {aten._grouped_mm.default: grouped_mm} if hasattr(aten, "_grouped_mm") else {}
)

OVERRIDES_OF_LIBRARIES = {"transformers::grouped_mm_fallback": grouped_mm}
"""Operators that would hide their products from the mode, by name: their library may come later, or never."""
