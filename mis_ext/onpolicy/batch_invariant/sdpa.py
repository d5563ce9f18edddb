"""torch's ``scaled_dot_product_attention`` on fixed-block attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mis_ext.onpolicy.batch_invariant.attention import attention


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
        ValueError: A mask together with ``is_causal``, or numbers of heads that do not fit.
    """
    if dropout_p > 0.0:
        raise NotImplementedError(f"batch-invariant attention has no dropout, got dropout_p={dropout_p}")
    if attn_mask is not None and type(attn_mask) is not Tensor:
        attn_mask = _mask_of_bias(attn_mask).to(query.device)
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        raise NotImplementedError(f"batch-invariant attention takes boolean masks, got {attn_mask.dtype}")
    if attn_mask is not None and is_causal:
        raise ValueError("attention takes attn_mask or is_causal=True, not both")
    heads = _num_heads(query, key, value, enable_gqa=enable_gqa)
    batch_shape = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))  # type: ignore[no-untyped-call]
    num_sequences, num_q, num_k = math.prod(batch_shape), query.shape[-2], key.shape[-2]
    if is_causal and num_q != num_k:
        # torch aligns the mask with the first key, not the last.
        attn_mask = torch.ones(num_q, num_k, dtype=torch.bool, device=query.device).tril()
    output = attention(
        *(_packed(x, batch_shape, num_heads) for x, num_heads in zip((query, key, value), heads, strict=True)),
        cu_seqlens_q=torch.arange(num_sequences + 1, dtype=torch.int32, device=query.device) * num_q,
        cu_seqlens_k=torch.arange(num_sequences + 1, dtype=torch.int32, device=query.device) * num_k,
        max_seqlen_q=num_q,
        max_seqlen_k=num_k,
        scale=scale,
        is_causal=is_causal and num_q == num_k,
        mask=None if attn_mask is None else _mask(attn_mask, batch_shape, (heads[0], num_q, num_k)),
    )
    output = output.view(num_sequences, num_q, heads[0], value.shape[-1]).transpose(1, 2)
    head_shape = heads[:1] if max(x.dim() for x in (query, key, value)) > 2 else []
    return output.reshape(*batch_shape, *head_shape, num_q, value.shape[-1])


def _mask_of_bias(mask: Tensor) -> Tensor:
    # It brings the compiler of torch along.
    from torch.nn.attention.bias import CausalBias, CausalVariant

    if not isinstance(mask, CausalBias):
        return mask
    shift = 0 if mask.variant == CausalVariant.UPPER_LEFT else mask.seq_len_kv - mask.seq_len_q
    return torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool).tril(shift)


def _num_heads(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> list[int]:
    """The number of heads of each; one head is broadcast to all, several are groups only if asked for."""
    heads = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
    if enable_gqa:
        return heads
    most = max(heads)
    if any(num_heads not in (1, most) for num_heads in heads):
        raise ValueError("query has {} heads, key {}, value {}: pass enable_gqa=True".format(*heads))
    return [most] * 3


def _packed(x: Tensor, batch_shape: torch.Size, num_heads: int) -> Tensor:
    """``[tokens, heads, dim]``, the sequences one after the other, in the dtype in which torch would attend."""
    device_type, (length, dim) = x.device.type, x.shape[-2:]
    if torch.is_autocast_enabled(device_type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device_type))
    x = x.expand(*batch_shape, num_heads, length, dim).reshape(math.prod(batch_shape), num_heads, length, dim)
    return x.transpose(1, 2).flatten(0, 1)


def _mask(mask: Tensor, batch_shape: torch.Size, shape: tuple[int, int, int]) -> Tensor:
    """``[sequences, 1 or heads, queries, keys]``."""
    num_heads, num_q, num_k = shape
    heads = num_heads if mask.dim() > 2 and mask.shape[-3] != 1 else 1
    return mask.expand(*batch_shape, heads, num_q, num_k).reshape(math.prod(batch_shape), heads, num_q, num_k)
