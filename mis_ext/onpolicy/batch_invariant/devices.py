# SPDX-License-Identifier: Apache-2.0
"""Which module computes for tensors of a device, what it takes, and the norm that engines call by name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mis_ext.onpolicy.batch_invariant import cpu
from mis_ext.scoring.backend import triton_obstacle


def products_on(x: Tensor) -> Any:
    """The module with products and sums of rows for the device of ``x``: ``cpu`` or ``triton_products``."""
    check_device_type(x.device.type)
    if x.device.type == "cpu":
        return cpu
    from mis_ext.onpolicy.batch_invariant import triton_products

    return triton_products


def attention_on(x: Tensor) -> Any:
    """The module with ``attention_forward``, likewise: ``cpu`` or ``triton_attention``."""
    check_device_type(x.device.type)
    if x.device.type == "cpu":
        return cpu
    from mis_ext.onpolicy.batch_invariant import triton_attention

    return triton_attention


# Every product asks.
@cache
def check_device_type(device_type: str) -> None:
    """Refuse a type of device that has no batch-invariant kernels."""
    if device_type == "cpu":
        return
    problem = triton_obstacle(device_type) if device_type == "cuda" else "only cpu and cuda have kernels"
    if problem is not None:
        raise RuntimeError(f"no batch-invariant execution on {device_type}: {problem}")


def check_dtype(x: Tensor) -> None:
    """Refuse float64 on CUDA, for which there are no kernels.

    Raises:
        NotImplementedError: So it is. ``a @ b`` would take a TypeError for a refusal of the operand.
    """
    if x.is_cuda and x.dtype == torch.float64:
        raise NotImplementedError(
            "no batch-invariant execution of float64 on cuda: take float32, bfloat16 or float16, or leave the mode"
        )


def check_tensors(tensors: Mapping[str, Tensor], *, one_dtype: bool = True, has_products: bool = False) -> None:
    """Refuse what the Triton kernels cannot compute, by the name that a message gives a tensor.

    Raises:
        RuntimeError: Triton cannot run on the device.
        TypeError: A dtype has no kernels, or, with ``one_dtype``, is not that of the first tensor; or products of
            bfloat16 in Triton's interpreter, which multiplies the bit patterns.
        ValueError: The tensors are on several devices.
    """
    (first_name, first), *others = tensors.items()
    if not first.is_cuda and (obstacle := triton_obstacle(first.device.type)) is not None:
        raise RuntimeError(f"{first_name}: {obstacle}")
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
    for name, tensor in others:
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, {first_name} on {first.device}")
        if one_dtype and tensor.dtype != first.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, {first_name} {first.dtype}")
    if has_products and first.dtype == torch.bfloat16 and not first.is_cuda:
        raise TypeError("Triton's interpreter has no products of bfloat16; take float16 or float32 on a CPU")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / sqrt(mean(x ** 2) + eps)).to(x.dtype)``: rounded before the weight, as in transformers' models.

    torch's own RMSNorm, which Megatron-Core's local layers use, rounds once, after the weight. A row has the same bits
    in any batch (Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467).

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: Added to the mean square.
    """
    if x.is_cuda:
        from mis_ext.onpolicy.batch_invariant import triton_reductions

        return triton_reductions.rms_norm(x, weight, eps)
    normalized = x.float()
    normalized = normalized * torch.rsqrt(normalized.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)
