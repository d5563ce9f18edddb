# SPDX-License-Identifier: Apache-2.0
"""The passes of a correction: plain functions of tensors without branches on data.

The tokens of all responses lie one after the other in one tensor ``[T]``. :func:`run_passes` has three passes:

1. Tokens: log-ratios, what a single token decides, and the values that each response sums up.
2. Responses: sums ``[F, S]`` of all context-parallel ranks, and what a response decides.
3. Batch: totals ``[A]`` of all data-parallel ranks, the scale of the weights, and the metrics.

:mod:`mis_ext.correction.correct` calls them, with the collectives between them.

To follow one filter, take ``rs_veto_threshold: 1e-4``. It is ``Gate(statistic="ratio", reduce="min", low=1e-4)``.
:func:`judge` finds the log-ratio of each token and where it is below ``log 1e-4``. :func:`gate_row` gives minus the
log-ratio under the key ``(label, "extreme")``, whose maximum over a response :func:`response_pass` compares. A response
token without a finite ratio vetoes too. ``keep`` of the response is then False, and :func:`output_pass` masks it.

A response token without a finite log-ratio, such as NaN, is not ``valid``: its mask and its weight become 0, and
``nonfinite_token_fraction`` counts it. A weight of responses, or a gate on their sum or mean, needs all ratios, and
masks the whole response. So does a veto; with ``action: zero`` it sets weights to 0. ``metrics_only`` masks nothing.
In the first calls :mod:`mis_ext.hosts.guards` stops a run in which most tokens have no finite log-prob.

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

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig, Gate
from mis_ext.correction.layout import Blocks
from mis_ext.correction.metrics import (
    BATCH_MAXIMA,
    BATCH_SUMS,
    PREFIX,
    TOKEN_MAXIMA,
    TOKEN_SUMS,
    Decided,
    Key,
    MetricRow,
    Responses,
    Totals,
    response_metrics,
)
from mis_ext.correction.segments import KNOWN_SEGMENT
from mis_ext.correction.tokens import Tokens, bounded_exp

_Name = TypeVar("_Name", bound=Key)


class Plan(NamedTuple):
    """What a call with a configuration computes: nothing that the configuration does not need.

    ``gates``: by label, with the one that a weight with ``mode: mask`` implies. ``segment_gates``: those on segments.
    ``rows``: the metrics that are emitted, by public name. ``needs_whole``: a token without a ratio makes its response
    unusable. ``sums``, ``maxima``: over the tokens of each response. ``totals``, ``extremes``: sums and maxima over all
    responses. ``needs_group``: the totals of other data-parallel ranks are needed.
    """

    config: CorrectionConfig
    gates: Mapping[str, Gate]
    segment_gates: Mapping[str, Gate]
    rows: Mapping[str, MetricRow]
    needs_whole: bool
    sums: tuple[Key, ...] = ()
    maxima: tuple[Key, ...] = ()
    totals: tuple[str, ...] = ()
    extremes: tuple[str, ...] = ()
    needs_group: bool = False


class _Asked(dict[Any, Tensor]):
    """Notes what formulas read, in the order in which they first read it. Every value is 1."""

    def __missing__(self, key: Any) -> Tensor:
        self[key] = torch.ones(1, dtype=torch.float64, device="cpu")
        return self[key]


WATCHED = ("generated", "n", "kept tokens", "kept responses", "responses")
"""Totals that every call has, for the monitor of rejection."""
_FACTORS = ("mean weight", "denominator factor", "scale")


@functools.lru_cache(maxsize=32)
def plan_of(config: CorrectionConfig) -> Plan:
    """The sums, totals, and metrics that a configuration needs: its formulas run once on values that note who asks."""
    gates, rows = config.all_gates, {PREFIX + row.name: row for row in config.selected_rows}
    on_segments = {label: gate for label, gate in gates.items() if gate.is_of_segments}
    plan = Plan(config, gates, on_segments, rows, config.needs_whole_sequences)
    of, total = _Asked(), _Asked()
    r = decide(of, plan)
    add_scale(total, total, config)
    response_metrics(r, total, rows.values())
    totals = [name for name in dict.fromkeys((*WATCHED, *total)) if name not in _FACTORS]
    for name in totals:
        total_row(name, r)
    maxima = tuple(key for key in of if key in TOKEN_MAXIMA or (isinstance(key, tuple) and key[1] == "extreme"))
    return plan._replace(
        sums=tuple(key for key in of if key not in maxima),
        maxima=maxima,
        totals=tuple(name for name in totals if name not in BATCH_MAXIMA),
        extremes=tuple(name for name in totals if name in BATCH_MAXIMA),
        needs_group=any(row.over == "group" for row in rows.values())
        or (config.is_scaled and config.scope == "data_parallel"),
    )


# --- 1. tokens


class Inputs(NamedTuple):
    """``[T]`` float32 each: log-probs of the local tokens, their response mask, their lags if they are needed.

    ``segments``: the result of :func:`~mis_ext.correction.segments.segment_values`, empty without gates on segments.
    """

    proximal_T: Tensor
    behavior_T: Tensor
    mask_T: Tensor
    lag_T: Tensor | None
    segments: dict[str, Tensor]


class Judged(NamedTuple):
    """What a gate finds of tokens, ``[N, 64]`` each: its statistic, where that is outside, where the gate looks."""

    value: Tensor
    below: Tensor
    above: Tensor
    looked_at: Tensor
    passes: Tensor


def judge(t: Tokens, gates: Mapping[str, Gate], segments: Mapping[str, Tensor]) -> dict[str, Judged]:
    """Apply every gate to all valid tokens, whatever the others reject, so that their order does not matter.

    ``segments``: ``[N, 64]``, the statistics of segments by the label of their gate, and which are known.
    """
    judged: dict[str, Judged] = {}
    # Gates on tokens first: others may look at what these leave.
    for label, gate in sorted(gates.items(), key=lambda item: not item[1].is_of_tokens):
        value, (low, high) = segments[label] if gate.is_of_segments else gate.row.of(t), gate.edges
        below, above = value < low, value > high
        passes = ~(below | above)
        if gate.is_of_segments:
            # The statistic of a segment with a token without a ratio is not known.
            passes = passes & segments[KNOWN_SEGMENT]
        looked_at = t.valid if gate.after is None else t.valid & judged[gate.after].passes
        judged[label] = Judged(value, below, above, looked_at, passes)
    return judged


def gate_row(what: str, gate: Gate, found: Judged) -> Tensor:
    """``[N, 64]``: what a response sums up of a gate, or takes the maximum of."""
    if what == "n":
        return found.looked_at
    if what == "low":
        return found.looked_at & found.below
    if what == "high":
        return found.looked_at & found.above
    if what == "extreme":
        return torch.where(found.looked_at, found.value if gate.reduce == "max" else -found.value, -math.inf)
    # The sum of the statistic; "shown" as its bounds are written, of a ratio and not of its log.
    value = bounded_exp(found.value) if what == "shown" and gate.row.is_log else found.value
    return torch.where(found.looked_at, value, 0.0)


def token_pass(x: Inputs, blocks: Blocks, plan: Plan) -> tuple[Decided, Tensor]:
    """What tokens decide, and ``[F + 1, S]`` float64: the plan's sums and maxima over local tokens, and no failure."""
    t = Tokens.read(
        blocks.of_tokens(x.proximal_T),
        blocks.of_tokens(x.behavior_T),
        (blocks.of_tokens(x.mask_T) != 0.0) & blocks.is_token_NB,
        None if x.lag_T is None else blocks.of_tokens(x.lag_T),
    )
    keep = weighted = t.valid
    weight, log_ratio = t.valid.float(), t.d
    if plan.config.weight is not None and plan.config.weight.level == "token":
        if plan.config.weight.when == "stale":
            log_ratio = torch.where(t.is_stale, t.d, 0.0)
        weight = torch.where(t.valid, plan.config.weight.bounded(log_ratio), 0.0)
    judged: Mapping[str, Judged] = {}
    if plan.gates:
        judged = judge(t, plan.gates, {label: blocks.of_tokens(value_T) for label, value_T in x.segments.items()})
    for label, gate in plan.gates.items():
        if gate.is_of_tokens and gate.action == "reject":
            keep = keep & judged[label].passes
        elif gate.is_of_tokens:
            weighted = weighted & judged[label].passes
    s = Decided(keep, weighted, weight, log_ratio, plan.config)
    rows = []
    for key in (*plan.sums, *plan.maxima):
        if isinstance(key, tuple):
            rows.append(gate_row(key[1], plan.gates[key[0]], judged[key[0]]))
        else:
            rows.append((TOKEN_MAXIMA if key in TOKEN_MAXIMA else TOKEN_SUMS)[key](t, s))
    sums_FS = blocks.sums(rows[: len(plan.sums)])
    no_failure_1S = torch.full_like(sums_FS[:1], -math.inf)
    if not plan.maxima:
        return s, torch.cat([sums_FS, no_failure_1S])
    return s, torch.cat([sums_FS, blocks.maxima(rows[len(plan.sums) :]), no_failure_1S])


# --- 2. responses


def decide(of: Mapping[Key, Tensor], plan: Plan) -> Responses:
    """What whole responses decide, from the sums over their tokens."""
    config, n, generated = plan.config, of["n"], of["generated"]
    # The product or mean over a response with an unknown ratio is unknown too.
    usable = (n > 0.0) & (n == generated) if plan.needs_whole else n > 0.0
    keep, weighted, gates = usable, usable, {}
    for label, gate in plan.gates.items():
        if gate.is_of_tokens:
            continue
        count = n if gate.after is None else of[label, "n"]
        if gate.reduce in ("min", "max"):
            value = of[label, "extreme"] if gate.reduce == "max" else -of[label, "extreme"]
        else:
            # Of ratios the total is that of their logs: the log of the product, or of the geometric mean.
            value = of[label, "total"] / count.clamp(min=1.0) if gate.reduce == "mean" else of[label, "total"]
        low, high = gate.edges
        below, above = value < low, value > high
        if gate.after is not None:
            # A gate that looks at no token, because of another gate, decides nothing.
            below, above = below & (count > 0.0), above & (count > 0.0)
        gates[label] = (value, below, above)
        passes = ~(below | above)
        if gate.is_veto:
            # rs_veto_threshold and its like: a response token without a finite ratio vetoes too.
            passes = passes & (n == generated)
        keep = keep & passes if gate.action == "reject" else keep
        weighted = weighted & passes if gate.action == "zero" else weighted
    log_ratio, weight = torch.zeros_like(n), torch.ones_like(n)
    if config.weight is not None and config.weight.level != "token":
        # sequence: prod_t rho_t = exp(sum_t d_t). geometric: exp(mean_t d_t).
        log_ratio = of["d"] if config.weight.level == "sequence" else of["d"] / n.clamp(min=1.0)
        weight = config.weight.bounded(log_ratio)
    num_kept = torch.where(keep, of["kept"], 0.0)
    return Responses(of, n, generated, keep, weighted, weight, log_ratio, usable, num_kept, gates, config)


def total_row(name: str, r: Responses) -> Tensor:
    """``[S]``: what each response adds to a total, or the values of which it is the maximum."""
    formula = BATCH_MAXIMA.get(name) or BATCH_SUMS.get(name)
    return r.of[name] if formula is None else formula(r)


def response_pass(merged_FS: Tensor, plan: Plan) -> tuple[Responses, Tensor]:
    """What responses decide, and ``[A + 1]`` float64: totals of this data-parallel rank, and last the status."""
    r = decide(by_name(merged_FS, plan.sums, plan.maxima), plan)
    # What all of them read lets the compiler sum them in one kernel: a response without a response token adds nothing.
    has_tokens_S = r.generated > 0.0
    found, pad = [], functools.partial(torch.nn.functional.pad, pad=(0, 1), value=-math.inf)
    for name in plan.totals:
        found.append(torch.where(has_tokens_S, total_row(name, r), 0.0).sum(dtype=torch.float64))
    for name in plan.extremes:
        # Padded, so that a call without responses has extremes too.
        found.append(pad(torch.where(has_tokens_S, total_row(name, r), -math.inf)).amax())
    return r, torch.stack([*found, pad(merged_FS[-1]).amax()])


# --- 3. batch


def by_name(values: Tensor, sums: tuple[_Name, ...], maxima: tuple[_Name, ...]) -> dict[_Name, Tensor]:
    """Sums and maxima by name or key; without the status, which is last."""
    return dict(zip((*sums, *maxima), values.unbind(), strict=False))


def add_scale(total: dict[str, Tensor], own: Totals, config: CorrectionConfig) -> dict[str, Tensor]:
    """``total`` with the factors by which all weights are divided and multiplied, over the configured scope.

    ``own`` are the totals of this data-parallel rank, for ``scope: micro_batch``.
    """
    of_scope, one = (total if config.scope == "data_parallel" else own), torch.ones_like(total["generated"])
    mean_weight = denominator = one
    if config.normalize_over is not None:
        mean_weight = _ratio_or_one(of_scope["weights in mean"], of_scope["number in mean"])
    if config.denominator == "kept":
        # The framework divides its sum by "terms". Times terms / kept terms, it is divided by "kept terms": the kept
        # tokens, or with a mean per response the sum over responses of (kept tokens / response tokens).
        denominator = _ratio_or_one(of_scope["terms"], of_scope["kept terms"])
    total.update(dict(zip(_FACTORS, (mean_weight, denominator, denominator / mean_weight), strict=True)))
    return total


def _ratio_or_one(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``; 1 where one of them is 0 because nothing was counted."""
    counted = (numerator > 0.0) & (denominator > 0.0)
    return torch.where(counted, numerator / torch.where(counted, denominator, 1.0), 1.0)


Sums = tuple[Tensor, Tensor, Tensor]


class Passed(NamedTuple):
    """``[F + 1, S]`` sums of responses, ``[A + 1]`` totals of this data-parallel rank and of all; and the outputs.

    ``[T]`` weights, and the mask that is left; ``[S]`` bool, responses that stay; ``[M, T]`` metrics or None.
    """

    merged_FS: Tensor
    own_A: Tensor
    group_A: Tensor
    weights_T: Tensor
    loss_mask_T: Tensor
    keep_S: Tensor
    metrics_MT: Tensor | None


def output_pass(
    s: Decided, r: Responses, sums: Sums, mask_T: Tensor, blocks: Blocks, plan: Plan, *, token_metrics: bool
) -> Passed:
    """The result of a call, once the totals are known; ``sums`` are the first three fields of :class:`Passed`."""
    own, total = by_name(sums[1], plan.totals, plan.extremes), by_name(sums[2], plan.totals, plan.extremes)
    add_scale(total, own, plan.config)
    # w_t = (weight of the token) * (weight of its response) * scale, 0 without a ratio, or where a gate sets it to 0.
    factor_S = torch.where(r.weighted, r.weight * total["scale"], 0.0).float()
    weight_NB = torch.where(s.weighted, s.weight * blocks.spread_to_blocks(factor_S), 0.0)
    keep_NB = s.keep & blocks.spread_to_blocks(r.keep)
    metrics_MT = None
    if token_metrics and plan.rows:
        rows_MS = response_metrics(r, total, plan.rows.values())
        # Tokens outside the response mask read a column of zeros.
        place_T = torch.where(mask_T != 0.0, blocks.response_T, len(r.n))
        metrics_MT = torch.nn.functional.pad(rows_MS, (0, 1)).index_select(-1, place_T)
    # A kept token counts as much as its mask: a mask of 0.25 stays one.
    loss_mask_T = torch.where(blocks.to_tokens(keep_NB), mask_T, 0.0)
    return Passed(*sums, blocks.to_tokens(weight_NB), loss_mask_T, r.keep, metrics_MT)


Exchange = Callable[[Tensor], Tensor] | None
"""From the sums or totals of this rank to those of all ranks; None for a rank alone."""


def run_passes(
    x: Inputs, blocks: Blocks, plan: Plan, over_cp: Exchange, over_dp: Exchange, *, token_metrics: bool
) -> Passed:
    """All passes, operation by operation."""
    s, parts_FS = token_pass(x, blocks, plan)
    merged_FS = parts_FS if over_cp is None else over_cp(parts_FS)
    r, own_A = response_pass(merged_FS, plan)
    sums = merged_FS, own_A, own_A if over_dp is None else over_dp(own_A)
    return output_pass(s, r, sums, x.mask_T, blocks, plan, token_metrics=token_metrics)
