"""Metrics. Each knows over what it is a mean; each mismatch metric looks at the original mask alone.

A formula is a function without arguments, so that only selected metrics are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.config import CorrectionConfig, GateFactor, WeightFactor
from mis_ext.layout import PackedLayout
from mis_ext.log_ratio import TokenRatios, bounded_exp, bounded_expm1, clipped_exp, mask_as_float, squared_excess
from mis_ext.metric_names import PREFIX, gate_names
from mis_ext.normalization import GroupTotals, WeightScale
from mis_ext.rejection import gate_statistic, vetoing_tokens
from mis_ext.statistics import SequenceStatistics
from mis_ext.weights import sequence_log_ratio


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A mean kept as ``(total, count)``: exact under any later sum over ranks or micro-batches."""

    total: Tensor
    count: Tensor

    def value(self) -> Tensor:
        """``total / count``; NaN when nothing was counted."""
        return self.total / self.count


class Population(NamedTuple):
    """The tokens that a token metric is a mean over, and how many of them each sequence has on all ranks."""

    name: Literal["valid", "usable", "response"]
    mask_T: Tensor
    count_S: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class TokenMetric:
    """One number per local token of a population; finite on the others too."""

    values_T: Tensor
    population: Population

    def mean(self) -> Mean:
        """Mean over this rank's tokens; sum totals and counts over data and context parallelism."""
        mask_T = self.population.mask_T
        return Mean(torch.where(mask_T, self.values_T, 0.0).sum(), mask_T.sum().float())

    def value(self) -> Tensor:
        """This rank's mean, 0-dim."""
        return self.mean().value()


@dataclass(frozen=True, slots=True, eq=False)
class SequenceMetric:
    """One number per measured sequence, equal on all context-parallel ranks."""

    values_S: Tensor
    measured_S: Tensor

    def mean(self) -> Mean:
        """Mean over measured sequences; sum totals and counts over data parallelism only."""
        return Mean(torch.where(self.measured_S, self.values_S, 0.0).sum(), self.measured_S.sum().float())

    def value(self) -> Tensor:
        """Mean of this call's sequences, 0-dim."""
        return self.mean().value()


@dataclass(frozen=True, slots=True, eq=False)
class GroupMetric:
    """One number for this call on all data-parallel ranks, 0-dim; NaN when nothing was measured."""

    total: Tensor

    def value(self) -> Tensor:
        """The number."""
        return self.total


Metric = TokenMetric | SequenceMetric | GroupMetric
Formulas = dict[str, Callable[[], Metric]]


class Outcome(NamedTuple):
    """What the correction decided, as the metrics need it; ``keep_T`` is 1 where a token stays in the loss, else 0."""

    layout: PackedLayout
    usable_S: Tensor
    keep_T: Tensor
    kept_count_S: Tensor
    token_weight_T: Tensor
    sequence_weight_S: Tensor
    scale: WeightScale


def measure(
    tokens: TokenRatios, stats: SequenceStatistics, over_group: GroupTotals, outcome: Outcome, config: CorrectionConfig
) -> dict[str, Metric]:
    """The selected metrics in their order, under their public names.

    Args:
        tokens: Log-ratios of the local tokens.
        stats: Statistics of whole sequences.
        over_group: Totals of all data-parallel ranks.
        outcome: What the correction decided.
        config: Says which metrics.
    """
    formulas = mismatch_formulas(tokens, stats, over_group, metric_max=config.metric_max)
    formulas |= correction_formulas(tokens, stats, outcome, config)
    return {PREFIX + name: formulas[name]() for name in config.selected_metrics}


def mismatch_formulas(
    tokens: TokenRatios, stats: SequenceStatistics, group: GroupTotals, *, metric_max: float
) -> Formulas:
    """How far the engines are apart, whatever the correction does.

    ``kl`` and ``k3_kl`` estimate KL(behavior || proximal): Schulman, Approximating KL Divergence, 2020. ``chi2_*``
    estimate the second moment of the ratio minus 1. ``tv`` estimates the total variation, ``E[1 - min(1, ratio)]``. The
    effective sample size is Kish's, ``(sum w)**2 / (n sum w**2)``.
    """
    log_ratio_T = tokens.log_ratio_T
    valid = Population("valid", tokens.valid_mask_T, stats.num_valid_S)
    response = Population("response", tokens.response_mask_T, stats.num_response_S)
    measured_S = stats.num_valid_S > 0
    count_S = stats.num_valid_S.clamp_min(1.0)

    def token(values_T: Tensor) -> TokenMetric:
        return TokenMetric(values_T, valid)

    def sequence(values_S: Tensor) -> SequenceMetric:
        return SequenceMetric(values_S, measured_S)

    def without_ratio() -> TokenMetric:
        return TokenMetric(mask_as_float(~tokens.valid_mask_T), response)

    return {
        "training_log_ppl": lambda: sequence(-stats.proximal_sum_S / count_S),
        "training_ppl": lambda: sequence(bounded_exp(-stats.proximal_sum_S / count_S)),
        "rollout_log_ppl": lambda: sequence(-stats.behavior_sum_S / count_S),
        "rollout_ppl": lambda: sequence(bounded_exp(-stats.behavior_sum_S / count_S)),
        "kl": lambda: token(-log_ratio_T),
        "k3_kl": lambda: token((tokens.ratio_excess_T - log_ratio_T).clamp(0.0, metric_max)),
        "log_ppl_diff": lambda: sequence(-stats.log_ratio_mean_S),
        "log_ppl_abs_diff": lambda: sequence(stats.log_ratio_mean_S.abs()),
        "ppl_ratio": lambda: sequence(bounded_exp(-stats.log_ratio_mean_S)),
        "chi2_token": lambda: sequence((stats.squared_ratio_excess_S / count_S).clamp_max(metric_max)),
        "chi2_seq": lambda: sequence(squared_excess(bounded_expm1(stats.log_ratio_sum_S)).clamp_max(metric_max)),
        "logprob_abs_diff": lambda: token(log_ratio_T.abs()),
        "tv": lambda: token(-tokens.ratio_excess_T.clamp_max(0.0)),
        "ratio_above_2_fraction": lambda: token(mask_as_float(log_ratio_T > math.log(2.0))),
        "ratio_below_half_fraction": lambda: token(mask_as_float(log_ratio_T < -math.log(2.0))),
        "ess_ratio_token": lambda: GroupMetric(
            _effective_share(group.ratio_sum, group.squared_ratio_sum, group.num_valid)
        ),
        "ess_ratio_seq": lambda: GroupMetric(
            _effective_share(group.sequence_ratio_sum, group.squared_sequence_ratio_sum, group.num_measured_sequences)
        ),
        "ratio_max": lambda: GroupMetric(_if_any(group, bounded_exp(group.log_ratio_max))),
        "ratio_min": lambda: GroupMetric(_if_any(group, bounded_exp(group.log_ratio_min))),
        "nonfinite_token_fraction": without_ratio,
        "train_rollout_logprob_abs_diff_max": lambda: GroupMetric(
            _if_any(group, torch.maximum(group.log_ratio_max.abs(), group.log_ratio_min.abs()))
        ),
        # Subtraction underflows gradually: only equal numbers, as +0 and -0 are, have a difference of 0.
        "train_rollout_logprob_abs_diff_nonzero": lambda: token(mask_as_float(log_ratio_T != 0.0)),
        "train_rollout_logprob_abs_diff_invalid": without_ratio,
    }


def correction_formulas(
    tokens: TokenRatios, stats: SequenceStatistics, outcome: Outcome, config: CorrectionConfig
) -> Formulas:
    """What the correction does to the weights and to the mask."""
    formulas: Formulas = {}
    if config.weight is not None:
        formulas |= _weight_formulas(tokens, stats, outcome, config.weight)
    for name, gate in config.named_gates:
        formulas |= _gate_formulas(name, gate, tokens, stats)
    response = Population("response", tokens.response_mask_T, stats.num_response_S)
    return formulas | {
        "batch_norm_factor": lambda: GroupMetric(outcome.scale.mean_weight),
        "kept_token_fraction": lambda: TokenMetric(outcome.keep_T, response),
        "kept_seq_fraction": lambda: SequenceMetric((outcome.kept_count_S > 0).float(), stats.num_response_S > 0),
        "denominator_factor": lambda: GroupMetric(outcome.scale.denominator_factor),
    }


def _weight_formulas(
    tokens: TokenRatios, stats: SequenceStatistics, outcome: Outcome, weight: WeightFactor
) -> Formulas:
    usable_S = outcome.usable_S
    count_S = stats.num_valid_S.clamp_min(1.0)
    band, factor = weight.clip_band, outcome.scale.factor
    if weight.level == "token":
        log_ratio, bounded = tokens.log_ratio_T, outcome.token_weight_T
        lowest_S, highest_S = stats.log_ratio_min_S, stats.log_ratio_max_S
        mean_S = stats.token_weight_sum_S / count_S
    else:
        log_ratio, bounded = sequence_log_ratio(stats, weight.level), outcome.sequence_weight_S
        lowest_S, highest_S, mean_S = log_ratio, log_ratio, bounded

    def at_level(values: Tensor) -> Metric:
        if weight.level != "token":
            return SequenceMetric(values, usable_S)
        mask_T = tokens.valid_mask_T & outcome.layout.index.to_tokens(usable_S)
        return TokenMetric(values, Population("usable", mask_T, torch.where(usable_S, stats.num_valid_S, 0.0)))

    def extreme(log_ratio_S: Tensor) -> SequenceMetric:
        # The weight grows with the ratio, so its extremes are the weights of the extreme ratios.
        weight_S = clipped_exp(log_ratio_S, log_low=band.log_low, log_high=band.log_high)
        return SequenceMetric(weight_S * factor, usable_S)

    def below() -> Metric:
        return at_level(mask_as_float(log_ratio < weight.band.log_low))

    def above() -> Metric:
        return at_level(mask_as_float(log_ratio > weight.band.log_high))

    return {
        "tis_weight_before_bound": lambda: at_level(bounded_exp(log_ratio)),
        "tis_weight_after_bound": lambda: at_level(bounded),
        "is_ratio_mean_after_tis_rs": lambda: at_level(bounded),
        "tis_truncate_fraction": above,
        "tis_clip_fraction_low": below,
        "tis_clip_fraction_high": above,
        "tis_mask_fraction_low": below,
        "tis_mask_fraction_high": above,
        "is_ratio_mean_final": lambda: SequenceMetric(mean_S * factor, usable_S),
        "is_ratio_min_final": lambda: extreme(lowest_S),
        "is_ratio_max_final": lambda: extreme(highest_S),
    }


def _gate_formulas(name: str, gate: GateFactor, tokens: TokenRatios, stats: SequenceStatistics) -> Formulas:
    valid = Population("valid", tokens.valid_mask_T, stats.num_valid_S)
    measured_S = stats.num_valid_S > 0
    first, second = gate_names(name, is_veto=gate.is_veto)
    band = gate.band
    if gate.level == "token":
        return {
            first: lambda: TokenMetric(mask_as_float(tokens.log_ratio_T < band.log_low), valid),
            second: lambda: TokenMetric(mask_as_float(tokens.log_ratio_T > band.log_high), valid),
        }
    statistic_S = gate_statistic(stats, gate)
    below_S, above_S = statistic_S < band.log_low, statistic_S > band.log_high
    if gate.is_veto:
        return {
            first: lambda: TokenMetric(mask_as_float(vetoing_tokens(tokens, gate)), valid),
            second: lambda: SequenceMetric((below_S | above_S).float(), measured_S),
        }
    return {
        first: lambda: SequenceMetric(below_S.float(), measured_S),
        second: lambda: SequenceMetric(above_S.float(), measured_S),
    }


def _effective_share(total: Tensor, squared_total: Tensor, count: Tensor) -> Tensor:
    """Kish's effective sample size over the sample size, in (0, 1]; NaN for an empty sample."""
    # Divided first: the square of a sum of ratios up to e^20 leaves float32.
    mean = total / count
    return (mean * (total / squared_total)).clamp(max=1.0)


def _if_any(group: GroupTotals, value: Tensor) -> Tensor:
    return torch.where(group.num_valid > 0, value, torch.nan)
