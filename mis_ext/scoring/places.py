# SPDX-License-Identifier: Apache-2.0
"""Which row of the logits scores which token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout, owned_chunks, runs, to_device


class Places(NamedTuple):
    """``[T]`` each: which local row of logits scores a response token, and which of all tokens it is."""

    row_T: Tensor
    token_T: Tensor


def response_places(
    layout: PackedLayout,
    *,
    total_lengths: Sequence[int],
    padded_lengths: Sequence[int] | None,
    cp_rank: int,
    cp_size: int,
) -> Places:
    """Where the local response tokens of a zigzag or whole layout stand.

    Args:
        layout: The local tokens.
        total_lengths: Tokens per prompt and response; the rows of a sample without padding.
        padded_lengths: Rows per sample of ``[B, L, V]`` logits; None for packed ones.
        cp_rank: This rank within the context-parallel group.
        cp_size: Ranks in the context-parallel group.
    """
    chunks = owned_chunks(cp_rank=cp_rank, cp_size=cp_size)
    rows: list[int] = []
    tokens: list[int] = []
    row = token = whole = 0
    pieces = iter(zip(layout.pieces.lengths, layout.pieces.whole_starts, strict=True))
    for index, (response, total) in enumerate(zip(layout.response_lengths, total_lengths, strict=True)):
        length = total if padded_lengths is None else padded_lengths[index]
        chunk = chunks.padded(length) // chunks.num_chunks
        for place, number in enumerate(chunks.owned):
            _, whole_start = next(pieces)
            position = total - response + whole_start - whole
            # The logits of the token before it, counted from where this chunk begins among the local rows.
            rows.append(row + place * chunk + position - 1 - number * chunk)
            tokens.append(token + position)
        row, token, whole = row + len(chunks.owned) * chunk, token + total, whole + response
    # Only the pieces are copied to the device: all tokens would take longer on the host than the loss on the device.
    numbers = torch.tensor([*rows, *tokens, *layout.pieces.lengths], dtype=torch.int64)
    pieces_3P = to_device([numbers], layout.device)[0].view(3, len(rows))
    return Places(*runs(pieces_3P[:2], pieces_3P[2], total=layout.num_local_tokens).unbind())
