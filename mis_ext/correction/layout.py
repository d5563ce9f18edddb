# SPDX-License-Identifier: Apache-2.0
"""The packed layout: which local token belongs to which sequence, and where in its response it lies.

Of whole responses also how they are padded.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.log_ratio import zero_outside
from mis_ext.correction.tokens import Blocks
from mis_ext.validation import check_lengths

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
        num_sequences: ``S``, the sequences of this call, also those without a token here.
    """

    response_lengths: tuple[int, ...]
    local_lengths: tuple[int, ...]
    is_whole: bool
    pieces: Pieces
    device: torch.device
    num_local_tokens: int
    num_whole_tokens: int
    num_sequences: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_sequences", len(self.response_lengths))

    @classmethod
    def whole(cls, response_lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedLayout:
        """The layout of a rank that holds whole responses one after the other; their lengths count masked tokens."""
        return _whole_layout(check_lengths("response_lengths", response_lengths), torch.device(device))

    @classmethod
    def without_tokens(
        cls, response_lengths: Sequence[int], *, is_whole: bool, device: torch.device | str = "cpu"
    ) -> PackedLayout:
        """The layout of a rank that has no token of any response: the lengths are those on the other ranks."""
        if is_whole:
            # No other rank holds parts of the same responses.
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
        padded_lengths = total_lengths if padded_lengths is None else padded_lengths
        responses = check_lengths("response_lengths", response_lengths)
        totals = check_lengths("total_lengths", total_lengths)
        padded = check_lengths("max_seq_lens", padded_lengths)
        numbers = (len(responses), len(totals), len(padded))
        if len({*numbers}) > 1:
            raise ValueError("there are {} response_lengths, {} total_lengths and {} padded_lengths".format(*numbers))
        if cp_size == 1:
            return _whole_layout(responses, torch.device(device))
        return _context_parallel_layout(responses, totals, padded, cp_rank, cp_size, partition, torch.device(device))

    def local_part(self, values_R: Tensor) -> Tensor:
        """``[..., T]``: this rank's tokens out of whole responses; without index tensors where every token is local."""
        return values_R if self.is_whole else self.index.local_part(values_R)

    @property
    def longest_response(self) -> int:
        """Tokens of the longest whole response."""
        return max(self.response_lengths, default=0)

    @property
    def longest(self) -> int:
        """Local tokens of the sequence that has most of them."""
        return max(self.local_lengths, default=0)

    @functools.cached_property
    def index(self) -> TokenIndex:
        """The index tensors that the eager pipeline works with; built when first asked for.

        To compile the pipeline with ``torch.compile``, ask once before: they are no part of the graph.
        """
        return TokenIndex.build(
            response_lengths=self.response_lengths,
            local_lengths=self.local_lengths,
            piece_lengths=self.pieces.lengths,
            piece_whole_starts=None if self.is_whole else self.pieces.whole_starts,
            device=self.device,
        )

    @property
    def sequence_T(self) -> Tensor:
        """``[T]``: the sequence of each local token.

        Without the other index tensors of :attr:`index`, whose building takes a while: a micro-batch has new lengths,
        and here only they are copied to the device. So in :meth:`reduce`.
        """
        index: TokenIndex | None = self.__dict__.get("index")
        return self._sequence_T if index is None else index.sequence_T

    @functools.cached_property
    def _sequence_T(self) -> Tensor:
        return _sequence_of(self._length_and_start_2S[0], self.num_local_tokens)

    @property
    def sequence_R(self) -> Tensor:
        """``[R]``: the sequence of each token of the whole responses."""
        return self.sequence_T if self.is_whole else self.index.sequence_R

    @property
    def offset_T(self) -> Tensor:
        """``[T]``: how many local tokens of its sequence stand before a local token."""
        start_T = self._length_and_start_2S[1].index_select(0, self.sequence_T)
        return torch.arange(self.num_local_tokens, device=self.device) - start_T

    @functools.cached_property
    def blocks(self) -> Blocks:
        """Where the local tokens of each response lie, for sums over responses."""
        return Blocks(self._length_and_start_2S, Blocks.sizes_of(self.local_lengths))

    @property
    def position_T(self) -> Tensor:
        """``[T]``: the place of each local token in the concatenated whole responses."""
        position_T = self.index.position_T
        assert position_T is not None
        return position_T

    @functools.cached_property
    def _length_and_start_2S(self) -> Tensor:
        """Length and first local token of each sequence, in one copy to the device."""
        start_S = [*itertools.accumulate(self.local_lengths, initial=0)][:-1]
        both = torch.tensor([*self.local_lengths, *start_S], dtype=torch.int64)
        return to_device([both], self.device)[0].view(2, len(start_S))

    @functools.cached_property
    def padding(self) -> Padding | None:
        """How sequences are padded; None where one is far longer than the others."""
        if (self.longest or 1) * self.num_sequences > _MOST_PADDING * self.num_local_tokens:
            return None
        return Padding.of(self._length_and_start_2S, self.longest or 1, self.num_local_tokens)

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


_BLOCK = 64
_FAN_IN = 32
_STACKED = 1 << 17
"""How many numbers of several rows are copied into one tensor to be reduced together."""
_TOGETHER = 1 << 20
"""How many numbers are written at once where one of several rows is: on a CPU more would leave the cache."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TokenIndex:
    """``T`` local tokens of ``S`` sequences with ``R`` tokens in their whole responses.

    Attributes:
        sequence_T: Sequence of each local token.
        sequence_R: Sequence of each token of the whole responses.
        position_T: Index of each local token in the concatenated whole responses; None when ``T`` is ``R``.
        edge_N: Local tokens that share their block of 64 with another sequence, or with the end of the tokens.
        tree: Index tensors of a reduction tree from blocks and edges to sequences, see :meth:`reduce`.
    """

    sequence_T: Tensor
    sequence_R: Tensor
    position_T: Tensor | None
    edge_N: Tensor
    tree: tuple[Tensor, ...]

    @classmethod
    def build(
        cls,
        *,
        response_lengths: Sequence[int],
        local_lengths: Sequence[int],
        piece_lengths: Sequence[int],
        piece_whole_starts: Sequence[int] | None,
        device: torch.device,
    ) -> TokenIndex:
        """What is as long as the tokens is built on ``device``, as the host would take milliseconds; the rest here."""
        lengths = [response_lengths]
        if piece_whole_starts is not None:
            lengths += [local_lengths, piece_whole_starts, piece_lengths]
        on_host = [torch.tensor(numbers, dtype=torch.int64) for numbers in lengths] + _edges_and_tree(local_lengths)
        # Copies of few numbers cost as much as the kernels that use them.
        on_device = to_device(on_host, device)
        (response_S, *local), (edge_N, *tree) = on_device[: len(lengths)], on_device[len(lengths) :]
        sequence_R = _sequence_of(response_S, sum(response_lengths))
        sequence_T, position_T = sequence_R, None
        if local:
            local_S, whole_start_P, length_P = local
            sequence_T = _sequence_of(local_S, sum(local_lengths))
            position_T = runs(whole_start_P, length_P, total=sum(local_lengths))
        return cls(sequence_T=sequence_T, sequence_R=sequence_R, position_T=position_T, edge_N=edge_N, tree=tuple(tree))

    def reduce(self, rows_T: Iterable[Tensor], op: Literal["sum", "min"]) -> Tensor:
        """:meth:`reduce_masked` over all tokens."""
        return self.reduce_masked(zip(rows_T, itertools.repeat(None)), op)

    def reduce_masked(
        self, rows_and_masks_T: Iterable[tuple[Tensor, Tensor | None]], op: Literal["sum", "min"]
    ) -> Tensor:
        """Reduce ``F`` rows of local tokens to ``[F, S]``; a sequence without local tokens gets the identity of ``op``.

        A token counts in a row if its float mask is not 0, where there are masks.

        First blocks of 64 tokens as they lie in memory, whatever their sequences, so that only the edges of sequences
        are gathered; then groups of at most 32 blocks and edges, level by level: accurate, and the same bits on every
        run. Long rows are taken one after the other, so that one can be gone before the next is computed.
        """
        num_tokens, is_sum = len(self.sequence_T), op == "sum"
        fold = torch.sum if is_sum else torch.amin
        # As many rows at a time as are copied for less than the operations on each of them cost.
        num_rows = 1 if self.sequence_T.is_cuda else max(_STACKED // max(num_tokens, 1), 1)
        in_blocks = num_tokens // _BLOCK * _BLOCK
        pairs, of_blocks, of_edges = iter(rows_and_masks_T), [], []
        while few := [*itertools.islice(pairs, num_rows)]:
            rows, masks = zip(*few, strict=True)
            few_FT = _stacked(rows)
            if masks[0] is not None:
                mask_FT = _stacked(masks)
                # Added to a minimum is 0 on tokens that count, else infinity.
                few_FT = zero_outside(mask_FT, few_FT) if is_sum else few_FT + (mask_FT.reciprocal() - 1.0)
            of_blocks.append(fold(few_FT[:, :in_blocks].view(len(few_FT), -1, _BLOCK), -1))
            of_edges.append(few_FT.index_select(-1, self.edge_N))
        columns = [torch.cat(of_blocks), torch.cat(of_edges)]
        identity = columns[0].new_full((len(columns[0]), 1), 0.0 if is_sum else torch.inf)
        for index in self.tree:
            padded = torch.cat([*columns, identity], dim=-1)
            columns = [fold(padded.index_select(-1, index).view(len(padded), -1, _FAN_IN), -1)]
        return columns[0]

    def to_tokens(self, values_S: Tensor) -> Tensor:
        """Give every local token the value of its sequence."""
        return values_S.index_select(-1, self.sequence_T)

    def spread(self, values_MS: Tensor, mask_T: Tensor) -> list[Tensor]:
        """``[T]`` for each row: the value of a token's sequence, or 0 where the float ``mask_T`` is 0.

        A block of 64 tokens of one sequence has one value, so that an index is read for each block and not for each
        token. A few rows at a time: fewer operations, and still in the cache.
        """
        num_blocks = len(self.sequence_T) // _BLOCK
        in_blocks = num_blocks * _BLOCK
        of_block, of_edge = self.sequence_T[:in_blocks:_BLOCK], self.sequence_T.index_select(0, self.edge_N)
        block_mask, edge_mask = mask_T[:in_blocks].view(-1, _BLOCK), mask_T.index_select(0, self.edge_N)
        spread: list[Tensor] = []
        for rows_MS in torch.split(values_MS, max(_TOGETHER // max(len(mask_T), 1), 1)):
            out_MT = rows_MS.new_empty(len(rows_MS), len(mask_T))
            blocks = rows_MS.index_select(-1, of_block).unsqueeze(-1)
            zero_outside(block_mask, blocks, out=out_MT[:, :in_blocks].view(len(rows_MS), -1, _BLOCK))
            out_MT.index_copy_(-1, self.edge_N, zero_outside(edge_mask, rows_MS.index_select(-1, of_edge)))
            spread += out_MT.unbind()
        return spread

    def to_whole(self, values_S: Tensor) -> Tensor:
        """Give every token of the whole responses the value of its sequence."""
        return values_S.index_select(-1, self.sequence_R)

    def local_part(self, values_R: Tensor) -> Tensor:
        """This rank's tokens out of whole responses."""
        return values_R if self.position_T is None else values_R.index_select(-1, self.position_T)


def _stacked(rows_T: Sequence[Tensor]) -> Tensor:
    return torch.stack([*rows_T]) if len(rows_T) > 1 else rows_T[0].unsqueeze(0)


def runs(first_P: Tensor, length_P: Tensor, *, total: int | None = None) -> Tensor:
    """The numbers ``first, first + 1, ...``, as many as ``length`` says, run after run; of each row of ``[..., P]``.

    On the device of its arguments. There ``total``, the sum of the lengths, spares waiting for it.
    """
    total = int(length_P.sum()) if total is None else total
    shift_P = first_P - (length_P.cumsum(0) - length_P)
    return torch.arange(total, device=length_P.device) + shift_P.repeat_interleave(length_P, -1, output_size=total)


def _sequence_of(length_S: Tensor, total: int) -> Tensor:
    return torch.repeat_interleave(length_S, output_size=total)


def _edges_and_tree(lengths: Sequence[int]) -> list[Tensor]:
    """The edges, and one index tensor per level, groups of 32, until one group per sequence is left.

    The first level points into all blocks followed by the edges, every other into the groups before it. A slot without
    a value points behind the last one, where :meth:`TokenIndex.reduce` puts the identity.
    """
    # Of Python numbers: a micro-batch has few sequences, and new ones in training. First number and length of each run.
    numbers: list[int] = []
    values: list[tuple[int, ...]] = []
    begin, size = 0, sum(lengths) // _BLOCK
    for length in lengths:
        end, first_block = begin + length, -(-begin // _BLOCK)
        num_blocks = max(end // _BLOCK - first_block, 0)
        head = min(first_block * _BLOCK, end) - begin
        tail = length - head - num_blocks * _BLOCK
        numbers += (begin, head, end - tail, tail)
        values.append((first_block, num_blocks, size, head + tail))
        begin, size = end, size + head + tail
    totals, last = [size - begin // _BLOCK], [begin]
    while len(totals) == 1 or size > len(lengths):
        num_groups, groups = 0, list[tuple[int, ...]]()
        for of_sequence in values:
            count = sum(of_sequence[1::2])
            own_groups = max(-(-count // _FAN_IN), 1)
            # The slots that are left are a run that begins behind the last value, and stays there.
            numbers += (*of_sequence, size, own_groups * _FAN_IN - count)
            groups.append((num_groups, own_groups))
            num_groups += own_groups
        totals.append(num_groups * _FAN_IN)
        last.append(size)
        values, size = groups, num_groups
    first_P, length_P = torch.tensor(numbers, dtype=torch.int64).view(-1, 2).unbind(1)
    parts = torch.split(runs(first_P, length_P, total=sum(totals)), totals)
    return [part.clamp_max(most) for part, most in zip(parts, last, strict=True)]


def to_device(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """``[N]`` each, of one dtype: one copy from the host, through pinned memory, so that it does not wait."""
    together = torch.cat([*tensors])
    if device.type == "cuda":
        together = together.pin_memory()
    return torch.split(together.to(device, non_blocking=True), [*map(len, tensors)])


# --- the positions of a sequence that a context-parallel rank holds

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
    """
    if cp_size == 1 or partition == "contiguous":
        return Chunks(cp_size, (cp_rank,))
    return Chunks(2 * cp_size, (cp_rank, 2 * cp_size - 1 - cp_rank))


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
