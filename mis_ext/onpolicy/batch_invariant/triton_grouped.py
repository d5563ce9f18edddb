"""Products of groups of rows on CUDA, with the bits of :func:`.triton_matmul.mm` on each group by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from mis_ext.correction.triton.launch import launching_on
from mis_ext.onpolicy.batch_invariant.triton_grouped_kernels import rows_kernel, sums_kernel
from mis_ext.onpolicy.batch_invariant.triton_inputs import (
    FLOAT32_PRODUCTS,
    check_products,
    check_tensors,
)
from mis_ext.onpolicy.batch_invariant.triton_matmul import TILES

_LEAST_GROUPS = 32


def grouped_rows(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """``[M, N]``: rows ``ends[g - 1]`` to ``ends[g]`` of ``a`` times ``b[g]``; zeros after the last of the groups.

    The host waits for nothing: there are programs for every way to share out the rows.

    Args:
        a: ``[M, K]``, float32, bfloat16 or float16, any strides.
        b: ``[G, K, N]``, likewise.
        ends: ``[G]`` int32, where each group ends, not decreasing.

    Raises:
        ValueError: The tensors are on several devices.
        TypeError: A dtype has no kernel, or the two differ.
        RuntimeError: Triton cannot run here.
    """
    _check(a, b)
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
    """``[G, M, N]``: columns ``ends[g - 1]`` to ``ends[g]`` of ``a`` times the same rows of ``b``.

    Arguments and errors as in :func:`grouped_rows`, with ``a [M, K]`` and ``b [K, N]``.
    """
    _check(a, b)
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


def _check(a: Tensor, b: Tensor) -> None:
    check_tensors({"a": a, "b": b})
    check_products(a.dtype, a.device)
