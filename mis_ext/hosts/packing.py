"""Lists of per-sample tensors, as the hosts hold them, to packed tensors and back."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mis_ext.layout import PackedLayout


def pack(name: str, tensors: list[Tensor], lengths: Sequence[int], *, device: torch.device) -> Tensor:
    """``[sum of lengths]``: the samples one after the other, on ``device``.

    Raises:
        ValueError: A sample has more or fewer tokens than ``lengths`` says, or there are more or fewer samples.
    """
    found = tuple(map(Tensor.numel, tensors))
    if found != tuple(lengths):
        raise ValueError(f"{name} has samples of {[*found]} tokens on this rank, the lengths say {[*lengths]}")
    return torch.cat(tensors).to(device, non_blocking=True) if tensors else torch.empty(0, device=device)


def unpack(values_R: Tensor, layout: PackedLayout) -> list[Tensor]:
    """One tensor per sample of whole responses."""
    # Not tracked as views, which is faster; nobody needs to know that a mask and its neighbour share memory.
    return [*torch.unsafe_split_with_sizes(values_R, layout.response_lengths)]
