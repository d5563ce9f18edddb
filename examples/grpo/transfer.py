# SPDX-License-Identifier: Apache-2.0
"""From the host to the device."""

import torch
from torch import Tensor


def moved(tensors_T: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return tensors of one dtype, each ``[T]``, on a device, in one copy: each copy waits for the device.

    Where several processes share a GPU, it waits for their turns too.
    """
    return list(torch.cat(tensors_T).to(device).split([len(tensor_T) for tensor_T in tensors_T]))
