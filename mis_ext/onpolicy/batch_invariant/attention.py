"""Fixed-block attention as a torch operator, differentiable, on a CPU and on CUDA."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from mis_ext.onpolicy.batch_invariant import kernels
from mis_ext.onpolicy.batch_invariant.packing import Packing


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
) -> Tensor:
    """Attention of packed sequences whose every output row has the same bits in a prefill, a chunk of it or a decode.

    Keys are taken in blocks of one width that start at the first key of the sequence, queries in tiles of one height,
    and a block of which a query sees nothing is an exact no-op of the online softmax (Milakov and Gimelshein, "Online
    normalizer calculation for softmax", arXiv 1805.02867). Sums are in float32.

    Args:
        query: ``[T, H, D]``, the sequences one after the other.
        key: ``[U, G, D]``; ``H`` is a multiple of ``G``, and head ``h`` attends to ``h // (H // G)``.
        value: ``[U, G, D]``.
        cu_seqlens_q: ``[S + 1]`` int32, where each sequence's queries start, and ``T``.
        cu_seqlens_k: The same for its keys; None: as the queries.
        max_seqlen_q: The most queries of a sequence.
        max_seqlen_k: The most keys of a sequence; None: as the queries.
        scale: Multiplies the scores; None: ``D ** -0.5``.
        is_causal: A sequence's last query sees its last key, the one before all but that, and so on.
        mask: ``[S, 1 or H, max_seqlen_q, max_seqlen_k]`` bool, True where a query may attend; on top of ``is_causal``.

    Returns:
        ``[T, H, D]``; 0 where a query may attend to nothing.

    Raises:
        ValueError: Shapes contradict each other.
        TypeError: The mask is not boolean, or the tensors have several dtypes.
    """
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    if max_seqlen_k is None:
        max_seqlen_k = max_seqlen_q
    _check(query, key, value, cu_seqlens_q, cu_seqlens_k, mask)
    output: Tensor
    output, _ = _attention_forward(
        query,
        key,
        value,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        1.0 / math.sqrt(query.shape[-1]) if scale is None else scale,
        is_causal,
        mask,
    )
    return output


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on :func:`attention`.

    Raises:
        NotImplementedError: Dropout, or a mask that is not boolean.
    """
    if dropout_p > 0.0:
        raise NotImplementedError(f"batch-invariant attention has no dropout, got dropout_p={dropout_p}")
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise NotImplementedError(f"batch-invariant attention takes boolean masks, got {attn_mask.dtype}")
    *batch_shape, num_q, _ = query.shape
    num_k = key.shape[-2]
    query, key, value = (x.reshape(-1, *x.shape[-3:]) if x.dim() > 3 else x.unsqueeze(1) for x in (query, key, value))
    num_sequences, num_heads = query.shape[:2]
    if key.shape[1] != num_heads and not enable_gqa:
        raise ValueError(f"query has {num_heads} heads, key {key.shape[1]}: pass enable_gqa=True")
    mask = None
    if is_causal and num_q != num_k:
        # torch aligns the mask with the first key, not the last.
        mask = torch.ones(num_q, num_k, dtype=torch.bool, device=query.device).tril()
        mask = mask.expand(num_sequences, 1, num_q, num_k)
    elif attn_mask is not None:
        leading = batch_shape if len(batch_shape) > 1 else [*batch_shape, 1]
        mask = attn_mask if len(batch_shape) > 1 or attn_mask.dim() < 3 else attn_mask.unsqueeze(1)
        heads = num_heads if mask.dim() > 2 and mask.shape[-3] != 1 else 1
        mask = mask.expand(*leading[:-1], heads, num_q, num_k).reshape(num_sequences, heads, num_q, num_k)
    output = attention(
        *(x.transpose(1, 2).flatten(0, 1) for x in (query, key, value)),
        cu_seqlens_q=torch.arange(num_sequences + 1, dtype=torch.int32, device=query.device) * num_q,
        cu_seqlens_k=torch.arange(num_sequences + 1, dtype=torch.int32, device=query.device) * num_k,
        max_seqlen_q=num_q,
        max_seqlen_k=num_k,
        scale=scale,
        is_causal=is_causal and num_q == num_k,
        mask=mask,
    )
    return output.view(num_sequences, num_q, num_heads, -1).transpose(1, 2).reshape(*batch_shape, num_q, -1)


# Operators, so that no override of the mode reaches into them: their products are cut into tiles already. An operator
# takes no bundle of tensors.
@torch.library.custom_op("mis_ext::attention_forward", mutates_args=())
def _attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    return kernels.of(query).attention_forward(
        query,
        key,
        value,
        Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, is_causal, mask),
    )


@torch.library.custom_op("mis_ext::attention_backward", mutates_args=())
def _attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    return kernels.of(query).attention_backward(
        grad_output,
        query,
        key,
        value,
        output,
        lse,
        Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, is_causal, mask),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, cu_seqlens_q, cu_seqlens_k, *ctx.settings, mask = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens_q, cu_seqlens_k, mask)


def _differentiate(ctx: Any, grad_output: Tensor, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    del grad_lse
    *tensors, cu_seqlens_q, cu_seqlens_k, mask = ctx.saved_tensors
    grads = _attention_backward(grad_output, *tensors, cu_seqlens_q, cu_seqlens_k, *ctx.settings, mask)
    return (*grads, *[None] * 7)


_attention_forward.register_autograd(_differentiate, setup_context=_save)


def _check(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, mask: Tensor | None
) -> None:
    shapes = {"query": [*query.shape], "key": [*key.shape], "value": [*value.shape]}
    if any(len(shape) != 3 for shape in shapes.values()):
        raise ValueError(f"attention takes [tokens, heads, dim], got {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"attention takes one dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    if shapes["key"] != shapes["value"] or shapes["key"][2] != shapes["query"][2]:
        raise ValueError(f"key and value must have one shape and the query's last dimension, got {shapes}")
    if query.shape[1] % max(key.shape[1], 1):
        raise ValueError(f"{query.shape[1]} query heads are no multiple of {key.shape[1]} key heads")
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.dim() != 1:
        raise ValueError(
            f"cu_seqlens_q {[*cu_seqlens_q.shape]} and cu_seqlens_k {[*cu_seqlens_k.shape]} must be [sequences + 1]"
        )
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}")
