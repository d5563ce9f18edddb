# SPDX-License-Identifier: Apache-2.0
"""All metrics: one row each, with its formula as code and in words.

Mismatch metrics look at the original response mask, whatever the correction does. ``d = log pi_prox - log mu`` of a
token; ``sum d`` and ``mean d`` are over the tokens of a response.

A row over tokens names a sum of :data:`TOKEN_SUMS`. Any other row is a function: of what is known of the responses
(:class:`Responses`), or of the totals of the batch. A call computes only the sums and totals that the selected rows
read: :func:`mis_ext.correction.passes.plan_of` finds them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.tokens import MAX_NATS, OPEN, UNKNOWN_LAG, Tokens, bounded_exp, bounded_expm1, is_open, k3

if TYPE_CHECKING:
    from mis_ext.correction.config import CorrectionConfig, Gate, Weight

PREFIX = "mis_"
LOG_2 = math.log(2.0)
PPO_RANGE = math.log(0.8), math.log(1.2)
"""What PPO's clip leaves alone, with the frameworks' default of 0.2."""

Key = str | tuple[str, str]
"""A sum or maximum over the tokens of a response: of :data:`TOKEN_SUMS`, or of a gate, by the gate's label."""

Population = Literal["valid_tokens", "response_tokens", "sequences", "responses", "group"]
"""What a metric is a mean over. ``sequences``: those with a valid token. ``responses``: those with a response token.
``group``: one value of all data-parallel ranks."""


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A mean kept as ``(total, count)``: exact under any later sum over calls or data-parallel ranks."""

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


# --- what is summed over tokens


class Decided(NamedTuple):
    """What single tokens decide; ``[N, 64]`` each, in blocks. ``weight`` is 0 where a token is not valid.

    ``log_ratio``: what a weight of tokens bounds, nats: 0, and so weight 1, of a fresh token with ``when: stale``.
    """

    keep: Tensor
    weighted: Tensor
    weight: Tensor
    log_ratio: Tensor
    config: CorrectionConfig


def edges_of(weight: Weight | None) -> tuple[float, float]:
    """Log-ratios between which a weight is the ratio itself; ``-high`` and ``high`` where nothing clips from below."""
    assert weight is not None
    low, high = weight.edges
    return (low if weight.bound.has_low else -high), high


def _valid(t: Tokens, x: Tensor) -> Tensor:
    return torch.where(t.valid, x, 0.0)


def _k3(t: Tokens, s: Decided) -> Tensor:
    return k3(t.d, t.excess).clamp(max=s.config.metric_max)


def _open(t: Tokens) -> Tensor:
    return is_open(t.log_mu, t.d)


def _dated(t: Tokens) -> Tensor:
    return torch.logical_and(t.valid, t.lag < UNKNOWN_LAG)


TOKEN_SUMS: dict[str, Callable[[Tokens, Decided], Tensor]] = {
    "generated": lambda t, s: t.generated,
    "n": lambda t, s: t.valid,
    "kept": lambda t, s: s.keep,
    "live": lambda t, s: s.keep & s.weighted,
    # These are 0 of a token that is not valid, because its d is.
    "d": lambda t, s: t.d,
    "log_pi": lambda t, s: t.log_pi,
    "log_mu": lambda t, s: t.log_mu,
    "rho": lambda t, s: _valid(t, t.ratio),
    "rho^2": lambda t, s: _valid(t, t.ratio.square()),
    "rho^2 - 1": lambda t, s: t.excess * (t.excess + 2.0),
    "k1": lambda t, s: (-t.d).clamp(-MAX_NATS, MAX_NATS),
    "k3": _k3,
    "|d|": lambda t, s: t.d.abs().clamp(max=MAX_NATS),
    "tv": lambda t, s: -t.excess.clamp(max=0.0),
    "rho > 2": lambda t, s: t.d > LOG_2,
    "rho < 1/2": lambda t, s: t.d < -LOG_2,
    "outside PPO": lambda t, s: (t.d > PPO_RANGE[1]) | (t.d < PPO_RANGE[0]),
    "d != 0": lambda t, s: t.d != 0.0,
    "open": lambda t, s: _open(t),
    "raised": lambda t, s: _open(t) & (t.d > 0.0),
    # Weights of tokens.
    "w": lambda t, s: s.weight,
    "w^2": lambda t, s: s.weight.square(),
    "w live": lambda t, s: torch.where(s.keep & s.weighted, s.weight, 0.0),
    "w - 1": lambda t, s: _valid(t, s.weight - 1.0),
    # In float64: of equal weights the scatter is a difference of equal numbers.
    "(w - 1)^2": lambda t, s: _valid(t, (s.weight - 1.0).double().square()),
    "w ratio": lambda t, s: _valid(t, bounded_exp(s.log_ratio)),
    "w low": lambda t, s: t.valid & (s.log_ratio < edges_of(s.config.weight)[0]),
    "w high": lambda t, s: t.valid & (s.log_ratio > edges_of(s.config.weight)[1]),
    # By age.
    "dated": lambda t, s: _dated(t),
    "lag": lambda t, s: torch.where(_dated(t), t.lag, 0.0),
    "stale": lambda t, s: t.valid & t.is_stale,
    "k3 fresh": lambda t, s: torch.where(t.is_stale, 0.0, _k3(t, s)),
    "k3 stale": lambda t, s: torch.where(t.is_stale, _k3(t, s), 0.0),
    "rho fresh": lambda t, s: _valid(t, torch.where(t.is_stale, 1.0, t.ratio)),
    "rho stale": lambda t, s: _valid(t, torch.where(t.is_stale, t.ratio, 1.0)),
    "rho^2 fresh": lambda t, s: _valid(t, torch.where(t.is_stale, 1.0, t.ratio.square())),
    "rho^2 stale": lambda t, s: _valid(t, torch.where(t.is_stale, t.ratio.square(), 1.0)),
}
"""Summed over the tokens of a response, 0 where a token does not count."""

TOKEN_MAXIMA: dict[str, Callable[[Tokens, Decided], Tensor]] = {
    "max d": lambda t, s: torch.where(t.valid, t.d, -math.inf),
    "max -d": lambda t, s: torch.where(t.valid, -t.d, -math.inf),
    "max w": lambda t, s: torch.where(t.valid, s.weight, -math.inf),
    "max -w": lambda t, s: torch.where(t.valid, -s.weight, -math.inf),
    "max lag": lambda t, s: torch.where(_dated(t), t.lag, -math.inf),
}
"""Of a response, ``-inf`` where a token does not count."""


# --- what is summed over responses


class Responses(NamedTuple):
    """What responses decide; ``[S]`` each, equal on all context-parallel ranks.

    ``of``: sums and maxima over their tokens. ``n``, ``generated``: valid and response tokens. ``log_ratio``: what the
    weight of a response bounds, 0 with a weight of tokens. ``gates``: value, below, above of each gate on responses, by
    label.
    """

    of: Mapping[Key, Tensor]
    n: Tensor
    generated: Tensor
    keep: Tensor
    weighted: Tensor
    weight: Tensor
    log_ratio: Tensor
    usable: Tensor
    num_kept: Tensor
    gates: dict[str, tuple[Tensor, Tensor, Tensor]]
    config: CorrectionConfig

    def mean(self, key: Key) -> Tensor:
        """The mean over valid tokens, 0 of none."""
        return (self.of[key] / self.n.clamp(min=1.0)).clamp(-MAX_NATS, MAX_NATS)

    def measured(self, x: Tensor, otherwise: float = 0.0) -> Tensor:
        """``x`` of a response with a valid token."""
        return torch.where(self.n > 0.0, x, otherwise)

    def weight_sum(self, key: Key, of_response: Tensor) -> Tensor:
        """The sum over weights of tokens, or the one value where each response has one weight."""
        return self.of[key] if self.config.has_token_weights else self.measured(of_response)


def _in_mean(r: Responses) -> tuple[Tensor, Tensor]:
    """What a response adds to the sum of the weights whose mean they are divided by, and to their number."""
    over_kept, of_tokens = r.config.normalize_over == "kept", r.config.has_token_weights
    counted = torch.where(r.keep & r.weighted, r.of["live"], 0.0) if over_kept else torch.where(r.usable, r.n, 0.0)
    total = r.of["w live" if over_kept else "w"] if of_tokens else r.weight
    return torch.where(counted > 0.0, total, 0.0), counted if of_tokens else (counted > 0.0).double()


BATCH_SUMS: dict[str, Callable[[Responses], Tensor]] = {
    "kept tokens": lambda r: r.num_kept,
    "responses": lambda r: r.generated > 0.0,
    "kept responses": lambda r: r.num_kept > 0.0,
    "measured": lambda r: r.n > 0.0,
    # The product of the ratios of a response: exp(sum d).
    "prod rho": lambda r: r.measured(bounded_exp(r.of["d"])),
    "(prod rho)^2": lambda r: r.measured(bounded_exp(r.of["d"])).square(),
    # Of weights of tokens, or of responses that have a valid token.
    "weights": lambda r: r.n if r.config.has_token_weights else r.n > 0.0,
    "sum w": lambda r: r.weight_sum("w", r.weight),
    "sum w^2": lambda r: r.weight_sum("w^2", r.weight.square()),
    "sum (w - 1)": lambda r: r.weight_sum("w - 1", r.weight - 1.0),
    "sum (w - 1)^2": lambda r: r.weight_sum("(w - 1)^2", (r.weight - 1.0).square()),
    "weights in mean": lambda r: _in_mean(r)[0],
    "number in mean": lambda r: _in_mean(r)[1],
    # What the framework divides by: all response tokens, or all responses (of each response it takes the mean over its
    # response tokens). The kept part of it: kept tokens, or sum over responses of kept tokens / response tokens.
    "terms": lambda r: r.generated if r.config.per_token_loss else r.generated > 0.0,
    "kept terms": lambda r: r.num_kept if r.config.per_token_loss else r.num_kept / r.generated.clamp(min=1.0),
}
"""Summed over the responses of a call, and of all data-parallel ranks; any other name is a key of :class:`Responses`.
Whole responses are equal on all context-parallel ranks, so the data-parallel group without context parallelism is the
right one."""

BATCH_MAXIMA: dict[str, Callable[[Responses], Tensor]] = {
    "max d": lambda r: r.of["max d"],
    "max -d": lambda r: r.of["max -d"],
    "max mean d": lambda r: r.measured(r.mean("d"), -math.inf),
    "max mean -d": lambda r: r.measured(-r.mean("d"), -math.inf),
    "max lag": lambda r: r.of["max lag"],
}

Totals = Mapping[str, Tensor]
"""Sums and maxima over responses, 0-dim, by name. Also the factors of :func:`~mis_ext.correction.passes.add_scale`."""


# --- rows


@dataclass(frozen=True, eq=False)
class MetricRow:
    """One metric.

    Attributes:
        name: Without prefix.
        over: What it is a mean over.
        text: What it measures, for the documentation.
        value: Of the group, a function of the totals. Else ``[S]`` as a function of :class:`Responses`, or as the key
            of a sum: over tokens the sum in each response, over sequences or responses the value of each.
        is_core: Whether it is on the short list to watch.
        count: Key of the number of tokens that count; a response without one was not measured.
        is_scaled: Whether the value is multiplied by the scale of the weights, which is known after the totals.
    """

    name: str
    over: Population
    text: str
    value: Any
    is_core: bool = False
    count: Key = "n"
    is_scaled: bool = False

    def measure(self, r: Responses, total: Totals) -> tuple[Tensor, Tensor]:
        """``[S]`` float64, the sum over the tokens of a response or its value; and how many tokens count.

        Of the group the first is 0-dim, the value.
        """
        count_S = r.generated if self.over in ("response_tokens", "responses", "group") else r.of[self.count]
        if self.over == "group":
            return self.value(total), count_S
        return (self.value(r) if callable(self.value) else r.of[self.value]).double(), count_S


def highest(total: Totals, name: str) -> Tensor:
    """A maximum over responses; NaN where nothing was measured."""
    return torch.where(total["n"] > 0.0, total[name], math.nan)


def effective_share(weights: str, squares: str, count: str) -> Callable[[Totals], Tensor]:
    """Kish's effective sample size over the sample size, ``(sum w)^2 / (n sum w^2)``; NaN of no sample."""
    # From left to right, because the square of a sum can be infinite.
    return lambda total: (total[weights] / total[count] * (total[weights] / total[squares])).clamp(max=1.0)


ESS_TOKEN = effective_share("rho", "rho^2", "n")
ESS_SEQUENCE = effective_share("prod rho", "(prod rho)^2", "measured")


def _weight_std(total: Totals) -> Tensor:
    # Of w - 1, which is near 0: a difference of squares of w would lose the digits.
    n, first, second = total["weights"], total["sum (w - 1)"], total["sum (w - 1)^2"]
    return ((second - first.square() / n).clamp(min=0.0) / n).sqrt()


def _chi2_token(r: Responses) -> Tensor:
    return (r.of["rho^2 - 1"] / r.n.clamp(min=1.0)).clamp(max=r.config.metric_max)


def _chi2_seq(r: Responses) -> Tensor:
    excess = bounded_expm1(r.of["d"])
    return (excess * (excess + 2.0)).clamp(max=r.config.metric_max)


def _largest_gap(t: Totals) -> Tensor:
    return torch.maximum(highest(t, "max d"), highest(t, "max -d"))


def _lag_max(t: Totals) -> Tensor:
    return torch.where(t["dated"] > 0.0, t["max lag"], math.nan)


_K3 = "`exp d - 1 - d`, at most `mis_metric_max`: KL(mu, pi_prox), never negative"
_CHI2 = "mean of `exp 2d` over the sequence, minus 1, at most `mis_metric_max`"
_PHANTOM = (
    "`exp d` outside [0.8, 1.2]: with the engine as old policy PPO clips such a token before any update, where its "
    "advantage has that sign"
)
_RAISED = f"tokens with `d > 0` among open ones: behavior probability in {OPEN}, two different log-probs"
_ESS = "`(sum w)^2 / (n sum w^2)` of the "
_ESS_SEQ = "`(sum W)^2 / (n sum W^2)` of the `n` sequences with a ratio, `W = exp(sum d)`, `sum d` between -20 and 20"
_ESS_AGE = "`ess_ratio_token` if {} tokens had the ratio 1"
_LR = "root of `ess_ratio_token`: what to multiply the learning rate by"
_LR_SEQ = "root of `ess_ratio_seq`: the same, as VCPO (arXiv:2602.17616) has it"
_UNDATED = "tokens with a ratio, and weights of unknown age"
_UNMEASURED = "sequences without any finite ratio: they say nothing in the metrics over tokens and sequences"
_NO_RATIO = "response tokens without a finite ratio"
_NONZERO = "tokens whose two log-probs are different float32 numbers (+0 equals -0)"
_INVALID = "`nonfinite_token_fraction` under the name that goes with these two"
_FINAL = "bounded and scaled weights, whatever the gates do: their mean over a sequence"
_VETO = "tokens that alone veto their sequence, those without a finite ratio among them"
_Row = MetricRow

MISMATCH_ROWS = (
    _Row("training_log_ppl", "sequences", "minus the mean proximal log-prob", lambda r: -r.mean("log_pi")),
    _Row("training_ppl", "sequences", "its `exp`", lambda r: bounded_exp(-r.mean("log_pi"))),
    _Row("rollout_log_ppl", "sequences", "minus the mean behavior log-prob", lambda r: -r.mean("log_mu")),
    _Row("rollout_ppl", "sequences", "its `exp`", lambda r: bounded_exp(-r.mean("log_mu"))),
    _Row("kl", "valid_tokens", "`-d`: the KL of `k3_kl`, noisier, any sign", "k1"),
    _Row("k3_kl", "valid_tokens", _K3, "k3", True),
    _Row("log_ppl_diff", "sequences", "`-mean d`", lambda r: -r.mean("d")),
    _Row("log_ppl_abs_diff", "sequences", "`abs mean d`", lambda r: r.mean("d").abs()),
    _Row("ppl_ratio", "sequences", "`exp(-mean d)`", lambda r: bounded_exp(-r.mean("d"))),
    # The smallest -mean d is minus the largest mean d.
    _Row("log_ppl_diff_min", "group", "smallest `-mean d` of a sequence", lambda t: -highest(t, "max mean d")),
    _Row("log_ppl_diff_max", "group", "largest `-mean d` of a sequence", lambda t: highest(t, "max mean -d")),
    _Row("chi2_token", "sequences", _CHI2, _chi2_token),
    _Row("chi2_seq", "sequences", "`exp(2 sum d) - 1`, at most `mis_metric_max`", _chi2_seq),
    _Row("logprob_abs_diff", "valid_tokens", "`abs d`", "|d|", True),
    _Row("tv", "valid_tokens", "`1 - min(1, exp d)`: total variation", "tv"),
    _Row("ratio_above_2_fraction", "valid_tokens", "`exp d` above 2", "rho > 2"),
    _Row("ratio_below_half_fraction", "valid_tokens", "`exp d` below 1/2", "rho < 1/2"),
    _Row("phantom_clip_fraction", "valid_tokens", _PHANTOM, "outside PPO"),
    _Row("raised_fraction", "group", _RAISED, lambda t: t["raised"] / t["open"]),
    _Row("ess_ratio_token", "group", _ESS + "unbounded token ratios: 1 on-policy", ESS_TOKEN, True),
    _Row("ess_ratio_seq", "group", _ESS_SEQ, ESS_SEQUENCE, True),
    _Row("lr_multiplier_token", "group", _LR, lambda t: ESS_TOKEN(t).sqrt()),
    _Row("lr_multiplier_seq", "group", _LR_SEQ, lambda t: ESS_SEQUENCE(t).sqrt()),
    _Row("ratio_max", "group", "largest `exp d`", lambda t: bounded_exp(highest(t, "max d")), True),
    _Row("ratio_min", "group", "smallest `exp d`", lambda t: bounded_exp(-highest(t, "max -d"))),
    _Row("nonfinite_token_fraction", "response_tokens", _NO_RATIO, lambda r: r.generated - r.n, True),
    _Row("unmeasured_seq_fraction", "responses", _UNMEASURED, lambda r: r.n == 0.0),
    _Row("train_rollout_logprob_abs_diff_max", "group", "largest `abs d`", _largest_gap),
    # Subtraction underflows gradually: only equal numbers, as +0 and -0 are, have a difference of 0.
    _Row("train_rollout_logprob_abs_diff_nonzero", "valid_tokens", _NONZERO, "d != 0"),
    _Row("train_rollout_logprob_abs_diff_invalid", "response_tokens", _INVALID, lambda r: r.generated - r.n),
)
"""How far the two engines are apart, whatever the correction does.

``kl``, ``k3_kl``: Schulman, Approximating KL Divergence, 2020. Effective sample size: Kish, Survey Sampling, 1965.
Learning rate: Huang et al., Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs (VCPO), arXiv:2602.17616; of
tokens: ours. Phantom clipping: Dirhoussi, Defeating the trainer-generator precision mismatch in TRL, 2026, whose range
follows from the run.
"""

AGE_ROWS = (
    _Row("lag_mean", "valid_tokens", "mean lag, of tokens with a known one", "lag", True, "dated"),
    _Row("lag_max", "group", "largest known lag", _lag_max, True),
    _Row("unknown_lag_token_fraction", "response_tokens", _UNDATED, lambda r: r.n - r.of["dated"], True),
    _Row("stale_token_fraction", "valid_tokens", "tokens whose lag is above 0, or unknown", "stale", True),
    _Row("k3_kl_fresh", "valid_tokens", "what fresh tokens add to `k3_kl`", "k3 fresh", True),
    _Row(
        "ess_ratio_token_fresh",
        "group",
        _ESS_AGE.format("stale"),
        effective_share("rho fresh", "rho^2 fresh", "n"),
        True,
    ),
    _Row("k3_kl_stale", "valid_tokens", "what stale tokens add to `k3_kl`", "k3 stale", True),
    _Row(
        "ess_ratio_token_stale",
        "group",
        _ESS_AGE.format("fresh"),
        effective_share("rho stale", "rho^2 stale", "n"),
        True,
    ),
)
"""Mismatch and staleness apart: on fresh tokens the engine alone differs, on stale ones the weights do too.

The share of one age is a mean over all valid tokens, the others counting as on-policy: so it is known in each call,
also in one that has no token of that age.
"""


def weight_rows(weight: Weight) -> Iterator[MetricRow]:
    """What bounding does to the weights, before they are scaled."""
    (low, high), mode, of_tokens = edges_of(weight), weight.mode, weight.level == "token"
    over: Population = "valid_tokens" if of_tokens else "sequences"
    below = "w low" if of_tokens else lambda r: r.log_ratio < low
    above = "w high" if of_tokens else lambda r: r.log_ratio > high
    bounded = "w" if of_tokens else lambda r: r.weight
    ratio = "w ratio" if of_tokens else lambda r: bounded_exp(r.log_ratio)
    yield _Row("tis_weight_before_bound", over, "the ratio at `tis_level`", ratio)
    if weight.bound.has_low:
        yield _Row(f"tis_{mode}_fraction_low", over, "weights below the lower bound", below)
        yield _Row(f"tis_{mode}_fraction_high", over, "weights above the upper bound", above)
    elif weight.bound.has_high:
        yield _Row(f"tis_{mode}_fraction", over, "weights above the upper bound", above)
        yield _Row(f"tis_{mode}_fraction_low", over, "weights below 1 / the upper bound", below)
    yield _Row("tis_weight_after_bound", over, "the bounded weight", bounded)
    yield _Row("is_ratio_mean_after_tis_rs", over, "the same, under the reference's name", bounded)
    yield _Row("tis_weight_std", "group", "standard deviation of the bounded weights", _weight_std)
    yield _Row(
        "tis_weight_ess",
        "group",
        "`(sum w)^2 / (n sum w^2)` of the bounded weights",
        effective_share("sum w", "sum w^2", "weights"),
    )


def gate_rows(label: str, gate: Gate) -> Iterator[MetricRow]:
    """What a gate finds outside its bounds, whatever other gates do."""

    def vetoing_tokens(r: Responses) -> Tensor:
        return r.of[label, "low"] + r.of[label, "high"] + (r.generated - r.n)

    def vetoed(r: Responses) -> Tensor:
        return r.gates[label][1] | r.gates[label][2] | (r.n != r.generated)

    # The statistic as its bounds are written: of a ratio, not of its log.
    def shown(r: Responses) -> Tensor:
        return bounded_exp(r.gates[label][0]) if gate.row.is_log else r.gates[label][0]

    over: Population = "valid_tokens" if gate.is_of_tokens else "sequences"
    if gate.is_veto:
        yield _Row(f"{label}_token_fraction", "response_tokens", _VETO, vetoing_tokens)
        yield _Row(f"{label}_seq_fraction", "responses", "sequences with such a token", vetoed)
    else:
        below = (label, "low") if gate.is_of_tokens else lambda r: r.gates[label][1]
        above = (label, "high") if gate.is_of_tokens else lambda r: r.gates[label][2]
        yield _Row(f"{label}_fraction_low", over, "below the band", below)
        yield _Row(f"{label}_fraction_high", over, "above the band", above)
    value = (label, "shown") if gate.is_of_tokens else shown
    yield _Row(
        f"{label}_value", over, "the statistic itself", value, False, "n" if gate.after is None else (label, "n")
    )


def outcome_rows(config: CorrectionConfig) -> Iterator[MetricRow]:
    """What the weights are in the end, and what the gates left."""
    if config.normalize_over is not None:
        yield _Row("batch_norm_factor", "group", "the mean weight divided by", lambda t: t["mean weight"])
    if config.weight is not None:
        # Means and extremes over a response, before they are scaled.
        mean = smallest = largest = lambda r: r.weight
        if config.has_token_weights:
            mean, smallest, largest = (
                lambda r: r.of["w"] / r.n.clamp(min=1.0),
                lambda r: -r.of["max -w"],
                lambda r: r.of["max w"],
            )
        yield _Row("is_ratio_mean_final", "sequences", _FINAL, mean, True, is_scaled=True)
        yield _Row("is_ratio_min_final", "sequences", "their smallest", smallest, is_scaled=True)
        yield _Row("is_ratio_max_final", "sequences", "their largest", largest, is_scaled=True)
    text = "sequences of which something is left in the mask"
    yield _Row("kept_token_fraction", "response_tokens", "what the gates left in the mask", lambda r: r.num_kept, True)
    yield _Row("kept_seq_fraction", "responses", text, lambda r: r.num_kept > 0.0, True)
    if config.denominator == "kept":
        text = "the factor of `mis_denominator: kept`"
        yield _Row("denominator_factor", "group", text, lambda t: t["denominator factor"])


@functools.lru_cache(maxsize=32)
def rows_of(config: CorrectionConfig) -> tuple[MetricRow, ...]:
    """Every metric that a configuration can emit, in the order of emission."""
    rows = [*MISMATCH_ROWS, *(AGE_ROWS if config.staleness else ())]
    if config.metrics_only:
        return tuple(rows)
    if config.weight is not None:
        rows += weight_rows(config.weight)
    for label, gate in config.labelled_gates.items():
        rows += gate_rows(label, gate)
    return (*rows, *outcome_rows(config))


def response_metrics(r: Responses, total: Totals, rows: Collection[MetricRow]) -> Tensor:
    """``[M, S]`` float32: the value that each token of a response gets of each metric.

    The framework averages over all responses, or over all their tokens. So a response that was not measured gets the
    mean of the others of this call: NaN where there are none.
    """
    if not rows:
        return r.n.new_empty(0, len(r.n)).float()
    values, counts = [], []
    for row in rows:
        value, count_S = row.measure(r, total)
        counts.append(count_S)
        if row.over in ("valid_tokens", "response_tokens"):
            value = value / count_S
        values.append(torch.where(count_S > 0.0, value * total["scale"] if row.is_scaled else value, 0.0))
    value_MS, is_measured_MS = torch.stack(values), torch.stack(counts) > 0.0
    share_MS = torch.where(is_measured_MS, r.generated if r.config.per_token_loss else 1.0, 0.0)
    mean_M1 = (value_MS * share_MS).sum(-1, keepdim=True) / share_MS.sum(-1, keepdim=True)
    return torch.where(is_measured_MS, value_MS, mean_M1).float()
