# SPDX-License-Identifier: Apache-2.0
"""The modules with the kernels of each device, their legal inputs, and the norm that engines call by name."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from mis_ext.onpolicy.batch_invariant import cpu
from mis_ext.scoring.backend import triton_obstacle


def kernels_on(x: Tensor) -> Any:
    """The module with the kernels for the device of ``x``: ``cpu`` or ``cuda``, which have the same functions.

    Raises:
        RuntimeError: The device has no kernels.
        NotImplementedError: The dtype has no kernels. ``a @ b`` would treat a TypeError as an unsupported operand.
    """
    check_device_type(x.device.type)
    if x.is_cpu:
        return cpu
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise NotImplementedError(
            f"no batch-invariant execution of {x.dtype} on cuda: use float32, bfloat16 or float16, or leave the mode"
        )
    from mis_ext.onpolicy.batch_invariant import cuda

    return cuda


# Cached, because every matmul calls it.
@cache
def check_device_type(device_type: str) -> None:
    """Refuse a type of device that has no batch-invariant kernels."""
    if device_type == "cpu":
        return
    problem = triton_obstacle(device_type) if device_type == "cuda" else "only cpu and cuda have kernels"
    if problem is not None:
        raise RuntimeError(f"no batch-invariant execution on {device_type}: {problem}")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / sqrt(mean(x ** 2) + eps)).to(x.dtype)``: rounded before the weight, as in transformers' models.

    torch's own RMSNorm, which Megatron-Core's local layers use, rounds once, after the weight. A row has the same bits
    in any batch (Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467).

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: Added to the mean square.

    Raises:
        ValueError: The shapes do not fit.
    """
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise ValueError(f"weight must be [D] for x [..., D], got {[*weight.shape]} and {[*x.shape]}")
    output: Tensor = kernels_on(x).rms_norm(x, weight, eps)
    return output
