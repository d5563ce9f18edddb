"""The matrix product, a program per tile of the output.

A library chooses tiles by the number of rows, and splits a long K over several programs that add up in any order. Both
change the last bits of a row with its batch. Here one program adds up all of K for its tile, from left to right, in
blocks that change no bit: of a depth that follows from the dtype, or of more steps of one instruction. So a row meets
the same sums in any batch.
"""

import triton
import triton.language as tl


@triton.jit
def sum_of_products(
    a_tile,
    b_tile,
    a_step,
    b_step,
    is_row,
    is_column,
    length,
    PRECISION: tl.constexpr,
    LENGTH_IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """A tile ``[BLOCK_M, BLOCK_N]`` in float32 from pointers to the first blocks of its factors.

    The order is that of the blocks, and within a block that of the matrix instruction. It adds up each element by
    itself, so other rows of the tile, or none, change nothing. What is loaded beyond an edge is 0. The products of
    groups share this loop, and so have the bits of a product of their own.
    """
    inner = tl.arange(0, BLOCK_K)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, length, BLOCK_K):
        if LENGTH_IS_EVEN:
            # K alone decides which branch is compiled, so no row is computed both ways.
            a_values = tl.load(a_tile, mask=is_row, other=0.0)
            b_values = tl.load(b_tile, mask=is_column, other=0.0)
        else:
            is_inner = inner < length - start
            a_values = tl.load(a_tile, mask=is_row & is_inner[None, :], other=0.0)
            b_values = tl.load(b_tile, mask=is_column & is_inner[:, None], other=0.0)
        total = tl.dot(a_values, b_values, total, input_precision=PRECISION)
        a_tile += a_step
        b_tile += b_step
    return total


@triton.jit
def matmul_kernel(
    a,
    b,
    bias,
    out,
    M,
    N,
    K,
    a_batch_stride,
    a_row_stride,
    a_column_stride,
    b_batch_stride,
    b_row_stride,
    b_column_stride,
    bias_row_stride,
    bias_column_stride,
    HAS_BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    K_IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of ``out [B, M, N]``, contiguous: sums over K in float32, rounded once to the dtype of ``out``.

    Strides are arguments: a transposed factor is read as it lies, and gives the bits of its copy.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    tile = tl.program_id(0) % (tiles_m * tiles_n)
    # Neighbours in time share rows of a and columns of b in the cache. Which program has which tile changes no bit.
    group = tile // (GROUP_M * tiles_n)
    group_height = min(tiles_m - group * GROUP_M, GROUP_M)
    tile_in_group = tile % (GROUP_M * tiles_n)
    first_row = (group * GROUP_M + tile_in_group % group_height) * BLOCK_M
    first_column = (tile_in_group // group_height) * BLOCK_N

    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    is_row, is_column = (rows < M)[:, None], (columns < N)[None, :]
    # int64: a matrix may have more than 2**31 elements.
    rows, columns, inner = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :], tl.arange(0, BLOCK_K).to(tl.int64)
    a_tile = a + batch * a_batch_stride + rows * a_row_stride + inner[None, :] * a_column_stride
    b_tile = b + batch * b_batch_stride + inner[:, None] * b_row_stride + columns * b_column_stride
    a_step, b_step = tl.cast(a_column_stride, tl.int64) * BLOCK_K, tl.cast(b_row_stride, tl.int64) * BLOCK_K

    total = sum_of_products(
        a_tile, b_tile, a_step, b_step, is_row, is_column, K, PRECISION, K_IS_EVEN, BLOCK_M, BLOCK_N, BLOCK_K
    )
    product = total.to(out.dtype.element_ty)
    if HAS_BIAS:
        # From the rounded product, so that a layer with its bias has the bits of a product and an addition.
        shift = tl.load(
            bias + rows * bias_row_stride + columns * bias_column_stride, mask=is_row & is_column, other=0.0
        )
        product = (product.to(tl.float32) + shift.to(tl.float32)).to(out.dtype.element_ty)
    tl.store(out + (batch * M + rows) * N + columns, product, mask=is_row & is_column)
