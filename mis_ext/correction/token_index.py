"""Index tensors of a layout, and what the eager pipeline does with them: reduce tokens to sequences, spread back."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from mis_ext.correction.log_ratio import zero_outside

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
        """Build what is as long as the tokens on ``device``, where the host would take milliseconds, and the rest here.

        Args:
            response_lengths: Tokens per whole response.
            local_lengths: Tokens per response on this rank.
            piece_lengths: Tokens per contiguous run of local tokens.
            piece_whole_starts: Where each run begins in the whole responses; None where every token is local.
            device: Where the results go.
        """
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

    def reduce(
        self, rows_T: Iterable[Tensor], op: Literal["sum", "min"], *, masks_T: Iterable[Tensor] | None = None
    ) -> Tensor:
        """Reduce ``F`` rows of local tokens to ``[F, S]``; a sequence without local tokens gets the identity of ``op``.

        A token counts in a row if its float mask is not 0, where there are masks: one for each row.

        First blocks of 64 tokens as they lie in memory, whatever their sequences, so that only the edges of sequences
        are gathered; then groups of at most 32 blocks and edges, level by level: accurate, and the same bits on every
        run. Long rows are taken one after the other, so that one can be gone before the next is computed.
        """
        in_blocks = len(self.sequence_T) // _BLOCK * _BLOCK
        rows_FT = self._few(rows_T)
        if masks_T is not None:
            rows_FT = itertools.starmap(functools.partial(_masked, op), zip(rows_FT, self._few(masks_T), strict=True))
        parts = [
            (_fold(few_FT[:, :in_blocks].view(len(few_FT), -1, _BLOCK), op), few_FT.index_select(-1, self.edge_N))
            for few_FT in rows_FT
        ]
        columns = [torch.cat(column) for column in zip(*parts, strict=True)]
        identity = columns[0].new_full((len(columns[0]), 1), 0.0 if op == "sum" else torch.inf)
        for index in self.tree:
            padded = torch.cat([*columns, identity], dim=-1)
            columns = [_fold(padded.index_select(-1, index).view(len(padded), -1, _FAN_IN), op)]
        return columns[0]

    def _few(self, rows_T: Iterable[Tensor]) -> Iterator[Tensor]:
        """``[F, T]``: as many rows at a time as are copied for less than the operations on each of them cost."""
        rows = iter(rows_T)
        num_rows = 1 if self.sequence_T.is_cuda else max(_STACKED // max(len(self.sequence_T), 1), 1)
        while few := [*itertools.islice(rows, num_rows)]:
            yield torch.stack(few) if len(few) > 1 else few[0].unsqueeze(0)

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


def _fold(values: Tensor, op: Literal["sum", "min"]) -> Tensor:
    return values.sum(-1) if op == "sum" else values.amin(-1)


def _masked(op: Literal["sum", "min"], rows_FT: Tensor, mask_FT: Tensor) -> Tensor:
    # Added to a minimum is 0 on tokens that count, else infinity.
    return zero_outside(mask_FT, rows_FT) if op == "sum" else rows_FT + (mask_FT.reciprocal() - 1.0)


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
