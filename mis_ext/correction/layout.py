"""The packed layout: which local token belongs to which sequence, and where in its response it lies."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.graph_layout import GraphLayout, Padding, offset_in_sequence
from mis_ext.correction.token_index import TokenIndex, to_device
from mis_ext.correction.zigzag import Partition, owned_chunks

_MOST_PADDING = 8
"""Slots of padded sequences per token, up to which sums over sequences pad them."""


class Pieces(NamedTuple):
    """Contiguous runs of local tokens, sequence after sequence; ``per_sequence`` of each, some of them empty.

    ``lengths`` are in tokens, ``whole_starts`` say where a piece begins in the concatenated whole responses.
    """

    per_sequence: int
    lengths: tuple[int, ...]
    whole_starts: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedLayout:
    """``T`` local tokens of ``S`` sequences; ``R`` tokens in the whole responses, equal on all context-parallel ranks.

    Attributes:
        response_lengths: Tokens per whole response.
        local_lengths: How many of them are on this rank.
        is_whole: Whether the layout gives every rank whole responses, so that local tokens are all tokens.
        pieces: Where the local tokens lie.
        device: Where index tensors go.
        num_local_tokens: ``T``.
        num_whole_tokens: ``R``.
    """

    response_lengths: tuple[int, ...]
    local_lengths: tuple[int, ...]
    is_whole: bool
    pieces: Pieces
    device: torch.device
    num_local_tokens: int
    num_whole_tokens: int
    # Built when first asked for.
    _index: list[TokenIndex] = field(default_factory=list, init=False, repr=False)
    _length_and_start: list[Tensor] = field(default_factory=list, init=False, repr=False)
    _sequences: list[Tensor] = field(default_factory=list, init=False, repr=False)
    _padding: list[Padding | None] = field(default_factory=list, init=False, repr=False)

    @classmethod
    def whole(cls, response_lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedLayout:
        """The layout of a rank that holds whole responses, one after the other.

        Args:
            response_lengths: Tokens of each response, masked ones too.
            device: Where index tensors go.
        """
        return _whole_layout(tuple(response_lengths), torch.device(device))

    @classmethod
    def without_tokens(
        cls, response_lengths: Sequence[int], *, is_whole: bool, device: torch.device | str = "cpu"
    ) -> PackedLayout:
        """The layout of a rank that has no token of any response.

        Args:
            response_lengths: Tokens per whole response, as on the other ranks.
            is_whole: Whether no other rank holds parts of the same responses: then they are left out.
            device: Where index tensors live.
        """
        if is_whole:
            return cls.whole((), device=device)
        lengths = tuple(response_lengths)
        nothing = (0,) * len(lengths)
        return cls(
            response_lengths=lengths,
            local_lengths=nothing,
            is_whole=False,
            pieces=Pieces(per_sequence=1, lengths=nothing, whole_starts=nothing),
            device=torch.device(device),
            num_local_tokens=0,
            num_whole_tokens=sum(lengths),
        )

    @classmethod
    def context_parallel(
        cls,
        response_lengths: Sequence[int],
        *,
        total_lengths: Sequence[int],
        cp_rank: int,
        cp_size: int,
        partition: Partition = "zigzag",
        padded_lengths: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> PackedLayout:
        """This rank's part of each response under context parallelism.

        Positions are those of prompt and response together. ``zigzag`` cuts ``L`` positions into ``2 * cp_size`` chunks
        of ``ceil(L / (2 * cp_size))`` and gives rank ``r`` the chunks ``r`` and ``2 * cp_size - 1 - r``; ``contiguous``
        cuts ``cp_size`` chunks. The log-prob of the token at position ``p`` lies with the owner of position ``p - 1``.

        Args:
            response_lengths: Tokens per response.
            total_lengths: Tokens per prompt and response.
            cp_rank: This rank within the context-parallel group.
            cp_size: Ranks in the context-parallel group.
            partition: How positions are dealt out.
            padded_lengths: ``L`` per sequence where sequences are padded (``bshd``); by default ``total_lengths``.
            device: Where the index tensors live.

        Raises:
            ValueError: A response has no prompt token before it: nobody would own its first log-prob. Or there are more
                or fewer total or padded lengths than responses.
        """
        if cp_size == 1:
            return cls.whole(response_lengths, device=device)
        padded_lengths = total_lengths if padded_lengths is None else padded_lengths
        numbers = (len(response_lengths), len(total_lengths), len(padded_lengths))
        if len({*numbers}) > 1:
            raise ValueError("there are {} response lengths, {} total lengths and {} padded lengths".format(*numbers))
        return _context_parallel_layout(
            tuple(response_lengths),
            tuple(total_lengths),
            tuple(padded_lengths),
            cp_rank,
            cp_size,
            partition,
            torch.device(device),
        )

    def local_part(self, values_R: Tensor) -> Tensor:
        """``[..., T]``: this rank's tokens out of whole responses; without index tensors where every token is local."""
        return values_R if self.is_whole else self.index.local_part(values_R)

    @property
    def sequence_T(self) -> Tensor:
        """``[T]``: the sequence of each local token.

        Without the other index tensors of :attr:`index`, whose building takes a while: a micro-batch has new lengths,
        and here only they are copied to the device. So in :meth:`reduce`.
        """
        if not self._sequences:
            length_S = self._length_and_start_2S[0]
            self._sequences.append(torch.repeat_interleave(length_S, output_size=self.num_local_tokens))
        return self._sequences[0]

    @property
    def sequence_R(self) -> Tensor:
        """``[R]``: the sequence of each token of the whole responses."""
        return self.sequence_T if self.is_whole else self.index.sequence_R

    @property
    def longest_response(self) -> int:
        """Tokens of the longest whole response."""
        return max(self.response_lengths, default=0)

    @property
    def offset_T(self) -> Tensor:
        """``[T]``: how many local tokens of its sequence stand before a local token."""
        return offset_in_sequence(self.sequence_T, self._length_and_start_2S[1])

    @property
    def longest(self) -> int:
        """Local tokens of the sequence that has most of them."""
        return max(self.local_lengths, default=0)

    @property
    def graph_layout(self) -> GraphLayout | None:
        """This layout for a graph; None where one sequence is far longer than the others, or ranks share them."""
        if not self.is_whole or not self._is_padded:
            return None
        return GraphLayout(self._length_and_start_2S, self.longest or 1, self.num_local_tokens)

    def spread(self, values_S: Tensor) -> Tensor:
        """``[T]``: give every local token the value of its sequence."""
        return values_S.index_select(0, self.sequence_T)

    def reduce(self, rows_FT: Tensor, op: Literal["sum", "min"]) -> Tensor:
        """``[F, S]``: sums or minima over the local tokens of each sequence, the same bits on every run.

        A sequence without local tokens gets 0, or infinity.
        """
        if self.padding is None:
            return self.index.reduce(rows_FT.unbind(), op)
        return self.padding.reduce(rows_FT, op)

    def sum_over_sequences(self, rows_FT: Tensor) -> Tensor:
        """``[F, S]``: sums over the local tokens of each sequence."""
        return self.reduce(rows_FT, "sum")

    @property
    def _length_and_start_2S(self) -> Tensor:
        """Length and first local token of each sequence, in one copy to the device."""
        if not self._length_and_start:
            start_S = [*itertools.accumulate(self.local_lengths, initial=0)][:-1]
            both = torch.tensor([*self.local_lengths, *start_S], dtype=torch.int64)
            self._length_and_start.append(to_device([both], self.device)[0].view(2, len(start_S)))
        return self._length_and_start[0]

    @property
    def padding(self) -> Padding | None:
        """How sequences are padded; None where one is far longer than the others."""
        if not self._padding:
            sizes = self.longest or 1, self.num_local_tokens
            self._padding.append(Padding.of(self._length_and_start_2S, *sizes) if self._is_padded else None)
        return self._padding[0]

    @property
    def _is_padded(self) -> bool:
        return (self.longest or 1) * self.num_sequences <= _MOST_PADDING * self.num_local_tokens

    @property
    def num_sequences(self) -> int:
        """``S``, the sequences of this call, also those without a token here."""
        return len(self.response_lengths)

    @property
    def index(self) -> TokenIndex:
        """The index tensors that the eager pipeline works with; built when first asked for.

        To compile the pipeline with ``torch.compile``, ask once before: they are no part of the graph.
        """
        if not self._index:
            index = TokenIndex.build(
                response_lengths=self.response_lengths,
                local_lengths=self.local_lengths,
                piece_lengths=self.pieces.lengths,
                piece_whole_starts=None if self.is_whole else self.pieces.whole_starts,
                device=self.device,
            )
            self._index.append(index)
        return self._index[0]


@functools.lru_cache(maxsize=2)
def _whole_layout(response_lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
    starts = tuple(itertools.accumulate(response_lengths, initial=0))
    return PackedLayout(
        response_lengths=response_lengths,
        local_lengths=response_lengths,
        is_whole=True,
        pieces=Pieces(per_sequence=1, lengths=response_lengths, whole_starts=starts[:-1]),
        device=device,
        num_local_tokens=starts[-1],
        num_whole_tokens=starts[-1],
    )


@functools.lru_cache(maxsize=2)
def _context_parallel_layout(
    response_lengths: tuple[int, ...],
    total_lengths: tuple[int, ...],
    padded_lengths: tuple[int, ...],
    cp_rank: int,
    cp_size: int,
    partition: Partition,
    device: torch.device,
) -> PackedLayout:
    chunks, owned = owned_chunks(cp_rank=cp_rank, cp_size=cp_size, partition=partition)
    lengths: list[int] = []
    whole_starts: list[int] = []
    whole_start = 0
    # Of Python numbers: a micro-batch's lengths are new in training, and it has few of them.
    for response, total, padded in zip(response_lengths, total_lengths, padded_lengths, strict=True):
        first_logit = total - response - 1
        if first_logit < 0 < response:
            raise ValueError("context parallelism needs a prompt token before every response: total > response length")
        chunk_length = -(-padded // chunks)
        for chunk in owned:
            begin = chunk * chunk_length - first_logit
            end = min(max(begin + chunk_length, 0), response)
            begin = min(max(begin, 0), response)
            lengths.append(end - begin)
            whole_starts.append(whole_start + begin)
        whole_start += response
    per_sequence = len(owned)
    local_lengths = tuple(map(sum, zip(*(lengths[part::per_sequence] for part in range(per_sequence)), strict=True)))
    return PackedLayout(
        response_lengths=response_lengths,
        local_lengths=local_lengths,
        is_whole=False,
        pieces=Pieces(per_sequence=per_sequence, lengths=tuple(lengths), whole_starts=tuple(whole_starts)),
        device=device,
        num_local_tokens=sum(local_lengths),
        num_whole_tokens=whole_start,
    )
