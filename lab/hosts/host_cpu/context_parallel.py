# SPDX-License-Identifier: Apache-2.0
"""The positions of each context-parallel rank's tokens in the pack."""

from collections.abc import Iterable

import torch
from torch import Tensor


def zigzag_places(lengths: Iterable[int], size: int) -> Tensor:
    """Return the place in the pack of every token of rank 0, then of rank 1, and so on.

    Each sequence is cut into ``2 * size`` chunks. Rank r has chunk r and the one as far from the end.

    Args:
        lengths: Lengths of the padded sequences of the pack, each a multiple of ``2 * size``.
        size: Count of ranks.
    """
    sequences = torch.arange(sum(lengths := list(lengths))).split(lengths)
    chunks = [sequence.chunk(2 * size) for sequence in sequences]
    return torch.cat([part for rank in range(size) for each in chunks for part in (each[rank], each[-1 - rank])])
