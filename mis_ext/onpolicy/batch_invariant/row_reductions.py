"""Reductions on a CPU that give a row the same bits in any batch, any layout and with any number of threads.

torch adds up columns in another order than rows, and cuts a sum whose only result is one number in two. Here rows are
contiguous, and a long one is never alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from mis_ext.onpolicy.batch_invariant import elementwise

aten = torch.ops.aten

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


def rows_of(x: Tensor, dim: int | Sequence[int]) -> Tensor:
    """``[..., E]``, contiguous: the dimensions of the reduction made one, the last."""
    dims = _dims(x, dim)
    moved = x if dims == [x.dim() - 1] else x.movedim(dims, [*range(-len(dims), 0)]).flatten(-len(dims))
    return moved.contiguous()


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
    rows = rows_of(x, dim)
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

    Raises:
        NotImplementedError: More than ``MOST_COLUMNS`` columns.
    """
    if x.dim() == 0 or x.numel() == 0:
        return torch._softmax(x, dim, half_to_float)
    rows = rows_of(x, dim)
    if rows.shape[-1] > MOST_COLUMNS:
        raise NotImplementedError(f"batch-invariant softmax takes at most {MOST_COLUMNS} columns, got {rows.shape[-1]}")
    out = torch.empty_like(rows, dtype=torch.float32 if half_to_float else x.dtype)
    num_columns = rows.shape[-1]
    # Part by part, so that what a part needs stays in the cache.
    size = max(1, _PART // num_columns)
    for start in range(0, rows.numel() // num_columns, size):
        part, into = (tensor.view(-1, num_columns)[start : start + size] for tensor in (rows, out))
        into.copy_(_softmax(part if part.dtype == torch.float64 else part.float()))
    return out.movedim(-1, dim).contiguous()


# No score is as low. Masks have minus infinity, or the least number of the dtype, 65,504 in float16.
_MASKED = -3e4


def refuse_masked_beginning(scores: Tensor) -> None:
    """Refuse attention scores ``[..., queries, keys]`` whose first key is masked where a later one is not.

    On CUDA the product of its shares and the values adds up blocks that start at that key: at padding on the left, at
    the sequence before in a pack, at a key that has left a window.

    Raises:
        NotImplementedError: There is such a row.
    """
    if scores.is_cuda and torch.cuda.is_current_stream_capturing():
        # Nothing may be read there.
        return
    rows = scores[scores[..., 0] < _MASKED] if scores.shape[-1] > 1 else scores[..., :0]
    if rows.numel() and bool((rows.amax(-1) > _MASKED).any()):
        raise NotImplementedError(
            "softmax of scores whose first keys are masked (padding on the left, packs, sliding windows) has no "
            'batch-invariant form in eager attention on cuda: take attn_implementation="sdpa"; a model without it '
            "(GPT-OSS) is exact on a CPU, and on cuda with sequences no longer than its window, padded on the right"
        )


def _softmax(rows: Tensor) -> Tensor:
    highest = rows.amax(-1, keepdim=True)
    shares: Tensor = elementwise.compute(aten.exp.default, rows - highest)
    # Without a number, or with an infinite one, all shares are NaN.
    return shares / torch.where(highest.isfinite(), _exact_sum(shares), torch.nan)


def softmax_backward(func: Any, grad: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    """``aten._softmax_backward_data``; columns whose share is 0 change no bit, wherever they are.

    The products of shares and gradients are added up as integers, in units of the largest.
    """
    if output.dim() == 0 or output.numel() == 0 or output.shape[dim] > MOST_COLUMNS:
        return func(grad, output, dim, input_dtype)  # type: ignore[no-any-return]
    shares, grads = rows_of(output, dim), rows_of(grad, dim)
    out = torch.empty_like(shares, dtype=input_dtype)
    num_columns = shares.shape[-1]
    size = max(1, _PART // num_columns)
    for start in range(0, shares.numel() // num_columns, size):
        share, slope, into = (x.view(-1, num_columns)[start : start + size] for x in (shares, grads, out))
        if share.dtype != torch.float64:
            share, slope = share.float(), slope.float()
        into.copy_((slope - _sum_of_any_order(share * slope)) * share)
    return out.movedim(-1, dim).contiguous()


def log_softmax(func: Any, x: Tensor, dim: int, half_to_float: bool) -> Any:
    """Stands in for ``aten._log_softmax``: over contiguous rows, so strides change no bit."""
    if x.dim() == 0 or x.numel() == 0:
        return func(x, dim, half_to_float)
    rows = rows_of(x, dim)
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


def _dims(x: Tensor, dim: int | Sequence[int] | None) -> list[int]:
    dims = [] if dim is None else [dim] if isinstance(dim, int) else dim
    return sorted(axis % x.dim() for axis in dims) if x.dim() else []
