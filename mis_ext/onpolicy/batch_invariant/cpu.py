# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant matmuls, sums and attention on a CPU: every matmul that BLAS computes has one fixed shape.

A BLAS selects its kernel, and thus the order of its sums, by the shapes and strides of the operands. This module splits
operands into tiles of a fixed height and width, pads them with zeros, and copies them to one memory layout. Sums are
split into blocks that are added in order. So a value depends only on its own row and its own column: fused and separate
projections (``qkv``, or ``q``, ``k`` and ``v``) agree too. 16-bit operands are multiplied in float32 and rounded once.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from mis_ext.onpolicy.batch_invariant.cpu_rows import softmax as softmax
from mis_ext.onpolicy.batch_invariant.cpu_rows import sum as sum
from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing

TILE_ROWS = 16
TILE_COLUMNS = 128
# A BLAS with idle threads splits a long sum if it gets a single tile.
SUM_BLOCK = 128


def mm(a: Tensor, b: Tensor) -> Tensor:
    """``[M, N]``: ``a [M, K]`` times ``b [K, N]``."""
    return _bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """``[B, M, N]``: ``a [B, M, K]`` times ``b [B, K, N]``. Zero terms at both ends of a sum change no bit.

    So in eager attention the bits of a query do not depend on masked keys before or after its own: padding, other
    sequences of a pack, keys outside of a window. Sums begin at the first nonzero value of ``a``.
    """
    if a.shape[2] == 0 or not bool((a[..., 0] == 0).any()):
        return _bmm(a, b)
    first_BM = (a != 0).to(torch.uint8).argmax(-1)
    output = a.new_zeros(a.shape[0], a.shape[1], b.shape[2])
    for first in sorted(set(first_BM.flatten().tolist())):
        is_here_BM = first_BM == first
        rows = is_here_BM.any(0).nonzero().squeeze(1)
        product = _bmm(a[:, rows, first:], b[:, first:])
        output[:, rows] = torch.where(is_here_BM[:, rows, None], product, output[:, rows])
    return output


def _bmm(a: Tensor, b: Tensor) -> Tensor:
    (batch, rows, length), columns = a.shape, b.shape[-1]
    dtype = _compute_dtype(a)
    a_tiles = _padded(_padded(a.to(dtype), 1, TILE_ROWS), 2, SUM_BLOCK).contiguous()
    b_tiles = _padded(_padded(b.to(dtype), 2, TILE_COLUMNS), 1, SUM_BLOCK)
    a_tiles = a_tiles.view(batch, -(-rows // TILE_ROWS), TILE_ROWS, a_tiles.shape[2])
    b_tiles = b_tiles.reshape(batch, b_tiles.shape[1], -(-columns // TILE_COLUMNS), TILE_COLUMNS)
    b_tiles = b_tiles.transpose(1, 2).contiguous()
    num_down, num_across = a_tiles.shape[1], b_tiles.shape[1]
    output = a_tiles.new_zeros(batch, num_down, TILE_ROWS, num_across, TILE_COLUMNS)
    for start in range(0, length, SUM_BLOCK):
        a_block, b_block = a_tiles[..., start : start + SUM_BLOCK], b_tiles[:, :, start : start + SUM_BLOCK]
        # One call per tile of the operand with fewer tiles, with all tiles of the other operand.
        if num_down < num_across:
            for down in range(num_down):
                output[:, down] += torch.matmul(a_block[:, down : down + 1], b_block).transpose(1, 2)
        else:
            for across in range(num_across):
                output[:, :, :, across] += torch.matmul(a_block, b_block[:, across : across + 1])
    whole = output.flatten(3).flatten(1, 2)
    if whole.shape == (batch, rows, columns):
        return whole.to(a.dtype)
    # A contiguous copy, because a part of the tiles could not be viewed in other shapes.
    return whole.new_empty(batch, rows, columns, dtype=a.dtype).copy_(whole[:, :rows, :columns])


def _padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """``x`` with zeros at the end of a dimension; without padding ``x`` itself, while F.pad copies."""
    missing = -x.shape[dim] % multiple
    return F.pad(x, (0, 0) * (x.dim() - 1 - dim) + (0, missing)) if missing else x


def grouped_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """``[M, N]``: rows ``ends[g - 1]`` to ``ends[g]`` of ``a [M, K]`` times ``b[g]`` of ``[G, K, N]``; then zeros."""
    out = a.new_zeros(a.shape[0], b.shape[2])
    stops = ends.tolist()
    for group, (start, stop) in enumerate(zip([0, *stops], stops, strict=False)):
        if not 0 <= start <= stop <= len(a):
            raise RuntimeError(f"offs must not decrease, within [0, {len(a)}], got {stops}")
        if start < stop:
            out[start:stop] = mm(a[start:stop], b[group])
    return out


def add_rows_(out: Tensor, index: Tensor, source: Tensor) -> None:
    """Add each row of ``source [N, E]`` to the row ``index [N]`` of ``out [D, E]``, in the order of ``source``."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    order_N = index.argsort(stable=True)
    destinations, which_N, counts = torch.unique_consecutive(index[order_N], return_inverse=True, return_counts=True)
    # The number of earlier rows with the same destination.
    rank_N = torch.arange(len(order_N)) - (counts.cumsum(0) - counts)[which_N]
    total = out[destinations].to(dtype)
    for part in rank_N.argsort(stable=True).split(rank_N.bincount().tolist()):
        total[which_N[part]] += source[order_N[part]].to(dtype)
    out[destinations] = total.to(out.dtype)


def attention_forward(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Attention of packed sequences, per sequence; see :func:`.attention.attention`.

    It uses :func:`bmm`, which skips the keys before those that a query sees, and a softmax in which masked keys change
    no bit.
    """
    dtype, output = _compute_dtype(query), query.new_zeros(*query.shape[:2], value.shape[2])
    spans = (pairwise(bounds.tolist()) for bounds in (packing.cu_seqlens_q, packing.cu_seqlens_k))
    for sequence, ((start, stop), (first_key, end)) in enumerate(zip(*spans, strict=True)):
        num_q, num_k = stop - start, end - first_key
        if num_q == 0 or num_k == 0:
            continue
        slots = packing.key_slots
        keys = slice(first_key, end) if slots is None else slots[sequence, :num_k].long()
        q, k, v = (x.to(dtype).transpose(0, 1) for x in (query[start:stop], key[keys], value[keys]))
        k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
        seen = torch.ones(1, num_q, num_k, dtype=torch.bool)
        if packing.is_causal:
            seen = seen.tril(num_k - num_q)
        if packing.mask is not None:
            seen = seen & packing.mask[sequence, :, :num_q, :num_k]
        scores = torch.where(seen, bmm(q, k.transpose(1, 2)) * packing.scale, -torch.inf)
        shares = torch.where(seen.any(-1, keepdim=True), softmax(scores, dtype, is_log=False), 0.0)
        output[start:stop] = bmm(shares, v).transpose(0, 1)
    return output


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """:func:`.devices.rms_norm` in float32."""
    normalized = x.float()
    normalized = normalized * torch.rsqrt(normalized.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
