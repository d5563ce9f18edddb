# SPDX-License-Identifier: Apache-2.0
"""Copies from the CPU to the device."""

import torch
from torch import Tensor


def moved(tensors_T: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copy tensors of one dtype, each ``[T]``, to a device in one transfer, because each transfer waits for the device.

    If several processes share a GPU, a transfer waits for their turns too.
    """
    return list(torch.cat(tensors_T).to(device).split([len(tensor_T) for tensor_T in tensors_T]))
