# SPDX-License-Identifier: Apache-2.0
"""Products of few rows on a GPU: torch's, ours with one tile for all, and ours with the tile of a decode.

    python lab/benchmarks/decode_tiles.py

The host has no part in the times: medians of 7, in microseconds.
The two of ours must have the same bits.
"""

import sys
from collections.abc import Callable
from unittest import mock

import torch
import torch.nn.functional as F
from device_time import median_milliseconds
from torch import Tensor

from mis_ext.onpolicy.batch_invariant import triton_products as matmul
from mis_ext.onpolicy.bits import same_bits

SHAPES = [(2048, 8192), (8192, 2048), (1024, 1024), (1024, 32768)]


def main() -> None:
    """Check, time and print."""
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}\n")
    print("| rows x K x N | dtype | torch | one tile | tile of a decode |\n|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        for K, N in SHAPES:
            weight = torch.randn(N, K, device="cuda").to(dtype)
            for rows in (1, 16, 64):
                a = torch.randn(rows, K, device="cuda").to(dtype)
                with mock.patch.object(matmul, "_is_hopper", return_value=False):
                    usual, usual_time = matmul.mm(a, weight.t()), microseconds(matmul.mm, a, weight.t())
                if not same_bits(matmul.mm(a, weight.t()), usual).all():
                    sys.exit(f"{rows} x {K} x {N} {dtype}: other bits")
                times = microseconds(F.linear, a, weight), usual_time, microseconds(matmul.mm, a, weight.t())
                cells = " | ".join(f"{time:.1f}" for time in times)
                print(f"| {rows} x {K} x {N} | {str(dtype)[6:]} | {cells} |", flush=True)


def microseconds(product: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> float:
    """Of one call on the device."""
    return median_milliseconds(lambda: product(a, b)) * 1e3


if __name__ == "__main__":
    main()
