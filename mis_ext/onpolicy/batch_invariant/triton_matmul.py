"""Matrix products on CUDA whose every row depends on the same row of the left matrix and on the right matrix alone."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.triton.launch import launching_on
from mis_ext.correction.triton.launcher import IS_HIP, Launcher
from mis_ext.onpolicy.batch_invariant.triton_inputs import (
    FLOAT32_PRODUCTS,
    check_products,
    check_tensors,
)
from mis_ext.onpolicy.batch_invariant.triton_matmul_kernel import matmul_kernel


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


def tile_of(a: Tensor, num_columns: int) -> Tile:
    """The tile for a product with ``a``.

    Args:
        a: ``[..., M, K]``.
        num_columns: ``N`` of all batches together.
    """
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
    """``a @ b``, rounded once from a sum in float32 that runs over K in one order.

    No split of K, no choice of tiles by M that would change a bit: the idea of He et al., "Defeating Nondeterminism in
    LLM Inference", Thinking Machines Lab, 2025. Float32 is multiplied with the accuracy of float32, never of TF32.

    Args:
        a: ``[M, K]``, float32, bfloat16 or float16, any strides.
        b: ``[K, N]``, likewise.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: Shapes or devices do not fit.
        TypeError: A dtype has no kernel, or the two differ.
        RuntimeError: Triton cannot run here.
    """
    _check(a, b, dim=2)
    return _product(a.unsqueeze(0), b.unsqueeze(0)).squeeze(0)


def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Batches of :func:`mm`, with the bits of each on its own.

    Args:
        a: ``[B, M, K]``.
        b: ``[B, K, N]``.

    Returns:
        ``[B, M, N]``, contiguous.

    Raises:
        ValueError: As in :func:`mm`.
        TypeError: As in :func:`mm`.
        RuntimeError: As in :func:`mm`.
    """
    _check(a, b, dim=3)
    # A query that sees one key: the share times the value, as where more keys are there and have no share.
    return _product(a, b, is_outer=a.shape[1:] != (1, 1))


def addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The bits of ``mm(a, b) + bias`` in one kernel: rounded after the product, and again after the addition.

    Args:
        bias: Broadcasts to ``[M, N]``; the dtype of ``a``.
        a: ``[M, K]``.
        b: ``[K, N]``.

    Returns:
        ``[M, N]``, contiguous.

    Raises:
        ValueError: As in :func:`mm`.
        TypeError: As in :func:`mm`.
        RuntimeError: As in :func:`mm`, or the bias does not broadcast.
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
    tile = tile_of(a, num_batches * N)
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
