"""The positions of a sequence that a context-parallel rank holds."""

from __future__ import annotations

from typing import Literal, NamedTuple

Partition = Literal["zigzag", "contiguous"]


class Chunks(NamedTuple):
    """Into how many equal chunks every sequence is cut, and which of them a rank holds, in its order."""

    num_chunks: int
    owned: tuple[int, ...]

    def padded(self, length: int) -> int:
        """The smallest length that the chunks cover, at least ``length``."""
        return self.num_chunks * -(-length // self.num_chunks)

    def ranges(self, length: int) -> tuple[range, ...]:
        """The rank's runs of positions in a sequence of ``length``; they may reach into its padding."""
        chunk = -(-length // self.num_chunks)
        return tuple(range(number * chunk, (number + 1) * chunk) for number in self.owned)


def owned_chunks(*, cp_rank: int, cp_size: int, partition: Partition = "zigzag") -> Chunks:
    """The chunks of a context-parallel rank; one rank holds the one chunk.

    ``zigzag`` cuts ``2 * cp_size`` chunks and gives rank ``r`` the chunks ``r`` and ``2 * cp_size - 1 - r``, so that
    causal attention costs all ranks the same. ``contiguous`` cuts ``cp_size`` chunks.

    Args:
        cp_rank: This rank within the context-parallel group.
        cp_size: Ranks in the context-parallel group.
        partition: How positions are dealt out.
    """
    if cp_size == 1 or partition == "contiguous":
        return Chunks(cp_size, (cp_rank,))
    return Chunks(2 * cp_size, (cp_rank, 2 * cp_size - 1 - cp_rank))
