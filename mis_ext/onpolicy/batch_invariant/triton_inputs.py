"""What the Triton kernels of this room take: float32, bfloat16 and float16 on one device, where Triton can run.

Every launcher refuses what is none of these, and shapes that do not fit (ValueError).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mis_ext.correction.backend import triton_obstacle
from mis_ext.correction.triton.launch import IS_HIP

DTYPES = (torch.float32, torch.bfloat16, torch.float16)

# Three products of TF32 for one of float32, as exact as float32's own and several times as fast: Ootomo and Yokota,
# "Recovering single precision accuracy from Tensor Cores while surpassing the FP32 theoretical peak performance", arXiv
# 2203.03341.
FLOAT32_PRODUCTS = "ieee" if IS_HIP else "tf32x3"


def check_tensors(tensors: Mapping[str, Tensor], *, one_dtype: bool = True) -> None:
    """Refuse what the kernels cannot compute, by the name that a message gives a tensor.

    Raises:
        RuntimeError: Triton cannot run on the device.
        TypeError: A dtype is none of ``DTYPES``, or, with ``one_dtype``, not that of the first.
        ValueError: The tensors are on several devices.
    """
    (first_name, first), *others = tensors.items()
    if not first.is_cuda and (obstacle := triton_obstacle(first.device.type)) is not None:
        raise RuntimeError(f"{first_name}: {obstacle}")
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} must be float32, bfloat16 or float16, got {tensor.dtype}")
    for name, tensor in others:
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device}, {first_name} on {first.device}")
        if one_dtype and tensor.dtype != first.dtype:
            raise TypeError(f"{name} is {tensor.dtype}, {first_name} {first.dtype}")


def check_products(dtype: torch.dtype, device: torch.device) -> None:
    """Refuse matrix products that Triton's interpreter gets wrong.

    Raises:
        TypeError: bfloat16 on a CPU: the interpreter multiplies the bit patterns.
    """
    if dtype == torch.bfloat16 and device.type == "cpu":
        raise TypeError("Triton's interpreter has no products of bfloat16; take float16 or float32 on a CPU")
