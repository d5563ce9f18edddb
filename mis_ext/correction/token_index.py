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
_STACKED = 1 << 16
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
        edge_N, tree = _build_tree(torch.tensor(local_lengths, dtype=torch.int64))
        on_host = [edge_N, *tree, *(torch.tensor(numbers, dtype=torch.int64) for numbers in lengths)]
        # Copies of few numbers cost as much as the kernels that use them.
        edge_N, *others = to_device(on_host, device)
        tree, (response_S, *local) = others[: len(tree)], others[len(tree) :]
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


def _build_tree(length_S: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The edges, and one index tensor per level, groups of 32, until one group per sequence is left.

    The first level points into all blocks followed by the edges, every other into the groups before it. A slot without
    a value points behind the last one, where :meth:`TokenIndex.reduce` puts the identity.
    """
    end_S = length_S.cumsum(0)
    begin_S = end_S - length_S
    first_block_S = (begin_S + _BLOCK - 1) // _BLOCK
    blocks_S = (end_S // _BLOCK - first_block_S).clamp_min(0)
    head_S = (first_block_S * _BLOCK).minimum(end_S) - begin_S
    tail_S = length_S - head_S - blocks_S * _BLOCK
    edges_S = head_S + tail_S
    edge_N = runs(_interleave(begin_S, end_S - tail_S), _interleave(head_S, tail_S))

    num_blocks = int(length_S.sum()) // _BLOCK
    first_edge_S = num_blocks + edges_S.cumsum(0) - edges_S
    values = runs(_interleave(first_block_S, first_edge_S), _interleave(blocks_S, edges_S))
    size, count_S = num_blocks + len(edge_N), blocks_S + edges_S
    tree: list[Tensor] = []
    while not tree or size > len(count_S):
        groups_S = ((count_S + _FAN_IN - 1) // _FAN_IN).clamp_min(1)
        num_groups = int(groups_S.sum())
        index = torch.full((num_groups * _FAN_IN,), size)
        index[runs((groups_S.cumsum(0) - groups_S) * _FAN_IN, count_S)] = values
        tree.append(index)
        values, size, count_S = torch.arange(num_groups), num_groups, groups_S
    return edge_N, tree


def _interleave(first_S: Tensor, second_S: Tensor) -> Tensor:
    return torch.stack([first_S, second_S], dim=1).flatten()


def to_device(tensors: Sequence[Tensor], device: torch.device) -> tuple[Tensor, ...]:
    """``[N]`` each, of one dtype: one copy from the host, through pinned memory, so that it does not wait."""
    together = torch.cat([*tensors])
    if device.type == "cuda":
        together = together.pin_memory()
    return torch.split(together.to(device, non_blocking=True), [*map(len, tensors)])
