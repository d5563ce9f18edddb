# SPDX-License-Identifier: Apache-2.0
"""The packed layout: the response and the position of each local token, and sums over the tokens of a response."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.tokens import Tokens
from mis_ext.validation import check_lengths

Partition = Literal["zigzag", "contiguous"]


class Pieces(NamedTuple):
    """Contiguous runs of local tokens: ``per_sequence`` runs for each response in order, some of them empty.

    ``lengths``: in tokens. ``whole_starts``: where each run begins in the concatenated whole responses.
    """

    per_sequence: int
    lengths: tuple[int, ...]
    whole_starts: tuple[int, ...]


class PackedLayout:
    """``T`` local tokens of ``S`` sequences; ``R`` tokens in the whole responses, equal on all context-parallel ranks.

    Attributes:
        response_lengths: Tokens per whole response.
        pieces: Positions of the local tokens.
        is_whole: Whether every rank has whole responses, so that local tokens are all tokens.
        device: Where index tensors go.
        local_lengths: Tokens of each response on this rank.
        num_local_tokens: ``T``.
        num_blocks: ``N``, the :class:`Blocks` of the local tokens.
        num_whole_tokens: ``R``.
        num_sequences: ``S``, the sequences of this call, including those without a local token.
    """

    def __init__(
        self, response_lengths: tuple[int, ...], pieces: Pieces, *, is_whole: bool, device: torch.device
    ) -> None:
        self.response_lengths, self.pieces, self.is_whole, self.device = response_lengths, pieces, is_whole, device
        count, lengths, _ = pieces
        local = lengths if count == 1 else tuple(map(sum, zip(*(lengths[k::count] for k in range(count)), strict=True)))
        self.local_lengths, self.num_local_tokens = local, sum(local)
        self.num_blocks = sum(-(-length // Blocks.TOKENS) for length in local)
        self.num_whole_tokens, self.num_sequences = sum(response_lengths), len(response_lengths)

    @classmethod
    def whole(cls, response_lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedLayout:
        """The layout of a rank that holds whole responses one after the other; their lengths count masked tokens."""
        return _whole_layout(check_lengths("response_lengths", response_lengths), torch.device(device))

    @property
    def emptied(self) -> PackedLayout:
        """The layout of a rank that shares these responses and has no token of them."""
        # Where responses are whole, no other rank has these.
        lengths, count = () if self.is_whole else self.response_lengths, self.pieces.per_sequence
        nothing = (0,) * (count * len(lengths))
        return PackedLayout(lengths, Pieces(count, nothing, nothing), is_whole=self.is_whole, device=self.device)

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

        :func:`owned_chunks` splits the ``L`` positions of prompt and response. The owner of position ``p - 1`` holds
        the log-prob of the token at position ``p``.

        Args:
            response_lengths: Tokens per response.
            total_lengths: Tokens per prompt and response.
            cp_rank: This rank within the context-parallel group.
            cp_size: Ranks in the context-parallel group.
            partition: How positions are distributed.
            padded_lengths: ``L`` per sequence where sequences are padded: ``cu_seqlens_padded.diff().tolist()`` for
                ``thd``, the width of the batch for ``bshd``, at least ``total_lengths``; by default these.
            device: Where the index tensors live.

        Raises:
            ValueError: A response has no prompt token before it, so no rank would own its first log-prob. Or the
                numbers of lengths differ. Or a padded length is below its total length.
        """
        responses = check_lengths("response_lengths", response_lengths)
        totals = check_lengths("total_lengths", total_lengths)
        padded = totals if padded_lengths is None else check_lengths("padded_lengths", padded_lengths)
        numbers = (len(responses), len(totals), len(padded))
        if len({*numbers}) > 1:
            raise ValueError("got {} response_lengths, but {} total_lengths and {} padded_lengths".format(*numbers))
        for index, (length, total) in enumerate(zip(padded, totals, strict=True)):
            if length < total:
                raise ValueError(f"padded_lengths[{index}] must be at least {total}, its total length, got {length}")
        if cp_size == 1:
            return _whole_layout(responses, torch.device(device))
        chunks = owned_chunks(cp_rank=cp_rank, cp_size=cp_size, partition=partition)
        return _context_parallel_layout(responses, totals, padded, chunks, torch.device(device))

    @functools.cached_property
    def length_S(self) -> Tensor:
        """``[S]``: local tokens of each response, on the device."""
        return to_device(self.local_lengths, self.device)

    @functools.cached_property
    def blocks(self) -> Blocks:
        """The local tokens of each response in blocks, for sums over them."""
        return Blocks(self.length_S, self.num_local_tokens, self.num_blocks)

    @functools.cached_property
    def sequence_T(self) -> Tensor:
        """``[T]``: the sequence of each local token; without :attr:`blocks`, which take longer to compute."""
        return torch.repeat_interleave(self.length_S, output_size=self.num_local_tokens)

    @functools.cached_property
    def sequence_R(self) -> Tensor:
        """``[R]``: the sequence of each token of the whole responses."""
        if self.is_whole:
            return self.sequence_T
        length_S = to_device(self.response_lengths, self.device)
        # Tensors with one entry per token are built on the device: the CPU would take milliseconds.
        return torch.repeat_interleave(length_S, output_size=self.num_whole_tokens)

    @functools.cached_property
    def position_T(self) -> Tensor:
        """``[T]``: the place of each local token in the concatenated whole responses."""
        numbers = self.pieces.whole_starts, self.pieces.lengths
        return runs(*to_device(numbers, self.device), total=self.num_local_tokens)

    def local_part(self, values_R: Tensor) -> Tensor:
        """``[..., T]``: this rank's tokens out of whole responses; without index tensors where every token is local."""
        if values_R.shape[-1] != self.num_whole_tokens:
            raise ValueError(
                f"values_R has {values_R.shape[-1]} tokens, but the responses have {self.num_whole_tokens}"
            )
        return values_R if self.is_whole else values_R.index_select(-1, self.position_T)

    def spread(self, values_S: Tensor) -> Tensor:
        """``[..., T]``: give every local token the value of its sequence."""
        return values_S.index_select(-1, self.sequence_T)

    def sums(self, rows_T: Iterable[Tensor]) -> Tensor:
        """``[F, S]`` float64: the sum of each row over the local tokens of each sequence; 0 without tokens."""
        return self.blocks.sums([self._in_blocks(row_T, 0) for row_T in rows_T])

    def minima(self, rows_T: Iterable[Tensor]) -> Tensor:
        """``[F, S]`` float64: the smallest value of each row in each sequence; infinity without tokens."""
        return -self.blocks.maxima([self._in_blocks(-row_T, -math.inf) for row_T in rows_T])

    def _in_blocks(self, row_T: Tensor, empty: float) -> Tensor:
        return torch.where(self.blocks.is_token_NB, self.blocks.of_tokens(row_T), empty)


@functools.lru_cache(maxsize=2)
def _whole_layout(response_lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
    starts = tuple(itertools.accumulate(response_lengths, initial=0))[:-1]
    return PackedLayout(response_lengths, Pieces(1, response_lengths, starts), is_whole=True, device=device)


@functools.lru_cache(maxsize=2)
def _context_parallel_layout(
    response_lengths: tuple[int, ...],
    total_lengths: tuple[int, ...],
    padded_lengths: tuple[int, ...],
    chunks: Chunks,
    device: torch.device,
) -> PackedLayout:
    lengths: list[int] = []
    whole_starts: list[int] = []
    whole_start = 0
    # Python integers are fast enough: a micro-batch has few lengths. A cache would not help, as they are new each time.
    for response, total, padded in zip(response_lengths, total_lengths, padded_lengths, strict=True):
        first_logit = total - response - 1
        if first_logit < 0 < response:
            raise ValueError("context parallelism needs a prompt token before every response: total > response length")
        for positions in chunks.ranges(padded):
            begin = min(max(positions.start - first_logit, 0), response)
            lengths.append(min(max(positions.stop - first_logit, 0), response) - begin)
            whole_starts.append(whole_start + begin)
        whole_start += response
    pieces = Pieces(len(chunks.owned), tuple(lengths), tuple(whole_starts))
    return PackedLayout(response_lengths, pieces, is_whole=False, device=device)


def runs(first_P: Tensor, length_P: Tensor, *, total: int) -> Tensor:
    """Concatenated runs of ``length`` integers ``first, first + 1, ...``, for each row of ``[..., P]``.

    ``total``: the sum of the lengths, so that the CPU does not wait for it.
    """
    shift_P = first_P - (length_P.cumsum(0) - length_P)
    return torch.arange(total, device=length_P.device) + shift_P.repeat_interleave(length_P, -1, output_size=total)


def to_device(integers: Any, device: torch.device) -> Tensor:
    """Copy integers or a tensor of them from the CPU, through pinned memory, so that the copy does not block."""
    values = torch.as_tensor(integers, dtype=torch.int64, device="cpu")
    return (values.pin_memory() if device.type == "cuda" else values).to(device, non_blocking=True)


class Chunks(NamedTuple):
    """The number of equal chunks of every sequence, and the chunks that a rank holds, in its order."""

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
    """The chunks of a context-parallel rank. A single rank holds the only chunk.

    ``zigzag`` makes ``2 * cp_size`` chunks and gives rank ``r`` the chunks ``r`` and ``2 * cp_size - 1 - r``, so that
    causal attention has the same cost on all ranks. ``contiguous`` makes ``cp_size`` chunks.
    """
    if cp_size == 1 or partition == "contiguous":
        return Chunks(cp_size, (cp_rank,))
    return Chunks(2 * cp_size, (cp_rank, 2 * cp_size - 1 - cp_rank))


# --- a micro-batch


class PackedStreams(NamedTuple):
    """One micro-batch, packed: log-probs of the local tokens ``[T]``, nats, the mask of whole responses ``[R]``.

    ``proximal_logprobs_T``: scored by the training engine before the update. ``behavior_logprobs_T``: reported by the
    inference engine that sampled the tokens. ``response_mask_R``: not 0 on tokens that the policy generated. ``lag_T``:
    weight updates since the weights that sampled a local token, NaN where unknown; or None.
    """

    proximal_logprobs_T: Tensor
    behavior_logprobs_T: Tensor
    response_mask_R: Tensor
    layout: PackedLayout
    lag_T: Tensor | None = None

    @property
    def tokens(self) -> Tokens:
        """The local tokens ``[T]`` with their log-ratios in float32, as the correction reads them."""
        generated_T = self.layout.local_part(self.response_mask_R) != 0
        return Tokens.read(self.proximal_logprobs_T, self.behavior_logprobs_T, generated_T, self.lag_T)


# --- sums over responses


class Blocks:
    """Positions of the tokens of each response, and float64 sums over them that are bitwise equal in every run.

    Every response is split into blocks of 64 tokens, and its last block is filled with empty slots. So values of tokens
    form a matrix ``[N, 64]``: a sum over a block is a sum over a row, and ``torch.segment_reduce`` adds up the blocks
    of each response, one after the other. An empty slot never counts: nothing was generated there.

    Args:
        length_S: Tokens of each response, int64.
        num_tokens: ``T``, their sum.
        num_blocks: ``N``. Both are known on the CPU, so that no size waits for the device.
    """

    TOKENS = 64

    def __init__(self, length_S: Tensor, num_tokens: int, num_blocks: int) -> None:
        token_O, self.response_T = _placed(length_S, num_tokens)
        self._block_O, self.response_N = _placed((length_S + (self.TOKENS - 1)) // self.TOKENS, num_blocks)
        # Token t is in the slot t + the empty slots of the responses before its own, one block after the other.
        empty_O = self._block_O * self.TOKENS - token_O
        self.slot_T = torch.arange(num_tokens, device=length_S.device) + empty_O.index_select(0, self.response_T)
        slot_NB = torch.arange(num_blocks * self.TOKENS, device=length_S.device).view(-1, self.TOKENS)
        token_NB = slot_NB - self.spread_to_blocks(empty_O)
        self.is_token_NB = token_NB < self.spread_to_blocks(token_O[1:])
        self._token_E = token_NB.clamp(max=num_tokens - 1).flatten()

    def of_tokens(self, x_T: Tensor) -> Tensor:
        """``[..., N, 64]``: values of tokens in their slots; an empty slot holds the value of another token."""
        return x_T.index_select(-1, self._token_E).view(*x_T.shape[:-1], -1, self.TOKENS)

    def to_tokens(self, x_NB: Tensor) -> Tensor:
        """``[T]``: values of slots in the order of the tokens."""
        return x_NB.flatten().index_select(0, self.slot_T)

    def spread_to_blocks(self, x_S: Tensor) -> Tensor:
        """``[N, 1]``: the value of each block's response."""
        return x_S.index_select(0, self.response_N)[:, None]

    def sums(self, rows_NB: list[Tensor]) -> Tensor:
        """``[F, S]`` float64: the sum of each row over each response; 0 without tokens."""
        x_NF = torch.stack([*map(functools.partial(torch.sum, dim=-1, dtype=torch.float64), rows_NB)], dim=-1)
        # With lengths, each call would compute the offsets again. unsafe=True skips a check that waits for the device.
        return torch.segment_reduce(x_NF, "sum", offsets=self._block_O, axis=0, unsafe=True).T

    def maxima(self, rows_NB: list[Tensor]) -> Tensor:
        """``[F, S]`` float64: the largest value of each row in each response; an empty slot must hold ``-inf``."""
        x_NF = torch.stack([*map(functools.partial(torch.amax, dim=-1), rows_NB)], dim=-1)
        return torch.segment_reduce(x_NF, "max", offsets=self._block_O, axis=0, unsafe=True).T.double()


def _placed(count_S: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """``[S + 1]``: start of each response's tokens or blocks, then the end of all; ``[total]``: their responses."""
    start_O = torch.nn.functional.pad(count_S, (1, 0)).cumsum(0)
    if torch.compiler.is_compiling():
        # The compiler fuses a search into another kernel; repeat_interleave would need its own kernels.
        return start_O, torch.bucketize(torch.arange(total, device=count_S.device), start_O, right=True) - 1
    return start_O, torch.repeat_interleave(count_S, output_size=total)


# --- segments: runs of generated tokens within a response, such as the turns of an agent


def segment_sums(rows_FR: Sequence[Tensor], mask_R: Tensor, sequence_R: Tensor) -> list[Tensor]:
    """``F`` tensors ``[R]`` float64: the sum of each row over each token's segment, a run of tokens in the mask.

    Each token outside of the mask is its own segment.
    """
    is_first_R = torch.ones_like(mask_R)
    is_first_R[1:] = ~(mask_R[1:] & mask_R[:-1] & (sequence_R[1:] == sequence_R[:-1]))
    segment_R = is_first_R.cumsum(0) - 1
    # There are at most as many segments as tokens. Unused lengths are 0, so that no size waits for the device.
    length_N = torch.zeros_like(segment_R).index_add(0, segment_R, torch.ones_like(segment_R))
    sum_of = functools.partial(torch.segment_reduce, reduce="sum", lengths=length_N, unsafe=True)
    return [sum_of(row_R.double()).index_select(0, segment_R) for row_R in rows_FR]


def whole_rows(rows_FT: Tensor, layout: PackedLayout, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """``[F, R]``: rows of local tokens as rows of whole responses; ``gather`` collects all context-parallel ranks."""
    if layout.is_whole:
        return rows_FT
    rows_FR = rows_FT.new_zeros(len(rows_FT), layout.num_whole_tokens)
    # Each token is on one rank, so the sum does not round.
    return gather(rows_FR.index_copy(-1, layout.position_T, rows_FT)).sum(0)
