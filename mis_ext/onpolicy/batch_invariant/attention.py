# SPDX-License-Identifier: Apache-2.0
"""Fixed-block attention as a torch operator, differentiable, and torch's ``scaled_dot_product_attention`` on it."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from mis_ext.onpolicy.batch_invariant import devices
from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing


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
    """Attention of packed sequences whose every output row has the same bits in a prefill, a chunk of it or a decode.

    Keys are taken in blocks of one width that start at the first key that a query sees, so a pack that a mask keeps
    apart, padding on the left, and a cache that drops keys out of a window leave its bits. Keys between its first and
    last that a mask hides are counted: a gap in the middle is part of the row. Queries are taken in tiles of one
    height, and a block of which a query sees nothing is an exact no-op of the online softmax (Milakov and Gimelshein,
    "Online normalizer calculation for softmax", arXiv 1805.02867). Sums are in float32.

    Args:
        query: ``[T, H, D]``, the sequences one after the other.
        key: ``[U, G, D]``; ``H`` is a multiple of ``G``, and head ``h`` attends to ``h // (H // G)``.
        value: ``[U, G, D]``; on a CPU its ``D`` may be another.
        cu_seqlens_q: ``[S + 1]`` int32, where each sequence's queries start, and ``T``.
        cu_seqlens_k: The same for its keys; None: as the queries.
        max_seqlen_q: The most queries of a sequence.
        max_seqlen_k: The most keys of a sequence; None: as the queries.
        scale: Multiplies the scores, > 0; None: ``D ** -0.5``.
        is_causal: A sequence's last query sees its last key, the one before all but that, and so on.
        mask: ``[S, 1 or H, max_seqlen_q, max_seqlen_k]`` bool, True where a query may attend; on top of ``is_causal``.
        key_slots: ``[S, max_seqlen_k]`` int32 or int64, for the paged cache of an engine: which rows of ``key`` and
            ``value`` the keys of each sequence are, and ``cu_seqlens_k`` says how many there are; None: they lie one
            sequence after the other. On CUDA the host reads nothing, so that a graph can capture a decode.

    Returns:
        ``[T, H, D]``; 0 where a query may attend to nothing, and after the end of the last sequence.

    Raises:
        ValueError: Shapes contradict each other.
        TypeError: The mask is not boolean, or the tensors have several dtypes.
        NotImplementedError: Differentiation in forward mode, by ``torch.func``, or twice; with ``key_slots`` any, and a
            mask.
    """
    if cu_seqlens_k is None:
        cu_seqlens_k = cu_seqlens_q
    if max_seqlen_k is None:
        max_seqlen_k = max_seqlen_q
    _check_shapes(query, key, value, cu_seqlens_q, cu_seqlens_k)
    if scale is not None and not scale > 0:
        raise ValueError(f"scale={scale}: attention takes a scale > 0")
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(f"mask must be boolean, got {mask.dtype}")
    if key_slots is not None:
        shape = [len(cu_seqlens_k) - 1, max_seqlen_k]
        if [*key_slots.shape] != shape or key_slots.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"key_slots must be [sequences, max_seqlen_k] = {shape} of int32 or int64, got {[*key_slots.shape]} of "
                f"{key_slots.dtype}"
            )
        if mask is not None:
            raise NotImplementedError("batch-invariant attention with key_slots takes no mask: gather the keys first")
        if torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value)):
            raise NotImplementedError(
                "batch-invariant attention with key_slots has no derivative: gather the keys first"
            )
    if any(unpack_dual(x).tangent is not None for x in (query, key, value)):  # type: ignore[no-untyped-call]
        raise NotImplementedError("batch-invariant attention has no derivative in forward mode")
    if not torch.compiler.is_compiling() and any(map(torch._C._functorch.is_gradtrackingtensor, (query, key, value))):
        raise NotImplementedError("batch-invariant attention has no derivative by torch.func: take torch.autograd.grad")
    output: Tensor = _attention_forward(
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
        key_slots,
    )
    return output


# Operators, so that no override of the mode reaches into them. Nor may autocast. They take no bundle of tensors.
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
    key_slots: Tensor | None,
) -> Tensor:
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, scale, is_causal, mask, key_slots)
    with torch.autocast(query.device.type, enabled=False):
        output: Tensor = devices.attention_on(query).attention_forward(query, key, value, packing)
    return output


@_attention_forward.register_fake
def _fake_forward(query: Tensor, key: Tensor, value: Tensor, *packing: Any) -> Tensor:
    return query.new_empty(*query.shape[:2], value.shape[2])


@torch.library.custom_op("mis_ext::attention_backward", mutates_args=())
def _attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    is_causal: bool,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of torch's own attention: right, and not batch-invariant."""
    ends_q, ends_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    lengths = [(q - p, k - j) for p, q, j, k in zip(ends_q, ends_q[1:], ends_k, ends_k[1:], strict=False)]
    # Sequences of one length are one batch.
    batch = len(lengths) if len({*lengths}) == 1 else 1
    calls = [(batch * num_q, batch * num_k) for num_q, num_k in lengths[::batch]]
    outputs, grads = [], []
    with ExitStack() as stack:
        # Inside an operator torch records nothing.
        for dispatch_key in (torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView):
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(dispatch_key, False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(query.device.type, enabled=False))
        leaves = [x.detach().requires_grad_() for x in (query, key, value)]
        parts = [
            torch.split(x[ends[0] : ends[-1]], [sizes[side] for sizes in calls])
            for x, ends, side in zip(
                (*leaves, grad_output), (ends_q, ends_k, ends_k, ends_q), (0, 1, 1, 0), strict=True
            )
        ]
        for call, tensors in enumerate(zip(*parts, strict=True)):
            if any(x.numel() == 0 for x in tensors):
                continue
            q, k, v, grad = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in tensors)
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            num_q, num_k = q.shape[2], k.shape[2]
            seen = None if mask is None else mask[call * batch : (call + 1) * batch, :, :num_q, :num_k]
            if is_causal and (mask is not None or num_q != num_k):
                causal = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
                seen = causal if seen is None else seen & causal
            if seen is not None:
                # Of a query that sees nothing torch may return NaN.
                sees = seen.any(-1, keepdim=True)
                seen, grad = seen | ~sees, torch.where(sees, grad, 0)
            settings = seen, 0.0, is_causal and seen is None
            outputs.append(torch.ops.aten.scaled_dot_product_attention(q, k, v, *settings, scale=scale))
            grads.append(grad)
        given = torch.autograd.grad(outputs, leaves, grads) if outputs else [torch.zeros_like(x) for x in leaves]
    return given[0].contiguous(), given[1].contiguous(), given[2].contiguous()


@_attention_backward.register_fake
def _fake_backward(
    grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor, *others: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    query, key, value, cu_seqlens_q, cu_seqlens_k, _, _, *ctx.settings, mask, _ = inputs
    ctx.save_for_backward(query, key, value, cu_seqlens_q, cu_seqlens_k, mask)


def _differentiate(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    *tensors, mask = ctx.saved_tensors
    return (*_attention_backward(grad_output, *tensors, *ctx.settings, mask), *[None] * 8)


def _refuse_second(ctx: Any, *grads: Tensor) -> None:
    raise NotImplementedError(
        "batch-invariant attention has no second derivative: leave the mode for create_graph=True"
    )


_attention_backward.register_autograd(_refuse_second)
_attention_forward.register_autograd(_differentiate, setup_context=_save)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> None:
    shapes = {"query": [*query.shape], "key": [*key.shape], "value": [*value.shape]}
    if any(len(shape) != 3 for shape in shapes.values()):
        raise ValueError(f"attention takes [tokens, heads, dim], got {shapes}")
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"attention takes one dtype, got {query.dtype}, {key.dtype} and {value.dtype}")
    if shapes["key"][:2] != shapes["value"][:2] or shapes["key"][2] != shapes["query"][2]:
        raise ValueError(
            f"key and value must be of one shape, but for the value's last dimension, and key and query have one last "
            f"dimension, got {shapes}"
        )
    num_heads, num_key_heads = query.shape[1], key.shape[1]
    if num_heads and (num_key_heads == 0 or num_heads % num_key_heads):
        raise ValueError(f"{num_heads} query heads are no multiple of {num_key_heads} key heads")
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
    enable_gqa: bool = False,
) -> Tensor:
    """``torch.nn.functional.scaled_dot_product_attention`` on :func:`attention`."""
    if dropout_p > 0.0:
        raise NotImplementedError(f"batch-invariant attention has no dropout, got dropout_p={dropout_p}")
    if attn_mask is not None and (type(attn_mask) is not Tensor or attn_mask.dtype != torch.bool):
        kind = f"{type(attn_mask).__name__} of {attn_mask.dtype}"
        raise NotImplementedError(f"batch-invariant attention takes boolean masks, got a {kind}")
    if attn_mask is not None and is_causal:
        raise ValueError("attention takes attn_mask or is_causal=True, not both")
    heads = _num_heads(query, key, value, enable_gqa=enable_gqa)
    batch_shape = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))  # type: ignore[no-untyped-call]
    num_sequences, num_q, num_k = math.prod(batch_shape), query.shape[-2], key.shape[-2]
    if is_causal and num_q != num_k:
        # torch aligns the mask with the first key, not the last.
        attn_mask = torch.ones(num_q, num_k, dtype=torch.bool, device=query.device).tril()
    mask = None
    if attn_mask is not None:
        num_masks = heads[0] if attn_mask.dim() > 2 and attn_mask.shape[-3] != 1 else 1
        mask = attn_mask.expand(*batch_shape, num_masks, num_q, num_k).reshape(num_sequences, num_masks, num_q, num_k)
    output = attention(
        *(_packed(x, batch_shape, num_heads) for x, num_heads in zip((query, key, value), heads, strict=True)),
        cu_seqlens_q=torch.arange(num_sequences + 1, dtype=torch.int32, device=query.device) * num_q,
        cu_seqlens_k=torch.arange(num_sequences + 1, dtype=torch.int32, device=query.device) * num_k,
        max_seqlen_q=num_q,
        max_seqlen_k=num_k,
        scale=scale,
        is_causal=is_causal and num_q == num_k,
        mask=mask,
    )
    output = output.view(num_sequences, num_q, heads[0], value.shape[-1]).transpose(1, 2)
    head_shape = heads[:1] if max(x.dim() for x in (query, key, value)) > 2 else []
    return output.reshape(*batch_shape, *head_shape, num_q, value.shape[-1])


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
