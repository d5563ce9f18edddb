# SPDX-License-Identifier: Apache-2.0
"""Metrics: what one is, and all of them, one row each. A new metric is a new row here, and nothing else.

Mismatch metrics look at the original mask alone, whatever the correction does. What they need is said by their
formulas, see :mod:`mis_ext.correction.plan`.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from mis_ext.correction.formula import (
    MAX_NATS,
    NUM_RESPONSE,
    NUM_VALID,
    Column,
    Formula,
    Total,
    bounded_exp,
    bounded_expm1,
    where,
    where_positive,
)
from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import LAG, OPEN, mean
from mis_ext.correction.weights import Weight

PREFIX = "mis_"
LOG_2 = math.log(2.0)
_PPO_RANGE = math.log(0.8), math.log(1.2)
"""What PPO's clip leaves alone, with the hosts' default of 0.2."""

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


class Kind(enum.IntEnum):
    """What each token of a sequence is given; in a plan rows of one kind stand side by side, in this order.

    ``OWN``: the number of its sequence. ``MEAN``: the mean over the tokens of its sequence. ``..._OR_CALL``: or that of
    the others of the call where the sequence was not measured. ``SCALED_...``: times the scale of the weights.
    """

    OWN = enum.auto()
    SCALED_OR_CALL = enum.auto()
    OWN_OR_CALL = enum.auto()
    MEAN_OR_CALL = enum.auto()
    MEAN = enum.auto()
    GROUP = enum.auto()


@dataclass(frozen=True)
class MetricRow:
    """One metric; the names that follow from a row are found once, because all plans share the rows.

    Attributes:
        name: Without prefix.
        over: What it is a mean over.
        formula: Of a valid token; over sequences or responses of a sequence; over response tokens the sum over those of
            a sequence; of the whole group.
        text: What it measures, for the documentation.
        is_core: Whether it is on the short list to watch.
        alias_of: Another row with the same values, which are not computed twice.
        mask: Name of the mask of which a sequence needs a token to be measured, and over which a mean over valid tokens
            is; by default what ``over`` says.
        is_scaled: Whether the value is that of the formula times ``scale_factor``, which is known after the totals.
    """

    name: str
    over: Population
    formula: Formula
    text: str
    is_core: bool = False
    alias_of: str | None = None
    mask: str | None = None
    is_scaled: bool = False

    @property
    def token_name(self) -> str:
        """Name of the formula of a token, whose sum over a sequence is needed."""
        return self.formula.names[0] if self.formula.is_name else f"metric_{self.name}"

    @functools.cached_property
    def total_formula(self) -> Formula:
        """What one sequence adds to the total of the mean."""
        if self.over != "valid_tokens":
            return self.formula
        return Formula.named(Column("sum", self.token_name, self.mask or "valid"))

    @functools.cached_property
    def amount_name(self) -> str:
        """Name of what one sequence adds to the total of the mean."""
        total = self.total_formula
        return total.needs[0] if total.is_name else f"amount_of_{self.name}"

    @functools.cached_property
    def count_name(self) -> Column:
        """How many tokens of a sequence count; a sequence without one was not measured."""
        mask = self.mask or ("valid" if self.over in ("valid_tokens", "sequences") else "response")
        return Column("sum", mask, mask)

    @property
    def value_name(self) -> str:
        """Name of the value of one sequence, 0 where it was not measured."""
        return f"value_of_{self.name}"

    @functools.cached_property
    def share_name(self) -> str:
        """Name of how much a sequence counts in the mean of its call."""
        return f"share_by_{self.count_name}"

    @functools.cached_property
    def kind(self) -> Kind:
        """What each token of a sequence is given."""
        is_mean = self.over in ("valid_tokens", "response_tokens")
        if self.over == "group":
            return Kind.GROUP
        if self.count_name == NUM_RESPONSE:
            # Every sequence with a response token is measured.
            return Kind.MEAN if is_mean else Kind.OWN
        if is_mean:
            return Kind.MEAN_OR_CALL
        return Kind.SCALED_OR_CALL if self.is_scaled else Kind.OWN_OR_CALL

    @functools.cached_property
    def is_of_call(self) -> bool:
        """Whether a sequence that was not measured counts as the mean of those of its call that were."""
        return self.kind in (Kind.SCALED_OR_CALL, Kind.OWN_OR_CALL, Kind.MEAN_OR_CALL)

    @functools.cached_property
    def call_totals(self) -> tuple[Total, Total]:
        """The sums over the measured sequences of a call: of what they add, and of their shares."""
        return Total("sum", f"term_of_{self.name}"), Total("sum", self.share_name)

    @functools.cached_property
    def sequence_formulas(self) -> dict[str, Formula]:
        """By name: its value of one sequence, 0 where it was not measured, and what that adds to the mean of a call."""
        value = mean_value if self.kind in (Kind.MEAN, Kind.MEAN_OR_CALL) else own_value
        formulas = {self.value_name: Formula(value, (self.amount_name, self.count_name))}
        if not self.total_formula.is_name:
            formulas[self.amount_name] = self.total_formula
        if self.is_of_call:
            formulas[f"term_of_{self.name}"] = Formula(term, (self.value_name, self.share_name))
        return formulas

    def share_formula(self, *, per_token_loss: bool) -> Formula:
        """How much a sequence counts in the mean of its call: with its response tokens where the host averages these.

        Args:
            per_token_loss: The host averages over tokens, not over per-sample means.
        """
        return Formula(share_of_tokens if per_token_loss else share_of_sequence, (self.count_name, NUM_RESPONSE))

    @property
    def spread_name(self) -> str:
        """Name of what each token of a sequence is given."""
        return f"spread_{self.name}"

    @functools.cached_property
    def spread_formulas(self) -> dict[str, Formula]:
        """By name: what each token of a sequence is given, for a host that divides by all samples."""
        if self.kind == Kind.GROUP:
            return {self.spread_name: self.formula}
        if not self.is_of_call:
            assert not self.is_scaled
            return {self.spread_name: Formula.named(self.value_name)}
        total, share = self.call_totals
        scale = ("scale_factor",) if self.is_scaled else ()
        needs = (self.count_name, self.value_name, total, f"inverse_{share}", *scale)
        return {f"inverse_{share}": Formula(inverse, (share,)), self.spread_name: Formula(known_or_mean, needs)}

    def alias(self, name: str, text: str) -> MetricRow:
        """The same values under another name."""
        return replace(self, name=name, text=text, is_core=False, alias_of=self.name)


# Of all rows the same functions, which the eager backend calls once with all rows, one below the other.


def mean_value(amount: Tensor, count: Tensor) -> Tensor:
    """The value of a sequence that is the mean over its tokens; 0 where it was not measured."""
    return where_positive(count, amount / count.clamp_min(1.0))


def own_value(amount: Tensor, count: Tensor) -> Tensor:
    """The value of a sequence that is a number of its own; 0 where it was not measured."""
    return where_positive(count, amount)


def share_of_sequence(count: Tensor, _num_response: Tensor) -> Tensor:
    """A measured sequence counts once."""
    return where(count > 0.0, 1.0, 0.0)


def share_of_tokens(count: Tensor, num_response: Tensor) -> Tensor:
    """A measured sequence counts with its response tokens."""
    return where(count > 0.0, num_response, 0.0)


def term(value: Tensor, share: Tensor) -> Tensor:
    """What a sequence adds to the total of its call."""
    return value * share


def inverse(share: Tensor) -> Tensor:
    """One over the share of all sequences of a call: one division for all rows; a share is 0, or 1 and more."""
    return where(share > 0.0, 1.0 / share.clamp_min(1.0), math.nan)


def known_or_mean(count: Tensor, value: Tensor, total: Tensor, inverse: Tensor, *scale: Tensor) -> Tensor:
    """What each token of a sequence is given: its value, or the mean of the others of its call, NaN without others."""
    known = where(count > 0.0, value, total * inverse)
    return known * scale[0] if scale else known


def row(
    name: str,
    over: Population,
    function: Callable[..., Tensor] | Formula,
    text: str,
    *,
    core: bool = False,
    mask: str | None = None,
    scaled: bool = False,
) -> MetricRow:
    """A row from a formula, or from a function whose parameters name what it needs."""
    formula = function if isinstance(function, Formula) else Formula.of(function)
    return MetricRow(name, over, formula, text, is_core=core, mask=mask, is_scaled=scaled)


def effective_share(total: Tensor, squared_total: Tensor, count: Tensor) -> Tensor:
    """Kish's effective sample size over the sample size, in (0, 1]; NaN for an empty sample."""
    # (sum w)^2 / (n sum w^2), divided first: the square of a sum of ratios up to e^20 leaves float32.
    return (total / count * (total / squared_total)).clamp_max(1.0)


def _sums(*names: str) -> tuple[Total, ...]:
    return tuple(Total("sum", name) for name in names)


GROUP_FORMULAS: dict[str, Formula] = {
    "one_if_any": Formula(lambda count: where(count > 0.0, 1.0, math.nan), _sums(NUM_VALID)),
    "effective_token_share": Formula(
        effective_share, _sums(Column("sum", "ratio"), Column("sum", "squared_ratio"), NUM_VALID)
    ),
    # The same of W = prod_t rho_t of each sequence: (sum W)^2 / (n sum W^2), over those with a valid token.
    "effective_sequence_share": Formula(
        effective_share, _sums("sequence_ratio", "squared_sequence_ratio", "is_measured")
    ),
}
"""Numbers of the group that several of its metrics need."""


@functools.lru_cache(maxsize=8)
def mismatch_rows(metric_max: float) -> tuple[MetricRow, ...]:
    """The rows of metrics that say how far the engines are apart, whatever the correction does; kept.

    Args:
        metric_max: Largest value that a token adds to ``k3_kl``, and a sequence to ``chi2_token`` and ``chi2_seq``.

    References:
        ``kl``, ``k3_kl``: Schulman, Approximating KL Divergence, 2020. Effective sample size: Kish, Survey Sampling,
        1965. Learning rate: Huang et al., Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs (VCPO),
        arXiv:2602.17616; of tokens: ours. Phantom clipping: Dirhoussi, Defeating the trainer-generator precision
        mismatch in TRL, 2026, whose range follows from the run.
    """

    def extreme(operation: Literal["min", "max"], of: str, function: Callable[[Tensor], Tensor]) -> Formula:
        # Of no valid token at all it is infinite, and the metric NaN.
        return Formula(lambda value, one_if_any: function(value) * one_if_any, (Total(operation, of), "one_if_any"))

    def chi2_seq(sum_log_ratio: Tensor) -> Tensor:
        excess = bounded_expm1(sum_log_ratio)
        return (excess * (excess + 2.0)).clamp_max(metric_max)

    raised = Formula(
        lambda raised, all_open: where(all_open > 0.0, raised / all_open.clamp_min(1.0), math.nan),
        _sums(Column("sum", "is_raised"), Column("sum", "is_open")),
    )
    chi2_token = Formula(mean, (Column("sum", "squared_ratio_excess"), NUM_VALID))
    without_ratio = row(
        "nonfinite_token_fraction",
        "response_tokens",
        lambda num_response, num_valid: num_response - num_valid,
        "response tokens without a finite ratio",
        core=True,
    )
    # With d = log pi_prox - log mu of a token; over sequences d is summed or averaged over the tokens of each.
    return (
        row("training_log_ppl", "sequences", lambda proximal_mean: -proximal_mean, "minus the mean proximal log-prob"),
        row("training_ppl", "sequences", lambda proximal_mean: bounded_exp(-proximal_mean), "its `exp`"),
        row("rollout_log_ppl", "sequences", lambda behavior_mean: -behavior_mean, "minus the mean behavior log-prob"),
        row("rollout_ppl", "sequences", lambda behavior_mean: bounded_exp(-behavior_mean), "its `exp`"),
        row(
            "kl",
            "valid_tokens",
            lambda log_ratio: (-log_ratio).clamp(-MAX_NATS, MAX_NATS),
            "`-d`: the KL of `k3_kl`, noisier, any sign",
        ),
        row(
            "k3_kl",
            "valid_tokens",
            lambda k3: k3.clamp_max(metric_max),
            "`exp d - 1 - d`, at most `mis_metric_max`: KL(mu, pi_prox), never negative",
            core=True,
        ),
        row("log_ppl_diff", "sequences", lambda log_ratio_mean: -log_ratio_mean, "`-mean d`"),
        row("log_ppl_abs_diff", "sequences", lambda log_ratio_mean: log_ratio_mean.abs(), "`abs mean d`"),
        row("ppl_ratio", "sequences", lambda log_ratio_mean: bounded_exp(-log_ratio_mean), "`exp(-mean d)`"),
        # Minus the largest mean is the smallest of minus the means.
        row(
            "log_ppl_diff_min",
            "group",
            extreme("max", "log_ratio_mean", lambda x: -x),
            "smallest `-mean d` of a sequence",
        ),
        row(
            "log_ppl_diff_max",
            "group",
            extreme("min", "log_ratio_mean", lambda x: -x),
            "largest `-mean d` of a sequence",
        ),
        row(
            "chi2_token",
            "sequences",
            chi2_token.then(lambda x: x.clamp_max(metric_max)),
            "mean of `exp 2d` over the sequence, minus 1, at most `mis_metric_max`",
        ),
        row(
            "chi2_seq",
            "sequences",
            Formula(chi2_seq, (Column("sum", "log_ratio"),)),
            "`exp(2 sum d) - 1`, at most `mis_metric_max`",
        ),
        row(
            "logprob_abs_diff",
            "valid_tokens",
            lambda abs_log_ratio: abs_log_ratio.clamp_max(MAX_NATS),
            "`abs d`",
            core=True,
        ),
        row(
            "tv",
            "valid_tokens",
            lambda ratio_excess: -ratio_excess.clamp_max(0.0),
            "`1 - min(1, exp d)`: total variation",
        ),
        row("ratio_above_2_fraction", "valid_tokens", lambda log_ratio: log_ratio > LOG_2, "`exp d` above 2"),
        row("ratio_below_half_fraction", "valid_tokens", lambda log_ratio: log_ratio < -LOG_2, "`exp d` below 1/2"),
        row(
            "phantom_clip_fraction",
            "valid_tokens",
            lambda log_ratio: where(log_ratio > _PPO_RANGE[1], 1.0, where(log_ratio < _PPO_RANGE[0], 1.0, 0.0)),
            "`exp d` outside [0.8, 1.2]: with the engine as old policy PPO clips such a token before any update, where "
            "its advantage has that sign",
        ),
        row(
            "raised_fraction",
            "group",
            raised,
            f"tokens with `d > 0` among open ones: behavior probability in {OPEN}, two different log-probs",
        ),
        # The formula of mis_ess_ratio_token and mis_ess_ratio_seq is effective_share, above.
        row(
            "ess_ratio_token",
            "group",
            Formula.named("effective_token_share"),
            "`(sum w)^2 / (n sum w^2)` of the unbounded token ratios: 1 on-policy",
            core=True,
        ),
        row(
            "ess_ratio_seq",
            "group",
            Formula.named("effective_sequence_share"),
            "the same of `exp(sum d)` of sequences, the sum between -20 and 20",
            core=True,
        ),
        row(
            "lr_multiplier_token",
            "group",
            lambda effective_token_share: effective_token_share.sqrt(),
            "root of `ess_ratio_token`: what to multiply the learning rate by",
        ),
        row(
            "lr_multiplier_seq",
            "group",
            lambda effective_sequence_share: effective_sequence_share.sqrt(),
            "root of `ess_ratio_seq`: the same, as VCPO (arXiv:2602.17616) has it",
        ),
        row(
            "ratio_max", "group", extreme("max", Column("max", "log_ratio"), bounded_exp), "largest `exp d`", core=True
        ),
        row("ratio_min", "group", extreme("min", Column("min", "log_ratio"), bounded_exp), "smallest `exp d`"),
        without_ratio,
        row(
            "unmeasured_seq_fraction",
            "responses",
            lambda num_valid: where(num_valid > 0.0, 0.0, 1.0),
            "sequences without any finite ratio: they say nothing in the metrics over tokens and sequences",
        ),
        row(
            "train_rollout_logprob_abs_diff_max",
            "group",
            extreme("max", Column("max", "abs_log_ratio"), _as_it_is),
            "largest `abs d`",
        ),
        # Subtraction underflows gradually: only equal numbers, as +0 and -0 are, have a difference of 0.
        row(
            "train_rollout_logprob_abs_diff_nonzero",
            "valid_tokens",
            lambda log_ratio: log_ratio != 0.0,
            "tokens whose two log-probs are different float32 numbers (+0 equals -0)",
        ),
        without_ratio.alias(
            "train_rollout_logprob_abs_diff_invalid",
            "`nonfinite_token_fraction` under the name that goes with these two",
        ),
    )


def age_rows(metric_max: float) -> Iterator[MetricRow]:
    """Mismatch and staleness apart: on fresh tokens the engine alone differs, on stale ones the weights do too.

    What one age shows is a number of all valid tokens, the others counting as on-policy: so it is known in each call,
    also in one that has no token of that age.
    """
    dated = Column("sum", "dated", "dated")
    lag = Formula.named(LAG)
    yield row("lag_mean", "valid_tokens", lag, "mean lag, of tokens with a known one", core=True, mask="dated")
    largest = Formula(
        lambda lag, count: where(count > 0.0, lag, math.nan), (Total("max", Column("max", LAG, "dated")), *_sums(dated))
    )
    yield row("lag_max", "group", largest, "largest known lag", core=True)
    yield row(
        "unknown_lag_token_fraction",
        "response_tokens",
        Formula(lambda num_valid, num_dated: num_valid - num_dated, (NUM_VALID, dated)),
        "tokens with a ratio, and weights of unknown age",
        core=True,
    )
    is_stale = Formula.of(lambda lag: where(lag > 0.0, 1.0, 0.0))
    yield row("stale_token_fraction", "valid_tokens", is_stale, "tokens whose lag is above 0, or unknown", core=True)
    k3_of = {
        "fresh": Formula.of(lambda lag, k3: where(lag > 0.0, 0.0, k3.clamp_max(metric_max))),
        "stale": Formula.of(lambda lag, k3: where(lag > 0.0, k3.clamp_max(metric_max), 0.0)),
    }
    for age, k3 in k3_of.items():
        other = "stale" if age == "fresh" else "fresh"
        yield row(f"k3_kl_{age}", "valid_tokens", k3, f"what {age} tokens add to `k3_kl`", core=True)
        needs = _sums(*(Column("sum", f"{power}{age}_ratio") for power in ("", "squared_")), NUM_VALID)
        text = f"`ess_ratio_token` if {other} tokens had the ratio 1"
        yield row(f"ess_ratio_token_{age}", "group", Formula(effective_share, needs), text, core=True)


def _as_it_is(value: Tensor) -> Tensor:
    return value


def weight_rows(weight: Weight) -> Iterator[MetricRow]:
    """What bounding does to the weights, before normalisation."""
    is_of_tokens, log_ratio = weight.level == "token", weight.log_ratio
    over: Population = "valid_tokens" if is_of_tokens else "sequences"

    def share_of(compare: Callable[[Tensor], Tensor]) -> Formula:
        return log_ratio.then(lambda x: where(compare(x), 1.0, 0.0))

    low, high = weight.log_low, weight.log_high
    before = Formula.named("ratio") if log_ratio.names == ("log_ratio",) else log_ratio.then(bounded_exp)
    yield row("tis_weight_before_bound", over, before, "the ratio at `tis_level`")
    above = share_of(lambda x: x > high)
    if weight.bound.has_low:
        below = share_of(lambda x: x < low)
        yield row(f"tis_{weight.mode}_fraction_low", over, below, "weights below the lower bound")
        yield row(f"tis_{weight.mode}_fraction_high", over, above, "weights above the upper bound")
    elif weight.bound.has_high:
        below = share_of(lambda x: x < -high)
        yield row(f"tis_{weight.mode}_fraction", over, above, "weights above the upper bound")
        yield row(f"tis_{weight.mode}_fraction_low", over, below, "weights below 1 / the upper bound")
    bounded = Formula.named("token_weight" if is_of_tokens else "sequence_weight")
    after = row("tis_weight_after_bound", over, bounded, "the bounded weight")
    yield after
    yield after.alias("is_ratio_mean_after_tis_rs", "the same, under the reference's name")
    deviation = Formula(
        lambda scatter, count: (scatter / count).sqrt(), (Total("scatter", "weight_excess"), *_sums("num_weights"))
    )
    yield row("tis_weight_std", "group", deviation, "standard deviation of the bounded weights")
    share = Formula(effective_share, _sums("weight", "squared_weight", "num_weights"))
    yield row("tis_weight_ess", "group", share, "`(sum w)^2 / (n sum w^2)` of the bounded weights")


def gate_rows(name: str, gate: Gate) -> Iterator[MetricRow]:
    """What a gate finds outside its bounds, whatever other gates do."""
    over: Population = "valid_tokens" if gate.is_of_tokens else "sequences"
    # The statistic and its bounds as they are written.
    shown = bounded_exp if gate.row.is_log else _as_it_is

    def share_of(found: Formula) -> Formula:
        return found.then(lambda flag: where(flag, 1.0, 0.0))

    if gate.is_veto:
        yield row(
            f"{name}_token_fraction",
            "response_tokens",
            Formula(
                lambda count, num_valid, num_response: count + (num_response - num_valid),
                (Column("sum", f"vetoes_of_{name}"), NUM_VALID, NUM_RESPONSE),
            ),
            "tokens that alone veto their sequence, those without a finite ratio among them",
        )
        rejected = share_of(gate.passes.then(lambda passes: ~passes))
        yield row(f"{name}_seq_fraction", "responses", rejected, "sequences with such a token")
    else:
        below, above = gate.found(lambda x, low, _high: x < low), gate.found(lambda x, _low, high: x > high)
        yield row(f"{name}_fraction_low", over, share_of(below), "below the band")
        yield row(f"{name}_fraction_high", over, share_of(above), "above the band")
    value = gate.value.then(shown) if gate.row.is_log else gate.value
    yield row(f"{name}_value", over, value, "the statistic itself", mask=gate.over)


def outcome_rows(weight: Weight | None, *, is_normalized: bool, has_kept_denominator: bool) -> Iterator[MetricRow]:
    """What the weights are in the end, and what the gates left."""
    if is_normalized:
        yield row("batch_norm_factor", "group", Formula.named("mean_weight"), "the mean weight divided by")
    if weight is not None:
        # Means and extremes over a sequence, before they are scaled.
        average = smallest = largest = Formula.named("sequence_weight")
        if weight.level == "token":
            average = Formula(mean, (Column("sum", "token_weight"), NUM_VALID))
            # The weight never falls where the ratio grows, so its extremes are the weights of the extreme ratios.
            (log_ratio,) = weight.log_ratio.names
            smallest, largest = (Formula(weight.bounded, (Column(side, log_ratio),)) for side in ("min", "max"))
        text = "bounded and scaled weights, whatever the gates do: their mean over a sequence"
        yield row("is_ratio_mean_final", "sequences", average, text, core=True, scaled=True)
        yield row("is_ratio_min_final", "sequences", smallest, "their smallest", scaled=True)
        yield row("is_ratio_max_final", "sequences", largest, "their largest", scaled=True)
    kept = Formula.named("num_kept")
    yield row("kept_token_fraction", "response_tokens", kept, "what the gates left in the mask", core=True)
    yield row(
        "kept_seq_fraction",
        "responses",
        kept.then(lambda count: where(count > 0.0, 1.0, 0.0)),
        "sequences of which something is left in the mask",
        core=True,
    )
    if has_kept_denominator:
        factor = Formula.named("denominator_factor")
        yield row("denominator_factor", "group", factor, "the factor of `mis_denominator: kept`")
