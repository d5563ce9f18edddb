# SPDX-License-Identifier: Apache-2.0
"""All metrics: one row each, with its formula in words and as code.

Mismatch metrics look at the original response mask, whatever the correction does. ``d = log pi_prox - log mu`` of a
token; ``sum d`` and ``mean d`` are over the tokens of a response.

A row over tokens names a sum of :data:`TOKEN_SUMS`. Any other row is a function: of the numbers of the responses
(:class:`Responses`), or of the totals of the batch (:class:`Totals`). ``needs`` and ``totals`` list what the function
reads, so that a call computes nothing that no row asks for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.gates import Gate
from mis_ext.correction.tokens import MAX_NATS, OPEN, UNKNOWN_LAG, Tokens, bounded_exp, bounded_expm1
from mis_ext.correction.weights import Weight

if TYPE_CHECKING:
    from mis_ext.correction.config import CorrectionConfig

PREFIX = "mis_"
LOG_2 = math.log(2.0)
_PPO_RANGE = math.log(0.8), math.log(1.2)
"""What PPO's clip leaves alone, with the frameworks' default of 0.2."""

Key = str | tuple[str, str]
"""A sum or maximum over the tokens of a response: of :data:`TOKEN_SUMS`, or of a gate, by the gate's label."""
Numbers = dict[Key, Tensor]

Population = Literal["valid_tokens", "response_tokens", "sequences", "responses", "group"]
"""What a metric is a mean over. ``sequences``: those with a valid token. ``responses``: those with a response token.
``group``: one number of all data-parallel ranks."""


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
    """One number of this call on all data-parallel ranks, 0-dim; NaN when nothing was measured."""

    number: Tensor

    def value(self) -> Tensor:
        """The number of all data-parallel ranks, 0-dim."""
        return self.number


Metric = Mean | GroupNumber


class TokenStep(NamedTuple):
    """What tokens decide; ``[N, 64]`` each, in blocks. ``weight`` is 0 where a token is not valid."""

    tokens: Tokens
    keep: Tensor
    weighted: Tensor
    weight: Tensor

    @property
    def live(self) -> Tensor:
        """Stays in the mask, and has a weight."""
        return self.keep & self.weighted


class Responses(NamedTuple):
    """What responses decide; ``[S]`` each, equal on all context-parallel ranks.

    ``of``: sums and maxima over their tokens. ``n``, ``generated``: valid and response tokens. ``log_ratio``: what the
    weight of a response bounds, 0 with a weight of tokens. ``gates``: value, below, above of each gate on responses, by
    label.
    """

    of: Numbers
    n: Tensor
    generated: Tensor
    keep: Tensor
    weighted: Tensor
    weight: Tensor
    log_ratio: Tensor
    usable: Tensor
    num_kept: Tensor
    gates: dict[str, tuple[Tensor, Tensor, Tensor]]

    @property
    def measured(self) -> Tensor:
        """bool: it has a valid token."""
        return self.n > 0.0

    def mean(self, key: Key) -> Tensor:
        """The mean over valid tokens, 0 of none."""
        return (self.of[key] / self.n.clamp(min=1.0)).clamp(-MAX_NATS, MAX_NATS)

    @property
    def product(self) -> Tensor:
        """``W = prod rho = exp(sum d)``, 0 without a valid token."""
        return torch.where(self.measured, bounded_exp(self.of["d"]), 0.0)


class Totals(dict[str, Tensor]):
    """Sums and maxima over responses by name, 0-dim: see :data:`BATCH_SUMS` and :data:`BATCH_MAXIMA`.

    Also ``mean weight`` and ``denominator factor``, by which weights are scaled.
    """

    @property
    def scale(self) -> Tensor:
        """What all weights are multiplied by."""
        return self["denominator factor"] / self["mean weight"]

    def highest(self, name: str) -> Tensor:
        """A maximum; NaN where nothing was measured."""
        return torch.where(self["n"] > 0.0, self[name], math.nan)

    def effective_share(self, total: str, squares: str, count: str) -> Tensor:
        """Kish's effective sample size over the sample size, ``(sum w)^2 / (n sum w^2)``; NaN of no sample."""
        return (self[total] / self[count] * (self[total] / self[squares])).clamp(max=1.0)


def _edges_of(weight: Weight) -> tuple[float, float]:
    """Log-ratios between which a weight is the ratio itself; ``-high`` and ``high`` where nothing clips from below."""
    return (weight.log_low if weight.bound.has_low else -weight.log_high), weight.log_high


def _edges(c: CorrectionConfig) -> tuple[float, float]:
    assert c.weight is not None
    return _edges_of(c.weight)


def _weighed(s: TokenStep, c: CorrectionConfig) -> Tensor:
    """The log-ratio that a weight of tokens bounds."""
    assert c.weight is not None
    return c.weight.log_ratio_of(s.tokens)


def _k3(s: TokenStep, c: CorrectionConfig) -> Tensor:
    return s.tokens.k3.clamp(max=c.metric_max)


def _valid_only(s: TokenStep, x: Tensor) -> Tensor:
    return torch.where(s.tokens.valid, x, 0.0)


TOKEN_SUMS: dict[str, Callable[[TokenStep, CorrectionConfig], Tensor]] = {
    "generated": lambda s, c: s.tokens.generated,
    "n": lambda s, c: s.tokens.valid,
    "kept": lambda s, c: s.keep,
    "live": lambda s, c: s.live,
    # These are 0 of a token that is not valid, because its d is.
    "d": lambda s, c: s.tokens.d,
    "log_pi": lambda s, c: s.tokens.log_pi,
    "log_mu": lambda s, c: s.tokens.log_mu,
    "rho": lambda s, c: _valid_only(s, s.tokens.ratio),
    "rho^2": lambda s, c: _valid_only(s, s.tokens.ratio.square()),
    "rho^2 - 1": lambda s, c: s.tokens.squared_excess,
    "k1": lambda s, c: (-s.tokens.d).clamp(-MAX_NATS, MAX_NATS),
    "k3": _k3,
    "|d|": lambda s, c: s.tokens.abs_d.clamp(max=MAX_NATS),
    "tv": lambda s, c: -s.tokens.excess.clamp(max=0.0),
    "rho > 2": lambda s, c: s.tokens.d > LOG_2,
    "rho < 1/2": lambda s, c: s.tokens.d < -LOG_2,
    "outside PPO": lambda s, c: (s.tokens.d > _PPO_RANGE[1]) | (s.tokens.d < _PPO_RANGE[0]),
    "d != 0": lambda s, c: s.tokens.d != 0.0,
    "open": lambda s, c: s.tokens.is_open,
    "raised": lambda s, c: s.tokens.is_open & (s.tokens.d > 0.0),
    # Weights of tokens.
    "w": lambda s, c: s.weight,
    "w^2": lambda s, c: s.weight.square(),
    "w live": lambda s, c: torch.where(s.live, s.weight, 0.0),
    "w - 1": lambda s, c: _valid_only(s, s.weight - 1.0),
    # In float64: of equal weights the scatter is a difference of equal numbers.
    "(w - 1)^2": lambda s, c: _valid_only(s, (s.weight - 1.0).double().square()),
    "w ratio": lambda s, c: _valid_only(s, bounded_exp(_weighed(s, c))),
    "w low": lambda s, c: s.tokens.valid & (_weighed(s, c) < _edges(c)[0]),
    "w high": lambda s, c: s.tokens.valid & (_weighed(s, c) > _edges(c)[1]),
    # By age. A token of unknown age is not fresh.
    "dated": lambda s, c: s.tokens.valid & (s.tokens.lag < UNKNOWN_LAG),
    "lag": lambda s, c: torch.where(s.tokens.valid & (s.tokens.lag < UNKNOWN_LAG), s.tokens.lag, 0.0),
    "stale": lambda s, c: s.tokens.valid & (s.tokens.lag > 0.0),
    "k3 fresh": lambda s, c: torch.where(s.tokens.lag > 0.0, 0.0, _k3(s, c)),
    "k3 stale": lambda s, c: torch.where(s.tokens.lag > 0.0, _k3(s, c), 0.0),
    "rho fresh": lambda s, c: _valid_only(s, torch.where(s.tokens.lag > 0.0, 1.0, s.tokens.ratio)),
    "rho stale": lambda s, c: _valid_only(s, torch.where(s.tokens.lag > 0.0, s.tokens.ratio, 1.0)),
    "rho^2 fresh": lambda s, c: _valid_only(s, torch.where(s.tokens.lag > 0.0, 1.0, s.tokens.ratio.square())),
    "rho^2 stale": lambda s, c: _valid_only(s, torch.where(s.tokens.lag > 0.0, s.tokens.ratio.square(), 1.0)),
}
"""Summed over the tokens of a response, 0 where a token does not count."""

TOKEN_MAXIMA: dict[str, Callable[[TokenStep, CorrectionConfig], Tensor]] = {
    "max d": lambda s, c: torch.where(s.tokens.valid, s.tokens.d, -math.inf),
    "max -d": lambda s, c: torch.where(s.tokens.valid, -s.tokens.d, -math.inf),
    "max w": lambda s, c: torch.where(s.tokens.valid, s.weight, -math.inf),
    "max -w": lambda s, c: torch.where(s.tokens.valid, -s.weight, -math.inf),
    "max lag": lambda s, c: torch.where(s.tokens.valid & (s.tokens.lag < UNKNOWN_LAG), s.tokens.lag, -math.inf),
}
"""Of a response, ``-inf`` where a token does not count."""


def _in_mean_weight(r: Responses, c: CorrectionConfig) -> tuple[Tensor, Tensor]:
    """What a response adds to the sum of the weights whose mean they are divided by, and to their number."""
    over_kept = c.normalize_over == "kept"
    counted = torch.where(r.keep & r.weighted, r.of["live"], 0.0) if over_kept else torch.where(r.usable, r.n, 0.0)
    if c.has_token_weights:
        total = r.of["w live"] if over_kept else r.of["w"]
        return torch.where(counted > 0.0, total, 0.0), counted
    return torch.where(counted > 0.0, r.weight, 0.0), (counted > 0.0).double()


def _kept_terms(r: Responses, c: CorrectionConfig) -> Tensor:
    # The framework divides by tokens, or by the tokens of each response and then by the responses.
    return r.num_kept if c.per_token_loss else r.num_kept / r.generated.clamp(min=1.0)


BATCH_SUMS: dict[str, Callable[[Responses, CorrectionConfig], Tensor]] = {
    "generated": lambda r, c: r.generated,
    "kept": lambda r, c: r.num_kept,
    "responses": lambda r, c: r.generated > 0.0,
    "kept responses": lambda r, c: r.num_kept > 0.0,
    "n": lambda r, c: r.n,
    "measured": lambda r, c: r.measured,
    "open": lambda r, c: r.of["open"],
    "raised": lambda r, c: r.of["raised"],
    "dated": lambda r, c: r.of["dated"],
    "rho": lambda r, c: r.of["rho"],
    "rho^2": lambda r, c: r.of["rho^2"],
    "rho fresh": lambda r, c: r.of["rho fresh"],
    "rho stale": lambda r, c: r.of["rho stale"],
    "rho^2 fresh": lambda r, c: r.of["rho^2 fresh"],
    "rho^2 stale": lambda r, c: r.of["rho^2 stale"],
    "W": lambda r, c: r.product,
    "W^2": lambda r, c: r.product.square(),
    # Of weights of tokens, or of responses that have a valid token.
    "weights": lambda r, c: r.n if c.has_token_weights else r.measured,
    "w": lambda r, c: r.of["w"] if c.has_token_weights else torch.where(r.measured, r.weight, 0.0),
    "w^2": lambda r, c: r.of["w^2"] if c.has_token_weights else torch.where(r.measured, r.weight.square(), 0.0),
    "w - 1": lambda r, c: r.of["w - 1"] if c.has_token_weights else torch.where(r.measured, r.weight - 1.0, 0.0),
    "(w - 1)^2": lambda r, c: (
        r.of["(w - 1)^2"] if c.has_token_weights else torch.where(r.measured, (r.weight - 1.0).square(), 0.0)
    ),
    "weights in mean": lambda r, c: _in_mean_weight(r, c)[0],
    "number in mean": lambda r, c: _in_mean_weight(r, c)[1],
    "terms": lambda r, c: r.generated if c.per_token_loss else r.generated > 0.0,
    "kept terms": _kept_terms,
}
"""Summed over the responses of a call, and of all data-parallel ranks. Whole responses are equal on all
context-parallel ranks, so the data-parallel group without context parallelism is the right one."""

BATCH_MAXIMA: dict[str, Callable[[Responses, CorrectionConfig], Tensor]] = {
    "max d": lambda r, c: r.of["max d"],
    "max -d": lambda r, c: r.of["max -d"],
    "max mean d": lambda r, c: torch.where(r.measured, r.mean("d"), -math.inf),
    "max mean -d": lambda r, c: torch.where(r.measured, -r.mean("d"), -math.inf),
    "max lag": lambda r, c: r.of["max lag"],
}


@dataclass(frozen=True, eq=False)
class MetricRow:
    """One metric.

    Attributes:
        name: Without prefix.
        over: What it is a mean over.
        text: What it measures, for the documentation.
        value: Over tokens, their sum in each response ``[S]``; over sequences or responses, the value of each.
        number: Of the group instead, from the totals.
        needs: Sums and maxima over tokens that it reads.
        totals: Sums and maxima over responses that it reads.
        is_core: Whether it is on the short list to watch.
        count: Key of the number of tokens that count; a response without one was not measured.
        is_scaled: Whether the value is multiplied by the scale of the weights, which is known after the totals.
    """

    name: str
    over: Population
    text: str
    value: Callable[[Responses], Tensor] | None = None
    number: Callable[[Totals], Tensor] | None = None
    needs: tuple[Key, ...] = ()
    totals: tuple[str, ...] = ()
    is_core: bool = False
    count: Key = "n"
    is_scaled: bool = False

    def amount_S(self, r: Responses) -> Tensor:
        """``[S]``: what a response adds to the total of the mean."""
        assert self.value is not None
        return self.value(r)

    def value_S(self, r: Responses) -> Tensor:
        """``[S]``: the value of a response; anything where it was not measured."""
        is_mean = self.over in ("valid_tokens", "response_tokens")
        return self.amount_S(r) / self.count_S(r) if is_mean else self.amount_S(r).double()

    def count_S(self, r: Responses) -> Tensor:
        """``[S]``: how many tokens of a response count."""
        return r.of["generated" if self.over in ("response_tokens", "responses", "group") else self.count]


def over_tokens(name: str, key: Key, text: str, *, count: Key = "n", core: bool = False) -> MetricRow:
    """The mean over valid tokens of what ``key`` sums."""
    return MetricRow(name, "valid_tokens", text, lambda r: r.of[key], needs=(key, count), is_core=core, count=count)


def of_group(
    name: str,
    number: Callable[[Totals], Tensor],
    text: str,
    *,
    totals: tuple[str, ...],
    needs: tuple[Key, ...],
    core: bool = False,
) -> MetricRow:
    """One number of all data-parallel ranks."""
    return MetricRow(name, "group", text, number=number, needs=needs, totals=totals, is_core=core)


def mismatch_rows(metric_max: float) -> Iterator[MetricRow]:
    """How far the two engines are apart, whatever the correction does.

    Args:
        metric_max: Largest value that a token adds to ``k3_kl``, and a response to ``chi2_token`` and ``chi2_seq``.

    References:
        ``kl``, ``k3_kl``: Schulman, Approximating KL Divergence, 2020. Effective sample size: Kish, Survey Sampling,
        1965. Learning rate: Huang et al., Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs (VCPO),
        arXiv:2602.17616; of tokens: ours. Phantom clipping: Dirhoussi, Defeating the trainer-generator precision
        mismatch in TRL, 2026, whose range follows from the run.
    """

    def of_response(name: str, value: Callable[[Responses], Tensor], text: str, needs: tuple[Key, ...]) -> MetricRow:
        return MetricRow(name, "sequences", text, value, needs=needs)

    def chi2_seq(r: Responses) -> Tensor:
        excess = bounded_expm1(r.of["d"])
        return (excess * (excess + 2.0)).clamp(max=metric_max)

    yield of_response("training_log_ppl", lambda r: -r.mean("log_pi"), "minus the mean proximal log-prob", ("log_pi",))
    yield of_response("training_ppl", lambda r: bounded_exp(-r.mean("log_pi")), "its `exp`", ("log_pi",))
    yield of_response("rollout_log_ppl", lambda r: -r.mean("log_mu"), "minus the mean behavior log-prob", ("log_mu",))
    yield of_response("rollout_ppl", lambda r: bounded_exp(-r.mean("log_mu")), "its `exp`", ("log_mu",))
    yield over_tokens("kl", "k1", "`-d`: the KL of `k3_kl`, noisier, any sign")
    text = "`exp d - 1 - d`, at most `mis_metric_max`: KL(mu, pi_prox), never negative"
    yield over_tokens("k3_kl", "k3", text, core=True)
    yield of_response("log_ppl_diff", lambda r: -r.mean("d"), "`-mean d`", ("d",))
    yield of_response("log_ppl_abs_diff", lambda r: r.mean("d").abs(), "`abs mean d`", ("d",))
    yield of_response("ppl_ratio", lambda r: bounded_exp(-r.mean("d")), "`exp(-mean d)`", ("d",))
    # The smallest -mean d is minus the largest mean d.
    yield of_group(
        "log_ppl_diff_min",
        lambda total: -total.highest("max mean d"),
        "smallest `-mean d` of a sequence",
        totals=("max mean d", "n"),
        needs=("d",),
    )
    yield of_group(
        "log_ppl_diff_max",
        lambda total: total.highest("max mean -d"),
        "largest `-mean d` of a sequence",
        totals=("max mean -d", "n"),
        needs=("d",),
    )
    yield of_response(
        "chi2_token",
        lambda r: (r.of["rho^2 - 1"] / r.n.clamp(min=1.0)).clamp(max=metric_max),
        "mean of `exp 2d` over the sequence, minus 1, at most `mis_metric_max`",
        ("rho^2 - 1",),
    )
    yield of_response("chi2_seq", chi2_seq, "`exp(2 sum d) - 1`, at most `mis_metric_max`", ("d",))
    yield over_tokens("logprob_abs_diff", "|d|", "`abs d`", core=True)
    yield over_tokens("tv", "tv", "`1 - min(1, exp d)`: total variation")
    yield over_tokens("ratio_above_2_fraction", "rho > 2", "`exp d` above 2")
    yield over_tokens("ratio_below_half_fraction", "rho < 1/2", "`exp d` below 1/2")
    yield over_tokens(
        "phantom_clip_fraction",
        "outside PPO",
        "`exp d` outside [0.8, 1.2]: with the engine as old policy PPO clips such a token before any update, where "
        "its advantage has that sign",
    )
    yield of_group(
        "raised_fraction",
        lambda total: total["raised"] / total["open"],
        f"tokens with `d > 0` among open ones: behavior probability in {OPEN}, two different log-probs",
        totals=("raised", "open"),
        needs=("raised", "open"),
    )
    yield of_group(
        "ess_ratio_token",
        lambda total: total.effective_share("rho", "rho^2", "n"),
        "`(sum w)^2 / (n sum w^2)` of the unbounded token ratios: 1 on-policy",
        core=True,
        totals=("rho", "rho^2", "n"),
        needs=("rho", "rho^2"),
    )
    yield of_group(
        "ess_ratio_seq",
        lambda total: total.effective_share("W", "W^2", "measured"),
        "the same of `exp(sum d)` of sequences, the sum between -20 and 20",
        core=True,
        totals=("W", "W^2", "measured"),
        needs=("d",),
    )
    yield of_group(
        "lr_multiplier_token",
        lambda total: total.effective_share("rho", "rho^2", "n").sqrt(),
        "root of `ess_ratio_token`: what to multiply the learning rate by",
        totals=("rho", "rho^2", "n"),
        needs=("rho", "rho^2"),
    )
    yield of_group(
        "lr_multiplier_seq",
        lambda total: total.effective_share("W", "W^2", "measured").sqrt(),
        "root of `ess_ratio_seq`: the same, as VCPO (arXiv:2602.17616) has it",
        totals=("W", "W^2", "measured"),
        needs=("d",),
    )
    yield of_group(
        "ratio_max",
        lambda total: bounded_exp(total.highest("max d")),
        "largest `exp d`",
        totals=("max d", "n"),
        needs=("max d",),
        core=True,
    )
    yield of_group(
        "ratio_min",
        lambda total: bounded_exp(-total.highest("max -d")),
        "smallest `exp d`",
        totals=("max -d", "n"),
        needs=("max -d",),
    )
    text = "response tokens without a finite ratio"
    yield MetricRow("nonfinite_token_fraction", "response_tokens", text, lambda r: r.generated - r.n, is_core=True)
    yield MetricRow(
        "unmeasured_seq_fraction",
        "responses",
        "sequences without any finite ratio: they say nothing in the metrics over tokens and sequences",
        lambda r: r.n == 0.0,
    )
    yield of_group(
        "train_rollout_logprob_abs_diff_max",
        lambda total: torch.maximum(total.highest("max d"), total.highest("max -d")),
        "largest `abs d`",
        totals=("max d", "max -d", "n"),
        needs=("max d", "max -d"),
    )
    # Subtraction underflows gradually: only equal numbers, as +0 and -0 are, have a difference of 0.
    yield over_tokens(
        "train_rollout_logprob_abs_diff_nonzero",
        "d != 0",
        "tokens whose two log-probs are different float32 numbers (+0 equals -0)",
    )
    yield MetricRow(
        "train_rollout_logprob_abs_diff_invalid",
        "response_tokens",
        "`nonfinite_token_fraction` under the name that goes with these two",
        lambda r: r.generated - r.n,
    )


def age_rows() -> Iterator[MetricRow]:
    """Mismatch and staleness apart: on fresh tokens the engine alone differs, on stale ones the weights do too.

    What one age shows is a number of all valid tokens, the others counting as on-policy: so it is known in each call,
    also in one that has no token of that age.
    """
    yield over_tokens("lag_mean", "lag", "mean lag, of tokens with a known one", count="dated", core=True)
    yield of_group(
        "lag_max",
        lambda total: torch.where(total["dated"] > 0.0, total["max lag"], math.nan),
        "largest known lag",
        totals=("max lag", "dated"),
        needs=("max lag", "dated"),
        core=True,
    )
    yield MetricRow(
        "unknown_lag_token_fraction",
        "response_tokens",
        "tokens with a ratio, and weights of unknown age",
        lambda r: r.n - r.of["dated"],
        needs=("dated",),
        is_core=True,
    )
    yield over_tokens("stale_token_fraction", "stale", "tokens whose lag is above 0, or unknown", core=True)
    yield over_tokens("k3_kl_fresh", "k3 fresh", "what fresh tokens add to `k3_kl`", core=True)
    yield of_group(
        "ess_ratio_token_fresh",
        lambda total: total.effective_share("rho fresh", "rho^2 fresh", "n"),
        "`ess_ratio_token` if stale tokens had the ratio 1",
        totals=("rho fresh", "rho^2 fresh", "n"),
        needs=("rho fresh", "rho^2 fresh"),
        core=True,
    )
    yield over_tokens("k3_kl_stale", "k3 stale", "what stale tokens add to `k3_kl`", core=True)
    yield of_group(
        "ess_ratio_token_stale",
        lambda total: total.effective_share("rho stale", "rho^2 stale", "n"),
        "`ess_ratio_token` if fresh tokens had the ratio 1",
        totals=("rho stale", "rho^2 stale", "n"),
        needs=("rho stale", "rho^2 stale"),
        core=True,
    )


def weight_rows(weight: Weight) -> Iterator[MetricRow]:
    """What bounding does to the weights, before normalisation."""
    of_tokens, (low, high) = weight.level == "token", _edges_of(weight)

    def share(name: str, key: Key, outside: Callable[[Tensor], Tensor], text: str) -> MetricRow:
        if of_tokens:
            return over_tokens(name, key, text)
        return MetricRow(name, "sequences", text, lambda r: outside(r.log_ratio), needs=("d",))

    def weights(name: str, key: Key, value: Callable[[Responses], Tensor], text: str) -> MetricRow:
        return over_tokens(name, key, text) if of_tokens else MetricRow(name, "sequences", text, value, needs=("d",))

    yield weights("tis_weight_before_bound", "w ratio", lambda r: bounded_exp(r.log_ratio), "the ratio at `tis_level`")
    if weight.bound.has_low:
        text = "weights below the lower bound"
        yield share(f"tis_{weight.mode}_fraction_low", "w low", lambda x: x < low, text)
        yield share(f"tis_{weight.mode}_fraction_high", "w high", lambda x: x > high, "weights above the upper bound")
    elif weight.bound.has_high:
        yield share(f"tis_{weight.mode}_fraction", "w high", lambda x: x > high, "weights above the upper bound")
        text = "weights below 1 / the upper bound"
        yield share(f"tis_{weight.mode}_fraction_low", "w low", lambda x: x < low, text)
    yield weights("tis_weight_after_bound", "w", lambda r: r.weight, "the bounded weight")
    text = "the same, under the reference's name"
    yield weights("is_ratio_mean_after_tis_rs", "w", lambda r: r.weight, text)
    moments: tuple[Key, ...] = ("w - 1", "(w - 1)^2") if of_tokens else ("d",)
    totals = ("weights", "w - 1", "(w - 1)^2")
    yield of_group(
        "tis_weight_std", _weight_std, "standard deviation of the bounded weights", totals=totals, needs=moments
    )
    yield of_group(
        "tis_weight_ess",
        lambda total: total.effective_share("w", "w^2", "weights"),
        "`(sum w)^2 / (n sum w^2)` of the bounded weights",
        totals=("w", "w^2", "weights"),
        needs=("w", "w^2") if of_tokens else ("d",),
    )


def _weight_std(total: Totals) -> Tensor:
    # Of w - 1, which is near 0: a difference of squares of w would lose the digits.
    n, first, second = total["weights"], total["w - 1"], total["(w - 1)^2"]
    return ((second - first.square() / n).clamp(min=0.0) / n).sqrt()


def gate_rows(label: str, gate: Gate) -> Iterator[MetricRow]:
    """What a gate finds outside its bounds, whatever other gates do."""
    counted: Key = (label, "n") if gate.after is not None else "n"

    if gate.is_veto:
        yield MetricRow(
            f"{label}_token_fraction",
            "response_tokens",
            "tokens that alone veto their sequence, those without a finite ratio among them",
            lambda r: r.of[label, "low"] + r.of[label, "high"] + (r.generated - r.n),
            needs=((label, "low"), (label, "high")),
        )
        yield MetricRow(
            f"{label}_seq_fraction",
            "responses",
            "sequences with such a token",
            lambda r: r.gates[label][1] | r.gates[label][2] | (r.n != r.generated),
        )
    elif gate.is_of_tokens:
        yield over_tokens(f"{label}_fraction_low", (label, "low"), "below the band")
        yield over_tokens(f"{label}_fraction_high", (label, "high"), "above the band")
    else:
        yield MetricRow(f"{label}_fraction_low", "sequences", "below the band", lambda r: r.gates[label][1])
        yield MetricRow(f"{label}_fraction_high", "sequences", "above the band", lambda r: r.gates[label][2])
    # The statistic as its bounds are written: of a ratio, not of its log.
    text = "the statistic itself"
    if gate.is_of_tokens:
        yield over_tokens(f"{label}_value", (label, "shown"), text, count=counted)
    else:
        shown = bounded_exp if gate.row.is_log else _as_it_is
        yield MetricRow(
            f"{label}_value",
            "sequences",
            text,
            lambda r: shown(r.gates[label][0]),
            needs=(counted,),
            count=counted,
        )


def _as_it_is(x: Tensor) -> Tensor:
    return x


def outcome_rows(config: CorrectionConfig) -> Iterator[MetricRow]:
    """What the weights are in the end, and what the gates left."""
    weight = config.weight
    if config.normalize_over is not None:
        yield of_group(
            "batch_norm_factor", lambda total: total["mean weight"], "the mean weight divided by", totals=(), needs=()
        )
    if weight is not None:
        # Means and extremes over a response, before they are scaled.
        of_tokens = weight.level == "token"
        text = "bounded and scaled weights, whatever the gates do: their mean over a sequence"
        values: dict[str, tuple[Callable[[Responses], Tensor], Key, str]] = {
            "is_ratio_mean_final": (lambda r: r.of["w"] / r.n.clamp(min=1.0), "w", text),
            "is_ratio_min_final": (lambda r: -r.of["max -w"], "max -w", "their smallest"),
            "is_ratio_max_final": (lambda r: r.of["max w"], "max w", "their largest"),
        }
        for name, (value, key, text) in values.items():
            yield MetricRow(
                name,
                "sequences",
                text,
                value if of_tokens else lambda r: r.weight,
                needs=(key,) if of_tokens else ("d",),
                is_core=name == "is_ratio_mean_final",
                is_scaled=True,
            )
    text = "what the gates left in the mask"
    yield MetricRow("kept_token_fraction", "response_tokens", text, lambda r: r.num_kept, is_core=True)
    text = "sequences of which something is left in the mask"
    yield MetricRow("kept_seq_fraction", "responses", text, lambda r: r.num_kept > 0.0, is_core=True)
    if config.denominator == "kept":
        text = "the factor of `mis_denominator: kept`"
        yield of_group("denominator_factor", lambda total: total["denominator factor"], text, totals=(), needs=())


@functools.lru_cache(maxsize=32)
def rows_of(config: CorrectionConfig) -> tuple[MetricRow, ...]:
    """Every metric that a configuration can emit, in the order of emission."""
    rows = [*mismatch_rows(config.metric_max)]
    if config.staleness:
        rows += age_rows()
    if config.metrics_only:
        return tuple(rows)
    if config.weight is not None:
        rows += weight_rows(config.weight)
    for label, gate in config.labelled_gates.items():
        rows += gate_rows(label, gate)
    return (*rows, *outcome_rows(config))
