"""The Triton backend: which kernel runs when, on which buffers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.config import CorrectionConfig
from mis_ext.kernels.launch import BoundKernel, dtypes_of
from mis_ext.kernels.output_kernels import weigh_kernel, whole_mask_kernel
from mis_ext.kernels.plan import SEQUENCES_PER_BLOCK, plan_of
from mis_ext.kernels.rows import NUM_ROWS, NUM_STATISTICS, NUM_TOTALS
from mis_ext.kernels.sequence_kernels import merge_totals_kernel, sequence_statistics_kernel
from mis_ext.kernels.tiles import TILE, tiles_of
from mis_ext.layout import PackedLayout
from mis_ext.normalization import WeightScale
from mis_ext.passes import Decisions, Outputs, Sequences, Streams
from mis_ext.statistics import SequenceStatistics

# Plain numbers: on the host, a compile-time constant is one attribute further away.
_NUM_STATISTICS, _NUM_ROWS, _NUM_TOTALS = NUM_STATISTICS.value, NUM_ROWS.value, NUM_TOTALS.value

_sequence_statistics = BoundKernel(sequence_statistics_kernel, BLOCK=64)
_merge_totals = BoundKernel(merge_totals_kernel, BLOCK=64)
_whole_mask = BoundKernel(whole_mask_kernel, HAS_BITS=False, TILE=TILE)
_whole_mask_from_bits = BoundKernel(whole_mask_kernel, HAS_BITS=True, TILE=TILE)
_weigh = BoundKernel(weigh_kernel, BLOCK=TILE)


class FusedSequences(NamedTuple):
    """:class:`~mis_ext.passes.Sequences` in two buffers."""

    rows_KS: Tensor
    totals_K: Tensor

    @property
    def stats(self) -> SequenceStatistics:
        """Statistics of whole sequences."""
        return SequenceStatistics._make(self.rows_KS[:_NUM_STATISTICS].unbind())

    @property
    def decisions(self) -> Decisions:
        """What becomes of each sequence."""
        usable_S, keep_S, sequence_weight_S, kept_count_S = self.rows_KS[_NUM_STATISTICS:].unbind()
        return Decisions(usable_S != 0, keep_S != 0, sequence_weight_S, kept_count_S)


class TritonBackend:
    """See :class:`~mis_ext.passes.Backend`."""

    def __init__(self, streams: Streams, layout: PackedLayout, config: CorrectionConfig) -> None:
        self.streams = Streams._make([stream.contiguous() for stream in streams])
        self.layout, self.config = layout, config
        self._device = streams.proximal_logprobs_T.device
        if self._device.type == "cuda" and self._device.index != torch.cuda.current_device():
            raise ValueError(
                f"the tensors are on {self._device}, the current device is cuda:{torch.cuda.current_device()}: Triton "
                "launches there; call torch.cuda.set_device"
            )
        self._dtypes = dtypes_of(self.streams)
        self._tiles = tiles_of(layout)
        self._plan = plan_of(config, host_metrics=True, is_whole=layout.is_whole)

    def token_statistics(self) -> Tensor:
        """See :class:`~mis_ext.passes.Backend`."""
        local, layout = self._tiles.local, self.layout
        num_sequences = layout.num_sequences
        partials = self._empty(_NUM_STATISTICS, local.num_tiles, dtype=torch.float64)
        self._plan.token_statistics(
            local.num_tiles,
            *self.streams,
            local.table,
            partials,
            local.num_tiles,
            local.num_pieces,
            varying=self._dtypes,
        )
        statistics = self._empty(_NUM_STATISTICS, num_sequences)
        _sequence_statistics(
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
        """See :class:`~mis_ext.passes.Backend`; every sequence begins at a whole byte."""
        local, whole = self._tiles.local, self._tiles.whole
        assert whole is not None
        keep_bits = self._empty(self._tiles.num_keep_bytes, dtype=torch.uint8)
        self._plan.keep_bits(
            whole.num_tiles,
            *self.streams,
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

    def sequence_decisions(self, gathered_NKS: Tensor) -> FusedSequences:
        """See :class:`~mis_ext.passes.Backend`."""
        num_sequences = self.layout.num_sequences
        num_blocks = max(1, -(-num_sequences // SEQUENCES_PER_BLOCK))
        rows = self._empty(_NUM_ROWS, num_sequences)
        block_totals = self._empty(num_blocks, _NUM_TOTALS)
        decide = self._plan.decisions(gathered_NKS.shape[0])
        decide(num_blocks, gathered_NKS, rows, block_totals, num_sequences)
        return FusedSequences(rows, self.merge_totals(block_totals))

    def merge_totals(self, gathered_NK: Tensor) -> Tensor:
        """See :class:`~mis_ext.passes.Backend`."""
        totals = self._empty(_NUM_TOTALS)
        _merge_totals(1, gathered_NK, totals, gathered_NK.shape[0])
        return totals

    def outputs(
        self,
        sequences: Sequences,
        *,
        over_group_K: Tensor,
        rollout_scale: WeightScale | None,
        keep_bits: Tensor | None,
        host_metrics: bool,
    ) -> Outputs:
        """See :class:`~mis_ext.passes.Backend`."""
        assert isinstance(sequences, FusedSequences)
        local, layout = self._tiles.local, self.layout
        plan = self._plan if host_metrics else plan_of(self.config, host_metrics=False, is_whole=layout.is_whole)
        num_tokens = layout.num_local_tokens
        writes = not self.config.metrics_only
        weights_T = self._empty(num_tokens if writes else 0)
        loss_mask_R = self._empty(layout.num_whole_tokens if writes else 0)
        metrics_MT = self._empty(len(plan.metric_names), num_tokens)
        # Read with another scope than rollout by nobody.
        scale = rollout_scale if rollout_scale is not None else WeightScale(over_group_K, over_group_K)
        plan.outputs(
            local.num_tiles,
            *self.streams,
            local.table,
            sequences.rows_KS,
            sequences.totals_K,
            over_group_K,
            scale.mean_weight,
            scale.denominator_factor,
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
        return Outputs(
            weights_T=weights_T if writes else None,
            loss_mask_R=loss_mask_R if writes else None,
            host_metrics=dict(zip(plan.metric_names, metrics_MT.unbind(), strict=True)),
        )

    def weigh(self, values_T: Tensor, weights_T: Tensor) -> Tensor:
        """See :class:`~mis_ext.passes.Backend`."""
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
            sequences.rows_KS,
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
        """The product."""
        ctx.save_for_backward(weights)
        return _weighed(values, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """The weights themselves have no gradient."""
        (weights,) = ctx.saved_tensors
        return _weighed(grad, weights), None


def _weighed(values: Tensor, weights: Tensor) -> Tensor:
    values = values.contiguous()
    weighed = torch.empty_like(values, dtype=torch.promote_types(values.dtype, weights.dtype))
    num_tokens = values.numel()
    _weigh(-(-num_tokens // TILE), values, weights, weighed, num_tokens, varying=(values.dtype,))
    return weighed
