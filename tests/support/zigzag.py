# SPDX-License-Identifier: Apache-2.0
"""The response tokens of a context-parallel rank, by position, from the interface of the frameworks."""

import math
from collections.abc import Sequence

import torch


def owner(position: int, *, length: int, cp_size: int, partition: str) -> int:
    """The rank that owns a position of a sequence with a layout of `length` positions."""
    if partition == "contiguous":
        return position // math.ceil(length / cp_size)
    chunk = position // math.ceil(length / (2 * cp_size))
    return chunk if chunk < cp_size else 2 * cp_size - 1 - chunk


def local_tokens(
    *,
    total_length: int,
    response_length: int,
    cp_rank: int,
    cp_size: int,
    partition: str = "zigzag",
    padded_length: int | None = None,
) -> list[int]:
    """Indices of response tokens whose log-prob is on `cp_rank`. Logits are one position before their token."""
    length = total_length if padded_length is None else padded_length
    prompt_length = total_length - response_length
    return [
        index
        for index in range(response_length)
        if owner(prompt_length + index - 1, length=length, cp_size=cp_size, partition=partition) == cp_rank
    ]


def take(
    whole: Sequence[torch.Tensor],
    *,
    total_lengths: Sequence[int],
    cp_rank: int,
    cp_size: int,
    partition: str = "zigzag",
    padded_lengths: Sequence[int] | None = None,
) -> list[torch.Tensor]:
    """This rank's part of whole responses."""
    out = []
    for index, (tensor, total_length) in enumerate(zip(whole, total_lengths, strict=True)):
        tokens = local_tokens(
            total_length=total_length,
            response_length=tensor.numel(),
            cp_rank=cp_rank,
            cp_size=cp_size,
            partition=partition,
            padded_length=None if padded_lengths is None else padded_lengths[index],
        )
        out.append(tensor[torch.tensor(tokens, dtype=torch.long)])
    return out
