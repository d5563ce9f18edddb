"""The packed layout: which local token belongs to which sequence, and where in its response it lies."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Partition = Literal["zigzag", "contiguous"]

_FAN_IN = 32


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedLayout:
    """``T`` local tokens of ``S`` sequences; ``R`` tokens in the whole responses, equal on all context-parallel ranks.

    Attributes:
        response_lengths: Tokens per whole response.
        local_lengths: How many of them are on this rank.
        sequence_T: Sequence of each local token.
        sequence_R: Sequence of each token of the whole responses.
        position_T: Index of each local token in the concatenated whole responses; None when ``T`` is ``R``.
        local_tree: Index tensors of a reduction tree from local tokens to sequences, see :meth:`reduce`.
        whole_tree: The same from the tokens of whole responses.
    """

    response_lengths: tuple[int, ...]
    local_lengths: tuple[int, ...]
    sequence_T: Tensor
    sequence_R: Tensor
    position_T: Tensor | None
    local_tree: tuple[Tensor, ...]
    whole_tree: tuple[Tensor, ...]

    @classmethod
    def whole(cls, response_lengths: Sequence[int], *, device: torch.device | str = "cpu") -> PackedLayout:
        """Every rank holds whole responses."""
        return _whole_layout(tuple(response_lengths), torch.device(device))

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
            ValueError: A response has no prompt token before it: nobody would own its first log-prob.
        """
        if cp_size == 1:
            return cls.whole(response_lengths, device=device)
        return _context_parallel_layout(
            tuple(response_lengths),
            tuple(total_lengths),
            tuple(padded_lengths if padded_lengths is not None else total_lengths),
            cp_rank,
            cp_size,
            partition,
            torch.device(device),
        )

    @property
    def num_sequences(self) -> int:
        """``S``."""
        return len(self.response_lengths)

    @property
    def num_local_tokens(self) -> int:
        """``T``."""
        return self.sequence_T.numel()

    def reduce(self, values_KT: Tensor, op: Literal["sum", "min"]) -> Tensor:
        """Reduce ``[K, T]`` local tokens to ``[K, S]``; a sequence without local tokens gets the identity of ``op``."""
        return _reduce_tree(values_KT, self.local_tree, op)

    def reduce_whole(self, values_KR: Tensor) -> Tensor:
        """Sum ``[K, R]`` tokens of whole responses to ``[K, S]``."""
        return _reduce_tree(values_KR, self.whole_tree, "sum")

    def to_tokens(self, values_S: Tensor) -> Tensor:
        """Give every local token the value of its sequence."""
        return values_S.index_select(-1, self.sequence_T)

    def to_whole(self, values_S: Tensor) -> Tensor:
        """Give every token of the whole responses the value of its sequence."""
        return values_S.index_select(-1, self.sequence_R)

    def local_part(self, values_R: Tensor) -> Tensor:
        """This rank's tokens out of whole responses."""
        return values_R if self.position_T is None else values_R.index_select(-1, self.position_T)


def _reduce_tree(values_KT: Tensor, tree: tuple[Tensor, ...], op: Literal["sum", "min"]) -> Tensor:
    """Sum or minimum over groups of at most 32, level by level: accurate, and the same bits on every run."""
    identity = 0.0 if op == "sum" else torch.inf
    for index in tree:
        padded = torch.nn.functional.pad(values_KT, (0, 1), value=identity)
        grouped = padded.index_select(-1, index.flatten()).view(len(values_KT), -1, _FAN_IN)
        values_KT = grouped.sum(-1) if op == "sum" else grouped.amin(-1)
    return values_KT


@functools.lru_cache(maxsize=2)
def _whole_layout(response_lengths: tuple[int, ...], device: torch.device) -> PackedLayout:
    lengths_S = torch.tensor(response_lengths, dtype=torch.int64)
    sequence_R = _sequence_of(lengths_S, sum(response_lengths), device)
    tree = _build_tree(lengths_S, device)
    return PackedLayout(
        response_lengths=response_lengths,
        local_lengths=response_lengths,
        sequence_T=sequence_R,
        sequence_R=sequence_R,
        position_T=None,
        local_tree=tree,
        whole_tree=tree,
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
    whole = _whole_layout(response_lengths, device)
    # Lengths are known on the host, and so is all that follows from them; only the results go to the device.
    response_S, total_S, padded_S = torch.tensor([response_lengths, total_lengths, padded_lengths])
    first_logit_S = total_S - response_S - 1
    if bool(((first_logit_S < 0) & (response_S > 0)).any()):
        raise ValueError("context parallelism needs a prompt token before every response: total > response length")
    chunks = 2 * cp_size if partition == "zigzag" else cp_size
    owned = (cp_rank, chunks - 1 - cp_rank) if partition == "zigzag" else (cp_rank,)
    chunk_S = (padded_S + chunks - 1) // chunks
    begin_P = torch.stack([chunk_S * chunk - first_logit_S for chunk in owned], dim=1)
    end_P = begin_P + chunk_S[:, None]
    begin_P, end_P = (edge.clamp_min(0).minimum(response_S[:, None]) for edge in (begin_P, end_P))
    length_P = end_P - begin_P
    length_S = length_P.sum(1)
    offset_P = (response_S.cumsum(0) - response_S)[:, None] + begin_P
    local_lengths = tuple(length_S.tolist())
    num_local = sum(local_lengths)
    # Piece after piece, each a contiguous run of its response.
    length_P, offset_P = length_P.flatten(), offset_P.flatten()
    start_P = length_P.cumsum(0) - length_P
    shift_T = (offset_P - start_P).repeat_interleave(length_P, output_size=num_local)
    return PackedLayout(
        response_lengths=response_lengths,
        local_lengths=local_lengths,
        sequence_T=_sequence_of(length_S, num_local, device),
        sequence_R=whole.sequence_R,
        position_T=_to_device(torch.arange(num_local) + shift_T, device),
        local_tree=_build_tree(length_S, device),
        whole_tree=whole.whole_tree,
    )


def _sequence_of(lengths_S: Tensor, total: int, device: torch.device) -> Tensor:
    sequence = torch.arange(len(lengths_S)).repeat_interleave(lengths_S, output_size=total)
    return _to_device(sequence, device)


def _build_tree(lengths_S: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Index tensors ``[groups, 32]``, one per level, until one group per sequence is left.

    A slot without a token points behind the last value, where :func:`_reduce_tree` puts the identity.
    """
    tree: list[Tensor] = []
    while not tree or int(lengths_S.sum()) > len(lengths_S):
        total = int(lengths_S.sum())
        groups_S = ((lengths_S + _FAN_IN - 1) // _FAN_IN).clamp_min(1)
        num_groups = int(groups_S.sum())
        first_group_S, first_value_S = groups_S.cumsum(0) - groups_S, lengths_S.cumsum(0) - lengths_S
        sequence_G = torch.arange(len(lengths_S)).repeat_interleave(groups_S, output_size=num_groups)
        within_G = torch.arange(num_groups) - first_group_S[sequence_G]
        slots = within_G[:, None] * _FAN_IN + torch.arange(_FAN_IN)
        index = torch.where(slots < lengths_S[sequence_G][:, None], first_value_S[sequence_G][:, None] + slots, total)
        tree.append(_to_device(index, device))
        lengths_S = groups_S
    return tuple(tree)


def _to_device(tensor: Tensor, device: torch.device) -> Tensor:
    # Pinned memory, so that the copy does not wait for the device.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
