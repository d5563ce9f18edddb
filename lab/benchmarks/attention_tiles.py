# SPDX-License-Identifier: Apache-2.0
"""Attention forward in bfloat16 on a GPU: torch's kernels, and ours with other tiles.

    python lab/benchmarks/attention_tiles.py

The host has no part in the times: medians of 7, in milliseconds. A tile is queries, warps, stages; it must not change
bits to be of use.
"""

import sys
from unittest import mock

import torch
from bench_batch_invariant import attention_case
from device_time import median_milliseconds
from torch.nn.attention import SDPBackend, sdpa_kernel

from mis_ext.onpolicy.batch_invariant import triton_attention as attention
from mis_ext.onpolicy.bits import same_bits

TILES = [(64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 2), (128, 8, 2), (128, 8, 3), (128, 4, 2), (32, 4, 2)]


def main() -> None:
    """Time and print."""
    if not torch.cuda.is_available():
        sys.exit("needs a CUDA device")
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}; torch {torch.__version__}\n")
    print("| shape | kernel | ms | bits of ours |\n|---|---|---|---|")
    for head_dim in (64, 128):
        case = attention_case(8, 1024, 16, head_dim, torch.bfloat16)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            with sdpa_kernel(backend):
                line(case.shape, f"torch, {backend.name}", median_milliseconds(case.torch))
        line(case.shape, "torch, by default", median_milliseconds(case.torch))
        line(case.shape, "ours", median_milliseconds(case.ours))
        bits = case.ours()
        usual = attention.choose_tiles(torch.bfloat16, head_dim)
        for tile in TILES:
            tiles = attention.Tile(*tile), usual[1]
            with mock.patch.object(attention, "choose_tiles", return_value=tiles):
                same = same_bits(case.ours(), bits).all()
                line(case.shape, f"ours, {tile}", median_milliseconds(case.ours), "yes" if same else "no")


def line(shape: str, kernel: str, time: float, same: str = "") -> None:
    """A row of the table."""
    print(f"| {shape} | {kernel} | {time:.4f} | {same} |", flush=True)


if __name__ == "__main__":
    main()
