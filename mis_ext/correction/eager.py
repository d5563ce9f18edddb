# SPDX-License-Identifier: Apache-2.0
"""The eager backend: PyTorch operations on any device.

It says what the numbers are, and compiles with ``torch.compile(fullgraph=True)``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.formula import Column, NamedValues
from mis_ext.correction.log_ratio import PackedStreams, mask_as_float, zero_outside
from mis_ext.correction.metrics import GROUP_FORMULAS, inverse, known_or_mean, mean_value, own_value, term
from mis_ext.correction.pipeline import Outputs, Sequences
from mis_ext.correction.plan import Plan, scale_values, total_values, with_scatters

_BITS = 8


class EagerSequences(NamedTuple):
    """What the pass over sequences found.

    ``values``: numbers of each sequence ``[S]``, by the names of the plan. ``totals_A``: totals of this call, in the
    order of the plan; behind them the status of the ranks. ``metrics_NS``, ``counts_NS``: the plan's metrics of
    sequences, and how many tokens of each sequence they count.
    """

    values: NamedValues
    totals_A: Tensor
    metrics_NS: Tensor
    counts_NS: Tensor


class EagerBackend:
    """One call's passes, in the order of the methods."""

    def __init__(self, streams: PackedStreams, plan: Plan) -> None:
        self.streams, self.layout, self.plan = streams, streams.layout, plan
        self.tokens = tokens = streams.tokens
        self._given = {
            "log_ratio": tokens.log_ratio_T,
            "proximal": tokens.proximal_T,
            "behavior": tokens.behavior_T,
            "valid": tokens.valid_mask_T,
            "response": tokens.response_mask_T,
        }
        self._tokens = NamedValues(self._given, plan.token)
        self._masks: dict[int, Tensor] = {}

    def take_given(self, given_FT: Tensor) -> None:
        """The plan's ``given_names`` of each local token; before any other pass, where there are some."""
        named = dict(zip(self.plan.given_names, given_FT.unbind(), strict=True))
        self._tokens = NamedValues(self._given | named, self.plan.token)

    def token_statistics(self) -> Tensor:
        """``[F + 1, S]``, this rank's share of the plan's columns, and a row for the status: ``inf``, no failure."""
        plan, reduce = self.plan, self.layout.index.reduce_masked
        sums, minima = plan.columns[: plan.num_sum_columns], plan.columns[plan.num_sum_columns :]
        sums_FS = reduce(map(self._row_and_mask, sums), "sum")
        status_FS = sums_FS.new_full((1, sums_FS.shape[1]), torch.inf)
        if not minima:
            return torch.cat([sums_FS, status_FS])
        minima_FS = reduce(map(self._row_and_mask, minima), "min")
        return torch.cat([sums_FS, minima_FS, status_FS])

    def keep_bits(self) -> Tensor:
        """uint8, one bit per token of the whole responses: set where a local token passes the gates on tokens."""
        position_T = self.layout.index.position_T
        assert position_T is not None
        flags_R = torch.zeros(self.layout.num_whole_tokens, dtype=torch.uint8, device=position_T.device)
        flags_R = flags_R.index_copy(0, position_T, self._tokens["kept"].to(torch.uint8))
        padded = torch.nn.functional.pad(flags_R, (0, -len(flags_R) % _BITS))
        return (padded.view(-1, _BITS) << _bit_numbers(padded.device)).sum(1, dtype=torch.uint8)

    def sequences(self, gathered_WFS: Tensor) -> EagerSequences:
        """What follows for sequences from the shares of all context-parallel ranks."""
        plan, table, num_sums = self.plan, self.plan.table, self.plan.num_sum_columns
        *rows, failed_S = [*gathered_WFS[:, :num_sums].sum(0).unbind(), *gathered_WFS[:, num_sums:].amin(0).unbind()]
        given = dict(zip(plan.column_names, rows, strict=True))
        for column, name in zip(plan.columns[num_sums:], plan.column_names[num_sums:], strict=True):
            if column.operation == "max":
                given[name] = -given[name]
        values = NamedValues(given, plan.sequence)

        amounts_NS, counts_NS = _stack(values, table.amounts, failed_S), _stack(values, table.counts, failed_S)
        own_NS = own_value(amounts_NS[table.own], counts_NS[table.own])
        means_NS = mean_value(amounts_NS[table.means], counts_NS[table.means])
        metrics_NS = torch.cat([own_NS, means_NS])

        terms_NS = term(metrics_NS[table.of_call], _stack(values, table.shares, failed_S))
        rows_AS = torch.cat([_stack(values, plan.summed, failed_S), terms_NS])
        sums_A = rows_AS.sum(-1)
        if plan.scatters:
            with_scatters(plan, sums_A, of_rows_AN=rows_AS)
        minima = []
        for operation, name in plan.extremes.values():
            value_S = -values[name] if operation == "max" else values[name]
            minima.append(torch.where(values["measured"], value_S, torch.inf))
        minima_AS = torch.stack([*minima, failed_S])
        # Padded, so that a micro-batch without sequences has extremes too.
        padded = torch.nn.functional.pad(minima_AS, (0, 1), value=torch.inf)
        return EagerSequences(values, torch.cat([sums_A, padded.amin(-1)]), metrics_NS, counts_NS)

    def merge_totals(self, gathered_WA: Tensor) -> Tensor:
        """``[A]`` totals of all data-parallel ranks from those of each."""
        num_sums = self.plan.num_sum_totals
        sums_A = with_scatters(self.plan, gathered_WA[:, :num_sums].sum(0), of_rows_AN=gathered_WA.T)
        return torch.cat([sums_A, gathered_WA[:, num_sums:].amin(0)])

    def outputs(
        self,
        sequences: Sequences,
        *,
        over_group_A: Tensor,
        keep_bits: Tensor | None,
        token_metrics: bool,
    ) -> Outputs:
        """Weights, masks, and where asked for the metrics of each token's sequence."""
        assert isinstance(sequences, EagerSequences)
        plan, index, values, tokens = self.plan, self.layout.index, sequences.values, self._tokens
        totals = total_values(plan, sequences.totals_A)
        over_group = totals if over_group_A is sequences.totals_A else total_values(plan, over_group_A)
        scales = {}
        if plan.scale_factors:
            scales = scale_values(plan, totals=totals, over_group=over_group)
        of_group = NamedValues(over_group | scales, GROUP_FORMULAS)
        metrics = self._token_metrics(sequences, totals, of_group) if token_metrics and plan.metrics else {}
        if plan.config.metrics_only:
            return Outputs(None, None, metrics)
        # w_t = (weight of the token) * (weight of its sequence) * scale, 0 where a gate or a missing ratio says so.
        factor_S = values["sequence_weight"] * scales["scale_factor"] if scales else values["sequence_weight"]
        factor_S = torch.where(values["weighted_sequence"], factor_S, 0.0)
        weights_T = self._mask("weighted") * factor_S.index_select(-1, index.sequence_T)
        if "token_weight" in plan.token:
            weights_T = weights_T * tokens["token_weight"]
        kept_S = values["kept_sequence"]
        # What a kept token counts is the caller's business: a mask of 0.25 comes back as that.
        given_R = self.streams.response_mask_R.float()
        if self.layout.is_whole:
            kept_T = self._mask("kept") * mask_as_float(kept_S).index_select(-1, index.sequence_T)
            loss_mask_R = zero_outside(kept_T, given_R)
        else:
            kept_R = self.streams.response_mask_R.bool() & index.to_whole(kept_S)
            if keep_bits is not None:
                kept_R = kept_R & _unpack_bits(keep_bits, len(kept_R))
            loss_mask_R = torch.where(kept_R, given_R, 0.0)
        return Outputs(weights_T, loss_mask_R, metrics)

    def weigh(self, values_T: Tensor, weights_T: Tensor) -> Tensor:
        """``[T]`` values times weights, 0 where the weight is 0, whatever the value; the gradient is the weight."""
        weighed_T = values_T * weights_T
        return zero_outside(weights_T.to(weighed_T.dtype), weighed_T)

    def _row_and_mask(self, column: Column) -> tuple[Tensor, Tensor]:
        """``[T]`` each: what the column reduces, and the tokens that count."""
        value_T = self._tokens[column.token]
        if value_T.dtype == torch.bool:
            value_T = self._mask(column.token)
        return -value_T if column.operation == "max" else value_T, self._mask(column.over)

    def _mask(self, name: str) -> Tensor:
        mask_T = self._tokens[name]
        # Without a gate on tokens several names are of one mask.
        if id(mask_T) not in self._masks:
            self._masks[id(mask_T)] = mask_as_float(mask_T)
        return self._masks[id(mask_T)]

    def _token_metrics(
        self, sequences: EagerSequences, totals: Mapping[str, Tensor], of_group: NamedValues
    ) -> dict[str, Tensor]:
        """``[T]`` each: what every token of a sequence is given, as :attr:`MetricRow.spread_formulas` say."""
        plan, table, (_, totals_A, metrics_NS, counts_NS) = self.plan, self.plan.table, sequences
        of_call, num_sums = table.of_call, plan.num_sum_totals
        term_N1 = totals_A[num_sums - len(table.shares) : num_sums].unsqueeze(-1)
        inverse_N1 = inverse(_stack(totals, table.total_shares, totals_A[-1])).unsqueeze(-1)
        known_NS = known_or_mean(counts_NS[of_call], metrics_NS[of_call], term_N1, inverse_N1)
        if plan.scale_factors:
            known_NS[: table.num_scaled].mul_(of_group["scale_factor"])
        rows = [metrics_NS[: of_call.start], known_NS, metrics_NS[of_call.stop :]]
        if plan.group:
            numbers_N = torch.stack([*map(of_group.compute, plan.group)])
            rows.append(numbers_N.unsqueeze(-1).expand(-1, self.layout.num_sequences))
        spread = self.layout.index.spread(torch.cat(rows), self._mask("response"))
        return dict(zip(plan.metric_index, map(spread.__getitem__, plan.metric_index.values()), strict=True))


def _stack(values: NamedValues | Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> Tensor:
    """``[N, ...]``: the values of names, one below the other; of no name of the shape of ``like``."""
    return torch.stack([*map(values.__getitem__, names)]) if names else like.new_empty(0, *like.shape)


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(_BITS, dtype=torch.uint8, device=device)


def _unpack_bits(packed: Tensor, length: int) -> Tensor:
    return ((packed[:, None] >> _bit_numbers(packed.device)) & 1).flatten()[:length].bool()
