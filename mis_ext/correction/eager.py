"""The eager backend: PyTorch operations on any device.

It says what the numbers are, and compiles with ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.formula import NamedValues
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.log_ratio import mask_as_float, zero_outside
from mis_ext.correction.normalization import WeightScale
from mis_ext.correction.passes import (
    Outputs,
    Sequences,
    Streams,
    named_band_scales,
    scale_of,
    scale_values,
    total_values,
    with_scatters,
)
from mis_ext.correction.plan import Column, Plan

_BITS = 8


class EagerSequences(NamedTuple):
    """:class:`~mis_ext.correction.passes.Sequences` as tensors."""

    values: NamedValues
    totals_A: Tensor


class EagerBackend:
    """See :class:`~mis_ext.correction.passes.Backend`."""

    def __init__(self, streams: Streams, layout: PackedLayout, plan: Plan, band_scales_N: Tensor) -> None:
        self.streams, self.layout, self.plan, self.band_scales_N = streams, layout, plan, band_scales_N
        self._band_scales = named_band_scales(plan, band_scales_N)
        self.tokens = tokens = streams.token_ratios(layout)
        given = {
            "log_ratio": tokens.log_ratio_T,
            "proximal": tokens.proximal_T,
            "behavior": tokens.behavior_T,
            "valid": tokens.valid_mask_T,
            "response": tokens.response_mask_T,
        }
        self._given = given | self._band_scales
        self._tokens = NamedValues(self._given, plan.token)
        self._masks: dict[int, Tensor] = {}

    def take_segments(self, segments_FT: Tensor) -> None:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        named = dict(zip(self.plan.segment_names, segments_FT.unbind(), strict=True))
        self._tokens = NamedValues(self._given | named, self.plan.token)

    def token_statistics(self) -> Tensor:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        index, columns, num_sums = self.layout.index, self.plan.columns, self.plan.num_sum_columns
        sums_FS = index.reduce(map(self._summand, columns[:num_sums]), "sum")
        status_FS = sums_FS.new_full((1, sums_FS.shape[1]), torch.inf)
        if num_sums == len(columns):
            return torch.cat([sums_FS, status_FS])
        return torch.cat([sums_FS, index.reduce(map(self._candidate, columns[num_sums:]), "min"), status_FS])

    def keep_bits(self) -> Tensor:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        position_T = self.layout.index.position_T
        assert position_T is not None
        flags_R = torch.zeros(self.layout.num_whole_tokens, dtype=torch.uint8, device=position_T.device)
        flags_R = flags_R.index_copy(0, position_T, self._tokens["kept"].to(torch.uint8))
        padded = torch.nn.functional.pad(flags_R, (0, -len(flags_R) % _BITS))
        return (padded.view(-1, _BITS) << _bit_numbers(padded.device)).sum(1, dtype=torch.uint8)

    def sequences(self, gathered_WFS: Tensor) -> EagerSequences:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        columns, num_sums = self.plan.columns, self.plan.num_sum_columns
        sums_FS, minima_FS = gathered_WFS[:, :num_sums].sum(0), gathered_WFS[:, num_sums:].amin(0)
        rows = [*sums_FS.unbind(), *minima_FS.unbind()]
        given = {
            column.name: -row if column.operation == "max" else row
            for column, row in zip(columns, rows[:-1], strict=True)
        }
        values = NamedValues(given | self._band_scales, self.plan.sequence)
        for alike in self.plan.alike:
            values.compute_alike(alike)
        return EagerSequences(values, self._totals(values, failed_S=rows[-1]))

    def merge_totals(self, gathered_WA: Tensor) -> Tensor:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        num_sums = self.plan.num_sum_totals
        sums_A = with_scatters(self.plan, gathered_WA[:, :num_sums].sum(0), of_rows_AN=gathered_WA.T)
        return torch.cat([sums_A, gathered_WA[:, num_sums:].amin(0)])

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
        plan, index, values, tokens = self.plan, self.layout.index, sequences.values, self._tokens
        scale = scale_of(plan, totals_A=sequences.totals_A, over_group_A=over_group_A, rollout_scale=rollout_scale)
        metrics = self._token_metrics(sequences, over_group_A, scale) if token_metrics else {}
        if plan.config.metrics_only:
            return Outputs(None, None, metrics)
        factor_S = torch.where(
            values["weighted_sequence"], values["sequence_weight"] * scale_values(scale)["scale_factor"], 0.0
        )
        weights_T = self._mask("weighted") * index.to_tokens(factor_S)
        if "token_weight" in plan.token:
            weights_T = weights_T * tokens["token_weight"]
        keep_S = values["keep_sequence"]
        # What a kept token counts is the caller's business: a mask of 0.25 comes back as that.
        given_R = self.streams.response_mask_R.float()
        if self.layout.is_whole:
            loss_mask_R = self._mask("kept") * index.to_tokens(mask_as_float(keep_S)) * given_R
        else:
            keep_mask_R = self.streams.response_mask_R.bool() & index.to_whole(keep_S)
            if keep_bits is not None:
                keep_mask_R = keep_mask_R & _unpack_bits(keep_bits, len(keep_mask_R))
            loss_mask_R = torch.where(keep_mask_R, given_R, 0.0)
        return Outputs(weights_T, loss_mask_R, metrics)

    def weigh(self, values_T: Tensor, weights_T: Tensor) -> Tensor:
        """See :class:`~mis_ext.correction.passes.Backend`."""
        weighed_T = values_T * weights_T
        return zero_outside(weights_T.to(weighed_T.dtype), weighed_T)

    def _summand(self, column: Column) -> Tensor:
        mask_T = self._mask(column.over)
        if column.token == column.over:
            return mask_T
        return zero_outside(mask_T, _as_float(self._tokens[column.token]))

    def _candidate(self, column: Column) -> Tensor:
        # 0 on tokens that count, else infinity.
        never_T = self._mask(column.over).reciprocal() - 1.0
        value_T: Tensor = self._tokens[column.token]
        return never_T - value_T if column.operation == "max" else never_T + value_T

    def _mask(self, name: str) -> Tensor:
        mask_T = self._tokens[name]
        # Without a gate on tokens several names are of one mask.
        if id(mask_T) not in self._masks:
            self._masks[id(mask_T)] = mask_as_float(mask_T)
        return self._masks[id(mask_T)]

    def _totals(self, values: NamedValues, *, failed_S: Tensor) -> Tensor:
        totals, num_sums = self.plan.totals, self.plan.num_sum_totals
        rows_AS = torch.stack([_as_float(values[total.sequence]) for total in totals[:num_sums]])
        sums_A = with_scatters(self.plan, rows_AS.sum(-1), of_rows_AN=rows_AS)
        minima = [
            torch.where(values["measured"], -value if total.operation == "max" else value, torch.inf)
            for total, value in ((total, values[total.sequence]) for total in totals[num_sums:])
        ]
        # Padded, so that a micro-batch without sequences has extremes too.
        padded = torch.nn.functional.pad(torch.stack([*minima, failed_S]), (0, 1), value=torch.inf)
        return torch.cat([sums_A, padded.amin(-1)])

    def _token_metrics(self, sequences: Sequences, over_group_A: Tensor, scale: WeightScale) -> dict[str, Tensor]:
        plan = self.plan
        scales = scale_values(scale)
        totals = total_values(plan, sequences.totals_A)
        of_sequences = NamedValues(totals | scales, plan.spread, others=sequences.values)
        over_group = totals if over_group_A is sequences.totals_A else total_values(plan, over_group_A)
        of_group = NamedValues(over_group | scales | self._band_scales, {})
        for alike in plan.spread_alike:
            of_sequences.compute_alike(alike)
        rows = [
            of_group.compute(row.formula).expand(self.layout.num_sequences)
            if row.over == "group"
            else of_sequences[row.spread_name]
            for row in plan.metrics
        ]
        if not rows:
            return {}
        table_MS = torch.stack(rows)
        spread = self.layout.index.spread(table_MS, self._mask("response"))
        return {name: spread[index] for name, index in plan.metric_index.items()}


def _as_float(value: Tensor) -> Tensor:
    return mask_as_float(value) if value.dtype == torch.bool else value


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)


def _unpack_bits(packed: Tensor, length: int) -> Tensor:
    return ((packed[:, None] >> _bit_numbers(packed.device)) & 1).flatten()[:length].bool()
