# SPDX-License-Identifier: Apache-2.0
"""The passes of a correction: plain functions of tensors without branches on data.

The tokens of all responses lie one after the other in one stream ``[T]``. A call has three passes:

1. Tokens: log-ratios, what a single token decides, and the numbers that each response sums up.
2. Responses: sums ``[F, S]`` of all context-parallel ranks, and what a response decides.
3. Batch: totals ``[A]`` of all data-parallel ranks, the scale of the weights, and the metrics.

:mod:`mis_ext.correction.correct` calls them, with the collectives between them.

To follow one filter, take ``rs_veto_threshold: 1e-4``. It is ``Gate(statistic="ratio", reduce="min", low=1e-4)``.
:func:`judge` finds the log-ratio of each token and where it is below ``log 1e-4``. :func:`token_row` gives minus the
log-ratio under the key ``(label, "extreme")``, whose maximum over a response :func:`response_step` compares. A response
token without a finite ratio vetoes too. ``keep`` of the response is then False, and :func:`output_pass` masks it.

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
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.gates import Gate
from mis_ext.correction.metrics import (
    BATCH_MAXIMA,
    BATCH_SUMS,
    TOKEN_MAXIMA,
    TOKEN_SUMS,
    Key,
    MetricRow,
    Numbers,
    Responses,
    TokenStep,
    Totals,
)
from mis_ext.correction.tokens import KNOWN_SEGMENT, Blocks, Tokens, bounded_exp


class Plan(NamedTuple):
    """What a call with a configuration computes: nothing that the configuration does not need.

    ``gates``: by label, with the one that a weight with ``mode: mask`` implies. ``sums``, ``maxima``: over the tokens
    of each response. ``totals``, ``extremes``: over all responses. ``rows``: the metrics that are emitted.
    ``needs_group``: other data-parallel ranks are asked. ``needs_whole``: a token without a ratio makes its response
    unusable.
    """

    config: CorrectionConfig
    gates: Mapping[str, Gate]
    rows: tuple[MetricRow, ...]
    sums: tuple[Key, ...]
    maxima: tuple[Key, ...]
    totals: tuple[str, ...]
    extremes: tuple[str, ...]
    needs_group: bool
    needs_whole: bool


@functools.lru_cache(maxsize=32)
def plan_of(config: CorrectionConfig) -> Plan:
    """The sums, totals, and metrics that a configuration needs."""
    rows, gates = config.selected_rows, config.all_gates
    keys: list[Key] = ["generated", "n", "kept"]
    totals = ["generated", "n", "kept", "responses", "kept responses"]
    if config.weight is not None and not config.has_token_weights:
        keys.append("d")
    for label, gate in gates.items():
        if not gate.is_of_tokens:
            keys.append((label, "extreme" if gate.reduce in ("min", "max") else "total"))
            keys += [(label, "n")] if gate.after is not None else []
    if config.normalize_over is not None:
        over_kept = config.normalize_over == "kept"
        keys += ["live"] if over_kept else []
        keys += ["w live" if over_kept else "w"] if config.has_token_weights else []
        totals += ["weights in mean", "number in mean"]
    if config.denominator == "kept":
        totals += ["terms", "kept terms"]
    for row in rows:
        keys += row.needs
        totals += row.totals
    keys, totals = [*dict.fromkeys(keys)], [*dict.fromkeys(totals)]
    return Plan(
        config=config,
        gates=gates,
        rows=rows,
        sums=tuple(key for key in keys if not _is_maximum(key)),
        maxima=tuple(key for key in keys if _is_maximum(key)),
        totals=tuple(name for name in totals if name not in BATCH_MAXIMA),
        extremes=tuple(name for name in totals if name in BATCH_MAXIMA),
        needs_group=any(row.over == "group" for row in rows) or (config.is_scaled and config.scope == "data_parallel"),
        needs_whole=config.needs_whole_sequences,
    )


def _is_maximum(key: Key) -> bool:
    return key in TOKEN_MAXIMA if isinstance(key, str) else key[1] == "extreme"


# --- Tokens


class Judged(NamedTuple):
    """What a gate says of tokens, ``[N, 64]`` each: its statistic, where that is outside, where the gate looks."""

    value: Tensor
    below: Tensor
    above: Tensor
    looked_at: Tensor
    passes: Tensor


def judge(t: Tokens, gates: Mapping[str, Gate], segments: Mapping[str, Tensor]) -> dict[str, Judged]:
    """Every gate looks at all valid tokens, whatever the others reject, so that their order does not matter.

    Args:
        t: The tokens.
        gates: By label.
        segments: ``[N, 64]``: the statistics of segments, by the label of their gate, and which are known.
    """
    judged: dict[str, Judged] = {}
    # Gates on tokens first: others may look at what these leave.
    for label, gate in sorted(gates.items(), key=lambda item: not item[1].is_of_tokens):
        value = segments[label] if gate.is_of_segments else gate.row.of(t)
        below, above = value < gate.log_low, value > gate.log_high
        passes = ~(below | above)
        if gate.is_of_segments:
            # The statistic of a segment with a token without a ratio is not known.
            passes = passes & segments[KNOWN_SEGMENT]
        looked_at = t.valid if gate.after is None else t.valid & judged[gate.after].passes
        judged[label] = Judged(value, below, above, looked_at, passes)
    return judged


def token_step(t: Tokens, plan: Plan, judged: Mapping[str, Judged]) -> TokenStep:
    """What single tokens decide."""
    keep = weighted = t.valid
    for label, gate in plan.gates.items():
        if gate.is_of_tokens and gate.action == "reject":
            keep = keep & judged[label].passes
        elif gate.is_of_tokens:
            weighted = weighted & judged[label].passes
    weight = plan.config.weight
    if weight is None or not plan.config.has_token_weights:
        return TokenStep(t, keep, weighted, t.valid.float())
    return TokenStep(t, keep, weighted, torch.where(t.valid, weight.bounded(weight.log_ratio_of(t)), 0.0))


def token_row(key: Key, s: TokenStep, plan: Plan, judged: Mapping[str, Judged]) -> Tensor:
    """``[N, 64]``: what a response sums up, or takes the maximum of."""
    if isinstance(key, str):
        rows = TOKEN_MAXIMA if key in TOKEN_MAXIMA else TOKEN_SUMS
        return rows[key](s, plan.config)
    label, what = key
    gate, found = plan.gates[label], judged[label]
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


# --- Responses


def response_step(of: Numbers, plan: Plan) -> Responses:
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
        below, above = value < gate.log_low, value > gate.log_high
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
    if config.weight is not None and not config.has_token_weights:
        # sequence: prod_t rho_t = exp(sum_t d_t). geometric: exp(mean_t d_t).
        log_ratio = of["d"] if config.weight.level == "sequence" else of["d"] / n.clamp(min=1.0)
        weight = config.weight.bounded(log_ratio)
    num_kept = torch.where(keep, of["kept"], 0.0)
    return Responses(of, n, generated, keep, weighted, weight, log_ratio, usable, num_kept, gates)


# --- Batch


def batch_totals(r: Responses, status_S: Tensor, plan: Plan) -> Tensor:
    """``[A + 1]``: the plan's totals, then its extremes, over the responses of this rank; last, the status."""
    # What all of them read lets the compiler sum them in one kernel: a response without a response token adds nothing.
    has_tokens_S = r.generated > 0.0
    sums = [torch.where(has_tokens_S, BATCH_SUMS[name](r, plan.config), 0.0) for name in plan.totals]
    extremes = [torch.where(has_tokens_S, BATCH_MAXIMA[name](r, plan.config), -math.inf) for name in plan.extremes]
    # Padded, so that a call without responses has extremes too.
    pad = functools.partial(torch.nn.functional.pad, pad=(0, 1), value=-math.inf)
    found = [x.sum(dtype=torch.float64) for x in sums] + [pad(x).amax() for x in (*extremes, status_S)]
    return torch.stack(found)


def merge(parts: Tensor, num_sums: int) -> Tensor:
    """``[W, F, ...]`` of all ranks to ``[F, ...]``: sums, and after ``num_sums`` rows maxima."""
    return torch.cat([parts[:, :num_sums].sum(0), parts[:, num_sums:].amax(0)])


def named_totals(totals_A: Tensor, plan: Plan) -> Totals:
    """Totals by name."""
    return Totals(zip((*plan.totals, *plan.extremes, "status"), totals_A.unbind(), strict=True))


def ratio_or_one(numerator: Tensor, denominator: Tensor) -> Tensor:
    """``numerator / denominator``; 1 where one of them is 0 because nothing was counted."""
    counted = (numerator > 0.0) & (denominator > 0.0)
    return torch.where(counted, numerator / torch.where(counted, denominator, 1.0), 1.0)


def scale_of(total: Mapping[str, Tensor], config: CorrectionConfig) -> Tensor:
    """0-dim: what all weights are multiplied by, from totals of any number of calls."""
    return add_scale(Totals(total), Totals(total), config).scale


def add_scale(total: Totals, own: Totals, config: CorrectionConfig) -> Totals:
    """The numbers by which all weights are divided and multiplied, over the configured scope, among the totals."""
    of_scope, one = (total if config.scope == "data_parallel" else own), torch.ones_like(own["generated"])
    mean_weight = denominator = one
    if config.normalize_over is not None:
        mean_weight = ratio_or_one(of_scope["weights in mean"], of_scope["number in mean"])
    if config.denominator == "kept":
        # The framework divides by all response tokens (or responses). Times all of them, and divided by those that are
        # kept, the loss is a mean over what is kept.
        denominator = ratio_or_one(of_scope["terms"], of_scope["kept terms"])
    return Totals(total | {"mean weight": mean_weight, "denominator factor": denominator})


# --- Metrics


def response_metrics(r: Responses, total: Totals, plan: Plan) -> Tensor:
    """``[M, S]`` float32: what each token of a response is given of each metric.

    The framework averages over all responses, or over all their tokens. So a response that was not measured gets the
    mean of the others of this call: NaN where there are none.
    """
    if not plan.rows:
        return r.n.new_empty(0, len(r.n)).float()
    values, counts = [], [row.count_S(r) for row in plan.rows]
    for row, count_S in zip(plan.rows, counts, strict=True):
        value = row.value_S(r) if row.number is None else row.number(total)
        values.append(torch.where(count_S > 0.0, value * total.scale if row.is_scaled else value, 0.0))
    value_MS, is_measured_MS = torch.stack(values), torch.stack(counts) > 0.0
    share_MS = torch.where(is_measured_MS, r.generated if plan.config.per_token_loss else 1.0, 0.0)
    mean_M1 = (value_MS * share_MS).sum(-1, keepdim=True) / share_MS.sum(-1, keepdim=True)
    return torch.where(is_measured_MS, value_MS, mean_M1).float()


# --- The three passes


class Inputs(NamedTuple):
    """``[T]`` float32 each: log-probs of the local tokens, their response mask, their lags if they are needed.

    ``segments``: what :func:`~mis_ext.correction.segments.segment_values` found, empty without gates on segments.
    """

    proximal_T: Tensor
    behavior_T: Tensor
    mask_T: Tensor
    lag_T: Tensor | None
    segments: dict[str, Tensor]

    def tokens(self, blocks: Blocks) -> Tokens:
        """The tokens ``[N, 64]``, in blocks."""
        return Tokens.read(
            blocks.of_tokens(self.proximal_T),
            blocks.of_tokens(self.behavior_T),
            (blocks.of_tokens(self.mask_T) != 0.0) & blocks.is_token_NB,
            None if self.lag_T is None else blocks.of_tokens(self.lag_T),
        )


def token_pass(x: Inputs, blocks: Blocks, plan: Plan) -> tuple[TokenStep, Tensor]:
    """What tokens decide, and ``[F + 1, S]`` float64: the plan's sums and maxima over local tokens, and no failure."""
    t = x.tokens(blocks)
    judged = judge(t, plan.gates, {label: blocks.of_tokens(value_T) for label, value_T in x.segments.items()})
    s = token_step(t, plan, judged)
    sums_FS = blocks.sums([token_row(key, s, plan, judged) for key in plan.sums])
    no_failure_1S = torch.full_like(sums_FS[:1], -math.inf)
    if not plan.maxima:
        return s, torch.cat([sums_FS, no_failure_1S])
    maxima_FS = blocks.maxima([token_row(key, s, plan, judged) for key in plan.maxima])
    return s, torch.cat([sums_FS, maxima_FS, no_failure_1S])


def response_pass(merged_FS: Tensor, plan: Plan) -> tuple[Responses, Tensor]:
    """What responses decide, and ``[A + 1]`` float64: the totals of this data-parallel rank, and the status."""
    of = dict(zip((*plan.sums, *plan.maxima), merged_FS.unbind(), strict=False))
    r = response_step(of, plan)
    return r, batch_totals(r, merged_FS[-1], plan)


class Outputs(NamedTuple):
    """``[T]`` weights, and the mask that is left; ``[S]`` bool, responses that stay; ``[M, T]`` metrics or None."""

    weights_T: Tensor
    loss_mask_T: Tensor
    keep_S: Tensor
    metrics_MT: Tensor | None


def output_pass(
    s: TokenStep,
    r: Responses,
    own_A: Tensor,
    group_A: Tensor,
    mask_T: Tensor,
    blocks: Blocks,
    plan: Plan,
    *,
    token_metrics: bool,
) -> Outputs:
    """What the caller gets, once totals are known."""
    total = add_scale(named_totals(group_A, plan), named_totals(own_A, plan), plan.config)
    # w_t = (weight of the token) * (weight of its response) * scale, 0 where a gate or a missing ratio says so.
    factor_S = torch.where(r.weighted, r.weight * total.scale, 0.0).float()
    weight_NB = torch.where(s.weighted, s.weight * blocks.spread_to_blocks(factor_S), 0.0)
    keep_NB = s.keep & blocks.spread_to_blocks(r.keep)
    metrics_MT = None
    if token_metrics and plan.rows:
        rows_MS = response_metrics(r, total, plan)
        # Tokens outside the response mask read a column of zeros.
        place_T = torch.where(mask_T != 0.0, blocks.response_T, len(r.n))
        metrics_MT = torch.nn.functional.pad(rows_MS, (0, 1)).index_select(-1, place_T)
    # What a kept token counts is the caller's business: a mask of 0.25 comes back as that.
    loss_mask_T = torch.where(blocks.to_tokens(keep_NB), mask_T, 0.0)
    return Outputs(blocks.to_tokens(weight_NB), loss_mask_T, r.keep, metrics_MT)


class Passes(NamedTuple):
    """The three passes of one call, in order, with graphs or without; ranks exchange numbers between two of them.

    ``tokens``: from nothing to ``[F + 1, S]``, the sums of this rank. ``responses``: from those of all ranks to
    ``[A + 1]``, the totals of this rank. ``outputs``: from the sums, the totals of this rank, and those of all ranks.
    """

    tokens: Callable[[], Tensor]
    responses: Callable[[Tensor], Tensor]
    outputs: Callable[[Tensor, Tensor, Tensor], Outputs]


def eager_passes(x: Inputs, blocks: Blocks, plan: Plan, *, token_metrics: bool) -> Passes:
    """The passes of one call, operation by operation."""
    step: TokenStep | None = None
    decided: Responses | None = None

    def tokens() -> Tensor:
        nonlocal step
        step, parts_FS = token_pass(x, blocks, plan)
        return parts_FS

    def responses(merged_FS: Tensor) -> Tensor:
        nonlocal decided
        decided, own_A = response_pass(merged_FS, plan)
        return own_A

    def outputs(merged_FS: Tensor, own_A: Tensor, group_A: Tensor) -> Outputs:
        assert step is not None
        assert decided is not None
        return output_pass(step, decided, own_A, group_A, x.mask_T, blocks, plan, token_metrics=token_metrics)

    return Passes(tokens, responses, outputs)
