"""What a mixture of experts computes on CUDA besides plain products: products of groups of rows, and sums of rows.

How many rows an expert has is known on the device only. A row of a grouped product has the bits of
:func:`.triton_matmul.mm` on its group by itself: tiles and the order of sums are the same. Rows that have one
destination are added in the order in which they lie, where torch adds them by atomic operations, in the order in which
they happen to come, so that two runs differ.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mis_ext.correction.triton.launch import launching_on
from mis_ext.onpolicy.batch_invariant.triton_inputs import FLOAT32_PRODUCTS, check_products, check_tensors
from mis_ext.onpolicy.batch_invariant.triton_matmul import TILES, sum_of_products

_LEAST_GROUPS = 32
_MOST_COLUMNS = 512


@triton.jit
def rows_kernel(
    a,
    b,
    ends,
    out,
    M,
    N,
    K,
    a_row_stride,
    a_column_stride,
    b_group_stride,
    b_row_stride,
    b_column_stride,
    num_groups,
    PRECISION: tl.constexpr,
    K_IS_EVEN: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out [M, N]``, contiguous: the rows that end at ``ends[g]`` times ``b[g]``.

    No tile has rows of two groups. Which rows share a tile depends on the other tokens of the batch, but changes no
    bit: each row is summed over K by itself. There are programs to spare, as many as any way to share out the rows
    needs, because the host would have to wait for the real number.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    # Every program finds its group by itself: the tiles of all groups, counted from the first one on.
    groups = tl.arange(0, GROUPS)
    is_group = groups < num_groups
    end = tl.minimum(tl.load(ends + groups, mask=is_group, other=0), M)
    begin = tl.minimum(tl.load(ends + groups - 1, mask=is_group & (groups > 0), other=0), M)
    num_tiles = tl.where(is_group & (end > begin), tl.cdiv(end - begin, BLOCK_M), 0)
    after = tl.cumsum(num_tiles)
    is_mine = (tile < after) & (tile >= after - num_tiles)
    group = tl.sum(tl.where(is_mine, groups, 0)).to(tl.int64)
    first_row = tl.sum(tl.where(is_mine, begin + (tile - after + num_tiles) * BLOCK_M, 0))
    end_row = tl.sum(tl.where(is_mine, end, 0))
    if first_row < end_row:
        rows = first_row + tl.arange(0, BLOCK_M)
        columns = (tl.program_id(0) % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = (rows < end_row)[:, None], (columns < N)[None, :]
        rows, columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
        inner = tl.arange(0, BLOCK_K).to(tl.int64)
        total = sum_of_products(
            a + rows * a_row_stride + inner[None, :] * a_column_stride,
            b + group * b_group_stride + inner[:, None] * b_row_stride + columns * b_column_stride,
            tl.cast(a_column_stride, tl.int64) * BLOCK_K,
            tl.cast(b_row_stride, tl.int64) * BLOCK_K,
            is_row,
            is_column,
            K,
            PRECISION,
            K_IS_EVEN,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
        )
        tl.store(out + rows * N + columns, total.to(out.dtype.element_ty), mask=is_row & is_column)


@triton.jit
def sums_kernel(
    a,
    b,
    ends,
    out,
    M,
    N,
    K,
    a_row_stride,
    a_column_stride,
    b_row_stride,
    b_column_stride,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """``out [G, M, N]``, contiguous: the columns of ``a`` that end at ``ends[g]`` times the same rows of ``b``.

    The gradient of the experts' matrices: a sum over the tokens of a group. Its blocks start at the first token of the
    group, not at a multiple of their depth, so where the group lies in the batch changes no bit. A group without
    tokens gets 0.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    group = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    # The bounds may go beyond the tokens that are there: then the last groups are shorter.
    end = tl.minimum(tl.load(ends + group), K)
    begin = tl.minimum(tl.load(ends + group - 1, mask=group > 0, other=0), K)
    rows = (tile // tiles_n) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tile % tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = (rows < M)[:, None], (columns < N)[None, :]
    rows, columns = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :]
    inner = begin.to(tl.int64) + tl.arange(0, BLOCK_K)
    total = sum_of_products(
        a + rows * a_row_stride + inner[None, :] * a_column_stride,
        b + inner[:, None] * b_row_stride + columns * b_column_stride,
        tl.cast(a_column_stride, tl.int64) * BLOCK_K,
        tl.cast(b_row_stride, tl.int64) * BLOCK_K,
        is_row,
        is_column,
        end - begin,
        PRECISION,
        False,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
    )
    tl.store(out + (group * M + rows) * N + columns, total.to(out.dtype.element_ty), mask=is_row & is_column)


def grouped_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """``[M, N]``: rows ``ends[g - 1]`` to ``ends[g]`` of ``a [M, K]`` times ``b[g]``; zeros after the last group.

    The host waits for nothing: there are programs for every way to share out the rows. ``b`` is ``[G, K, N]``, ``ends``
    ``[G]`` int32 and not decreasing; factors have one dtype, any strides.
    """
    check_tensors({"a": a, "b": b})
    check_products(a.dtype, a.device)
    (M, K), (num_groups, _, N) = a.shape, b.shape
    tile = TILES[a.dtype]
    out = torch.zeros(M, N, dtype=a.dtype, device=a.device)
    # Each group has at most one tile that is not full.
    num_tiles = M // tile.BLOCK_M + min(num_groups, M)
    num_programs = num_tiles * -(-N // tile.BLOCK_N)
    if num_programs == 0:
        return out
    with launching_on(a):
        rows_kernel[(num_programs,)](
            a,
            b,
            ends.contiguous(),
            out,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            num_groups,
            PRECISION=FLOAT32_PRODUCTS,
            K_IS_EVEN=K % tile.BLOCK_K == 0,
            GROUPS=max(1 << (num_groups - 1).bit_length(), _LEAST_GROUPS),
            **tile.of_one_product(),
        )
    return out


def grouped_sums(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """``[G, M, N]``: columns ``ends[g - 1]`` to ``ends[g]`` of ``a [M, K]`` times the same rows of ``b [K, N]``."""
    check_tensors({"a": a, "b": b})
    check_products(a.dtype, a.device)
    M, (K, N), num_groups = a.shape[0], b.shape, len(ends)
    tile = TILES[a.dtype]
    out = torch.empty(num_groups, M, N, dtype=a.dtype, device=a.device)
    num_programs = num_groups * -(-M // tile.BLOCK_M) * -(-N // tile.BLOCK_N)
    if num_programs == 0:
        return out
    with launching_on(a):
        sums_kernel[(num_programs,)](
            a,
            b,
            ends.contiguous(),
            out,
            M,
            N,
            K,
            *a.stride(),
            *b.stride(),
            PRECISION=FLOAT32_PRODUCTS,
            **tile.of_one_product(),
        )
    return out


@triton.jit
def accumulate_kernel(
    out,
    destinations,
    order,
    source,
    N,
    E,
    out_stride,
    source_row_stride,
    source_column_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Adds to ``out [D, E]``: the first of the sorted ``destinations [N]`` that are equal adds up all of them.

    ``order [N]`` says where the rows lie in ``source``; it comes from a stable sort, so equal destinations keep their
    order. One lane carries a sum from the value in ``out`` through all its rows, in float32, and rounds once. So a
    sum depends on its own rows alone, not on how many other rows there are, or on where its own lie between them.
    """
    tiles_e = tl.cdiv(E, BLOCK_E)
    position = (tl.program_id(0) // tiles_e) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = ((tl.program_id(0) % tiles_e) * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)[None, :]
    destination = tl.load(destinations + position, mask=position < N, other=-1)
    before = tl.load(destinations + position - 1, mask=(position > 0) & (position < N), other=-1)
    is_first = (position < N) & (destination != before)
    is_written = is_first[:, None] & (columns < E)
    into = out + destination[:, None] * out_stride + columns
    total = tl.load(into, mask=is_written, other=0.0).to(tl.float32)
    is_running = is_first
    # As many rounds as the longest sum of the tile has rows: the host need not know it.
    while tl.max(is_running.to(tl.int32)) > 0:
        row = tl.load(order + position, mask=is_running, other=0)
        is_added = is_running[:, None] & (columns < E)
        values = source + row[:, None] * source_row_stride + columns * source_column_stride
        # A sum that is complete stays as it is, also -0.
        total = tl.where(is_added, total + tl.load(values, mask=is_added, other=0.0).to(tl.float32), total)
        position += 1
        following = tl.load(destinations + position, mask=is_running & (position < N), other=-1)
        is_running = is_running & (following == destination)
    tl.store(into, total.to(out.dtype.element_ty), mask=is_written)


def add_rows_(out: Tensor, index: Tensor, source: Tensor) -> None:
    """Add each row of ``source [N, E]`` to the row of ``out [D, E]`` that ``index [N]`` names, in the order of rows.

    Sums are float32 from the value in ``out`` on, and rounded once. The host waits for nothing, so the index, int64 in
    [0, D), is not checked. ``out`` is contiguous, and changed in place.
    """
    check_tensors({"out": out, "source": source})
    num_rows, num_columns = source.shape
    if source.numel() == 0:
        return
    destinations, order = torch.sort(index, stable=True)
    block_columns = min(1 << (num_columns - 1).bit_length(), _MOST_COLUMNS)
    block_rows = _MOST_COLUMNS // block_columns
    num_programs = -(-num_rows // block_rows) * -(-num_columns // block_columns)
    with launching_on(out):
        accumulate_kernel[(num_programs,)](
            out,
            destinations,
            order,
            source,
            num_rows,
            num_columns,
            out.stride(0),
            *source.stride(),
            BLOCK_N=block_rows,
            BLOCK_E=block_columns,
        )
