"""Products of groups of rows, each with the matrix of its group; a program per tile of the output.

The groups are the experts of a mixture: how many rows each has is known on the device only. Tiles and the order of sums
are those of :mod:`triton_matmul_kernel`, so a row has the bits of a product with its expert alone.
"""

import triton
import triton.language as tl

from mis_ext.onpolicy.batch_invariant.triton_matmul_kernel import sum_of_products


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
