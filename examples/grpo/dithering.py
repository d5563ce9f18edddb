"""Weights in bf16 whose copy in float32 lies anywhere among the numbers that are rounded to them."""

from __future__ import annotations

import torch
from torch import Tensor


def dithered(weight: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a number of float32 for each weight that is rounded to it in bf16.

    Of an update so small that it moves no weight of a checkpoint in bf16, all is seen on average then: as many weights
    move as it is a part of the way to the next number.

    Args:
        weight: Numbers of bf16, in any dtype and shape.
        generator: On the device of ``weight``.
    """
    number = weight.bfloat16()
    below, above = (
        (number.float() + number.nextafter(torch.full_like(number, side)).float()) / 2
        for side in (-torch.inf, torch.inf)
    )
    # Not a tie itself, which may be rounded to the neighbour.
    share = torch.rand(weight.shape, generator=generator, device=weight.device).clamp(0.001, 0.999)
    return below.lerp(above, share)
