# SPDX-License-Identifier: Apache-2.0
"""Differentiable fixed-block attention, and torch's ``scaled_dot_product_attention`` based on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _disable_current_modes

from mis_ext.onpolicy.batch_invariant import devices
from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing
from mis_ext.validation import check_tensors


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
    scale: float | None = None,
    is_causal: bool = True,
    mask: Tensor | None = None,
    key_slots: Tensor | None = None,
) -> Tensor:
    """Attention of packed sequences. Every output row has the same bits in a prefill, a chunk of it, or a decode.

    Keys are processed in blocks of a fixed width that start at the first key that a query sees. So a pack that a mask
    separates, padding on the left, and a cache that drops keys outside of a window do not change the bits. Masked keys
    between the first and the last key count: a gap is part of the row. Queries are processed in tiles of a fixed
    height, and a block without a visible key is an exact no-op of the online softmax (Milakov and Gimelshein, "Online
    normalizer calculation for softmax", arXiv 1805.02867). Sums are in float32.

    Args:
        query: ``[T, H, D]``, the concatenated sequences.
        key: ``[U, G, D]``; ``H`` is a multiple of ``G``, and head ``h`` attends to ``h // (H // G)``.
        value: ``[U, G, D]``; on a CPU its ``D`` may differ.
        cu_seqlens_q: ``[S + 1]`` int32, the start of each sequence's queries, and ``T``.
        cu_seqlens_k: The same for keys; None: equal to the queries.
        max_seqlen_q: The largest number of queries of a sequence.
        max_seqlen_k: The largest number of keys of a sequence; None: equal to the queries.
        scale: Multiplies the scores, > 0; None: ``D ** -0.5``.
        is_causal: The last query of a sequence sees all keys, the previous query all but the last key, and so on.
        mask: ``[S, 1 or H, max_seqlen_q, max_seqlen_k]`` bool, True where a query may attend, in addition to
            ``is_causal``.
        key_slots: ``[S, max_seqlen_k]`` int32 or int64, for the paged cache of an engine: the rows of ``key`` and
            ``value`` for the keys of each sequence, whose number is in ``cu_seqlens_k``. None: the sequences are
            concatenated. On CUDA no value is read on the CPU, so that a graph can capture a decode.

    Returns:
        ``[T, H, D]``; 0 for queries without a key, and after the last sequence.

    Raises:
        ValueError: Shapes do not fit.
        TypeError: The mask is not boolean, or the tensors have different dtypes.
        NotImplementedError: ``key_slots`` is given together with a mask, or where a derivative is needed.
        RuntimeError: Differentiation is in forward mode, by ``torch.func``, or twice, which torch refuses.
    """
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    if max_seqlen_k is None:
        max_seqlen_k = max_seqlen_q
    check_tensors({"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k})
    _check_shapes(query, key, value, cu_seqlens_q, cu_seqlens_k)
    if scale is not None and not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")
    if mask is not None:
        if mask.dtype != torch.bool:
            raise TypeError(f"mask must be boolean, got {mask.dtype}")
        shapes = [[len(cu_seqlens_q) - 1, heads, max_seqlen_q, max_seqlen_k] for heads in (1, query.shape[1])]
        if [*mask.shape] not in shapes:
            raise ValueError(f"mask must be {shapes[0]} or {shapes[1]}, got {[*mask.shape]}")
    if key_slots is not None:
        shape = [len(cu_seqlens_k) - 1, max_seqlen_k]
        if [*key_slots.shape] != shape or key_slots.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"key_slots must be [sequences, max_seqlen_k] = {shape} of int32 or int64, got {[*key_slots.shape]} of "
                f"{key_slots.dtype}"
            )
        if mask is not None:
            raise NotImplementedError(
                "batch-invariant attention with key_slots supports no mask: gather the keys first"
            )
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise NotImplementedError(
                "batch-invariant attention with key_slots has no derivative: gather the keys first"
            )
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, is_causal, mask, key_slots)
    output: Tensor = _Attention.apply(query, key, value, packing)  # type: ignore[no-untyped-call]
    return output


@contextmanager
def _undisturbed(x: Tensor) -> Iterator[None]:
    """Disable the overrides of the mode and autocast inside attention."""
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.autocast(x.device.type, enabled=False):
        yield


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.packing = packing
        with _undisturbed(query):
            output: Tensor = devices.kernels_on(query).attention_forward(query, key, value, packing)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of torch's own attention, per sequence: correct, but not batch-invariant."""
        cu_seqlens_q, cu_seqlens_k, _, _, scale, is_causal, mask, _ = ctx.packing
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        spans = (pairwise(bounds.tolist()) for bounds in (cu_seqlens_q, cu_seqlens_k))
        outputs, grads = [], []
        with _undisturbed(grad_output), torch.enable_grad():
            for place, (span_q, span_k) in enumerate(zip(*spans, strict=True)):
                tensors = zip((*leaves, grad_output), (span_q, span_k, span_k, span_q), strict=True)
                q, k, v, grad = (x[slice(*span)].transpose(0, 1)[None] for x, span in tensors)
                if q.numel() == 0 or k.numel() == 0:
                    continue
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
                num_q, num_k = q.shape[2], k.shape[2]
                seen = None if mask is None else mask[place : place + 1, :, :num_q, :num_k]
                if is_causal and (mask is not None or num_q != num_k):
                    causal = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
                    seen = causal if seen is None else seen & causal
                if seen is not None:
                    # torch may return NaN for a query without a key.
                    sees = seen.any(-1, keepdim=True)
                    seen, grad = seen | ~sees, torch.where(sees, grad, 0)
                settings = seen, 0.0, is_causal and seen is None
                outputs.append(torch.ops.aten.scaled_dot_product_attention(q, k, v, *settings, scale=scale))
                grads.append(grad)
            given = torch.autograd.grad(outputs, leaves, grads) if outputs else [torch.zeros_like(x) for x in leaves]
        return (*given, None)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    shapes = {"query": [*query.shape], "key": [*key.shape], "value": [*value.shape]}
    if any(len(shape) != 3 for shape in shapes.values()):
        raise ValueError(f"query, key and value must be [tokens, heads, dim], got {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"query, key and value must have one dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    if shapes["key"][:2] != shapes["value"][:2] or shapes["key"][2] != shapes["query"][2]:
        raise ValueError(
            "key and value must have the same shape except for the last dimension, and key and query the same last "
            f"dimension, got {shapes}"
        )
    num_heads, num_key_heads = query.shape[1], key.shape[1]
    if num_heads and (num_key_heads == 0 or num_heads % num_key_heads):
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_key_heads} key heads")
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.dim() != 1:
        raise ValueError(
            f"cu_seqlens_q {[*cu_seqlens_q.shape]} and cu_seqlens_k {[*cu_seqlens_k.shape]} must be [sequences + 1]"
        )


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,  # Fewer key heads are always allowed.
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` of ``[B, H, T, D]`` on :func:`attention`."""
    if dropout_p > 0.0:
        raise NotImplementedError(f"batch-invariant attention has no dropout, got dropout_p={dropout_p}")
    if attn_mask is not None and (type(attn_mask) is not Tensor or attn_mask.dtype != torch.bool):
        kind = f"{type(attn_mask).__name__} of {attn_mask.dtype}"
        raise NotImplementedError(f"batch-invariant attention supports only boolean masks, got a {kind}")
    if attn_mask is not None and is_causal:
        raise ValueError("pass attn_mask or is_causal=True, not both")
    shape, shapes = query.shape, [[*x.shape] for x in (query, key, value)]
    query, key, value = (x[(None,) * (4 - x.dim())] for x in (query, key, value))
    if any(x.dim() != 4 or len(x) != len(query) for x in (query, key, value)):
        raise NotImplementedError(
            f"batch-invariant attention supports only [batch, heads, tokens, dim] of one batch, got {shapes}"
        )
    (batch, heads, num_q, _), num_k = query.shape, key.shape[2]
    if is_causal and num_q != num_k:
        # torch aligns the mask with the first key, not with the last key.
        attn_mask = torch.ones(num_q, num_k, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None:
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())].expand(batch, -1, num_q, num_k)
    device_type = query.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    output: Tensor = attention(
        *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=query.device) * num_q,
        cu_seqlens_k=torch.arange(batch + 1, dtype=torch.int32, device=query.device) * num_k,
        max_seqlen_q=num_q,
        max_seqlen_k=num_k,
        scale=scale,
        is_causal=is_causal and num_q == num_k,
        mask=attn_mask,
    )
    return output.view(batch, num_q, heads, value.shape[3]).transpose(1, 2).reshape(*shape[:-1], value.shape[3])
