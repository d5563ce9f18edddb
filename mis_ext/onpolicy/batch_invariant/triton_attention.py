# SPDX-License-Identifier: Apache-2.0
"""Attention on CUDA. Every output row has the same bits in a prefill, a chunk of it, or a decode.

A program computes one run of queries and one head. Blocks of keys start at the first key that a query sees, so that the
blocks are the same in a prefill, in a chunk of it, and in a decode. A block without a visible key does not change a bit
of the sums: the maximum does not change, so the sums are multiplied by exactly 1, and zeros are added.

The keys of a query are never split between programs, unlike in flash decoding for long caches: the number of parts, and
thus the order of the sums, would depend on the batch.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from mis_ext.onpolicy.batch_invariant.packed_sequences import Packing, seen_keys, split_runs
from mis_ext.onpolicy.batch_invariant.triton_products import FLOAT32_PRODUCTS
from mis_ext.scoring.launch import IS_HIP, Launcher, launching_on

LOG2_E = tl.constexpr(1.4426950408889634)

# Keys per block: the number of bits of a word of the mask.
BLOCK_N = tl.constexpr(64)
# Heads that are computed together: few enough for their keys to stay in the cache. 8 was slower in a test.
HEADS_AT_A_TIME = tl.constexpr(16)

# Arguments that differ between a prefill and a decode must not select different code: Triton recompiles for arguments
# that are 1 or a multiple of 16, and another compilation may change the order of sums.
VARYING = ["mask", "mask_starts", "num_tiles", "mask_head_stride", "mask_query_stride"]
# Slices of bounds, with any alignment.
UNALIGNED = ["cu_seqlens_q", "key_starts", "key_ends"]


@triton.jit
def may_attend(
    mask,
    queries,
    start,
    num_queries,
    num_keys,
    mask_query_stride,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Return the mask of ``queries`` and the keys of the block at ``start``, ``[queries, keys]`` bool.

    The causal diagonal ends at the last key: the queries are the last queries of the sequence, as in a decode.
    """
    keys = start + tl.arange(0, BLOCK_N)
    allowed = (queries < num_queries)[:, None] & (keys < num_keys)[None, :]
    if IS_CAUSAL:
        allowed = allowed & (queries[:, None] + (num_keys - num_queries) >= keys[None, :])
    if HAS_MASK:
        # One word per query and block: with a byte per pair, the compiler would choose the layout of the scores by
        # these loads, and add the weights of a row in a different order than without a mask.
        words = mask + queries.to(tl.int64) * mask_query_stride + start // BLOCK_N
        word = tl.load(words, mask=queries < num_queries, other=0)
        allowed = allowed & (((word[:, None] >> tl.arange(0, BLOCK_N)[None, :].to(tl.int64)) & 1) != 0)
    return allowed


@triton.jit
def load_keys(
    x, slots, first_key, start, end, row_stride, HAS_SLOTS: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_DIM: tl.constexpr
):
    """The rows of the block of keys at ``start``. Rows starting at ``end`` repeat the last row before it.

    This costs less than a predicate per row. No query may attend to them.
    """
    lane = tl.arange(0, BLOCK_D)
    keys = tl.arange(0, BLOCK_N)
    if HAS_SLOTS:
        offset = tl.load(slots + tl.minimum(start + keys, end - 1)).to(tl.int64) * row_stride
    else:
        # One 64-bit address, and 32-bit offsets from it.
        x += (first_key + start).to(tl.int64) * row_stride
        last = min(end - 1 - start, BLOCK_N - 1)
        offset = tl.minimum(keys * row_stride, last * row_stride)
    return tl.load(x + lane[None, :] + offset[:, None], mask=(lane < HEAD_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def forward_kernel(
    query,
    key,
    value,
    mask,
    output,
    slots,
    cu_seqlens_q,
    key_starts,
    key_ends,
    mask_starts,
    num_tiles,
    num_heads,
    scale,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    mask_head_stride,
    mask_query_stride,
    slot_stride,
    QUERIES_PER_KEY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """``output [T, H, D]`` of one tile of queries; ``scale`` is positive.

    One loop processes all blocks from left to right, with and without masked keys, so that all have the same
    arithmetic. With ``HAS_SLOTS`` keys are read from a paged cache by their slots. Rows without a sequence do not
    change.
    """
    # Causal: process the tiles with the most keys first, so that the last programs are short.
    sequence = tl.program_id(0) // (num_tiles * num_heads)
    place = tl.program_id(0) % (num_tiles * num_heads)
    first_head = place // (num_tiles * HEADS_AT_A_TIME) * HEADS_AT_A_TIME
    heads = min(num_heads - first_head, HEADS_AT_A_TIME)
    place -= first_head * num_tiles
    tile = num_tiles - 1 - place // heads
    head = first_head + place % heads
    wide_head = head.to(tl.int64)
    first_query, first_key = tl.load(cu_seqlens_q + sequence), tl.load(key_starts + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - first_query
    num_keys = tl.load(key_ends + sequence) - first_key
    if tile * BLOCK_M >= num_queries:
        return
    output += wide_head * HEAD_DIM
    query += wide_head * query_head_stride
    key += wide_head // QUERIES_PER_KEY * key_head_stride
    value += wide_head // QUERIES_PER_KEY * value_head_stride
    slots += sequence.to(tl.int64) * slot_stride
    if HAS_MASK:
        mask += tl.load(mask_starts + sequence) + wide_head * mask_head_stride

    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    lane = tl.arange(0, BLOCK_D)[None, :]
    row = (first_query + queries).to(tl.int64)[:, None]
    is_there = (queries < num_queries)[:, None] & (lane < HEAD_DIM)
    q = tl.load(query + row * query_stride + lane, mask=is_there, other=0.0)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weighted = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # The end of the keys that some query of the tile sees, and of those that all its queries see.
    end, whole = num_keys, num_keys
    if IS_CAUSAL:
        end = min(num_keys, num_keys - num_queries + (tile + 1) * BLOCK_M)
        whole = num_keys - num_queries + tile * BLOCK_M + 1
    if HAS_MASK:
        whole = 0
    # In units of log 2, for the hardware's exp2.
    scale_2 = scale * LOG2_E
    for start in range(0, end, BLOCK_N):
        k = load_keys(key, slots, first_key, start, end, key_stride, HAS_SLOTS, BLOCK_D, HEAD_DIM)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if start + BLOCK_N > whole:
            allowed = may_attend(mask, queries, start, num_queries, num_keys, mask_query_stride, IS_CAUSAL, HAS_MASK)
            score = tl.where(allowed, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, 1) * scale_2)
        # It is minus infinity until the query has seen a key; avoid the difference of infinities.
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        # A single operation, because a compiler would fuse two operations only in some kernels.
        weight = tl.exp2(tl.fma(score, scale_2, -origin[:, None]))
        decay = tl.exp2(highest - origin)
        total = tl.fma(total, decay, tl.sum(weight, 1))
        highest = higher
        v = load_keys(value, slots, first_key, start, end, value_stride, HAS_SLOTS, BLOCK_D, HEAD_DIM)
        weighted = tl.dot(weight.to(v.dtype), v, weighted * decay[:, None], input_precision=PRECISION)

    is_empty = total == 0.0
    # Adding 0 turns -0 into +0, like the zeros of a block without a visible key.
    result = weighted / tl.where(is_empty, 1.0, total)[:, None] + 0.0
    tl.store(output + row * (num_heads * HEAD_DIM) + lane, result.to(output.dtype.element_ty), mask=is_there)


_launch = Launcher(forward_kernel)
_MAX_HEAD_DIM = 256
# Larger heads need other tiles.
_WIDE = 128


class Tile(NamedTuple):
    """Number of queries per program, and its launch options; key blocks have ``BLOCK_N`` keys."""

    BLOCK_M: int
    num_warps: int
    num_stages: int


def choose_tile(dtype: torch.dtype, head_dim: int) -> Tile:
    """The tile; it may depend only on dtype and head dimension."""
    is_wide = head_dim > _WIDE
    if dtype == torch.float32:
        # Both operands of a matmul pass through registers, which are the limit.
        return Tile(32, 8, 1) if is_wide or IS_HIP else Tile(32, 4, 1)
    if IS_HIP:
        return Tile(64, 8, 1)
    return Tile(64, 8, 2) if is_wide else Tile(64, 4, 3)


def attention_forward(query: Tensor, key: Tensor, value: Tensor, packing: Packing) -> Tensor:
    """Attention of packed sequences by an online softmax in float32; see :func:`.attention.attention`.

    The output is 0 for queries without a key or without a sequence. A non-finite value affects the queries that see its
    key, and also other queries of a tile that reads it: a tile reads all keys from the first to the last that one of
    its queries may see.
    """
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, _, scale, is_causal, mask, slots = packing
    value_dim, head_dim, device = value.shape[2], max(query.shape[2], value.shape[2]), query.device
    if not 1 <= head_dim <= _MAX_HEAD_DIM:
        raise ValueError(f"the last dimensions must be in [1, {_MAX_HEAD_DIM}], got {head_dim}")
    for name, lengths in {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}.items():
        if lengths.dtype != torch.int32 or lengths.device != device:
            raise TypeError(f"{name} must be int32 on {device}, got {lengths.dtype} on {lengths.device}")
    # Pad all to the same width: values may be narrower than keys, as in DeepSeek-V3.
    query, key, value = (
        x if x.shape[2] == head_dim else pad(x, (0, head_dim - x.shape[2])) for x in (query, key, value)
    )
    num_heads = query.shape[1]
    if mask is None:
        # Without computation, which would delay a decode.
        bounds = [cu_seqlens_q, cu_seqlens_k[:-1], cu_seqlens_k[1:], cu_seqlens_q]
    else:
        if mask.dtype != torch.bool or mask.device != device:
            raise TypeError(f"mask must be bool on {device}, got {mask.dtype} on {mask.device}")
        runs = split_runs(packing)
        mask = _packed_words(_from_first_key(mask) if mask.numel() else mask).expand(-1, num_heads, -1, -1)
        bounds = [*runs[:3], runs.sequence_R * mask.stride(0) + runs.row_R * mask.stride(2)]
    # Only the last dimension must be dense, and offsets within a block of keys must fit into 32 bits.
    query, key, value = (
        x if x.stride(2) == 1 and x.stride(0) < 2**31 // BLOCK_N.value else x.contiguous() for x in (query, key, value)
    )
    output = torch.zeros(query.shape, dtype=query.dtype, device=device)
    BLOCK_M, num_warps, num_stages = choose_tile(query.dtype, head_dim)
    # The tiles of the longest sequence.
    num_tiles = -(-max(max_seqlen_q, 1) // BLOCK_M)
    num_programs = num_tiles * num_heads * bounds[1].numel()
    strides = [stride for x in (query, key, value) for stride in x.stride()[:2]]
    strides += (0, 0) if mask is None else mask.stride()[1:3]
    if num_programs and len(query):
        with launching_on(query):
            _launch(
                num_programs,
                (
                    *(query, key, value, query if mask is None else mask, output, query if slots is None else slots),
                    *(x.contiguous() for x in bounds),
                ),
                (num_tiles, num_heads, float(scale), *strides, 0 if slots is None else slots.stride(0)),
                {
                    "QUERIES_PER_KEY": num_heads // max(key.shape[1], 1),
                    "HEAD_DIM": head_dim,
                    "IS_CAUSAL": is_causal,
                    "HAS_MASK": mask is not None,
                    # The parts of three TF32 matmuls would not fit into shared memory.
                    "PRECISION": "ieee" if head_dim > _WIDE else FLOAT32_PRODUCTS,
                    "BLOCK_D": max(16, 1 << (head_dim - 1).bit_length()),
                    "HAS_SLOTS": slots is not None,
                    "BLOCK_M": BLOCK_M,
                },
                {"num_warps": num_warps, "num_stages": num_stages},
            )
    return output[..., :value_dim].contiguous()


def _from_first_key(mask: Tensor) -> Tensor:
    """The mask, shifted so that each query's row starts at its first visible key."""
    num_keys = mask.shape[-1]
    key_SQJ = seen_keys(mask)[0][..., None] + torch.arange(num_keys, device=mask.device)
    index = key_SQJ.clamp(max=num_keys - 1)[:, None].expand(-1, mask.shape[1], -1, -1)
    return mask.gather(-1, index) & (key_SQJ < num_keys)[:, None]


def _packed_words(mask: Tensor) -> Tensor:
    """One bit per key, lowest bit first, 64 per word: ``[..., blocks]`` int64."""
    padded = pad(mask, (0, -mask.shape[-1] % BLOCK_N.value))
    bits = padded.view(*padded.shape[:-1], padded.shape[-1] // 8, 8)
    places = 1 << torch.arange(8, dtype=torch.uint8, device=mask.device)
    return torch.where(bits, places, 0).sum(-1, dtype=torch.uint8).view(torch.int64)
