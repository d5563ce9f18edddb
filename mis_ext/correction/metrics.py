# SPDX-License-Identifier: Apache-2.0
"""All metrics: one row each, with its formula as code and in words.

Mismatch metrics use the original response mask, independent of the correction. ``d = log pi_prox - log mu`` of a token;
``sum d`` and ``mean d`` are over the tokens of a response. A call computes only the sums and totals that its rows read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.tokens import MAX_NATS, OPEN, UNKNOWN_LAG, Tokens, bounded_exp, bounded_expm1, is_open, k3

if TYPE_CHECKING:
    from mis_ext.correction.config import CorrectionConfig, Gate, Weight
    from mis_ext.correction.correct import Batch, Responses, TokenResults

PREFIX = "mis_"
PPO_RANGE = math.log(0.8), math.log(1.2)
"""Log-ratios that PPO does not clip, with the frameworks' default of 0.2."""

Population = Literal["valid_tokens", "response_tokens", "sequences", "responses", "group"]
"""Scope of the mean of a metric. ``sequences``: responses with a valid token. ``responses``: with a response token.
``group``: one value of all data-parallel ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A mean as ``(total, count)``, so that later sums over calls or data-parallel ranks are exact."""

    total: Tensor
    count: Tensor

    def value(self) -> Tensor:
        """``total / count``; NaN when nothing was counted."""
        return self.total / self.count


@dataclass(frozen=True, slots=True, eq=False)
class GroupNumber:
    """One value of this call on all data-parallel ranks, 0-dim; NaN when nothing was measured."""

    number: Tensor

    def value(self) -> Tensor:
        """The value of all data-parallel ranks, 0-dim."""
        return self.number


Metric = Mean | GroupNumber


# --- sums over the tokens of a response, and over responses


class Sum(NamedTuple):
    """A sum over the tokens of a response. The formula gives ``[N, 64]``, 0 for a token that does not count.

    ``r.of[SUM]`` is the sum of each response, and ``b.of[SUM]`` the sum over all responses of all data-parallel ranks.
    Create each key once: two objects with the same code are two keys.
    """

    formula: Callable[[Tokens, TokenResults], Tensor]


class Max(NamedTuple):
    """A maximum over the tokens of a response. The formula gives ``-inf`` for a token that does not count."""

    formula: Callable[[Tokens, TokenResults], Tensor]


class BatchSum(NamedTuple):
    """A sum over responses, ``b.of[SUM]``. The formula gives ``[S]``."""

    formula: Callable[[Responses], Tensor]


def _valid(t: Tokens, x: Tensor, otherwise: float = 0.0) -> Tensor:
    return torch.where(t.valid, x, otherwise)


def _k3(t: Tokens, s: TokenResults) -> Tensor:
    return k3(t.d, t.excess).clamp(max=s.config.metric_max)


def _dated(t: Tokens) -> Tensor:
    return torch.logical_and(t.valid, t.lag < UNKNOWN_LAG)


GENERATED, NUM_VALID = Sum(lambda t, s: t.generated), Sum(lambda t, s: t.valid)
# These are 0 for a token that is not valid, because its d and its log-probs are 0.
SUM_D, LOG_PI, LOG_MU = Sum(lambda t, s: t.d), Sum(lambda t, s: t.log_pi), Sum(lambda t, s: t.log_mu)
MAX_D, MAX_MINUS_D = Max(lambda t, s: _valid(t, t.d, -math.inf)), Max(lambda t, s: _valid(t, -t.d, -math.inf))
RHO, RHO_SQUARED = Sum(lambda t, s: _valid(t, t.ratio)), Sum(lambda t, s: _valid(t, t.ratio.square()))
SUM_W = Sum(lambda t, s: s.weight)
KEPT, LIVE = Sum(lambda t, s: s.keep), Sum(lambda t, s: s.keep & s.weighted)
SUM_LIVE_W = Sum(lambda t, s: torch.where(s.keep & s.weighted, s.weight, 0.0))
DATED = Sum(lambda t, s: _dated(t))

MEASURED = BatchSum(lambda r: r.n > 0.0)
# The product of the ratios of a response: exp(sum d).
PRODUCT = BatchSum(lambda r: r.measured(bounded_exp(r.of[SUM_D])))
PRODUCT_SQUARED = BatchSum(lambda r: r.measured(bounded_exp(r.of[SUM_D])).square())


# --- rows


@dataclass(frozen=True, eq=False)
class MetricRow:
    """One metric.

    Attributes:
        name: Without prefix.
        over: The population of its mean.
        text: What it measures, for the documentation.
        value: For a group metric, a function of ``Batch`` in ``correct.py``. Otherwise ``[S]``, as a :class:`Sum` or a
            function of ``Responses`` there: the sum over the tokens of each response, or the value of each response.
        is_core: Whether it is in the short list of metrics to watch.
        count: The number of tokens that count; a response without one was not measured.
        is_scaled: Whether the value is multiplied by the scale of the weights, which is known after the totals.
    """

    name: str
    over: Population
    text: str
    value: Any
    is_core: bool = False
    count: Sum = NUM_VALID
    is_scaled: bool = False


def highest(b: Batch, maximum: Max, count: Sum = NUM_VALID) -> Tensor:
    """A maximum over responses; NaN if nothing was counted."""
    return torch.where(b.of[count] > 0.0, b.of[maximum], math.nan)


def effective_share(
    weights: Sum | BatchSum, squares: Sum | BatchSum, count: Sum | BatchSum
) -> Callable[[Batch], Tensor]:
    """Kish's effective sample size over the sample size, ``(sum w)^2 / (n sum w^2)``; NaN without samples."""
    return lambda b: b.of[weights].square() / (b.of[count] * b.of[squares])


def _chi2_token(r: Responses) -> Tensor:
    # The mean of rho^2 - 1.
    return (r.of[_EXCESS_OF_SQUARE] / r.n.clamp(min=1.0)).clamp(max=r.config.metric_max)


def _chi2_seq(r: Responses) -> Tensor:
    excess = bounded_expm1(r.of[SUM_D])
    return (excess * (excess + 2.0)).clamp(max=r.config.metric_max)


def _largest_abs_d(b: Batch) -> Tensor:
    return torch.maximum(highest(b, MAX_D), highest(b, MAX_MINUS_D))


_K3_TEXT = "`exp d - 1 - d`, capped at `mis_metric_max`: KL(mu, pi_prox), never negative"
_CHI2 = "mean of `exp 2d` over the sequence, minus 1, capped at `mis_metric_max`"
_PHANTOM = (
    "`exp d` outside [0.8, 1.2]: with the engine as old policy, PPO clips such a token before any update if its "
    "advantage has the matching sign"
)
_RAISED = f"tokens with `d > 0` among uncertain tokens: behavior probability in {OPEN}, two different log-probs"
_ESS_TOKEN = "`(sum w)^2 / (n sum w^2)` of the token ratios, `d` clamped to +-20: 1 on-policy"
_ESS_SEQ = "`(sum W)^2 / (n sum W^2)` of the `n` sequences, `W = exp(sum d)`, `sum d` clamped to +-20"
_UNDATED = "tokens with a ratio and an unknown lag"
_UNMEASURED = "sequences without a finite ratio: metrics over tokens and sequences exclude them"
_NO_RATIO = "response tokens without a finite ratio"
_NONZERO = "tokens whose two log-probs differ in float32 (+0 equals -0)"
_FINAL = "mean over a sequence of the bounded and scaled weights, independent of filters"
_VETO = "tokens that veto their sequence, including those without a finite ratio"
_Row = MetricRow
_K1 = Sum(lambda t, s: (-t.d).clamp(-MAX_NATS, MAX_NATS))
_EXCESS_OF_SQUARE = Sum(lambda t, s: t.excess * (t.excess + 2.0))
_OUTSIDE_PPO = Sum(lambda t, s: (t.d > PPO_RANGE[1]) | (t.d < PPO_RANGE[0]))
_OPEN = Sum(lambda t, s: is_open(t.log_mu, t.d))
_RAISED_OPEN = Sum(lambda t, s: is_open(t.log_mu, t.d) & (t.d > 0.0))
_MAX_W = Max(lambda t, s: _valid(t, s.weight, -math.inf))
_MAX_MINUS_W = Max(lambda t, s: _valid(t, -s.weight, -math.inf))
_LAG = Sum(lambda t, s: torch.where(_dated(t), t.lag, 0.0))
_MAX_LAG = Max(lambda t, s: torch.where(_dated(t), t.lag, -math.inf))
_STALE = Sum(lambda t, s: t.valid & t.is_stale)
_K3_FRESH = Sum(lambda t, s: torch.where(t.is_stale, 0.0, _k3(t, s)))
_K3_STALE = Sum(lambda t, s: torch.where(t.is_stale, _k3(t, s), 0.0))

MISMATCH_ROWS = (
    _Row("training_log_ppl", "sequences", "minus the mean proximal log-prob", lambda r: -r.mean(LOG_PI)),
    _Row("training_ppl", "sequences", "`exp` of `training_log_ppl`", lambda r: bounded_exp(-r.mean(LOG_PI))),
    _Row("rollout_log_ppl", "sequences", "minus the mean behavior log-prob", lambda r: -r.mean(LOG_MU)),
    _Row("rollout_ppl", "sequences", "`exp` of `rollout_log_ppl`", lambda r: bounded_exp(-r.mean(LOG_MU))),
    _Row("kl", "valid_tokens", "`-d`: estimates the same KL as `k3_kl`, noisier, of any sign", _K1),
    _Row("k3_kl", "valid_tokens", _K3_TEXT, Sum(_k3), True),
    _Row("log_ppl_diff", "sequences", "`-mean d`", lambda r: -r.mean(SUM_D)),
    _Row("log_ppl_abs_diff", "sequences", "`abs mean d`", lambda r: r.mean(SUM_D).abs()),
    _Row("ppl_ratio", "sequences", "`exp(-mean d)`", lambda r: bounded_exp(-r.mean(SUM_D))),
    _Row("chi2_token", "sequences", _CHI2, _chi2_token),
    _Row("chi2_seq", "sequences", "`exp(2 sum d) - 1`, capped at `mis_metric_max`", _chi2_seq),
    _Row("logprob_abs_diff", "valid_tokens", "`abs d`", Sum(lambda t, s: t.d.abs().clamp(max=MAX_NATS)), True),
    _Row("tv", "valid_tokens", "`1 - min(1, exp d)`: total variation", Sum(lambda t, s: -t.excess.clamp(max=0.0))),
    _Row("phantom_clip_fraction", "valid_tokens", _PHANTOM, _OUTSIDE_PPO),
    _Row("raised_fraction", "group", _RAISED, lambda b: b.of[_RAISED_OPEN] / b.of[_OPEN]),
    _Row("ess_ratio_token", "group", _ESS_TOKEN, effective_share(RHO, RHO_SQUARED, NUM_VALID), True),
    _Row("ess_ratio_seq", "group", _ESS_SEQ, effective_share(PRODUCT, PRODUCT_SQUARED, MEASURED), True),
    _Row("ratio_max", "group", "largest `exp d`", lambda b: bounded_exp(highest(b, MAX_D)), True),
    _Row("ratio_min", "group", "smallest `exp d`", lambda b: bounded_exp(-highest(b, MAX_MINUS_D))),
    _Row("nonfinite_token_fraction", "response_tokens", _NO_RATIO, lambda r: r.generated - r.n, True),
    _Row("unmeasured_seq_fraction", "responses", _UNMEASURED, lambda r: r.n == 0.0),
    _Row("train_rollout_logprob_abs_diff_max", "group", "largest `abs d`", _largest_abs_d),
    # Subtraction underflows gradually: only equal numbers, as +0 and -0 are, have a difference of 0.
    _Row("train_rollout_logprob_abs_diff_nonzero", "valid_tokens", _NONZERO, Sum(lambda t, s: t.d != 0.0)),
)
"""Mismatch of the two engines, independent of the correction.

``kl``, ``k3_kl``: Schulman, Approximating KL Divergence, 2020. Effective sample size: Kish, Survey Sampling, 1965.
Phantom clipping: Dirhoussi, Defeating the trainer-generator precision mismatch in TRL, 2026; its range depends on the
run.
"""

AGE_ROWS = (
    _Row("lag_mean", "valid_tokens", "mean of the known lags", _LAG, True, DATED),
    _Row("lag_max", "group", "largest known lag", lambda b: highest(b, _MAX_LAG, DATED), True),
    _Row("unknown_lag_token_fraction", "response_tokens", _UNDATED, lambda r: r.n - r.of[DATED], True),
    _Row("stale_token_fraction", "valid_tokens", "tokens whose lag is above 0, or unknown", _STALE, True),
    _Row("k3_kl_fresh", "valid_tokens", "contribution of fresh tokens to `k3_kl`", _K3_FRESH, True),
    _Row("k3_kl_stale", "valid_tokens", "contribution of stale tokens to `k3_kl`", _K3_STALE, True),
)
"""Separate mismatch and staleness: on fresh tokens only the engine differs, on stale tokens the weights do too.

Both parts of ``k3_kl`` are means over all valid tokens, so they are known also in a call without a token of that kind.
"""


def _row_of(over: Population, name: str, text: str, formula: Callable[[TokenResults | Responses], Tensor]) -> MetricRow:
    """A row over valid tokens or sequences. Both kinds of results name weight, log-ratio and gates the same way."""
    return _Row(name, over, text, Sum(lambda t, s: _valid(t, formula(s))) if over == "valid_tokens" else formula)


def weight_rows(weight: Weight) -> Iterator[MetricRow]:
    """Rows of the bounded weights, before they are scaled."""
    mode, of_tokens = weight.mode, weight.level == "token"
    low, high = weight.edges
    if not weight.bound.has_low:
        # This mode has no lower bound: a ratio below 1 / high counts as low.
        low = -high
    over: Population = "valid_tokens" if of_tokens else "sequences"
    row = functools.partial(_row_of, over)
    yield row("tis_weight_before_bound", "the ratio at `tis_level`", lambda x: bounded_exp(x.log_ratio))
    if weight.bound.has_low:
        yield row(f"tis_{mode}_fraction_low", "weights below the lower bound", lambda x: x.log_ratio < low)
        yield row(f"tis_{mode}_fraction_high", "weights above the upper bound", lambda x: x.log_ratio > high)
    elif weight.bound.has_high:
        yield row(f"tis_{mode}_fraction", "weights above the upper bound", lambda x: x.log_ratio > high)
        yield row(f"tis_{mode}_fraction_low", "weights below 1 / the upper bound", lambda x: x.log_ratio < low)
    bounded = SUM_W if of_tokens else lambda r: r.weight
    yield _Row("tis_weight_after_bound", over, "the bounded weight", bounded)
    yield _Row("is_ratio_mean_after_tis_rs", over, "alias of `tis_weight_after_bound` in slime's example", bounded)
    if of_tokens:
        ess = effective_share(SUM_W, Sum(lambda t, s: s.weight.square()), NUM_VALID)
    else:
        squares = BatchSum(lambda r: r.measured(r.weight.square()))
        ess = effective_share(BatchSum(lambda r: r.measured(r.weight)), squares, MEASURED)
    yield _Row("tis_weight_ess", "group", "`(sum w)^2 / (n sum w^2)` of the bounded weights", ess)


def gate_rows(label: str, gate: Gate) -> Iterator[MetricRow]:
    """Rows of the values of a filter and of those outside of its bounds, independent of other filters."""
    row = functools.partial(_row_of, "valid_tokens" if gate.is_of_tokens else "sequences")
    if gate.is_veto:
        vetoing = Sum(lambda t, s: s.gates[label].below | s.gates[label].above | (t.generated & ~t.valid))
        yield _Row(f"{label}_token_fraction", "response_tokens", _VETO, vetoing)
        vetoed = "sequences with such a token"
        yield _Row(f"{label}_seq_fraction", "responses", vetoed, lambda r: ~r.gates[label].passes)
    else:
        yield row(f"{label}_fraction_low", "below the lower bound", lambda x: x.gates[label].below)
        yield row(f"{label}_fraction_high", "above the upper bound", lambda x: x.gates[label].above)
    # On the scale of the bounds: the ratio, not its log.
    as_bound = bounded_exp if gate.row.is_log else lambda value: value
    yield row(f"{label}_value", "the value of the statistic", lambda x: as_bound(x.gates[label].value))


def outcome_rows(config: CorrectionConfig) -> Iterator[MetricRow]:
    """Rows of the final weights and of the kept tokens."""
    if config.normalize_over is not None:
        yield _Row("batch_norm_factor", "group", "the mean weight that divides all weights", lambda b: b.mean_weight)
    if config.weight is not None:
        # Means and extremes over a response, before they are scaled.
        mean = smallest = largest = lambda r: r.weight
        if config.has_token_weights:
            mean, smallest, largest = (
                lambda r: r.of[SUM_W] / r.n.clamp(min=1.0),
                lambda r: -r.of[_MAX_MINUS_W],
                lambda r: r.of[_MAX_W],
            )
        yield _Row("is_ratio_mean_final", "sequences", _FINAL, mean, True, is_scaled=True)
        yield _Row("is_ratio_min_final", "sequences", "the smallest of these weights", smallest, is_scaled=True)
        yield _Row("is_ratio_max_final", "sequences", "the largest of these weights", largest, is_scaled=True)
    text = "tokens that stay in the loss mask"
    yield _Row("kept_token_fraction", "response_tokens", text, lambda r: r.num_kept, True)
    text = "sequences with a kept token"
    yield _Row("kept_seq_fraction", "responses", text, lambda r: r.num_kept > 0.0, True)
    if config.denominator == "kept":
        text = "the factor of `mis_denominator: kept`"
        yield _Row("denominator_factor", "group", text, lambda b: b.denominator_factor)


@functools.lru_cache(maxsize=32)
def rows_of(config: CorrectionConfig) -> tuple[MetricRow, ...]:
    """Every metric that a configuration can emit, in the order of emission."""
    rows = [*MISMATCH_ROWS, *(AGE_ROWS if config.staleness else ())]
    if config.metrics_only:
        return tuple(rows)
    if config.weight is not None:
        rows += weight_rows(config.weight)
    for label, gate in config.labeled_gates.items():
        rows += gate_rows(label, gate)
    return (*rows, *outcome_rows(config))


def measure(rows: Collection[MetricRow], r: Responses, b: Batch) -> tuple[Tensor, Tensor]:
    """``[M, S]`` float64: the sum of each metric over a response's tokens, or the response's value; and their number.

    A group metric has its value in each response with a response token.
    """
    if not rows:
        return r.n.new_empty(0, len(r.n)), r.n.new_empty(0, len(r.n))
    sums, counts = [], []
    for row in rows:
        if row.over == "group":
            value_S = row.value(b).expand_as(r.n)
        else:
            value_S = r.of[row.value] if isinstance(row.value, Sum) else row.value(r).double()
        tokens_S = r.of[row.count] if row.over in ("valid_tokens", "sequences") else r.generated
        # All rows read this mask, so the compiler writes them in one kernel.
        sums.append(torch.where(tokens_S > 0.0, value_S * b.scale if row.is_scaled else value_S, 0.0))
        counts.append(tokens_S if row.over in ("valid_tokens", "response_tokens") else (tokens_S > 0.0).double())
    return torch.stack(sums), torch.stack(counts)


def response_metrics(r: Responses, b: Batch, rows: Collection[MetricRow]) -> Tensor:
    """``[M, S]`` float32: the value of each metric for all tokens of a response.

    The metric is the mean over responses, or over response tokens with a per-token loss. The framework divides by all
    of them. So a response that was not measured, because it has no token of the metric's population, gets the mean of
    the measured responses of this call; NaN if there are none.
    """
    sum_MS, count_MS = measure(rows, r, b)
    value_MS, is_measured_MS = sum_MS / count_MS.clamp(min=1.0), count_MS > 0.0
    share_MS = torch.where(is_measured_MS, r.generated if r.config.per_token_loss else 1.0, 0.0)
    mean_M1 = (value_MS * share_MS).sum(-1, keepdim=True) / share_MS.sum(-1, keepdim=True)
    return torch.where(is_measured_MS, value_MS, mean_M1).float()
