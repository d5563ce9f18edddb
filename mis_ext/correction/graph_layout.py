# SPDX-License-Identifier: Apache-2.0
"""Whole responses, one after the other: how they are padded, and their layout for a graph of ``torch.compile``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor


class Padding(NamedTuple):
    """Sequences side by side, as long as the longest: ``[S, L]`` the token of each slot, and where there is none."""

    position_SL: Tensor
    is_empty_SL: Tensor

    @classmethod
    def of(cls, length_and_start_2S: Tensor, longest: int, num_tokens: int) -> Padding:
        """From length and first token of each sequence, and the numbers of tokens of the longest and of all."""
        length_S1, start_S1 = length_and_start_2S.unsqueeze(-1)
        place_L = torch.arange(longest, device=start_S1.device)
        return cls((start_S1 + place_L).clamp_(max=num_tokens - 1), place_L >= length_S1)

    def reduce(self, rows_FT: Tensor, op: Literal["sum", "min"]) -> Tensor:
        """``[F, S]``: as :meth:`PackedLayout.reduce`."""
        values_FSL = rows_FT.index_select(-1, self.position_SL.flatten()).view(len(rows_FT), *self.position_SL.shape)
        values_FSL = values_FSL.masked_fill_(self.is_empty_SL, 0.0 if op == "sum" else torch.inf)
        return values_FSL.sum(-1) if op == "sum" else values_FSL.amin(-1)


@dataclass(frozen=True, eq=False)
class GraphLayout:
    """A layout of whole responses without tensors of their sizes: a graph of ``torch.compile`` makes those itself."""

    length_and_start_2S: Tensor
    longest: int
    num_tokens: int
    is_whole: ClassVar[bool] = True

    @property
    def sequence_T(self) -> Tensor:
        """``[T]``: the sequence of each token."""
        end_S = self.length_and_start_2S.sum(0)
        return torch.bucketize(torch.arange(self.num_tokens, device=end_S.device), end_S, right=True)

    @property
    def sequence_R(self) -> Tensor:
        """``[R]``: the same, as every token is here."""
        return self.sequence_T

    @property
    def longest_response(self) -> int:
        """Tokens of the longest sequence."""
        return self.longest

    @property
    def offset_T(self) -> Tensor:
        """``[T]``: how many tokens of its sequence stand before a token."""
        return offset_in_sequence(self.sequence_T, self.length_and_start_2S[1])

    def spread(self, values_S: Tensor) -> Tensor:
        """``[T]``: give every token the value of its sequence."""
        return values_S.index_select(0, self.sequence_T)

    def reduce(self, rows_FT: Tensor, op: Literal["sum", "min"]) -> Tensor:
        """``[F, S]``: as :meth:`PackedLayout.reduce`."""
        return Padding.of(self.length_and_start_2S, self.longest, self.num_tokens).reduce(rows_FT, op)

    def sum_over_sequences(self, rows_FT: Tensor) -> Tensor:
        """``[F, S]``: sums over the tokens of each sequence."""
        return self.reduce(rows_FT, "sum")


def offset_in_sequence(sequence_T: Tensor, start_S: Tensor) -> Tensor:
    """``[T]``: how many tokens stand before a token in its sequence, which begins at ``start_S``."""
    return torch.arange(len(sequence_T), device=sequence_T.device) - start_S.index_select(0, sequence_T)
