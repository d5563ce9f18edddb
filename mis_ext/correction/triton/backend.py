"""The Triton backend: which kernel runs when, on which buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.formula import Formula, NamedValues
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.log_ratio import TokenRatios
from mis_ext.correction.normalization import WeightScale
from mis_ext.correction.passes import Outputs, Sequences, Streams, named_band_scales
from mis_ext.correction.plan import Plan
from mis_ext.correction.triton.generate import SEQUENCES_PER_BLOCK, programs_of
from mis_ext.correction.triton.kernels import weigh_kernel, whole_mask_kernel
from mis_ext.correction.triton.launch import BoundKernel, dtypes_of, kernel
from mis_ext.correction.triton.tiles import TILE, tiles_of

_whole_mask_kernel = kernel(whole_mask_kernel)
_whole_mask = BoundKernel(_whole_mask_kernel, HAS_BITS=False, TILE=TILE)
_whole_mask_from_bits = BoundKernel(_whole_mask_kernel, HAS_BITS=True, TILE=TILE)
_weigh = BoundKernel(kernel(weigh_kernel), BLOCK=TILE)


class FusedSequences:
    """:class:`~mis_ext.correction.passes.Sequences` in two buffers."""

    def __init__(
        self, plan: Plan, rows: tuple[str, ...], rows_FS: Tensor, totals_A: Tensor, band_scales_N: Tensor
    ) -> None:
        self.plan, self.rows, self.rows_FS = plan, rows, rows_FS
        self.totals_A, self.band_scales_N = totals_A, band_scales_N

    @property
    def values(self) -> NamedValues:
        """See :class:`~mis_ext.correction.passes.Sequences`."""
        given = dict(zip(self.rows, self.rows_FS.unbind(), strict=True))
        # Compared when they are asked for, which costs a launch.
        masks = {name: _nonzero(given.pop(name)) for name in ("weighted_sequence", "keep_sequence")}
        bands = named_band_scales(self.plan, self.band_scales_N)
        return NamedValues(given | bands, {**self.plan.sequence, **masks})


def _nonzero(row_S: Tensor) -> Formula:
    return Formula(lambda: row_S != 0, ())


class TritonBackend:
    """See :class:`~mis_ext.correction.passes.Backend`."""

    def __init__(self, streams: Streams, layout: PackedLayout, plan: Plan, band_scales_N: Tensor) -> None:
        self.streams = Streams._make([stream.contiguous() for stream in streams])
        self.layout, self.plan, self.band_scales_N = layout, plan, band_scales_N
        self._device = streams.proximal_logprobs_T.device
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            raise ValueError(
                f"the tensors are on {self._device}, the current device is cuda:{torch.cuda.current_device()}: Triton "
                "launches there; call torch.cuda.set_device"
            )
        self._dtypes = dtypes_of(self.streams)
        self._tiles = tiles_of(layout)
        self._programs = programs_of(plan, is_whole=layout.is_whole)
        # Read by nobody without segments.
        self._segments_TF = band_scales_N

    @property
    def tokens(self) -> TokenRatios:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        return self.streams.token_ratios(self.layout)

    def take_segments(self, segments_FT: Tensor) -> None:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        self._segments_TF = segments_FT.T.contiguous()

    def token_statistics(self) -> Tensor:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        local, layout = self._tiles.local, self.layout
        num_columns, num_sequences = len(self.plan.columns), layout.num_sequences
        partials = self._empty(num_columns, local.num_tiles, dtype=torch.float64)
        self._programs.token_statistics(
            local.num_tiles,
            *self.streams,
            self._segments_TF,
            local.table,
            self.band_scales_N,
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
        """See :class:`~mis_ext.correction.passes.Backend`; every sequence begins at a whole byte."""
        local, whole = self._tiles.local, self._tiles.whole
        assert whole is not None
        keep_bits = self._empty(self._tiles.num_keep_bytes, dtype=torch.uint8)
        self._programs.keep_bits(
            whole.num_tiles,
            *self.streams,
            self._segments_TF,
            local.table,
            whole.table,
            self._tiles.keep_byte_S,
            self.band_scales_N,
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
        """See :class:`~mis_ext.correction.passes.Backend`."""
        num_sequences = self.layout.num_sequences
        num_blocks = max(1, -(-num_sequences // SEQUENCES_PER_BLOCK))
        rows = self._empty(len(self._programs.rows), num_sequences)
        block_totals = self._empty(num_blocks, len(self.plan.totals) + 1)
        decide = self._programs.decisions(gathered_WFS.shape[0])
        decide(num_blocks, gathered_WFS, self.band_scales_N, rows, block_totals, num_sequences)
        # The totals of the only block are those of the call.
        totals_A = block_totals.view(-1) if num_blocks == 1 else self.merge_totals(block_totals)
        return FusedSequences(self.plan, self._programs.rows, rows, totals_A, self.band_scales_N)

    def merge_totals(self, gathered_WA: Tensor) -> Tensor:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        totals = self._empty(gathered_WA.shape[1])
        self._programs.merge_totals(1, gathered_WA, totals, gathered_WA.shape[0])
        return totals

    def outputs(
        self,
        sequences: Sequences,
        *,
        over_group_A: Tensor,
        rollout_scale: WeightScale | None,
        keep_bits: Tensor | None,
        token_metrics: bool,
    ) -> Outputs:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        assert isinstance(sequences, FusedSequences)
        local, layout, plan = self._tiles.local, self.layout, self.plan
        num_tokens = layout.num_local_tokens
        writes = not plan.config.metrics_only
        weights_T = self._empty(num_tokens if writes else 0)
        loss_mask_R = self._empty(layout.num_whole_tokens if writes else 0)
        metrics_MT = self._empty(len(plan.metrics), num_tokens)
        # Read with another scope than rollout by nobody.
        scale = rollout_scale if rollout_scale is not None else WeightScale(over_group_A, over_group_A)
        self._programs.outputs(
            local.num_tiles,
            *self.streams,
            self._segments_TF,
            local.table,
            sequences.rows_FS,
            sequences.totals_A,
            over_group_A,
            scale.mean_weight,
            scale.denominator_factor,
            self.band_scales_N,
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
        """See :class:`~mis_ext.correction.passes.Backend`."""
        weighed: Tensor = _Weigh.apply(values_T, weights_T)  # type: ignore[no-untyped-call]
        return weighed

    def _write_whole_mask(self, loss_mask_R: Tensor, sequences: FusedSequences, keep_bits: Tensor | None) -> None:
        whole = self._tiles.whole
        assert whole is not None
        launch = _whole_mask if keep_bits is None else _whole_mask_from_bits
        launch(
            whole.num_tiles,
            self.streams.response_mask_R,
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
