# SPDX-License-Identifier: Apache-2.0
"""Matmuls and sums of rows on CUDA. A row depends only on the same row of the left matrix, and on the right matrix.

A library chooses tiles by the number of rows, and splits a long K over several programs that add in any order. Both
make the last bits of a row depend on its batch. Here one program sums all of K for its tile, from left to right. The
block depth follows from the dtype, or adds more steps of the same instruction, which changes no bit. So the sums of a
row are the same in any batch. A row of an MoE expert uses the same tiles and loop, so it equals a separate matmul. Rows
with the same destination are added in their order in memory. torch adds them by atomic operations in random order, so
that two runs differ.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mis_ext.scoring.launch import IS_HIP, Launcher, launching_on

# Three TF32 matmuls replace a float32 matmul, with the same accuracy and several times the speed: Ootomo and Yokota,
# "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", arXiv
# 2203.03341.
FLOAT32_PRODUCTS = "ieee" if IS_HIP else "tf32x3"


# The smallest compiled number of groups; more groups need another kernel.
_LEAST_GROUPS = 32


@triton.jit
def matmul_kernel(
    a,
    b,
    ends,
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
    num_groups,
    GROUPS: tl.constexpr,
    PRECISION: tl.constexpr,
    K_IS_EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of ``out``, contiguous: sums over K in float32, rounded once to the dtype of ``out``.

    ``out [B, M, N]`` has one product per batch. With ``GROUPS``, ``out [M, N]`` has the rows that end at ``ends[g]``
    times ``b[g]``. No tile has rows of two groups. The rows that share a tile depend on the other tokens of the batch,
    but this changes no bit. The number of programs is an upper bound for any split of the rows, because the CPU would
    have to wait for the exact number.

    The order of a sum is the order of the blocks, and within a block that of the matrix instruction. The instruction
    sums each element separately, so other rows of the tile do not matter. Strides are arguments: a transposed factor is
    read in place, and gives the same bits as its copy.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    if GROUPS:
        tile = tl.program_id(0) // tiles_n
        # Every program finds its own group by counting the tiles of all groups.
        groups = tl.arange(0, GROUPS)
        is_group = groups < num_groups
        end = tl.minimum(tl.load(ends + groups, mask=is_group, other=0), M)
        begin = tl.minimum(tl.load(ends + groups - 1, mask=is_group & (groups > 0), other=0), M)
        num_tiles = tl.where(is_group & (end > begin), tl.cdiv(end - begin, BLOCK_M), 0)
        after = tl.cumsum(num_tiles)
        is_mine = (tile < after) & (tile >= after - num_tiles)
        batch = tl.sum(tl.where(is_mine, groups, 0)).to(tl.int64)
        first_row = tl.sum(tl.where(is_mine, begin + (tile - after + num_tiles) * BLOCK_M, 0))
        end_row = tl.sum(tl.where(is_mine, end, 0))
        first_column = (tl.program_id(0) % tiles_n) * BLOCK_N
        if first_row >= end_row:
            return
    else:
        tiles_m = tl.cdiv(M, BLOCK_M)
        batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
        tile = tl.program_id(0) % (tiles_m * tiles_n)
        # Consecutive programs share rows of a and columns of b in the cache. The assignment of tiles changes no bit.
        group = tile // (GROUP_M * tiles_n)
        group_height = min(tiles_m - group * GROUP_M, GROUP_M)
        tile_in_group = tile % (GROUP_M * tiles_n)
        first_row, end_row = (group * GROUP_M + tile_in_group % group_height) * BLOCK_M, M
        first_column = (tile_in_group // group_height) * BLOCK_N
        a += batch * a_batch_stride
        out += batch * M * N
    rows, columns = first_row + tl.arange(0, BLOCK_M), first_column + tl.arange(0, BLOCK_N)
    is_row, is_column = (rows < end_row)[:, None], (columns < N)[None, :]
    # int64: a matrix may have more than 2**31 elements.
    rows, columns, inner = rows.to(tl.int64)[:, None], columns.to(tl.int64)[None, :], tl.arange(0, BLOCK_K)
    a_tile = a + rows * a_row_stride + inner.to(tl.int64)[None, :] * a_column_stride
    b_tile = b + batch * b_batch_stride + inner.to(tl.int64)[:, None] * b_row_stride + columns * b_column_stride
    a_step, b_step = tl.cast(a_column_stride, tl.int64) * BLOCK_K, tl.cast(b_row_stride, tl.int64) * BLOCK_K
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, K, BLOCK_K):
        if K_IS_EVEN:
            # Only K determines the compiled branch, so no row is computed both ways.
            a_values = tl.load(a_tile, mask=is_row, other=0.0)
            b_values = tl.load(b_tile, mask=is_column, other=0.0)
        else:
            is_inner = inner < K - start
            a_values = tl.load(a_tile, mask=is_row & is_inner[None, :], other=0.0)
            b_values = tl.load(b_tile, mask=is_column & is_inner[:, None], other=0.0)
        total = tl.dot(a_values, b_values, total, input_precision=PRECISION)
        a_tile += a_step
        b_tile += b_step
    tl.store(out + rows * N + columns, total.to(out.dtype.element_ty), mask=is_row & is_column)


class Tile(NamedTuple):
    """The size of a block: rows, columns and depth, the order of blocks, and options of Triton's compiler."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    num_warps: int
    num_stages: int


# Tiles depend only on the dtype: a different depth or different instructions may change bits.
_HALF = Tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=2 if IS_HIP else 3)
TILES = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: Tile(BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=4, num_stages=2 if IS_HIP else 3),
}

# A decode has few rows, and reads the whole right matrix: smaller tiles let more processors read. On Hopper they give
# the same bits: each instruction adds the same number of products for any number of rows, and the order over K is the
# same. So half dtypes may use deeper blocks too. float32 may not, because the three matmuls of a block are added first.
# Tests check this.
_FEW_ROWS = 64
_LEAST_TILES = {torch.bfloat16: 128, torch.float16: 128, torch.float32: 256}
_NARROWEST, _WIDEST = 16, 64
_DEEP = 256
_FEWEST_ROWS = 16
_launch = Launcher(matmul_kernel)


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and not IS_HIP and torch.cuda.get_device_capability(device) == (9, 0)


def choose_tile(a: Tensor, num_columns: int) -> Tile:
    """The tile for a matmul with ``a [..., M, K]``; ``num_columns``: ``N`` of all batches together."""
    tile, (M, K) = TILES[a.dtype], a.shape[-2:]
    if M > _FEW_ROWS or not _is_hopper(a.device):
        return tile
    tile = tile._replace(BLOCK_M=_FEW_ROWS, num_warps=4, num_stages=6)
    if a.dtype == torch.float32 and M <= _FEWEST_ROWS:
        return tile._replace(BLOCK_M=_FEWEST_ROWS, BLOCK_N=32)
    columns = max(num_columns // _LEAST_TILES[a.dtype], _NARROWEST)
    tile = tile._replace(BLOCK_N=min(1 << (columns.bit_length() - 1), _WIDEST))
    if a.dtype != torch.float32 and tile.BLOCK_N == _NARROWEST and K % _DEEP == 0:
        return tile._replace(BLOCK_K=_DEEP, num_stages=5)
    return tile


def mm(a: Tensor, b: Tensor) -> Tensor:
    """``a [M, K] @ b [K, N]``, contiguous; float32 with the accuracy of float32, never of TF32.

    The factors have the same dtype and any strides.
    """
    return _product(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batched :func:`mm` ``[B, M, N]`` of ``a [B, M, K]`` and ``b [B, K, N]``, bitwise equal to separate calls."""
    # A query with one key: share times value, with the same arithmetic as with further masked keys.
    return _product(a, b, is_outer=a.shape[1:] != (1, 1))


def _product(a: Tensor, b: Tensor, *, is_outer: bool = True) -> Tensor:
    num_batches, M, K = a.shape
    N = b.shape[2]
    if K == 1 and is_outer:
        # An outer product rounds once; three TF32 matmuls would change the last bit.
        return (a * b).contiguous()
    tile = choose_tile(a, num_batches * N)
    out = torch.empty(num_batches, M, N, dtype=a.dtype, device=a.device)
    _launch_tiles(tile, num_batches * -(-M // tile.BLOCK_M), a, b, out)
    return out


def grouped_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """``[M, N]``: rows ``ends[g - 1]`` to ``ends[g]`` of ``a [M, K]`` times ``b[g]``; zeros after the last group.

    ``b`` is ``[G, K, N]``, ``ends`` ``[G]`` int32 and not decreasing; factors have the same dtype and any strides.
    """
    tile, out = TILES[a.dtype], torch.zeros(a.shape[0], b.shape[2], dtype=a.dtype, device=a.device)
    # Each group has at most one partial tile.
    _launch_tiles(tile, len(a) // tile.BLOCK_M + min(len(b), len(a)), a[None], b, out, ends.contiguous())
    return out


def _launch_tiles(tile: Tile, num_tiles: int, a: Tensor, b: Tensor, out: Tensor, ends: Tensor | None = None) -> None:
    """Compute ``out`` with ``num_tiles`` tiles over its rows."""
    (M, K), (num_groups, _, N), (*blocks, num_warps, num_stages) = a.shape[1:], b.shape, tile
    num_programs = num_tiles * -(-N // tile.BLOCK_N)
    if num_programs == 0:
        return
    with launching_on(a):
        _launch(
            num_programs,
            (a, b, out if ends is None else ends, out),
            (M, N, K, *a.stride(), *b.stride(), 0 if ends is None else num_groups),
            {
                "GROUPS": 0 if ends is None else max(1 << (num_groups - 1).bit_length(), _LEAST_GROUPS),
                "PRECISION": FLOAT32_PRODUCTS,
                "K_IS_EVEN": K % tile.BLOCK_K == 0,
                **dict(zip(Tile._fields, blocks, strict=False)),
            },
            {"num_warps": num_warps, "num_stages": num_stages},
        )


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
    """Add to ``out [D, E]``: the first of equal sorted ``destinations [N]`` sums all of their rows.

    ``order [N]``: indices of the rows in ``source``, from a stable sort, so equal destinations keep their order. One
    lane accumulates a sum from the value in ``out`` over all its rows, in float32, and rounds once. So a sum depends
    only on its own rows, not on the number or position of other rows.
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
    # The number of rounds is that of the longest sum of the tile; the CPU does not need it.
    while tl.max(is_running.to(tl.int32)) > 0:
        row = tl.load(order + position, mask=is_running, other=0)
        is_added = is_running[:, None] & (columns < E)
        values = source + row[:, None] * source_row_stride + columns * source_column_stride
        # A complete sum does not change, also -0.
        total = tl.where(is_added, total + tl.load(values, mask=is_added, other=0.0).to(tl.float32), total)
        position += 1
        following = tl.load(destinations + position, mask=is_running & (position < N), other=-1)
        is_running = is_running & (following == destination)
    tl.store(into, total.to(out.dtype.element_ty), mask=is_written)


_MOST_COLUMNS = 512


def add_rows_(out: Tensor, index: Tensor, source: Tensor) -> None:
    """Add each row of ``source [N, E]`` to the row ``index [N]`` of ``out [D, E]``, in the order of ``source``.

    Sums start with the value in ``out``, are float32, and are rounded once. The index, int64 in [0, D), is not checked,
    because the CPU would wait. ``out`` is contiguous, and changed in place.
    """
    num_rows, num_columns = source.shape
    if source.numel() == 0:
        return
    destinations, order = torch.sort(index, stable=True)
    block_columns = min(1 << (num_columns - 1).bit_length(), _MOST_COLUMNS)
    block_rows = _MOST_COLUMNS // block_columns
    num_programs = -(-num_rows // block_rows) * -(-num_columns // block_columns)
    numbers = num_rows, num_columns, out.stride(0), *source.stride()
    with launching_on(out):
        accumulate_kernel[(num_programs,)](
            out, destinations, order, source, *numbers, BLOCK_N=block_rows, BLOCK_E=block_columns
        )
