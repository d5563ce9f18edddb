"""The gradients of :mod:`triton_attention_kernels`: a kernel for queries and one for keys and values.

One kernel for all three would have to add up either the queries' or the keys' gradients over programs, by atomic
operations, in whatever order they come. Two kernels compute the weights twice instead, and each sum has one program
and one order. A gradient so depends on its own sequence alone.
"""

import triton
import triton.language as tl

from mis_ext.onpolicy.batch_invariant.triton_attention_kernels import (
    BLOCK_N,
    LOG2_E,
    UNALIGNED,
    VARYING,
    load_rows,
    may_attend,
    store_rows,
)


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def query_gradient_kernel(
    query,
    key,
    value,
    mask,
    output,
    lse,
    grad_output,
    delta,
    grad_query,
    cu_seqlens_q,
    key_starts,
    key_ends,
    mask_starts,
    num_tiles,
    num_heads,
    num_rows,
    scale,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    mask_head_stride,
    mask_query_stride,
    QUERIES_PER_KEY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """``grad_query [T, H, D]`` of one tile of queries, and ``delta [H, T]``, the sum of output times its gradient.

    Blocks of keys from left to right, from the first key of the sequence on. It runs first: the other kernel reads
    ``delta``.
    """
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    head = (tl.program_id(0) // num_tiles % num_heads).to(tl.int64)
    sequence = tl.program_id(0) // (num_tiles * num_heads)
    first_query, first_key = tl.load(cu_seqlens_q + sequence), tl.load(key_starts + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - first_query
    num_keys = tl.load(key_ends + sequence) - first_key
    if tile * BLOCK_M >= num_queries:
        return
    query += head * query_head_stride
    key += head // QUERIES_PER_KEY * key_head_stride
    value += head // QUERIES_PER_KEY * value_head_stride
    if HAS_MASK:
        mask += tl.load(mask_starts + sequence) + head * mask_head_stride
    head_dim: tl.constexpr = HEAD_DIM
    out_stride = num_heads * head_dim

    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_query = queries < num_queries
    row = head * num_rows + first_query + queries
    q = load_rows(query, first_query, queries, num_queries, query_stride, BLOCK_D, HEAD_DIM)
    slope = load_rows(grad_output + head * head_dim, first_query, queries, num_queries, out_stride, BLOCK_D, HEAD_DIM)
    result = load_rows(output + head * head_dim, first_query, queries, num_queries, out_stride, BLOCK_D, HEAD_DIM)
    shift = tl.sum(result.to(tl.float32) * slope.to(tl.float32), 1)
    tl.store(delta + row, shift, mask=is_query)
    log_total = tl.load(lse + row, mask=is_query, other=0.0) * LOG2_E
    gradient = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    end = num_keys
    if IS_CAUSAL:
        end = min(num_keys, num_keys - num_queries + (tile + 1) * BLOCK_M)
    scale_2 = scale * LOG2_E
    for start in range(0, end, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        k = load_rows(key, first_key, keys, num_keys, key_stride, BLOCK_D, HEAD_DIM)
        v = load_rows(value, first_key, keys, num_keys, value_stride, BLOCK_D, HEAD_DIM)
        allowed = may_attend(mask, queries, start, num_queries, num_keys, mask_query_stride, IS_CAUSAL, HAS_MASK)
        score = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_2
        weight = tl.where(allowed, tl.exp2(score - log_total[:, None]), 0.0)
        weight_slope = tl.dot(slope, tl.trans(v), input_precision=PRECISION)
        score_slope = weight * (weight_slope - shift[:, None])
        gradient = tl.dot(score_slope.to(k.dtype), k, gradient, input_precision=PRECISION)
    store_rows(
        grad_query + head * head_dim, gradient * scale, first_query, queries, num_queries, out_stride, BLOCK_D, HEAD_DIM
    )


@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=UNALIGNED)
def key_gradient_kernel(
    query,
    key,
    value,
    mask,
    lse,
    grad_output,
    delta,
    grad_key,
    grad_value,
    cu_seqlens_q,
    key_starts,
    key_ends,
    mask_starts,
    num_tiles,
    num_heads,
    num_rows,
    scale,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    mask_head_stride,
    mask_query_stride,
    QUERIES_PER_KEY: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """``grad_key`` and ``grad_value [U, G, D]`` of one tile of keys.

    The query heads of the group one after the other, of each the blocks of queries from left to right.
    """
    num_groups = num_heads // QUERIES_PER_KEY
    tile = tl.program_id(0) % num_tiles
    group = (tl.program_id(0) // num_tiles % num_groups).to(tl.int64)
    sequence = tl.program_id(0) // (num_tiles * num_groups)
    first_query, first_key = tl.load(cu_seqlens_q + sequence), tl.load(key_starts + sequence)
    num_queries = tl.load(cu_seqlens_q + sequence + 1) - first_query
    num_keys = tl.load(key_ends + sequence) - first_key
    if tile * BLOCK_N >= num_keys:
        return
    if HAS_MASK:
        mask += tl.load(mask_starts + sequence)
    head_dim: tl.constexpr = HEAD_DIM
    keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = load_rows(key + group * key_head_stride, first_key, keys, num_keys, key_stride, BLOCK_D, HEAD_DIM)
    v = load_rows(value + group * value_head_stride, first_key, keys, num_keys, value_stride, BLOCK_D, HEAD_DIM)
    key_slope = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    value_slope = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    begin = 0
    if IS_CAUSAL:
        # The first block with a query that sees a key of the tile; blocks start at the same queries for every tile.
        begin = max(0, tile * BLOCK_N - (num_keys - num_queries)) // BLOCK_M * BLOCK_M
    scale_2 = scale * LOG2_E
    for member in range(QUERIES_PER_KEY):
        head = group * QUERIES_PER_KEY + member
        for start in range(begin, num_queries, BLOCK_M):
            queries = start + tl.arange(0, BLOCK_M)
            is_query = queries < num_queries
            row = head * num_rows + first_query + queries
            q = load_rows(
                query + head * query_head_stride, first_query, queries, num_queries, query_stride, BLOCK_D, HEAD_DIM
            )
            slope = load_rows(
                grad_output + head * head_dim,
                first_query,
                queries,
                num_queries,
                num_heads * head_dim,
                BLOCK_D,
                HEAD_DIM,
            )
            log_total = tl.load(lse + row, mask=is_query, other=0.0) * LOG2_E
            shift = tl.load(delta + row, mask=is_query, other=0.0)
            allowed = may_attend(
                mask + head * mask_head_stride,
                queries,
                tile * BLOCK_N,
                num_queries,
                num_keys,
                mask_query_stride,
                IS_CAUSAL,
                HAS_MASK,
            )
            score = tl.dot(k, tl.trans(q), input_precision=PRECISION) * scale_2
            weight = tl.where(tl.trans(allowed), tl.exp2(score - log_total[None, :]), 0.0)
            value_slope = tl.dot(weight.to(slope.dtype), slope, value_slope, input_precision=PRECISION)
            weight_slope = tl.dot(v, tl.trans(slope), input_precision=PRECISION)
            score_slope = weight * (weight_slope - shift[None, :])
            key_slope = tl.dot(score_slope.to(q.dtype), q, key_slope, input_precision=PRECISION)
    out_stride = num_groups * head_dim
    group_offset = group * head_dim
    store_rows(grad_key + group_offset, key_slope * scale, first_key, keys, num_keys, out_stride, BLOCK_D, HEAD_DIM)
    store_rows(grad_value + group_offset, value_slope, first_key, keys, num_keys, out_stride, BLOCK_D, HEAD_DIM)
