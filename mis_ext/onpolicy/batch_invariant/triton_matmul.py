"""Matrix products on CUDA whose every row depends on the same row of the left matrix and on the right matrix alone.

A library chooses tiles by the number of rows, and splits a long K over several programs that add up in any order. Both
change the last bits of a row with its batch. Here one program adds up all of K for its tile, from left to right, in
blocks that change no bit: of a depth that follows from the dtype, or of more steps of one instruction. So a row meets
the same sums in any batch.
"""

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from mis_ext.correction.triton.launch import IS_HIP, Launcher, launching_on
from mis_ext.onpolicy.batch_invariant.triton_inputs import (
    FLOAT32_PRODUCTS,
    check_products,
    check_tensors,
)


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


class Tile(NamedTuple):
    """The size of a block: rows, columns and depth, the order of blocks, and options of Triton's compiler."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    GROUP_M: int
    num_warps: int
    num_stages: int

    @property
    def options(self) -> dict[str, int]:
        """The options of Triton's compiler."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}

    @property
    def constants(self) -> dict[str, int]:
        """The compile-time arguments of the kernel of one matrix product."""
        return {name: value for name, value in self._asdict().items() if name not in self.options}

    def of_one_product(self) -> dict[str, int]:
        """All but the order in which the tiles of a matrix are computed."""
        return {name: value for name, value in self._asdict().items() if name != "GROUP_M"}


# By dtype alone: a tile of another depth may give other bits, and so may one of other instructions.
_HALF = Tile(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, GROUP_M=8, num_warps=8, num_stages=2 if IS_HIP else 3)
TILES = {
    torch.bfloat16: _HALF,
    torch.float16: _HALF,
    torch.float32: Tile(BLOCK_M=128, BLOCK_N=64, BLOCK_K=32, GROUP_M=8, num_warps=4, num_stages=2 if IS_HIP else 3),
}


# A decode has few rows, and reads all of the right matrix: smaller tiles let more processors read. On Hopper they have
# the bits of the others: each instruction, of any number of rows, adds up as many products, and K runs in one order. So
# half dtypes may take deeper blocks too. Not float32, whose three products of a block are added up first. Tests look.
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
    """The tile for a product with ``a [..., M, K]``; ``num_columns`` is ``N`` of all batches together."""
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
    """``a [M, K] @ b [K, N]``, contiguous, rounded once from a sum in float32 that runs over K in one order.

    No split of K, no choice of tiles by M that would change a bit: the idea of He et al., "Defeating Nondeterminism in
    LLM Inference", Thinking Machines Lab, 2025. Float32 is multiplied with the accuracy of float32, never of TF32. The
    factors have one dtype, any strides.
    """
    _check(a, b, dim=2)
    return _product(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batches ``[B, M, N]`` of :func:`mm`, of ``a [B, M, K]`` and ``b [B, K, N]``, with the bits of each on its own."""
    _check(a, b, dim=3)
    # A query that sees one key: the share times the value, as where more keys are there and have no share.
    return _product(a, b, is_outer=a.shape[1:] != (1, 1))


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The bits of ``mm(a, b) + bias`` in one kernel: rounded after the product, and again after the addition.

    The bias has the dtype of ``a`` and broadcasts to ``[M, N]``.
    """
    _check(a, b, dim=2)
    check_tensors({"a": a, "bias": bias})
    return _product(a.unsqueeze(0), b.unsqueeze(0), bias.expand(a.shape[0], b.shape[1])).squeeze(0)


def _check(a: Tensor, b: Tensor, *, dim: int) -> None:
    check_tensors({"a": a, "b": b})
    check_products(a.dtype, a.device)
    if a.dim() != dim or b.dim() != dim or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        names = "[M, K] and [K, N]" if dim == 2 else "[B, M, K] and [B, K, N]"
        raise ValueError(f"a and b must be {names}, got {[*a.shape]} and {[*b.shape]}")


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None, *, is_outer: bool = True) -> Tensor:
    num_batches, M, K = a.shape
    N = b.shape[2]
    if K == 1 and is_outer:
        # One rounding, as anyone expects of an outer product; three products of TF32 would be another last bit.
        product = (a * b).contiguous()
        return product if bias is None else product + bias
    tile = choose_tile(a, num_batches * N)
    out = torch.empty(num_batches, M, N, dtype=a.dtype, device=a.device)
    num_programs = num_batches * -(-M // tile.BLOCK_M) * -(-N // tile.BLOCK_N)
    if num_programs == 0:
        return out
    with launching_on(a):
        _launch(
            num_programs,
            (a, b, out if bias is None else bias, out),
            (M, N, K, *a.stride(), *b.stride(), *((0, 0) if bias is None else bias.stride())),
            {
                "HAS_BIAS": bias is not None,
                "PRECISION": FLOAT32_PRODUCTS,
                "K_IS_EVEN": K % tile.BLOCK_K == 0,
                **tile.constants,
            },
            tile.options,
        )
    return out
