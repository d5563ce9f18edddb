"""Batch-invariant products and attention on a CPU: every product that reaches the BLAS library has one fixed shape.

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

from mis_ext.onpolicy.batch_invariant.packing import Packing, Runs, gather_keys, runs_of

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
    """``[B, M, N]``: ``a [B, M, K]`` times ``b [B, K, N]``; zeros at the ends of a row of ``a`` change no bit.

    So the attention of an eager model gives a query the same bits whether or not masked keys come before or after its
    own: padding, other sequences of a pack, keys that have left a window. Its sums begin at the first that is not 0.
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


def attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor]:
    """Attention of packed sequences in fixed blocks of keys, and its log-sum-exp; see :func:`.attention.attention`.

    Blocks start at the first key that a query sees. One of which it sees nothing changes no bit of its running maximum,
    sum and output. So neither what was cached before, nor what follows, matters.
    """
    key, value, packing = gather_keys(key, value, packing)
    scale, is_causal, mask = packing.scale, packing.is_causal, packing.mask
    num_heads, dtype = query.shape[1], _compute_dtype(query)
    runs = runs_of(packing)
    tiles = _make_tiles(runs, is_causal=is_causal)
    num_tiles, group = len(tiles.run_N), num_heads // key.shape[1]
    query_NHQD = query[tiles.query_NQ].to(dtype).transpose(1, 2).contiguous()
    maximum = query_NHQD.new_full((num_tiles, num_heads, TILE_ROWS, 1), -torch.inf)
    total = torch.zeros_like(maximum)
    # A BLAS has other functions for the columns that are left over, and takes them for one matrix, not for many.
    value_dim = value.shape[-1]
    value = _padded(value, 2, VALUE_COLUMNS)
    output = query_NHQD.new_zeros(num_tiles, num_heads, TILE_ROWS, value.shape[-1])
    for block in range(int(tiles.num_blocks_N.max()) if num_tiles else 0):
        live = int((tiles.num_blocks_N > block).sum())
        key_position_J = torch.arange(block * KEY_BLOCK, (block + 1) * KEY_BLOCK)
        is_key_NJ = key_position_J < tiles.num_keys_N[:live, None]
        key_NJ = torch.where(is_key_NJ, tiles.first_key_N[:live, None] + key_position_J, 0)
        seen = is_key_NJ[:, None, None, :]
        if is_causal:
            seen = seen & (key_position_J <= tiles.position_NQ[:live, :, None])[:, None]
        if mask is not None:
            seen = seen & _mask_tile(mask, runs, tiles, live, key_position_J)
        keys, values = (_key_block(x, key_NJ, is_key_NJ, group, dtype) for x in (key, value))
        scores = torch.matmul(query_NHQD[:live], keys.transpose(-1, -2).contiguous()) * scale
        scores = torch.where(seen, scores, -torch.inf)
        new_maximum = torch.maximum(maximum[:live], scores.amax(-1, keepdim=True))
        # A row that has seen nothing yet stays at -inf without computing -inf - -inf.
        finite = torch.where(new_maximum == -torch.inf, 0.0, new_maximum)
        weights = torch.exp(scores - finite)
        shrink = torch.exp(maximum[:live] - finite)
        total[:live] = total[:live] * shrink + weights.sum(-1, keepdim=True)
        output[:live] = output[:live] * shrink + torch.matmul(weights, values)
        maximum[:live] = new_maximum
    log_total = torch.where(total > 0, maximum + total.log(), -torch.inf)
    output = torch.where(total > 0, output / total, 0.0)
    packed = query.new_zeros(*query.shape[:2], value_dim)
    packed[tiles.query_NQ[tiles.is_query_NQ]] = (
        output[..., :value_dim].transpose(1, 2)[tiles.is_query_NQ].to(query.dtype)
    )
    lse = query_NHQD.new_zeros(num_heads, query.shape[0])
    lse[:, tiles.query_NQ[tiles.is_query_NQ]] = log_total.squeeze(-1).transpose(1, 2)[tiles.is_query_NQ].t()
    return packed, lse


def attention_backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of :func:`attention_forward`, one sequence after the other, from the exact weights of the forward."""
    cu_seqlens_q, cu_seqlens_k, _, _, scale, is_causal, mask, _ = packing
    dtype, group = _compute_dtype(query), query.shape[1] // key.shape[1]
    grads = [x.new_zeros(x.shape, dtype=dtype) for x in (query, key, value)]
    bounds_q, bounds_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for index in range(len(bounds_q) - 1):
        of_q, of_k = (slice(*bounds[index : index + 2]) for bounds in (bounds_q, bounds_k))
        num_q, num_k = of_q.stop - of_q.start, of_k.stop - of_k.start
        q, grad, out = (x[of_q].to(dtype).transpose(0, 1) for x in (query, grad_output, output))
        k, v = (x[of_k].to(dtype).transpose(0, 1).repeat_interleave(group, dim=0) for x in (key, value))
        seen = torch.ones(1, num_q, num_k, dtype=torch.bool)
        if is_causal:
            seen = seen.tril(num_k - num_q)
        if mask is not None:
            seen = seen & mask[index, :, :num_q, :num_k]
        weights = torch.where(seen, torch.exp(q @ k.transpose(1, 2) * scale - lse[:, of_q, None]), 0.0)
        inner = grad @ v.transpose(1, 2) - (grad * out).sum(-1, keepdim=True)
        grad_scores = torch.where(seen, weights * inner, 0.0) * scale
        grads[0][of_q] = (grad_scores @ k).transpose(0, 1)
        for into, per_head in ((grads[1], grad_scores.transpose(1, 2) @ q), (grads[2], weights.transpose(1, 2) @ grad)):
            # Rounded as the gradient of a head of its own: models that mask repeat the heads, and then do not.
            rounded = per_head.to(key.dtype).view(key.shape[1], group, *per_head.shape[1:])
            into[of_k] = rounded.sum(1).transpose(0, 1)
    grad_query, grad_key, grad_value = (grad.to(x.dtype) for grad, x in zip(grads, (query, key, value), strict=True))
    return grad_query, grad_key, grad_value


def _make_tiles(runs: Runs, *, is_causal: bool) -> _Tiles:
    num_q_R, num_k_R = runs.cu_seqlens_q.diff().long(), (runs.key_end_R - runs.key_start_R).long()
    tiles_R = (num_q_R + TILE_ROWS - 1) // TILE_ROWS
    run_N = torch.repeat_interleave(torch.arange(len(tiles_R)), tiles_R)
    tile_of_run_N = torch.arange(len(run_N)) - (tiles_R.cumsum(0) - tiles_R)[run_N]
    row_NQ = tile_of_run_N[:, None] * TILE_ROWS + torch.arange(TILE_ROWS)
    is_query_NQ = row_NQ < num_q_R[run_N, None]
    query_NQ = torch.where(is_query_NQ, runs.cu_seqlens_q.long()[run_N, None] + row_NQ, 0)
    position_NQ = row_NQ + (num_k_R - num_q_R)[run_N, None]
    last_N = torch.where(is_query_NQ, position_NQ, -1).amax(1) + 1 if len(run_N) else run_N
    num_keys_N = num_k_R[run_N]
    num_blocks_N = ((last_N if is_causal else num_keys_N) + KEY_BLOCK - 1) // KEY_BLOCK
    tiles = _Tiles(
        run_N=run_N,
        row_NQ=row_NQ,
        query_NQ=query_NQ,
        is_query_NQ=is_query_NQ,
        position_NQ=position_NQ,
        first_key_N=runs.key_start_R.long()[run_N],
        num_keys_N=num_keys_N,
        num_blocks_N=num_blocks_N,
    )
    order_N = num_blocks_N.argsort(descending=True, stable=True)
    return _Tiles._make(part[order_N] for part in tiles)


def _key_block(x: Tensor, key_NJ: Tensor, is_key_NJ: Tensor, group: int, dtype: torch.dtype) -> Tensor:
    """``[N, H, KEY_BLOCK, D]``; zeros beyond the end of a sequence, where another one may hold anything."""
    block = torch.where(is_key_NJ[:, :, None, None], x[key_NJ].to(dtype), 0.0)
    return block.transpose(1, 2).repeat_interleave(group, dim=1)


def _mask_tile(mask: Tensor, runs: Runs, tiles: _Tiles, live: int, key_position_J: Tensor) -> Tensor:
    """``[N, 1 or H, TILE_ROWS, KEY_BLOCK]``; what lies beyond the mask's edges is no query and no key."""
    run_N = tiles.run_N[:live]
    row_NQ = (tiles.row_NQ[:live] + runs.row_R[run_N, None]).clamp(max=mask.shape[2] - 1)
    key_NJ = (key_position_J + runs.origin_R[run_N, None]).clamp(max=mask.shape[3] - 1)
    return mask[runs.sequence_R[run_N, None, None], :, row_NQ[:, :, None], key_NJ[:, None]].movedim(-1, 1)


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32
