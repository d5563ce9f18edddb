"""The columns among which a token was drawn, where the engine cut the distribution off (top-p, top-k)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

BITS = 32


class KeptColumns(NamedTuple):
    """The columns of the vocabulary from which each token was sampled, as the engine recorded them.

    ``id_N``: the kept ids, for one token after the other, in any order. ``token_N``: to which of the ``T`` tokens each
    id belongs. ``is_recorded_T``: False for a token without a record; then all columns are kept. A token is always
    among its own kept columns, recorded or not.
    """

    id_N: Tensor
    token_N: Tensor
    is_recorded_T: Tensor

    def bits(self, *, first: int, num_columns: int) -> Tensor:
        """``[T, ceil(num_columns / 32)]``, int32: of the columns from id ``first`` on, a bit each, lowest first."""
        num_words = -(-num_columns // BITS)
        column_N = self.id_N.long() - first
        is_here_N = (column_N >= 0) & (column_N < num_columns)
        # An id that came twice counts once: as sums, its bits would carry over.
        key_N, order_N = torch.sort(torch.where(is_here_N, self.token_N * max(num_columns, 1) + column_N, -1))
        is_new_N = torch.ones_like(is_here_N)
        is_new_N[1:] = key_N[1:] != key_N[:-1]
        column_N, token_N = column_N[order_N], self.token_N[order_N]
        bit_N = torch.where(is_new_N & (key_N >= 0), 1 << (column_N % BITS), 0).int()
        word_N = torch.where(key_N >= 0, token_N * num_words + column_N // BITS, 0)
        bits_TC = torch.zeros(len(self.is_recorded_T) * num_words, dtype=torch.int32, device=self.id_N.device)
        if num_words > 0:
            bits_TC.index_add_(0, word_N, bit_N)
        return torch.where(self.is_recorded_T.unsqueeze(-1), bits_TC.view(len(self.is_recorded_T), num_words), -1)


def unpacked(bits_TC: Tensor, num_columns: int) -> Tensor:
    """``[T, num_columns]``, bool: the columns whose bits are set."""
    bit_E = torch.arange(BITS, dtype=torch.int32, device=bits_TC.device)
    return (bits_TC.unsqueeze(-1) >> bit_E & 1).bool().flatten(1)[:, :num_columns]
