# SPDX-License-Identifier: Apache-2.0
"""The packed layout: which local token belongs to which sequence, and where in its response it lies."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.tokens import Blocks, BlockSizes, Tokens
from mis_ext.validation import check_lengths


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

    @property
    def emptied(self) -> PackedLayout:
        """The layout of a rank that shares these responses and has no token of them."""
        if self.is_whole:
            return PackedLayout.whole((), device=self.device)
        nothing = (0,) * len(self.pieces.lengths)
        return replace(
            self,
            local_lengths=(0,) * self.num_sequences,
            pieces=self.pieces._replace(lengths=nothing, whole_starts=nothing),
            num_local_tokens=0,
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

    @property
    def longest_response(self) -> int:
        """Tokens of the longest whole response."""
        return max(self.response_lengths, default=0)

    @property
    def longest(self) -> int:
        """Local tokens of the sequence that has most of them."""
        return max(self.local_lengths, default=0)

    @functools.cached_property
    def places(self) -> tuple[Tensor, BlockSizes]:
        """Where the local tokens of each response lie: :func:`places_of` their lengths."""
        return places_of(self.local_lengths, self.device)

    @functools.cached_property
    def blocks(self) -> Blocks:
        """The same for sums over responses."""
        return Blocks(*self.places)

    @functools.cached_property
    def sequence_T(self) -> Tensor:
        """``[T]``: the sequence of each local token; without :attr:`blocks`, which take longer to make."""
        end_S, start_S = self.places[0]
        return torch.repeat_interleave(end_S - start_S, output_size=self.num_local_tokens)

    @property
    def offset_T(self) -> Tensor:
        """``[T]``: how many local tokens of its sequence stand before a local token."""
        start_T = self.places[0][1].index_select(0, self.sequence_T)
        return torch.arange(self.num_local_tokens, device=self.device) - start_T

    @property
    def sequence_R(self) -> Tensor:
        """``[R]``: the sequence of each token of the whole responses."""
        return self.sequence_T if self.is_whole else self._whole_places[0]

    @property
    def position_T(self) -> Tensor:
        """``[T]``: the place of each local token in the concatenated whole responses."""
        return self._whole_places[1]

    @functools.cached_property
    def _whole_places(self) -> tuple[Tensor, Tensor]:
        """The sequence of each token of the whole responses, and the place of each local token among them."""
        numbers = (self.response_lengths, self.pieces.whole_starts, self.pieces.lengths)
        length_S, start_P, length_P = to_device([torch.tensor(x, dtype=torch.int64) for x in numbers], self.device)
        # What is as long as the tokens is built on the device: the host would take milliseconds.
        sequence_R = torch.repeat_interleave(length_S, output_size=self.num_whole_tokens)
        return sequence_R, runs(start_P, length_P, total=self.num_local_tokens)

    def local_part(self, values_R: Tensor) -> Tensor:
        """``[..., T]``: this rank's tokens out of whole responses; without index tensors where every token is local."""
        return values_R if self.is_whole else values_R.index_select(-1, self.position_T)

    def spread(self, values_S: Tensor) -> Tensor:
        """``[..., T]``: give every local token the value of its sequence."""
        return values_S.index_select(-1, self.sequence_T)

    def sums(self, rows_T: Iterable[Tensor]) -> Tensor:
        """``[F, S]`` float64: the sum of each row over the local tokens of each sequence, 0 of none."""
        return self.blocks.sums([self._in_blocks(row_T, 0) for row_T in rows_T])

    def minima(self, rows_T: Iterable[Tensor]) -> Tensor:
        """``[F, S]`` float64: the smallest value of each row in each sequence, infinity of none."""
        return -self.blocks.maxima([self._in_blocks(-row_T, -math.inf) for row_T in rows_T])

    def _in_blocks(self, row_T: Tensor, empty: float) -> Tensor:
        return torch.where(self.blocks.is_token_NB, self.blocks.of_tokens(row_T), empty)


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


def places_of(lengths: Sequence[int], device: torch.device) -> tuple[Tensor, BlockSizes]:
    """``[2, S]``: end and start of responses of these lengths, on ``device``; and sizes for :class:`Blocks`."""
    places_2S, sizes = Blocks.places(lengths)
    return to_device([places_2S.flatten()], device)[0].view(2, len(lengths)), sizes


def runs(first_P: Tensor, length_P: Tensor, *, total: int | None = None) -> Tensor:
    """The numbers ``first, first + 1, ...``, as many as ``length`` says, run after run; of each row of ``[..., P]``.

    On the device of its arguments. There ``total``, the sum of the lengths, spares waiting for it.
    """
    total = int(length_P.sum()) if total is None else total
    shift_P = first_P - (length_P.cumsum(0) - length_P)
    return torch.arange(total, device=length_P.device) + shift_P.repeat_interleave(length_P, -1, output_size=total)


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


# --- a micro-batch


class TokenRatios(NamedTuple):
    """Local tokens; every field is finite everywhere, 0 where ``valid_mask_T`` is False."""

    log_ratio_T: Tensor
    proximal_T: Tensor
    behavior_T: Tensor
    response_mask_T: Tensor
    valid_mask_T: Tensor


class PackedStreams(NamedTuple):
    """One micro-batch, packed: log-probs of the local tokens ``[T]``, nats, the mask of whole responses ``[R]``.

    ``proximal``: scored by the training engine before the update. ``behavior``: reported by the inference engine that
    sampled the tokens. The mask is not 0 on tokens that the policy generated. ``lag``: by how many weight updates the
    weights that sampled a local token are older than the trainer's, NaN where nobody knows; None if nobody says.
    """

    proximal_logprobs_T: Tensor
    behavior_logprobs_T: Tensor
    response_mask_R: Tensor
    layout: PackedLayout
    lag_T: Tensor | None = None

    @property
    def tokens(self) -> TokenRatios:
        """Per-token ``log(pi_prox / mu)`` in float32, and the mask of the tokens that have one."""
        response_mask_T = self.layout.local_part(self.response_mask_R).bool()
        t = Tokens.read(self.proximal_logprobs_T, self.behavior_logprobs_T, response_mask_T)
        return TokenRatios(t.d, t.log_pi, t.log_mu, response_mask_T, t.valid)
