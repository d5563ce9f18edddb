"""The eager backend: PyTorch operations on any device.

It says what the numbers are, and compiles with ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.backend import Outputs, Sequences
from mis_ext.correction.formula import NamedValues
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.log_ratio import Streams, mask_as_float, zero_outside
from mis_ext.correction.metrics import GROUP_FORMULAS, inverse, known_or_mean, mean_value, own_value, term
from mis_ext.correction.normalization import WeightScale
from mis_ext.correction.plan import Column, Plan, named_band_scales, scale_values, total_values, with_scatters

_BITS = 8


class MetricValues(NamedTuple):
    """``[N, S]`` each: the plan's metrics of sequences, and how many tokens of each sequence they count."""

    values_NS: Tensor
    counts_NS: Tensor


class EagerSequences(NamedTuple):
    """:class:`~mis_ext.correction.backend.Sequences` as tensors."""

    values: NamedValues
    totals_A: Tensor
    metrics: MetricValues


class EagerBackend:
    """See :class:`~mis_ext.correction.backend.Backend`."""

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
        """See :class:`~mis_ext.correction.backend.Backend`."""
        named = dict(zip(self.plan.segment_names, segments_FT.unbind(), strict=True))
        self._tokens = NamedValues(self._given | named, self.plan.token)

    def token_statistics(self) -> Tensor:
        """See :class:`~mis_ext.correction.backend.Backend`."""
        columns, num_sums = self.plan.columns, self.plan.num_sum_columns
        sums_FS = self._reduce(columns[:num_sums], "sum")
        status_FS = sums_FS.new_full((1, sums_FS.shape[1]), torch.inf)
        if num_sums == len(columns):
            return torch.cat([sums_FS, status_FS])
        return torch.cat([sums_FS, self._reduce(columns[num_sums:], "min"), status_FS])

    def keep_bits(self) -> Tensor:
        """See :class:`~mis_ext.correction.backend.Backend`."""
        position_T = self.layout.index.position_T
        assert position_T is not None
        flags_R = torch.zeros(self.layout.num_whole_tokens, dtype=torch.uint8, device=position_T.device)
        flags_R = flags_R.index_copy(0, position_T, self._tokens["kept"].to(torch.uint8))
        padded = torch.nn.functional.pad(flags_R, (0, -len(flags_R) % _BITS))
        return (padded.view(-1, _BITS) << _bit_numbers(padded.device)).sum(1, dtype=torch.uint8)

    def sequences(self, gathered_WFS: Tensor) -> EagerSequences:
        """See :class:`~mis_ext.correction.backend.Backend`."""
        columns, num_sums = self.plan.columns, self.plan.num_sum_columns
        sums_FS, minima_FS = gathered_WFS[:, :num_sums].sum(0), gathered_WFS[:, num_sums:].amin(0)
        rows = [*sums_FS.unbind(), *minima_FS.unbind()]
        given = {
            column.name: -row if column.operation == "max" else row
            for column, row in zip(columns, rows[:-1], strict=True)
        }
        values = NamedValues(given | self._band_scales, self.plan.sequence)
        metrics = self._metric_values(values)
        return EagerSequences(values, self._totals(values, metrics, failed_S=rows[-1]), metrics)

    def merge_totals(self, gathered_WA: Tensor) -> Tensor:
        """See :class:`~mis_ext.correction.backend.Backend`."""
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
        """See :class:`~mis_ext.correction.backend.Backend`."""
        assert isinstance(sequences, EagerSequences)
        plan, index, values, tokens = self.plan, self.layout.index, sequences.values, self._tokens
        totals = total_values(plan, sequences.totals_A)
        over_group = totals if over_group_A is sequences.totals_A else total_values(plan, over_group_A)
        scales = scale_values(plan, totals=totals, over_group=over_group, rollout_scale=rollout_scale)
        of_group = NamedValues(over_group | scales | self._band_scales, GROUP_FORMULAS)
        metrics = self._token_metrics(sequences, totals, of_group) if token_metrics and plan.metrics else {}
        if plan.config.metrics_only:
            return Outputs(None, None, metrics)
        factor_S = torch.where(values["weighted_sequence"], values["sequence_weight"] * scales["scale_factor"], 0.0)
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
        """See :class:`~mis_ext.correction.backend.Backend`."""
        weighed_T = values_T * weights_T
        return zero_outside(weights_T.to(weighed_T.dtype), weighed_T)

    def _reduce(self, columns: Iterable[Column], op: Literal["sum", "min"]) -> Tensor:
        masks = (self._mask(column.over) for column in columns)
        return self.layout.index.reduce(map(self._row, columns), op, masks_T=masks)

    def _row(self, column: Column) -> Tensor:
        value_T: Tensor = self._tokens[column.token]
        if value_T.dtype == torch.bool:
            return self._mask(column.token)
        return -value_T if column.operation == "max" else value_T

    def _mask(self, name: str) -> Tensor:
        mask_T = self._tokens[name]
        # Without a gate on tokens several names are of one mask.
        if id(mask_T) not in self._masks:
            self._masks[id(mask_T)] = mask_as_float(mask_T)
        return self._masks[id(mask_T)]

    def _metric_values(self, values: NamedValues) -> MetricValues:
        table, like_S = self.plan.table, values["num_response"]
        amounts_NS, counts_NS = _stack(values, table.amounts, like_S), _stack(values, table.counts, like_S)
        own_NS = own_value(amounts_NS[table.own], counts_NS[table.own])
        means_NS = mean_value(amounts_NS[table.means], counts_NS[table.means])
        return MetricValues(torch.cat([own_NS, means_NS]), counts_NS)

    def _totals(self, values: NamedValues, metrics: MetricValues, *, failed_S: Tensor) -> Tensor:
        plan, table = self.plan, self.plan.table
        terms_NS = term(metrics.values_NS[table.of_call], _stack(values, table.shares, failed_S))
        sums, extremes = plan.totals[: plan.num_sum_totals - len(table.shares)], plan.totals[plan.num_sum_totals :]
        rows_AS = torch.cat([torch.stack([_as_float(values[total.sequence]) for total in sums]), terms_NS])
        sums_A = with_scatters(plan, rows_AS.sum(-1), of_rows_AN=rows_AS)
        minima = [failed_S.unsqueeze(0)]
        if extremes:
            signed = [-values[x.sequence] if x.operation == "max" else values[x.sequence] for x in extremes]
            minima.insert(0, torch.where(values["measured"], torch.stack(signed), torch.inf))
        # Padded, so that a micro-batch without sequences has extremes too.
        padded = torch.nn.functional.pad(torch.cat(minima), (0, 1), value=torch.inf)
        return torch.cat([sums_A, padded.amin(-1)])

    def _token_metrics(
        self, sequences: EagerSequences, totals: Mapping[str, Tensor], of_group: NamedValues
    ) -> dict[str, Tensor]:
        plan, table, (values_NS, counts_NS) = self.plan, self.plan.table, sequences.metrics
        of_call, num_sums, like = table.of_call, plan.num_sum_totals, sequences.totals_A[-1]
        term_N1 = sequences.totals_A[num_sums - len(table.shares) : num_sums].unsqueeze(-1)
        inverse_N1 = inverse(_stack(totals, table.total_shares, like)).unsqueeze(-1)
        known_NS = known_or_mean(counts_NS[of_call], values_NS[of_call], term_N1, inverse_N1)
        known_NS[: table.num_scaled].mul_(of_group["scale_factor"])
        over_group = [of_group.compute(row.formula) for row in plan.metrics[len(values_NS) :]]
        rows = [values_NS[: of_call.start], known_NS, values_NS[of_call.stop :]]
        if over_group:
            rows.append(torch.stack(over_group).unsqueeze(-1).expand(-1, self.layout.num_sequences))
        spread = self.layout.index.spread(torch.cat(rows), self._mask("response"))
        return {name: spread[index] for name, index in plan.metric_index.items()}


def _stack(values: NamedValues | Mapping[str, Tensor], names: tuple[str, ...], like: Tensor) -> Tensor:
    """``[N, ...]``: the values of names, one below the other; of no name of the shape of ``like``."""
    return torch.stack([values[name] for name in names]) if names else like.new_empty(0, *like.shape)


def _as_float(value: Tensor) -> Tensor:
    return mask_as_float(value) if value.dtype == torch.bool else value


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)


def _unpack_bits(packed: Tensor, length: int) -> Tensor:
    return ((packed[:, None] >> _bit_numbers(packed.device)) & 1).flatten()[:length].bool()
