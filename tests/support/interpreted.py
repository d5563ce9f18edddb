"""Triton's interpreter with products as on a GPU, whose instruction for a tile rounds all of its rows alike."""

from __future__ import annotations

from typing import Any

import numpy as np


def dot_row_by_row(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """``tl.dot`` in the interpreter, each element by itself: the terms are added in the order of k.

    The interpreter multiplies by ``numpy.matmul``, where the BLAS may round the rows of one tile differently. OpenBLAS
    0.3.29 does so in its kernels for Haswell, those of a CPU without AVX-512, not in those for SkylakeX.
    """
    a_data, b_data = a.data.astype(d.data.dtype), b.data.astype(d.data.dtype)
    total = np.zeros_like(d.data)
    for k in range(a_data.shape[-1]):
        total += a_data[..., :, k, None] * b_data[..., k, None, :]
    return type(d)(total + d.data, d.dtype.scalar)
