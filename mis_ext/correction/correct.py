# SPDX-License-Identifier: Apache-2.0
"""Weights, keep mask, and metrics of one micro-batch: plain functions of tensors without branches on data.

The tokens of all responses lie one after the other in one tensor ``[T]``. :func:`correct`, further down, runs three
passes, as graphs of :mod:`mis_ext.correction.compiled` or operation by operation:

1. Tokens: log-ratios, from :meth:`Tokens.read` in ``tokens.py``, and what a single token decides.
2. Responses: their sums ``[F, S]`` of all context-parallel ranks, and what a response decides.
3. Batch: totals ``[A]`` of all data-parallel ranks, the scale of the weights, and the metrics of ``metrics.py``.

Example of a filter: ``rs_veto_threshold: 1.0e-4``. ``_gates`` of ``keys/reading.py`` creates
``Gate(statistic="ratio", reduce="min", low=1e-4)`` from it, by ``VETOES`` of ``keys/rows.py``. :func:`token_pass`
computes the log-ratio ``d`` of each token, and :func:`gate_sum` requests the maximum of ``-d`` in each response, which
is minus the minimum of ``d``. :func:`decide_responses` sets ``keep`` of the response to False if that minimum is below
``log 1e-4``, or if a response token has no finite ratio. :func:`output_pass` masks the response.

A response token without a finite log-ratio, such as NaN, is not ``valid``: its mask and its weight become 0, and
``nonfinite_token_fraction`` counts it. Its whole response is masked if weights are per response, if a filter is a veto,
or if a filter uses the sum or mean of a response. A veto with ``action: zero`` sets the weights of the response to 0
instead. ``metrics_only`` masks nothing. :mod:`mis_ext.hosts.guards` stops a run if most of its first tokens have no
finite log-prob.

Context-parallel ranks agree on the keep mask through ``collectives.py``. For filters on segments they first gather the
values of the tokens. Then they gather the sums of each response and add them up in rank order (``Due.merge``), so all
ranks make the same decision for each response. Last, they gather one bit per token, which the rank that holds the
token sets (``Due.gather_bits``). If a configuration can only mask whole responses, also for a NaN, no bits are needed.

==============  =======================================================================================================
``generated``   the policy generated the token: the response mask
``valid``       generated, and the log-ratio is finite
``keep``        stays in the loss mask: valid, and no gate rejects it
``weighted``    has a weight: valid, and no gate sets its weight to 0
``live``        keep and weighted
``usable``      of a response: it has a valid token, and every ratio that a statistic of the response needs is known
==============  =======================================================================================================
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.collectives import Due, Group, Message, bits_message, group_size
from mis_ext.correction.config import CorrectionConfig, Gate
from mis_ext.correction.layout import Blocks, PackedLayout, PackedStreams, segment_sums, whole_rows
from mis_ext.correction.metrics import (
    GENERATED,
    KEPT,
    LIVE,
    NUM_VALID,
    SUM_D,
    SUM_LIVE_W,
    SUM_W,
    BatchSum,
    GroupNumber,
    Max,
    Mean,
    Metric,
    MetricRow,
    Sum,
    measure,
    response_metrics,
)
from mis_ext.correction.tokens import MAX_NATS, Tokens
from mis_ext.validation import check_instance, check_tensors

# --- 1. tokens


class Inputs(NamedTuple):
    """``[T]`` float32 each: log-probs of the local tokens, their response mask, their lags if they are needed.

    ``segments_GT``: the result of :func:`segment_values`; None without gates on segments.
    """

    proximal_T: Tensor
    behavior_T: Tensor
    mask_T: Tensor
    lag_T: Tensor | None
    segments_GT: Tensor | None


def segment_values(streams: PackedStreams, gates: Sequence[Gate], gather: Callable[[Tensor], Tensor]) -> Tensor:
    """``[G + 1, T]``: the statistic of each gate in each token's segment; last, 1 where all its tokens have a ratio.

    The statistics skip tokens without a ratio. A rank may hold any part of a segment. So one gather arranges the values
    of all ranks as whole responses. Then every rank adds the same values in the same order.
    """
    t, layout, generated_R = streams.tokens, streams.layout, streams.response_mask_R != 0
    rows = [t.valid.float(), *(torch.where(t.valid, gate.row.of(t), 0.0) for gate in gates)]
    rows_FR = whole_rows(torch.stack(rows), layout, gather)
    size_R, count_R, *totals = segment_sums([generated_R, *rows_FR], generated_R, layout.sequence_R)
    for index, gate in enumerate(gates):
        if gate.reduce == "segment_mean":
            totals[index] = totals[index] / count_R.clamp(min=1.0)
    return layout.local_part(torch.stack([*totals, count_R == size_R]).float())


class Judged(NamedTuple):
    """Result of a filter for tokens ``[N, 64]`` or responses ``[S]``.

    ``value``: the statistic; the log of a ratio. ``below``, ``above``: a valid token, or a response with a valid token,
    is outside of that bound. ``passes``: neither, and the statistic is known.
    """

    value: Tensor
    below: Tensor
    above: Tensor
    passes: Tensor


def judge(gate: Gate, value: Tensor, valid: Tensor, known: Tensor | None = None) -> Judged:
    """Compare a statistic with a filter's bounds; ``known`` is False if a token without a ratio makes it unknown."""
    low, high = gate.edges
    below, above = valid & (value < low), valid & (value > high)
    inside = ~(below | above)
    return Judged(value, below, above, inside if known is None else inside & known)


class TokenResults(NamedTuple):
    """Results of single tokens; ``[N, 64]`` each, in blocks. ``weight`` is 0 where a token is not valid.

    ``log_ratio``: the input of token weights, nats. With ``when: stale`` it is 0 (weight 1) for a fresh token.
    """

    keep: Tensor
    weighted: Tensor
    weight: Tensor
    log_ratio: Tensor
    gates: Mapping[str, Judged]
    config: CorrectionConfig


def token_pass(x: Inputs, blocks: Blocks, plan: Plan, status: float = -math.inf) -> tuple[TokenResults, Tensor]:
    """Compute the results of tokens, and ``[F + 1, S]`` float64: sums and maxima of the plan, and the status."""
    t = Tokens.read(
        blocks.of_tokens(x.proximal_T),
        blocks.of_tokens(x.behavior_T),
        (blocks.of_tokens(x.mask_T) != 0.0) & blocks.is_token_NB,
        None if x.lag_T is None else blocks.of_tokens(x.lag_T),
    )
    keep = weighted = t.valid
    judged: dict[str, Judged] = {}
    segments = [] if x.segments_GT is None else [*blocks.of_tokens(x.segments_GT).unbind()]
    # Each gate reads all valid tokens, even those that another gate rejects, so their order does not matter.
    for label, gate in plan.config.all_gates.items():
        if gate.is_of_segments:
            judged[label] = judge(gate, segments.pop(0), t.valid, segments[-1] != 0.0)
        else:
            judged[label] = judge(gate, gate.row.of(t), t.valid)
        if gate.is_of_tokens and gate.action == "reject":
            keep = keep & judged[label].passes
        elif gate.is_of_tokens:
            weighted = weighted & judged[label].passes
    weight, log_ratio = t.valid.float(), t.d
    if plan.config.weight is not None and plan.config.weight.level == "token":
        if plan.config.weight.when == "stale":
            log_ratio = torch.where(t.is_stale, t.d, 0.0)
        weight = torch.where(t.valid, plan.config.weight.bounded(log_ratio), 0.0)
    s = TokenResults(keep, weighted, weight, log_ratio, judged, plan.config)
    rows, num_sums = [], len(plan.of_tokens.sums)
    for key in (*plan.of_tokens.sums, *plan.of_tokens.maxima):
        rows.append(key.formula(t, s))
    parts = [blocks.sums(rows[:num_sums])]
    if plan.of_tokens.maxima:
        parts.append(blocks.maxima(rows[num_sums:]))
    return s, torch.cat([*parts, torch.full_like(parts[0][:1], status)])


# --- 2. responses


def gate_sum(label: str, gate: Gate) -> Sum | Max:
    """The formula from which :func:`decide_responses` gets the statistic of a filter.

    ``max``: the largest value. ``min``: the largest negated value. Otherwise the sum; for ratios, of their logs.
    """
    if gate.reduce == "max":
        return Max(lambda t, s: torch.where(t.valid, s.gates[label].value, -math.inf))
    if gate.reduce == "min":
        return Max(lambda t, s: torch.where(t.valid, -s.gates[label].value, -math.inf))
    return Sum(lambda t, s: torch.where(t.valid, s.gates[label].value, 0.0))


class Responses(NamedTuple):
    """Results of responses; ``[S]`` each, equal on all context-parallel ranks.

    ``of``: sums and maxima over their tokens. ``n``, ``generated``: numbers of valid and of response tokens.
    ``log_ratio``: the input of response weights; 0 with token weights. ``gates``: the gates on responses, by label.
    """

    of: Mapping[Sum | Max, Tensor]
    n: Tensor
    generated: Tensor
    keep: Tensor
    weighted: Tensor
    weight: Tensor
    log_ratio: Tensor
    usable: Tensor
    num_kept: Tensor
    gates: Mapping[str, Judged]
    config: CorrectionConfig

    def mean(self, total: Sum) -> Tensor:
        """The mean over valid tokens; 0 without one."""
        return (self.of[total] / self.n.clamp(min=1.0)).clamp(-MAX_NATS, MAX_NATS)

    def measured(self, x: Tensor) -> Tensor:
        """``x`` for a response with a valid token, else 0."""
        return torch.where(self.n > 0.0, x, 0.0)


def decide_responses(of: Mapping[Sum | Max, Tensor], plan: Plan) -> Responses:
    """Compute the results of responses from the sums over their tokens."""
    config, n, generated = plan.config, of[NUM_VALID], of[GENERATED]
    # The product or mean over a response with an unknown ratio is unknown too.
    usable = (n > 0.0) & (n == generated) if config.needs_all_ratios else n > 0.0
    keep, weighted, gates = usable, usable, {}
    for label, key in plan.gate_sums.items():
        gate, value = config.all_gates[label], of[key]
        if gate.reduce == "min":
            value = -value
        elif gate.reduce == "mean":
            # For ratios, this is the log of the geometric mean.
            value = value / n.clamp(min=1.0)
        # Vetoes such as rs_veto_threshold: a response token without a finite ratio also vetoes.
        gates[label] = judge(gate, value, n > 0.0, n == generated if gate.is_veto else None)
        if gate.action == "reject":
            keep = keep & gates[label].passes
        else:
            weighted = weighted & gates[label].passes
    log_ratio, weight = torch.zeros_like(n), torch.ones_like(n)
    if config.weight is not None and config.weight.level != "token":
        # sequence: prod_t rho_t = exp(sum_t d_t). geometric: exp(mean_t d_t).
        log_ratio = of[SUM_D] if config.weight.level == "sequence" else of[SUM_D] / n.clamp(min=1.0)
        weight = config.weight.bounded(log_ratio)
    num_kept = torch.where(keep, of[KEPT], 0.0)
    return Responses(of, n, generated, keep, weighted, weight, log_ratio, usable, num_kept, gates, config)


# --- 3. batch


def _in_mean(r: Responses) -> tuple[Tensor, Tensor]:
    """Weights of each response in the mean that divides all weights: their sum and their number (tokens, or 1)."""
    over_kept = r.config.normalize_over == "kept"
    number = torch.where(r.keep & r.weighted, r.of[LIVE], 0.0) if over_kept else torch.where(r.usable, r.n, 0.0)
    if r.config.has_token_weights:
        weight = r.of[SUM_LIVE_W if over_kept else SUM_W]
    else:
        weight, number = r.weight, (number > 0.0).double()
    return torch.where(number > 0.0, weight, 0.0), number


IN_MEAN, NUMBER_IN_MEAN = BatchSum(lambda r: _in_mean(r)[0]), BatchSum(lambda r: _in_mean(r)[1])
# TERMS is the denominator of the framework: with a per-token loss the number of response tokens, else the number of
# responses. (The framework sums the mask, which is the same if the mask has only 0 and 1.) KEPT_TERMS is that of
# mis_denominator: kept: with a per-token loss the number of kept tokens, else the sum over responses of kept tokens /
# response tokens.
TERMS = BatchSum(lambda r: r.generated if r.config.per_token_loss else r.generated > 0.0)
KEPT_TERMS = BatchSum(lambda r: r.num_kept if r.config.per_token_loss else r.num_kept / r.generated.clamp(min=1.0))

WATCHED = (
    GENERATED,
    NUM_VALID,
    BatchSum(lambda r: r.num_kept),
    BatchSum(lambda r: r.num_kept > 0.0),
    BatchSum(lambda r: r.generated > 0.0),
)
"""The first totals of every call, for the monitor of rejection: response tokens, valid tokens, kept tokens, responses
with a kept token, and responses with a response token.
"""


def response_pass(merged_FS: Tensor, plan: Plan) -> tuple[Responses, Tensor]:
    """Compute the results of responses, and ``[A + 1]`` float64: totals of this data-parallel rank, and the status."""
    r = decide_responses(plan.of_tokens.named(merged_FS), plan)
    # A response without a response token adds nothing. All rows read this mask: the compiler sums them in one kernel.
    has_tokens_S = r.generated > 0.0
    found = []
    for key in plan.of_responses.sums:
        row_S = r.of[key] if isinstance(key, Sum) else key.formula(r)
        found.append(torch.where(has_tokens_S, row_S, 0.0).sum(dtype=torch.float64))
    extremes = []
    for key in plan.of_responses.maxima:
        extremes.append(torch.where(has_tokens_S, r.of[key], -math.inf))
    for row_S in (*extremes, merged_FS[-1]):
        # A call without responses needs extremes too.
        found.append(row_S.amax() if len(row_S) > 0 else row_S.new_full((), -math.inf))
    return r, torch.stack(found)


class Batch(NamedTuple):
    """Sums and maxima over all responses, and the factors of all weights; 0-dim.

    ``scale`` is ``denominator_factor / mean_weight``.
    """

    of: Mapping[BatchKey, Tensor]
    mean_weight: Tensor
    denominator_factor: Tensor
    scale: Tensor

    @classmethod
    def over(cls, of: Mapping[BatchKey, Tensor], own: Mapping[BatchKey, Tensor], config: CorrectionConfig) -> Batch:
        """Compute the factors over the configured scope; ``own``: the totals of this rank, for ``micro_batch``."""
        of_scope = of if config.scope == "data_parallel" else own
        mean_weight = denominator_factor = torch.ones_like(of[GENERATED])
        if config.normalize_over is not None:
            mean_weight = _ratio_or_one(of_scope[IN_MEAN], of_scope[NUMBER_IN_MEAN])
        if config.denominator == "kept":
            # The framework divides its sum by TERMS. The factor TERMS / KEPT_TERMS changes the divisor to KEPT_TERMS.
            denominator_factor = _ratio_or_one(of_scope[TERMS], of_scope[KEPT_TERMS])
        return cls(of, mean_weight, denominator_factor, denominator_factor / mean_weight)


def _ratio_or_one(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``; 1 where one of them is 0 because nothing was counted."""
    counted = (numerator > 0.0) & (denominator > 0.0)
    return torch.where(counted, numerator / torch.where(counted, denominator, 1.0), 1.0)


# --- outputs


class Passed(NamedTuple):
    """Results of the passes.

    ``merged_FS``: ``[F + 1, S]``, sums and maxima of the responses. ``own_A``, ``group_A``: ``[A + 1]``, totals of this
    data-parallel rank, and of all. The last element of each is a status. ``weights_T``: the weights. ``loss_mask_T``:
    the mask after rejection. ``keep_S``: bool, the kept responses. ``metrics_MT``: metrics per token, or None.
    """

    merged_FS: Tensor
    own_A: Tensor
    group_A: Tensor
    weights_T: Tensor
    loss_mask_T: Tensor
    keep_S: Tensor
    metrics_MT: Tensor | None


def output_pass(
    s: TokenResults, r: Responses, sums: tuple[Tensor, ...], mask_T: Tensor, blocks: Blocks, plan: Plan
) -> Passed:
    """Compute the fields of :class:`Passed` that follow its three ``sums``."""
    merged_FS, own_A, group_A = sums
    b = Batch.over(plan.of_responses.named(group_A), plan.of_responses.named(own_A), plan.config)
    # w_t = (weight of the token) * (weight of its response) * scale, 0 without a ratio, or where a gate sets it to 0.
    factor_S = torch.where(r.weighted, r.weight * b.scale, 0.0).float()
    weight_NB = torch.where(s.weighted, s.weight * blocks.spread_to_blocks(factor_S), 0.0)
    keep_NB = s.keep & blocks.spread_to_blocks(r.keep)
    metrics_MT = None
    if plan.token_metrics and plan.rows:
        rows_MS = response_metrics(r, b, plan.rows.values())
        # Tokens outside the response mask read a column of zeros. Its concatenation makes the compiler write the table
        # to memory; otherwise it would divide sum by count again for each token.
        place_T = torch.where(mask_T != 0.0, blocks.response_T, len(r.n))
        metrics_MT = torch.cat([rows_MS, rows_MS.new_zeros(len(rows_MS), 1)], -1).index_select(-1, place_T)
    # A kept token keeps the value of its mask, such as 0.25.
    loss_mask_T = torch.where(blocks.to_tokens(keep_NB), mask_T, 0.0)
    return Passed(merged_FS, own_A, group_A, blocks.to_tokens(weight_NB), loss_mask_T, r.keep, metrics_MT)


Exchange = Callable[[Tensor], Tensor] | None
"""Maps the sums or totals of this rank to those of all ranks; None for a single rank."""
_ALONE = Due((), torch.device("cpu"))
"""A single rank has no collectives."""


def run_passes(
    x: Inputs, blocks: Blocks, plan: Plan, over_cp: Exchange, over_dp: Exchange, *, status: float = -math.inf
) -> Passed:
    """All passes, operation by operation; ``status``: what this rank sends, see ``collectives.py``."""
    s, parts_FS = token_pass(x, blocks, plan, status)
    merged_FS = parts_FS if over_cp is None else over_cp(parts_FS)
    r, own_A = response_pass(merged_FS, plan)
    group_A = own_A if over_dp is None else over_dp(own_A)
    return output_pass(s, r, (merged_FS, own_A, group_A), x.mask_T, blocks, plan)


# --- what a configuration needs

BatchKey = Sum | Max | BatchSum


class Keys(NamedTuple):
    """Sums and maxima that ranks exchange, in this order; a status follows them."""

    sums: tuple[Any, ...] = ()
    maxima: tuple[Any, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[BatchKey]) -> Keys:
        """The keys in their order, sums first."""
        maxima = tuple(key for key in keys if isinstance(key, Max))
        return cls(tuple(key for key in keys if not isinstance(key, Max)), maxima)

    def named(self, values: Tensor) -> dict[Any, Tensor]:
        """The rows of exchanged values by their keys."""
        return dict(zip((*self.sums, *self.maxima), values[:-1].unbind(), strict=True))


class Plan(NamedTuple):
    """The computations of a call.

    ``token_metrics``: whether to compute metrics per token. ``rows``: the metrics that are emitted, by public name.
    ``gate_sums``: the sum or maximum that decides each gate on responses, by label. ``of_tokens``: sums of each
    response over its tokens. ``of_responses``: totals over responses.
    """

    config: CorrectionConfig
    token_metrics: bool
    rows: Mapping[str, MetricRow]
    gate_sums: Mapping[str, Sum | Max]
    of_tokens: Keys = Keys()
    of_responses: Keys = Keys()


@functools.lru_cache(maxsize=32)
def plan_of(config: CorrectionConfig, *, token_metrics: bool = False) -> Plan:
    """The sums, totals, and metrics that a configuration needs: run the formulas once and record which keys they read.

    The formulas read only fields of the plan that are already set.
    """
    gate_sums = {label: gate_sum(label, gate) for label, gate in config.all_gates.items() if not gate.is_of_tokens}
    plan = Plan(config, token_metrics, config.rows, gate_sums)
    # These record the keys in order. Every value is 1, which has a log. No formula branches on a value.
    of, total = (defaultdict[Any, Tensor](lambda: torch.ones(1, dtype=torch.float64, device="cpu")) for _ in range(2))
    r = decide_responses(of, plan)
    response_metrics(r, Batch.over(total, total, config), plan.rows.values())
    totals = dict.fromkeys((*WATCHED, *total))
    for key in totals:
        _ = of[key] if isinstance(key, (Sum, Max)) else key.formula(r)
    return plan._replace(of_tokens=Keys.of(of), of_responses=Keys.of(totals))


# --- a call


@dataclass(frozen=True, eq=False)
class Correction:
    """Weights, keep masks, and metrics of one call, detached.

    Attributes:
        weights_T: ``[T]`` float32, the weight of the loss of each local token. A rejected token keeps its weight,
            because the mask removes it. The weight is 0 for a token outside the response mask, for a token without a
            finite ratio, and where a gate has ``action: zero``. With ``metrics_only`` all weights are 1.
        loss_mask_R: ``[R]`` float32, the given mask on tokens that stay in the loss, else 0. The framework multiplies
            the loss by it. Equal on all context-parallel ranks. With ``metrics_only`` it is the given mask.
        token_metrics: ``[T]`` per selected metric, the value of the token's response, 0 outside the response mask: see
            :func:`~mis_ext.correction.metrics.response_metrics`. Empty unless requested.
        status: 0-dim, whether a rank failed from which this call needed data: see
            :mod:`mis_ext.correction.collectives`.
    """

    config: CorrectionConfig
    layout: PackedLayout
    weights_T: Tensor
    loss_mask_R: Tensor
    token_metrics: dict[str, Tensor]
    status: Tensor
    _found: Passed
    _plan: Plan

    @functools.cached_property
    def batch(self) -> Batch:
        """Totals over responses: of all data-parallel ranks if a metric or the scale needs them, else of this rank."""
        of_group, own = map(self._plan.of_responses.named, (self._found.group_A, self._found.own_A))
        return Batch.over(of_group, own, self.config)

    @property
    def watched(self) -> Tensor:
        """``[5]``: the totals :data:`WATCHED`, on this data-parallel rank."""
        return self._found.own_A[: len(WATCHED)]

    @property
    def keep_mask_T(self) -> Tensor:
        """``[T]`` bool, local tokens that stay in the loss."""
        return self.layout.local_part(self.keep_mask_R)

    @property
    def keep_mask_R(self) -> Tensor:
        """``[R]`` bool, the same for whole responses."""
        return self.loss_mask_R != 0

    @functools.cached_property
    def _sums_and_counts(self) -> tuple[Tensor, Tensor]:
        r = decide_responses(self._plan.of_tokens.named(self._found.merged_FS), self._plan)
        return measure(self._plan.rows.values(), r, self.batch)

    @property
    def measured(self) -> dict[str, Tensor]:
        """``[S]`` bool per selected metric: the responses that it counts; for a group metric, those with a token."""
        _, count_MS = self._sums_and_counts
        return dict(zip(self._plan.rows, (count_MS > 0.0).unbind(), strict=True))

    @property
    def metrics(self) -> dict[str, Metric]:
        """Selected metrics by public name: of this data-parallel rank, or of all of them for group metrics."""
        sum_M, count_M = (x_MS.sum(-1).float() for x_MS in self._sums_and_counts)
        return {
            name: GroupNumber(row.value(self.batch).float()) if row.over == "group" else Mean(total, count)
            for (name, row), total, count in zip(self._plan.rows.items(), sum_M, count_M, strict=True)
        }

    def weigh(self, loss_T: Tensor) -> Tensor:
        """``[T]``: the loss times the weights; 0 where the weight is 0. The gradient is the weight."""
        return torch.where(self.weights_T != 0.0, loss_T * self.weights_T, 0.0)


def compute_correction(
    *,
    proximal_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    response_mask_R: Tensor,
    layout: PackedLayout,
    config: CorrectionConfig,
    cp_group: Group | None = None,
    dp_group: Group | None = None,
    token_metrics: bool = False,
    lag_T: Tensor | None = None,
) -> Correction:
    """Correct for the difference between the policy that sampled and the policy that trains.

    Args:
        proximal_logprobs_T: ``[T]``, nats, any float dtype; see :class:`~mis_ext.PackedStreams`.
        behavior_logprobs_T: ``[T]``, nats, any float dtype.
        response_mask_R: ``[R]``, of whole responses on every rank.
        layout: Where the local tokens lie in the responses.
        config: The configuration.
        cp_group: Ranks that hold other parts of the same responses; None for one rank.
        dp_group: Ranks that hold other responses, without context parallelism; None for one rank.
        token_metrics: Also compute the selected metrics per token.
        lag_T: ``[T]``, see :class:`~mis_ext.PackedStreams`; required and used only with ``staleness``.

    Raises:
        ValueError: Lengths differ, the layout does not fit ``cp_group``, or lags are missing.
    """
    streams = PackedStreams(proximal_logprobs_T, behavior_logprobs_T, response_mask_R, layout, lag_T)
    check_instance("config", config, CorrectionConfig)
    check_instance("layout", layout, PackedLayout)
    cp_group = cp_group if group_size(cp_group) > 1 else None
    with due_of(config, layout.response_lengths, cp_group, dp_group, device=layout.device).reporting_errors():
        check_streams(streams, config, cp_group)
    return correct(streams, config, cp_group=cp_group, dp_group=dp_group, token_metrics=token_metrics)


@torch.no_grad()
def correct(
    streams: PackedStreams,
    config: CorrectionConfig,
    *,
    cp_group: Group | None = None,
    dp_group: Group | None = None,
    token_metrics: bool = False,
) -> Correction:
    """:func:`compute_correction` of a micro-batch that :func:`check_streams` has checked; the arguments are the same.

    If it fails, the other ranks see the error in :attr:`Correction.status`, if a collective is still due.
    """
    layout, device = streams.layout, streams.response_mask_R.device
    is_alone = cp_group is None and dp_group is None
    due = _ALONE if is_alone else due_of(config, layout.response_lengths, cp_group, dp_group, device=device)
    # No other rank waits for a single rank.
    with contextlib.nullcontext() if is_alone else due.reporting_errors():
        # Each collective below is also in due_of, in this order.
        plan, mask_R = plan_of(config, token_metrics=token_metrics), streams.response_mask_R.float()
        mask_T = layout.local_part(mask_R)
        log_probs = streams.proximal_logprobs_T.detach().float(), streams.behavior_logprobs_T.detach().float()
        segment_gates = config.segment_gates
        segments_GT = segment_values(streams, segment_gates, due.gather) if segment_gates else None
        x = Inputs(*log_probs, mask_T, streams.lag_T, segments_GT)
        over_cp = None if cp_group is None else functools.partial(due.merge, num_sums=len(plan.of_tokens.sums))
        is_over_dp = dp_group is not None and config.needs_group
        over_dp = functools.partial(due.merge, num_sums=len(plan.of_responses.sums)) if is_over_dp else None
        wants_graphs = mask_R.is_cuda if config.compile == "auto" else config.compile
        if wants_graphs and not torch.compiler.is_compiling():
            # This import loads the compiler.
            from mis_ext.correction.compiled import graphs_of

            found = graphs_of(config, token_metrics=token_metrics).run(x, layout, over_cp, over_dp)
        else:
            found = run_passes(x, layout.blocks, plan, over_cp, over_dp)
        weights_T, loss_mask_R, status_1 = found.weights_T, mask_R, found.group_A[-1:]
        if config.metrics_only:
            weights_T = torch.ones_like(weights_T)
        elif layout.is_whole:
            loss_mask_R = found.loss_mask_T
        elif not config.rejects_single_tokens:
            # All ranks make the same decision for each response, from the same sums.
            loss_mask_R = torch.where(found.keep_S.index_select(0, layout.sequence_R), mask_R, 0.0)
        else:
            # Only the rank that has a token knows whether it stays.
            own_R = torch.zeros_like(mask_R, dtype=torch.bool).index_copy(0, layout.position_T, found.loss_mask_T != 0)
            keep_R, status_1 = due.gather_bits(own_R, status_1)
            loss_mask_R = torch.where(keep_R, mask_R, 0.0)
        metrics = {} if found.metrics_MT is None else dict(zip(plan.rows, found.metrics_MT.unbind(), strict=True))
        return Correction(config, layout, weights_T, loss_mask_R, metrics, status_1.squeeze(0), found, plan)


def due_of(
    config: CorrectionConfig,
    response_lengths: Sequence[int],
    cp_group: Group | None,
    dp_group: Group | None,
    *,
    device: torch.device,
) -> Due:
    """The collectives of a call, in the order in which :func:`correct` joins them."""
    plan, num_sequences, num_tokens = plan_of(config), len(response_lengths), sum(response_lengths)
    messages = []
    if config.segment_gates:
        messages.append(Message((1 + len(config.segment_gates), num_tokens), torch.float32, cp_group))
    messages.append(Message((sum(map(len, plan.of_tokens)) + 1, num_sequences), torch.float64, cp_group))
    if config.needs_group:
        messages.append(Message((sum(map(len, plan.of_responses)) + 1,), torch.float64, dp_group))
    if config.rejects_single_tokens:
        messages.append(bits_message(num_tokens, cp_group))
    return Due(messages, device)


def check_streams(streams: PackedStreams, config: CorrectionConfig, cp_group: Group | None) -> None:
    """Raise an error if tensors do not fit together, before any communication."""
    layout = streams.layout
    num_local, num_whole = layout.num_local_tokens, layout.num_whole_tokens
    sizes = {"proximal_logprobs_T": num_local, "behavior_logprobs_T": num_local, "response_mask_R": num_whole}
    sizes |= {} if streams.lag_T is None else {"lag_T": num_local}
    for name, size in sizes.items():
        values = getattr(streams, name)
        check_tensors({name: values})
        if values.shape != (size,):
            raise ValueError(f"{name} must be a 1-D tensor of {size} tokens, got shape {list(values.shape)}")
    ranks = 1 if cp_group is None else group_size(cp_group)
    if layout.is_whole != (ranks == 1):
        kind, needed = ("whole", "one rank") if layout.is_whole else ("context_parallel", "several ranks")
        raise ValueError(f"a layout of PackedLayout.{kind} needs {needed}, but cp_group has {ranks}")
    if config.staleness and streams.lag_T is None:
        raise ValueError(
            "mis_staleness, rs_max_staleness, and tis_when: stale need the lags of the tokens: pass lag, lags (for "
            "lists), or lag_T of PackedStreams"
        )
