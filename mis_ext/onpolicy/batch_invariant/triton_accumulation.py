"""Sums of rows that have one destination, on CUDA."""

from __future__ import annotations

import torch
from torch import Tensor

from mis_ext.correction.triton.launch import launching_on
from mis_ext.onpolicy.batch_invariant.triton_accumulation_kernel import accumulate_kernel
from mis_ext.onpolicy.batch_invariant.triton_inputs import check_tensors

_MOST_COLUMNS = 512


def add_rows_(out: Tensor, index: Tensor, source: Tensor) -> None:
    """Add each row of ``source`` to the row of ``out`` that ``index`` names, in the order of ``source``.

    Sums are float32 from the value in ``out`` on, and rounded once. The host waits for nothing.

    Args:
        out: ``[D, E]``, contiguous, float32, bfloat16 or float16; changed in place.
        index: ``[N]`` int64 in [0, D), which is not checked.
        source: ``[N, E]`` of the dtype of ``out``, any strides.

    Raises:
        ValueError: The tensors are on several devices.
        TypeError: A dtype has no kernel, or the two differ.
        RuntimeError: Triton cannot run here.
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
