# SPDX-License-Identifier: Apache-2.0
"""The Triton backend: which kernel runs when, on which buffers."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.formula import Formula, NamedValues
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.log_ratio import PackedStreams, TokenRatios
from mis_ext.correction.pipeline import Outputs, Sequences
from mis_ext.correction.plan import Plan
from mis_ext.correction.triton.generate import SEQUENCES_PER_BLOCK, programs_of
from mis_ext.correction.triton.kernels import TILE, weigh_kernel, whole_mask_kernel
from mis_ext.correction.triton.launch import BoundKernel, dtypes_of, kernel

_MAX_TOKENS = 2**31 - TILE
_whole_mask_kernel = kernel(whole_mask_kernel)
_whole_mask = BoundKernel(_whole_mask_kernel, HAS_BITS=False, TILE=TILE)
_whole_mask_from_bits = BoundKernel(_whole_mask_kernel, HAS_BITS=True, TILE=TILE)
_weigh = BoundKernel(kernel(weigh_kernel), BLOCK=TILE)


class FusedSequences:
    """:class:`~mis_ext.correction.eager.EagerSequences` in two buffers."""

    def __init__(self, plan: Plan, rows: tuple[str, ...], rows_FS: Tensor, totals_A: Tensor) -> None:
        self.plan, self.rows, self.rows_FS, self.totals_A = plan, rows, rows_FS, totals_A

    @property
    def values(self) -> NamedValues:
        """See :class:`~mis_ext.correction.eager.EagerSequences`."""
        given = dict(zip(self.rows, self.rows_FS.unbind(), strict=True))
        # Compared when they are asked for, which costs a launch.
        masks = {name: _nonzero(given.pop(name)) for name in ("weighted_sequence", "kept_sequence")}
        return NamedValues(given, {**self.plan.sequence, **masks})


def _nonzero(row_S: Tensor) -> Formula:
    return Formula(lambda: row_S != 0, ())


class TritonBackend:
    """See :class:`~mis_ext.correction.eager.EagerBackend`."""

    def __init__(self, streams: PackedStreams, plan: Plan) -> None:
        self.streams, self.layout = streams, streams.layout
        self._inputs = tuple(stream.contiguous() for stream in streams[:3])
        self.plan = plan
        self._device = streams.proximal_logprobs_T.device
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            raise ValueError(
                f"the tensors are on {self._device}, the current device is cuda:{torch.cuda.current_device()}: Triton "
                "launches there; call torch.cuda.set_device"
            )
        self._dtypes = dtypes_of(self._inputs)
        self._tiles = tiles_of(self.layout)
        self._programs = programs_of(plan, is_whole=self.layout.is_whole)
        # Read by nobody where a plan has no given_names.
        self._given_TF = streams.proximal_logprobs_T

    @property
    def tokens(self) -> TokenRatios:
        """See :class:`~mis_ext.correction.eager.EagerBackend`."""
        return self.streams.tokens

    def take_given(self, given_FT: Tensor) -> None:
        """See :class:`~mis_ext.correction.eager.EagerBackend`."""
        self._given_TF = given_FT.T.contiguous()

    def token_statistics(self) -> Tensor:
        """See :class:`~mis_ext.correction.eager.EagerBackend`."""
        local, layout = self._tiles.local, self.layout
        num_columns, num_sequences = len(self.plan.columns), layout.num_sequences
        partials = self._empty(num_columns, local.num_tiles, dtype=torch.float64)
        self._programs.token_statistics(
            local.num_tiles,
            *self._inputs,
            self._given_TF,
            local.table,
            partials,
            local.num_tiles,
            local.num_pieces,
            varying=self._dtypes,
        )
        statistics = self._empty(num_columns + 1, num_sequences)
        self._programs.sequence_statistics(
            num_sequences,
            partials,
            local.table,
            statistics,
            local.num_tiles,
            num_sequences,
            layout.pieces.per_sequence,
        )
        return statistics

    def keep_bits(self) -> Tensor:
        """See :class:`~mis_ext.correction.eager.EagerBackend`; every sequence begins at a whole byte."""
        local, whole = self._tiles.local, self._tiles.whole
        assert whole is not None
        keep_bits = self._empty(self._tiles.num_keep_bytes, dtype=torch.uint8)
        self._programs.keep_bits(
            whole.num_tiles,
            *self._inputs,
            self._given_TF,
            local.table,
            whole.table,
            self._tiles.keep_byte_S,
            keep_bits,
            local.num_tiles,
            local.num_pieces,
            whole.num_tiles,
            self.layout.num_sequences,
            self.layout.pieces.per_sequence,
            varying=self._dtypes,
        )
        return keep_bits

    def sequences(self, gathered_WFS: Tensor) -> FusedSequences:
        """See :class:`~mis_ext.correction.eager.EagerBackend`."""
        num_sequences = self.layout.num_sequences
        num_blocks = max(1, -(-num_sequences // SEQUENCES_PER_BLOCK))
        rows = self._empty(len(self._programs.rows), num_sequences)
        block_totals = self._empty(num_blocks, len(self.plan.totals) + 1)
        decide = self._programs.decisions(gathered_WFS.shape[0])
        decide(num_blocks, gathered_WFS, rows, block_totals, num_sequences)
        # The totals of the only block are those of the call.
        totals_A = block_totals.view(-1) if num_blocks == 1 else self.merge_totals(block_totals)
        return FusedSequences(self.plan, self._programs.rows, rows, totals_A)

    def merge_totals(self, gathered_WA: Tensor) -> Tensor:
        """See :class:`~mis_ext.correction.eager.EagerBackend`."""
        totals = self._empty(gathered_WA.shape[1])
        self._programs.merge_totals(1, gathered_WA, totals, gathered_WA.shape[0])
        return totals

    def outputs(
        self,
        sequences: Sequences,
        *,
        over_group_A: Tensor,
        keep_bits: Tensor | None,
        token_metrics: bool,
    ) -> Outputs:
        """See :class:`~mis_ext.correction.eager.EagerBackend`."""
        assert isinstance(sequences, FusedSequences)
        local, layout, plan = self._tiles.local, self.layout, self.plan
        num_tokens = layout.num_local_tokens
        writes = not plan.config.metrics_only
        weights_T = self._empty(num_tokens if writes else 0)
        loss_mask_R = self._empty(layout.num_whole_tokens if writes else 0)
        metrics_MT = self._empty(len(plan.metrics), num_tokens)
        self._programs.outputs(
            local.num_tiles,
            *self._inputs,
            self._given_TF,
            local.table,
            sequences.rows_FS,
            sequences.totals_A,
            over_group_A,
            weights_T,
            loss_mask_R,
            metrics_MT,
            local.num_tiles,
            local.num_pieces,
            layout.num_sequences,
            num_tokens,
            layout.pieces.per_sequence,
            varying=self._dtypes,
        )
        if writes and not layout.is_whole:
            self._write_whole_mask(loss_mask_R, sequences, keep_bits)
        metrics = metrics_MT.unbind()
        return Outputs(
            weights_T=weights_T if writes else None,
            loss_mask_R=loss_mask_R if writes else None,
            token_metrics={name: metrics[index] for name, index in plan.metric_index.items()} if token_metrics else {},
        )

    def weigh(self, values_T: Tensor, weights_T: Tensor) -> Tensor:
        """See :class:`~mis_ext.correction.eager.EagerBackend`."""
        weighed: Tensor = _Weigh.apply(values_T, weights_T)  # type: ignore[no-untyped-call]
        return weighed

    def _write_whole_mask(self, loss_mask_R: Tensor, sequences: FusedSequences, keep_bits: Tensor | None) -> None:
        whole = self._tiles.whole
        assert whole is not None
        launch = _whole_mask if keep_bits is None else _whole_mask_from_bits
        launch(
            whole.num_tiles,
            self._inputs[2],
            whole.table,
            self._tiles.keep_byte_S,
            keep_bits if keep_bits is not None else loss_mask_R,
            sequences.rows_FS[self._programs.keep_row],
            loss_mask_R,
            whole.num_tiles,
            self.layout.num_sequences,
            varying=self._dtypes[2:],
        )

    def _empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


class _Weigh(torch.autograd.Function):
    """Values times weights, in one kernel each way; 0 where the weight is 0, whatever the value."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weights: Tensor) -> Tensor:
        """``[T]``: values times weights, in the wider dtype of the two."""
        ctx.save_for_backward(weights)
        return _weighed(values, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """``[T]``: the gradient of the values is the weights; these have none, as they are detached."""
        (weights,) = ctx.saved_tensors
        return _weighed(grad, weights), None


def _weighed(values: Tensor, weights: Tensor) -> Tensor:
    values = values.contiguous()
    weighed = torch.empty_like(values, dtype=torch.promote_types(values.dtype, weights.dtype))
    num_tokens = values.numel()
    _weigh(-(-num_tokens // TILE), values, weights, weighed, num_tokens, varying=(values.dtype,))
    return weighed


class Tiles(NamedTuple):
    """Tiles of ``P`` pieces, as ``locate_tile`` in the kernels reads them.

    ``table`` is int32 on the device: the piece of each tile ``[num_tiles]``; then of each piece the first tile
    ``[P + 1]``, the first token ``[P + 1]``, and the first token in the whole responses ``[P]``.
    """

    table: Tensor
    num_tiles: int
    num_pieces: int


class LayoutTiles(NamedTuple):
    """Tiles of the local tokens, and where these are not all tokens, of the whole responses too.

    ``keep_byte_S`` says where the keep bits of each sequence begin, ``[S + 1]`` int32; whole bytes per sequence.
    """

    local: Tiles
    whole: Tiles | None
    keep_byte_S: Tensor | None
    num_keep_bytes: int


@functools.lru_cache(maxsize=2)
def tiles_of(layout: PackedLayout) -> LayoutTiles:
    """The tiles of ``layout``: one copy to its device, which the host does not wait for."""
    if layout.num_whole_tokens > _MAX_TOKENS:
        raise ValueError(f"the Triton backend takes at most {_MAX_TOKENS} tokens, got {layout.num_whole_tokens}")
    pieces, lengths = layout.pieces, layout.response_lengths
    local = _host_table(pieces.lengths, pieces.whole_starts)
    if layout.is_whole:
        (table,) = _to_device([local], layout.device)
        return LayoutTiles(_tiles(table, len(pieces.lengths)), None, None, 0)
    whole = _host_table(lengths, _offsets(lengths)[:-1])
    keep_bytes = _offsets((length + 7) // 8 for length in lengths)
    table, whole_table, keep_byte_S = _to_device([local, whole, keep_bytes], layout.device)
    return LayoutTiles(
        local=_tiles(table, len(pieces.lengths)),
        whole=_tiles(whole_table, len(lengths)),
        keep_byte_S=keep_byte_S,
        num_keep_bytes=keep_bytes[-1],
    )


def _host_table(lengths: Sequence[int], whole_starts: Sequence[int]) -> array[int]:
    # The lengths of a micro-batch are new in training, so this runs once per call: iterators, which are faster here
    # than small tensors.
    tiles = [(length + (TILE - 1)) // TILE for length in lengths]
    piece_of_tile = array("i", chain.from_iterable(map(repeat, range(len(tiles)), tiles)))
    return piece_of_tile + _offsets(tiles) + _offsets(lengths) + array("i", whole_starts)


def _offsets(counts: Iterable[int]) -> array[int]:
    return array("i", accumulate(counts, initial=0))


def _tiles(table: Tensor, num_pieces: int) -> Tiles:
    return Tiles(table, num_tiles=len(table) - 3 * num_pieces - 2, num_pieces=num_pieces)


def _to_device(tables: list[array[int]], device: torch.device) -> tuple[Tensor, ...]:
    host = torch.frombuffer(sum(tables[1:], tables[0]), dtype=torch.int32)
    if device.type == "cuda":
        # Pinned memory, so that the copy does not wait for the device.
        host = host.pin_memory()
    return torch.split(host.to(device, non_blocking=True), list(map(len, tables)))
