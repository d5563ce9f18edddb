# SPDX-License-Identifier: Apache-2.0
"""Batch-invariant products, sums and attention on a CPU: every product that reaches BLAS has one fixed shape.

A BLAS picks its kernel, and with it the order of its sums, by the shapes and strides of the operands. Here operands are
cut into tiles of one height and one width, padded with zeros, and copied to one memory layout, and sums are cut into
blocks that are added up in order. So a number depends on its own row and its own column, and on nothing else: fused and
separate projections (``qkv`` against ``q``, ``k`` and ``v``) agree too. 16-bit operands are multiplied in float32 and
rounded once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing, Runs, gather_keys, split_runs

TILE_ROWS = 16
TILE_COLUMNS = 128
# A BLAS with threads to spare cuts a long sum in two when it gets a single tile.
SUM_BLOCK = 128
KEY_BLOCK = 64
VALUE_COLUMNS = 16


def mm(a: Tensor, b: Tensor) -> Tensor:
    """``[M, N]``: ``a [M, K]`` times ``b [K, N]``."""
    return _bmm(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """``[B, M, N]``: ``a [B, M, K]`` times ``b [B, K, N]``; terms of 0 at the ends of a sum change no bit.

    So the attention of an eager model gives a query the same bits whether or not masked keys come before or after its
    own: padding, other sequences of a pack, keys that have left a window. Sums begin at the first number of ``a`` that
    is not 0.
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
        # One call per tile of the operand with fewer of them, against all tiles of the other.
        if num_down < num_across:
            for down in range(num_down):
                output[:, down] += torch.matmul(a_block[:, down : down + 1], b_block).transpose(1, 2)
        else:
            for across in range(num_across):
                output[:, :, :, across] += torch.matmul(a_block, b_block[:, across : across + 1])
    whole = output.flatten(3).flatten(1, 2)
    if whole.shape == (batch, rows, columns):
        return whole.to(a.dtype)
    # Its own memory, as long as it looks: a part of the tiles could not be viewed in other shapes.
    return whole.new_empty(batch, rows, columns, dtype=a.dtype).copy_(whole[:, :rows, :columns])


def _padded(x: Tensor, dim: int, multiple: int) -> Tensor:
    """``x`` with zeros at the end of a dimension; itself where there is nothing to add, unlike torch's copy."""
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
    """Add each row of ``source [N, E]`` to the row of ``out [D, E]`` that ``index [N]`` names, in their order."""
    dtype = torch.promote_types(out.dtype, torch.float32)
    order_N = index.argsort(stable=True)
    destinations, which_N, counts = torch.unique_consecutive(index[order_N], return_inverse=True, return_counts=True)
    # How many rows come before this one on the way to its destination.
    rank_N = torch.arange(len(order_N)) - (counts.cumsum(0) - counts)[which_N]
    total = out[destinations].to(dtype)
    for part in rank_N.argsort(stable=True).split(rank_N.bincount().tolist()):
        total[which_N[part]] += source[order_N[part]].to(dtype)
    out[destinations] = total.to(out.dtype)


class _Tiles(NamedTuple):
    """Tiles of ``TILE_ROWS`` queries of one run each, those with the most key blocks first."""

    run_N: Tensor
    row_NQ: Tensor
    query_NQ: Tensor
    is_query_NQ: Tensor
    position_NQ: Tensor
    first_key_N: Tensor
    num_keys_N: Tensor
    num_blocks_N: Tensor


def attention_forward(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Attention of packed sequences in fixed blocks of keys; see :func:`.attention.attention`.

    Blocks start at the first key that a query sees. One of which it sees nothing changes no bit of its running maximum,
    sum and output. So neither what was cached before, nor what follows, matters.
    """
    key, value, packing = gather_keys(key, value, packing)
    num_heads, dtype = query.shape[1], _compute_dtype(query)
    runs = split_runs(packing)
    tiles = _make_tiles(runs, is_causal=packing.is_causal)
    num_tiles, group = len(tiles.run_N), num_heads // max(key.shape[1], 1)
    query_NHQD = _gathered(_by_head(query, dtype), tiles.query_NQ)
    maximum = query_NHQD.new_full((num_tiles, num_heads, TILE_ROWS, 1), -torch.inf)
    total = torch.zeros_like(maximum)
    # A BLAS has other functions for the columns that are left over, and takes them for one matrix, not for many.
    value_dim = value.shape[-1]
    key, value = _by_head(key, dtype), _by_head(value, dtype, VALUE_COLUMNS)
    output = query_NHQD.new_zeros(num_tiles, num_heads, TILE_ROWS, value.shape[-1])
    for block in range(int(tiles.num_blocks_N.max()) if num_tiles else 0):
        live = int((tiles.num_blocks_N > block).sum())
        key_position_J = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
        key_NJ, seen = _tile_keys(tiles, slice(live), key_position_J, runs, packing)
        keys, values = (_gathered(x, key_NJ, group) for x in (key, value))
        scores = torch.matmul(query_NHQD[:live], keys.transpose(-1, -2).contiguous()) * packing.scale
        scores = torch.where(seen, scores, -torch.inf)
        new_maximum = torch.maximum(maximum[:live], scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet stays at -inf without computing -inf - -inf.
        finite = torch.where(new_maximum == -torch.inf, 0.0, new_maximum)
        weights = torch.exp(scores - finite)
        shrink = torch.exp(maximum[:live] - finite)
        total[:live] = total[:live] * shrink + weights.sum(-1, keepdim=True)
        output[:live] = output[:live] * shrink + torch.matmul(weights, values)
        maximum[:live] = new_maximum
    output = torch.where(total > 0, output / total, 0.0)
    return _packed(output, tiles, query.new_zeros(*query.shape[:2], value_dim))


def _make_tiles(runs: Runs, *, is_causal: bool) -> _Tiles:
    num_q_R, num_k_R = runs.cu_seqlens_q.diff().long(), (runs.key_end_R - runs.key_start_R).long()
    tiles_R = (num_q_R + TILE_ROWS - 1) // TILE_ROWS
    run_N = torch.repeat_interleave(torch.arange(len(tiles_R)), tiles_R)
    tile_of_run_N = torch.arange(len(run_N)) - (tiles_R.cumsum(0) - tiles_R)[run_N]
    row_NQ = (tile_of_run_N * TILE_ROWS)[:, None] + torch.arange(TILE_ROWS)
    is_query_NQ = row_NQ < num_q_R[run_N, None]
    query_NQ = torch.where(is_query_NQ, runs.cu_seqlens_q.long()[run_N, None] + row_NQ, -1)
    position_NQ = row_NQ + (num_k_R - num_q_R)[run_N, None]
    last_N = torch.where(is_query_NQ, position_NQ, -1).amax(1) + 1 if len(run_N) else run_N
    num_keys_N = num_k_R[run_N]
    num_blocks_N = ((last_N.clamp(min=0) if is_causal else num_keys_N) + KEY_BLOCK - 1) // KEY_BLOCK
    first_key_N = runs.key_start_R.long()[run_N]
    tiles = _Tiles(run_N, row_NQ, query_NQ, is_query_NQ, position_NQ, first_key_N, num_keys_N, num_blocks_N)
    order_N = num_blocks_N.argsort(descending=True, stable=True)
    return _Tiles._make(part[order_N] for part in tiles)


def _by_head(x: Tensor, dtype: torch.dtype, multiple: int = 1) -> Tensor:
    """``[G, U + 1, D]`` of ``x [U, G, D]``, with zeros at the ends of rows, and a last row of zeros."""
    return F.pad(x.to(dtype).transpose(0, 1), (0, -x.shape[2] % multiple, 0, 1)).contiguous()


def _gathered(x: Tensor, row_NJ: Tensor, group: int = 1) -> Tensor:
    """``[N, H, J, D]``: rows of ``x [G, U + 1, D]``, -1 for that of zeros; each head ``group`` times."""
    num_heads, num_rows, dim = x.shape
    first_H = torch.arange(num_heads).repeat_interleave(group) * num_rows
    index = (row_NJ % num_rows)[:, None] + first_H[:, None]
    return x.view(-1, dim).index_select(0, index.flatten()).view(*index.shape, dim)


def _packed(x_NHQD: Tensor, tiles: _Tiles, into: Tensor) -> Tensor:
    """``into [T, H, D]`` with the rows of the tiles."""
    rows = x_NHQD[..., : into.shape[2]].transpose(1, 2)[tiles.is_query_NQ]
    into[tiles.query_NQ[tiles.is_query_NQ]] = rows.to(into.dtype)
    return into


def _tile_keys(
    tiles: _Tiles, part: slice, key_position_J: Tensor, runs: Runs, packing: Packing
) -> tuple[Tensor, Tensor]:
    """Of some tiles, ``[N, J]`` which keys stand there, -1 for none, and ``[N, 1 or H, Q, J]`` which a query sees."""
    is_key_NJ = key_position_J < tiles.num_keys_N[part, None]
    seen = is_key_NJ[:, None, None, :]
    if packing.is_causal:
        seen = seen & (key_position_J <= tiles.position_NQ[part, :, None])[:, None]
    if packing.mask is not None:
        seen = seen & _mask_tile(packing.mask, runs, tiles, part, key_position_J)
    return torch.where(is_key_NJ, tiles.first_key_N[part, None] + key_position_J, -1), seen


def _mask_tile(mask: Tensor, runs: Runs, tiles: _Tiles, part: slice, key_position_J: Tensor) -> Tensor:
    """``[N, 1 or H, TILE_ROWS, KEY_BLOCK]``; what lies beyond the mask's edges is no query and no key."""
    run_N = tiles.run_N[part]
    row_NQ = (tiles.row_NQ[part] + runs.row_R[run_N, None]).clamp(0, mask.shape[2] - 1)
    key_NJ = (key_position_J + runs.origin_R[run_N, None]).clamp(max=mask.shape[3] - 1)
    return mask[runs.sequence_R[run_N, None, None], :, row_NQ[:, :, None], key_NJ[:, None]].movedim(-1, 1).contiguous()


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
