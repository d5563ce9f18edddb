"""Metrics, one row each. A new metric is a new row here, and nothing else.

Mismatch metrics look at the original mask alone, whatever the correction does. What they need is said by the names of
their formulas' parameters, see :mod:`mis_ext.correction.plan`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from mis_ext.correction.formula import MAX_NATS, Formula, bounded_exp, bounded_expm1, where, where_positive
from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import OPEN
from mis_ext.correction.weights import Weight

LOG_2 = math.log(2.0)


def effective_share(total: Tensor, squared_total: Tensor, count: Tensor) -> Tensor:
    """Kish's effective sample size over the sample size, in (0, 1]; NaN for an empty sample."""
    # Divided first: the square of a sum of ratios up to e^20 leaves float32.
    return (total / count * (total / squared_total)).clamp_max(1.0)


GROUP_FORMULAS: dict[str, Formula] = {
    "one_if_any": Formula.of(lambda total_num_valid: where(total_num_valid > 0.0, 1.0, math.nan)),
    "effective_token_share": Formula(
        effective_share, ("total_sum_ratio", "total_sum_squared_ratio", "total_num_valid")
    ),
    "effective_sequence_share": Formula(
        effective_share, ("total_sequence_ratio", "total_squared_sequence_ratio", "total_measured")
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
        arXiv:2602.17616; of tokens: ours.
    """
    return tuple(_mismatch_rows(metric_max))


def _mismatch_rows(metric_max: float) -> Iterator[MetricRow]:
    def sequence(name: str, function: Callable[..., Tensor], text: str) -> MetricRow:
        return row(name, "sequences", function, text, stage="sequence")

    def token(name: str, function: Callable[..., Tensor] | Formula, text: str, *, core: bool = False) -> MetricRow:
        return row(name, "valid_tokens", function, text, stage="token", core=core)

    def group(name: str, function: Callable[..., Tensor] | Formula, text: str, *, core: bool = False) -> MetricRow:
        return row(name, "group", function, text, stage="group", core=core)

    def chi2_seq(sum_log_ratio: Tensor) -> Tensor:
        excess = bounded_expm1(sum_log_ratio)
        return (excess * (excess + 2.0)).clamp_max(metric_max)

    yield sequence("training_log_ppl", lambda proximal_mean: -proximal_mean, "minus the mean proximal log-prob")
    yield sequence("training_ppl", lambda proximal_mean: bounded_exp(-proximal_mean), "its `exp`")
    yield sequence("rollout_log_ppl", lambda behavior_mean: -behavior_mean, "minus the mean behavior log-prob")
    yield sequence("rollout_ppl", lambda behavior_mean: bounded_exp(-behavior_mean), "its `exp`")
    yield token(
        "kl", lambda log_ratio: (-log_ratio).clamp(-MAX_NATS, MAX_NATS), "`-d`: the KL of `k3_kl`, noisier, any sign"
    )
    yield token(
        "k3_kl",
        lambda k3: k3.clamp_max(metric_max),
        "`exp d - 1 - d`, at most `mis_metric_max`: KL(mu, pi_prox), never negative",
        core=True,
    )
    yield sequence("log_ppl_diff", lambda log_ratio_mean: -log_ratio_mean, "`-mean d`")
    yield sequence("log_ppl_abs_diff", lambda log_ratio_mean: log_ratio_mean.abs(), "`abs mean d`")
    yield sequence("ppl_ratio", lambda log_ratio_mean: bounded_exp(-log_ratio_mean), "`exp(-mean d)`")
    yield group(
        "log_ppl_diff_min",
        lambda highest_log_ratio_mean, one_if_any: -highest_log_ratio_mean * one_if_any,
        "smallest `-mean d` of a sequence",
    )
    yield group(
        "log_ppl_diff_max",
        lambda lowest_log_ratio_mean, one_if_any: -lowest_log_ratio_mean * one_if_any,
        "largest `-mean d` of a sequence",
    )
    yield sequence(
        "chi2_token",
        lambda sum_squared_ratio_excess, num_valid: (sum_squared_ratio_excess / num_valid.clamp_min(1.0)).clamp_max(
            metric_max
        ),
        "mean of `exp 2d` over the sequence, minus 1, at most `mis_metric_max`",
    )
    yield sequence("chi2_seq", chi2_seq, "`exp(2 sum d) - 1`, at most `mis_metric_max`")
    yield token("logprob_abs_diff", lambda abs_log_ratio: abs_log_ratio.clamp_max(MAX_NATS), "`abs d`", core=True)
    yield token("tv", lambda ratio_excess: -ratio_excess.clamp_max(0.0), "`1 - min(1, exp d)`: total variation")
    yield token("ratio_above_2_fraction", lambda log_ratio: log_ratio > LOG_2, "`exp d` above 2")
    yield token("ratio_below_half_fraction", lambda log_ratio: log_ratio < -LOG_2, "`exp d` below 1/2")
    yield group(
        "raised_fraction",
        lambda total_sum_is_raised, total_sum_is_open: where(
            total_sum_is_open > 0.0, total_sum_is_raised / total_sum_is_open.clamp_min(1.0), math.nan
        ),
        f"tokens with `d > 0` among open ones: behavior probability in {OPEN}, two different log-probs",
    )
    yield group(
        "ess_ratio_token",
        Formula.named("effective_token_share"),
        "`(sum w)^2 / (n sum w^2)` of the unbounded token ratios: 1 on-policy",
        core=True,
    )
    yield group(
        "ess_ratio_seq",
        Formula.named("effective_sequence_share"),
        "the same of the products of ratios of sequences",
        core=True,
    )
    yield group(
        "lr_multiplier_token",
        lambda effective_token_share: effective_token_share.sqrt(),
        "root of `ess_ratio_token`: what to multiply the learning rate by",
    )
    yield group(
        "lr_multiplier_seq",
        lambda effective_sequence_share: effective_sequence_share.sqrt(),
        "root of `ess_ratio_seq`: the same, as VCPO (arXiv:2602.17616) has it",
    )
    yield group(
        "ratio_max",
        lambda highest_max_log_ratio, one_if_any: bounded_exp(highest_max_log_ratio) * one_if_any,
        "largest `exp d`",
        core=True,
    )
    yield group(
        "ratio_min",
        lambda lowest_min_log_ratio, one_if_any: bounded_exp(lowest_min_log_ratio) * one_if_any,
        "smallest `exp d`",
    )
    without_ratio = row(
        "nonfinite_token_fraction",
        "response_tokens",
        lambda num_response, num_valid: num_response - num_valid,
        "response tokens without a finite ratio",
        stage="sequence",
        core=True,
    )
    yield without_ratio
    yield row(
        "unmeasured_seq_fraction",
        "responses",
        lambda num_valid: where(num_valid > 0.0, 0.0, 1.0),
        "sequences without any finite ratio: they say nothing in the metrics over tokens and sequences",
        stage="sequence",
    )
    yield group(
        "train_rollout_logprob_abs_diff_max",
        lambda highest_max_abs_log_ratio, one_if_any: highest_max_abs_log_ratio * one_if_any,
        "largest `abs d`",
    )
    # Subtraction underflows gradually: only equal numbers, as +0 and -0 are, have a difference of 0.
    yield token(
        "train_rollout_logprob_abs_diff_nonzero",
        lambda log_ratio: log_ratio != 0.0,
        "tokens whose two log-probs are different float32 numbers (+0 equals -0)",
    )
    yield without_ratio.alias(
        "train_rollout_logprob_abs_diff_invalid", "`nonfinite_token_fraction` under the name that goes with these two"
    )


def weight_rows(weight: Weight) -> Iterator[MetricRow]:
    """What bounding does to the weights, before normalisation."""
    over: Population = "valid_tokens" if weight.level == "token" else "sequences"
    stage: Any = "token" if weight.level == "token" else "sequence"
    log_ratio = weight.log_ratio
    bounded = Formula.named(f"{stage}_weight")

    def at_level(name: str, formula: Formula, text: str) -> MetricRow:
        return row(name, over, formula, text, stage=stage)

    def compared(compare: Callable[[Tensor], Tensor]) -> Formula:
        return Formula(lambda *values: _as_number(compare(log_ratio.function(*values))), log_ratio.needs)

    def below(bound: float) -> Formula:
        return compared(lambda value: value < bound)

    above = compared(lambda value: value > weight.log_high)
    before = Formula(lambda *values: bounded_exp(log_ratio.function(*values)), log_ratio.needs)
    if weight.level == "token":
        before = Formula.named("ratio")
    yield at_level("tis_weight_before_bound", before, "the ratio at `tis_level`")
    if weight.bound.has_low:
        yield at_level(f"tis_{weight.mode}_fraction_low", below(weight.log_low), "weights below the lower bound")
        yield at_level(f"tis_{weight.mode}_fraction_high", above, "weights above the upper bound")
    elif weight.bound.has_high:
        yield at_level(f"tis_{weight.mode}_fraction", above, "weights above the upper bound")
        yield at_level(f"tis_{weight.mode}_fraction_low", below(-weight.log_high), "weights below 1 / the upper bound")
    after = at_level("tis_weight_after_bound", bounded, "the bounded weight")
    yield after
    yield after.alias("is_ratio_mean_after_tis_rs", "the same, under the reference's name")
    yield row(
        "tis_weight_std",
        "group",
        lambda scatter_weight_excess, total_num_weights: (scatter_weight_excess / total_num_weights).sqrt(),
        "standard deviation of the bounded weights",
        stage="group",
    )
    yield row(
        "tis_weight_ess",
        "group",
        Formula(effective_share, ("total_weight", "total_squared_weight", "total_num_weights")),
        "`(sum w)^2 / (n sum w^2)` of the bounded weights",
        stage="group",
    )


def gate_rows(name: str, gate: Gate) -> Iterator[MetricRow]:
    """What a gate finds outside its bounds, whatever other gates do."""
    over: Population = "valid_tokens" if gate.is_of_tokens else "sequences"
    stage: Any = "token" if gate.is_of_tokens else "sequence"

    def flagged(flag: Callable[..., Tensor]) -> Formula:
        found = gate.found(flag)
        return Formula(lambda *values: _as_number(found.function(*values)), found.needs)

    if gate.is_veto:
        yield row(
            f"{name}_token_fraction",
            "response_tokens",
            Formula(
                lambda count, num_valid, num_response: count + (num_response - num_valid),
                (f"sum_vetoes_of_{name}", "num_valid", "num_response"),
            ),
            "tokens that alone veto their sequence, those without a finite ratio among them",
            stage="sequence",
        )
        passes = gate.passes
        yield row(
            f"{name}_seq_fraction",
            "responses",
            Formula(lambda *values: _as_number(~passes.function(*values)), passes.needs),
            "sequences with such a token",
            stage="sequence",
        )
    else:
        below, above = flagged(lambda x, low, _high: x < low), flagged(lambda x, _low, high: x > high)
        yield row(f"{name}_fraction_low", over, below, "below the band", stage=stage)
        yield row(f"{name}_fraction_high", over, above, "above the band", stage=stage)
    yield row(f"{name}_value", over, _shown(gate), "the statistic itself", stage=stage, mask=gate.over)
    if gate.target_accept is not None:
        for side, edge in (("low", gate.log_low), ("high", gate.log_high)):
            if math.isfinite(edge):
                yield row(
                    f"{name}_bound_{side}", "group", _bound(gate, edge), f"the {side} bound of today", stage="group"
                )


def _bound(gate: Gate, edge: float) -> Formula:
    """A bound that a target has moved, on the scale in which it is written."""
    return Formula(lambda scale: bounded_exp(scale * edge) if gate.row.is_log else scale * edge, (gate.scale_name,))


def _shown(gate: Gate) -> Formula:
    """The statistic on the scale of its bounds."""
    value = gate.value
    if not gate.row.is_log:
        return value
    return Formula(lambda *values: bounded_exp(value.function(*values)), value.needs)


def outcome_rows(weight: Weight | None, *, is_normalized: bool, has_kept_denominator: bool) -> Iterator[MetricRow]:
    """What the weights are in the end, and what the gates left."""
    if is_normalized:
        yield row(
            "batch_norm_factor", "group", Formula.named("mean_weight"), "the mean weight divided by", stage="group"
        )
    if weight is not None:
        final = {
            "mean": (True, "bounded and scaled weights, whatever the gates do: their mean over a sequence"),
            "min": (False, "their smallest"),
            "max": (False, "their largest"),
        }
        for name, (core, text) in final.items():
            formula = _final_weight(weight, name)
            yield row(f"is_ratio_{name}_final", "sequences", formula, text, stage="sequence", core=core, scaled=True)
    yield row(
        "kept_token_fraction",
        "response_tokens",
        Formula.named("num_kept"),
        "what the gates left in the mask",
        stage="sequence",
        core=True,
    )
    yield row(
        "kept_seq_fraction",
        "responses",
        lambda num_kept: _as_number(num_kept > 0.0),
        "sequences of which something is left in the mask",
        stage="sequence",
        core=True,
    )
    if has_kept_denominator:
        yield row(
            "denominator_factor",
            "group",
            Formula.named("denominator_factor"),
            "the factor of `mis_denominator: kept`",
            stage="group",
        )


def _final_weight(weight: Weight, reduce: str) -> Formula:
    """Mean or extreme of the weights of a sequence, before they are scaled."""
    if weight.level != "token":
        return Formula.named("sequence_weight")
    if reduce == "mean":
        return Formula.of(lambda sum_token_weight, num_valid: sum_token_weight / num_valid.clamp_min(1.0))
    # The weight never falls where the ratio grows, so its extremes are the weights of the extreme ratios.
    return Formula(weight.bounded, (f"{reduce}_log_ratio",))


def _as_number(flag: Tensor) -> Tensor:
    return where(flag, 1.0, 0.0)


PREFIX = "mis_"

Population = Literal["valid_tokens", "response_tokens", "sequences", "responses", "group"]
"""What a metric is a mean over. ``sequences``: those with a valid token. ``responses``: those with a response token.
``group``: one number of all data-parallel ranks."""

Stage = Literal["token", "sequence", "group"]


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


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric.

    Attributes:
        name: Without prefix.
        over: What it is a mean over.
        stage: Of what the formula is: a token, a sequence, or the whole group. With ``over`` T or R, the formula of a
            sequence is the sum over its tokens.
        formula: Its parameters name what it needs.
        text: What it measures, for the documentation.
        is_core: Whether it is on the short list to watch.
        alias_of: Another row with the same values, which are not computed twice.
        mask: Name of the mask of which a sequence needs a token to be measured; by default what ``over`` says.
        is_scaled: Whether the value is that of the formula times ``scale_factor``, which is known after the totals.
    """

    name: str
    over: Population
    stage: Stage
    formula: Formula
    text: str
    is_core: bool = False
    alias_of: str | None = None
    mask: str | None = None
    is_scaled: bool = False

    @property
    def token_name(self) -> str:
        """Name of the formula of a token, whose sum over a sequence is needed."""
        return self.formula.needs[0] if self.formula.is_name else f"metric_{self.name}"

    @property
    def amount_name(self) -> str:
        """Name of what one sequence adds to the total of the mean."""
        total = self.total_formula
        return total.needs[0] if total.is_name else f"amount_of_{self.name}"

    @property
    def is_of_tokens(self) -> bool:
        """Whether the value of a sequence is a mean over its tokens."""
        return self.over in ("valid_tokens", "response_tokens")

    @property
    def count_name(self) -> str:
        """How many tokens of a sequence count; a sequence without one was not measured."""
        return f"num_{self.mask or ('valid' if self.over in ('valid_tokens', 'sequences') else 'response')}"

    @property
    def total_formula(self) -> Formula:
        """What one sequence adds to the total of the mean."""
        return Formula.named(f"sum_{self.token_name}") if self.stage == "token" else self.formula

    def sequence_formulas(self, *, per_token_loss: bool) -> dict[str, Formula]:
        """By name: its value of one sequence, 0 where it was not measured, and what that adds to the mean of a call.

        Args:
            per_token_loss: The host averages over tokens, so that a sequence counts with its response tokens.
        """
        total, value_name, share_name = self.total_formula, f"value_of_{self.name}", f"share_by_{self.count_name}"
        value = mean_value if self.is_of_tokens else own_value
        formulas = {value_name: Formula(value, (self.amount_name, self.count_name))}
        if not total.is_name:
            formulas[self.amount_name] = total
        if not self.call_totals:
            return formulas

        def share(count: Tensor, num_response: Tensor) -> Tensor:
            return where(count > 0.0, num_response if per_token_loss else 1.0, 0.0)

        return formulas | {
            share_name: Formula(share, (self.count_name, "num_response")),
            f"term_of_{self.name}": Formula(term, (value_name, share_name)),
        }

    @property
    def call_totals(self) -> tuple[str, ...]:
        """Names of the sums over the measured sequences of a call: of what they add, and of their shares.

        None where every sequence with a response token is measured.
        """
        if self.over == "group" or self.count_name == "num_response":
            return ()
        return f"total_term_of_{self.name}", f"total_share_by_{self.count_name}"

    @property
    def kind(self) -> int:
        """Its place in a plan, where rows that one operation takes together stand side by side; see ``MetricTable``."""
        if self.over == "group":
            return 5
        if not self.call_totals:
            return 4 if self.is_of_tokens else 0
        return 3 if self.is_of_tokens else 2 - self.is_scaled

    @property
    def spread_name(self) -> str:
        """Name of what each token of a sequence is given."""
        return f"spread_{self.name}"

    @property
    def spread_formulas(self) -> dict[str, Formula]:
        """By name: what each token of a sequence is given, for a host that divides by all samples.

        A sequence that was not measured counts as the mean of those of its call that were; NaN where none was.
        """
        if self.over == "group":
            return {self.spread_name: self.formula}
        if not self.call_totals:
            assert not self.is_scaled
            return {self.spread_name: Formula.named(f"value_of_{self.name}")}
        scale = ("scale_factor",) if self.is_scaled else ()
        total, share = self.call_totals

        needs = (self.count_name, f"value_of_{self.name}", total, f"inverse_{share}", *scale)
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


def term(value: Tensor, share: Tensor) -> Tensor:
    """What a sequence adds to the total of its call."""
    return value * share


def inverse(share: Tensor) -> Tensor:
    """One over the share of all sequences of a call: one division for all rows; a share is 0, or 1 and more."""
    return where(share > 0.0, 1.0 / share.clamp_min(1.0), math.nan)


def known_or_mean(count: Tensor, value: Tensor, total: Tensor, inverse: Tensor, *scale: Tensor) -> Tensor:
    """What each token of a sequence is given: its value, or that of the others of its call."""
    known = where(count > 0.0, value, total * inverse)
    return known * scale[0] if scale else known


def row(
    name: str,
    over: Population,
    function: Callable[..., Tensor] | Formula,
    text: str,
    *,
    stage: Stage,
    core: bool = False,
    mask: str | None = None,
    scaled: bool = False,
) -> MetricRow:
    """A row from a function whose parameters name what it needs."""
    formula = function if isinstance(function, Formula) else Formula.of(function)
    return MetricRow(name, over, stage, formula, text, is_core=core, mask=mask, is_scaled=scaled)
