"""Metrics as instructions of the output kernel: an operation, what it reads, and over what its mean is taken.

The operations are what :mod:`mis_ext.metrics` computes; a name there is a row here.
"""

import math
from typing import NamedTuple

import triton.language as tl

from mis_ext.config import CorrectionConfig, GateFactor, WeightFactor
from mis_ext.kernels.rows import (
    BEHAVIOR_SUM,
    LOG_RATIO_MAX,
    LOG_RATIO_MIN,
    LOG_RATIO_SUM,
    PROXIMAL_MIN,
    PROXIMAL_SUM,
)
from mis_ext.metric_names import gate_names

# Operations on tokens.
KL = tl.constexpr(0)
K3_KL = tl.constexpr(1)
ABS_DIFF = tl.constexpr(2)
IS_DIFFERENT = tl.constexpr(3)
TOTAL_VARIATION = tl.constexpr(4)
WITHOUT_RATIO = tl.constexpr(5)
TOKEN_RATIO = tl.constexpr(6)
TOKEN_WEIGHT = tl.constexpr(7)
TOKEN_KEPT = tl.constexpr(8)
TOKEN_BELOW = tl.constexpr(9)
TOKEN_ABOVE = tl.constexpr(10)
PROBABILITY_BELOW = tl.constexpr(11)
# Operations on sequences.
FIRST_SEQUENCE_OPERATION = tl.constexpr(12)
NEGATED_MEAN = tl.constexpr(12)
EXP_OF_NEGATED_MEAN = tl.constexpr(13)
ABS_OF_MEAN = tl.constexpr(14)
CHI2_TOKEN = tl.constexpr(15)
CHI2_SEQUENCE = tl.constexpr(16)
SEQUENCE_RATIO = tl.constexpr(17)
SEQUENCE_WEIGHT_BEFORE_SCALE = tl.constexpr(18)
SEQUENCE_BELOW = tl.constexpr(19)
SEQUENCE_ABOVE = tl.constexpr(20)
MEAN_FINAL_WEIGHT = tl.constexpr(21)
FINAL_WEIGHT = tl.constexpr(22)
SEQUENCE_KEPT = tl.constexpr(23)
# Numbers of the whole group.
FIRST_GROUP_OPERATION = tl.constexpr(24)
ESS_TOKEN = tl.constexpr(24)
ESS_SEQUENCE = tl.constexpr(25)
RATIO_MAX = tl.constexpr(26)
RATIO_MIN = tl.constexpr(27)
ABS_DIFF_MAX = tl.constexpr(28)
MEAN_WEIGHT = tl.constexpr(29)
DENOMINATOR_FACTOR = tl.constexpr(30)

NAN = tl.constexpr(float("nan"))

# Populations.
VALID = tl.constexpr(0)
USABLE_TOKENS = tl.constexpr(1)
RESPONSE = tl.constexpr(2)

# What an operation on sequences reads: a row of the statistics, or this.
LOG_RATIO_MEAN = tl.constexpr(-1)


class MetricRow(NamedTuple):
    """One instruction."""

    operation: tl.constexpr
    population: tl.constexpr = VALID
    source: tl.constexpr = LOG_RATIO_MEAN
    bound: float = 0.0


def metric_rows(config: CorrectionConfig) -> list[MetricRow]:
    """The selected metrics, in their order."""
    rows = _mismatch_rows()
    if config.weight is not None:
        rows |= _weight_rows(config.weight)
    for name, gate in config.named_gates:
        rows |= dict(zip(gate_names(name, is_veto=gate.is_veto), _gate_rows(gate), strict=True))
    rows |= {
        "batch_norm_factor": MetricRow(MEAN_WEIGHT),
        "kept_token_fraction": MetricRow(TOKEN_KEPT, RESPONSE),
        "kept_seq_fraction": MetricRow(SEQUENCE_KEPT, RESPONSE),
        "denominator_factor": MetricRow(DENOMINATOR_FACTOR),
    }
    return [rows[name] for name in config.selected_metrics]


def _mismatch_rows() -> dict[str, MetricRow]:
    without_ratio = MetricRow(WITHOUT_RATIO, RESPONSE)
    return {
        "training_log_ppl": MetricRow(NEGATED_MEAN, source=PROXIMAL_SUM),
        "training_ppl": MetricRow(EXP_OF_NEGATED_MEAN, source=PROXIMAL_SUM),
        "rollout_log_ppl": MetricRow(NEGATED_MEAN, source=BEHAVIOR_SUM),
        "rollout_ppl": MetricRow(EXP_OF_NEGATED_MEAN, source=BEHAVIOR_SUM),
        "kl": MetricRow(KL),
        "k3_kl": MetricRow(K3_KL),
        "log_ppl_diff": MetricRow(NEGATED_MEAN, source=LOG_RATIO_SUM),
        "log_ppl_abs_diff": MetricRow(ABS_OF_MEAN),
        "ppl_ratio": MetricRow(EXP_OF_NEGATED_MEAN, source=LOG_RATIO_SUM),
        "chi2_token": MetricRow(CHI2_TOKEN),
        "chi2_seq": MetricRow(CHI2_SEQUENCE),
        "logprob_abs_diff": MetricRow(ABS_DIFF),
        "tv": MetricRow(TOTAL_VARIATION),
        "ratio_above_2_fraction": MetricRow(TOKEN_ABOVE, bound=math.log(2.0)),
        "ratio_below_half_fraction": MetricRow(TOKEN_BELOW, bound=-math.log(2.0)),
        "ess_ratio_token": MetricRow(ESS_TOKEN),
        "ess_ratio_seq": MetricRow(ESS_SEQUENCE),
        "ratio_max": MetricRow(RATIO_MAX),
        "ratio_min": MetricRow(RATIO_MIN),
        "nonfinite_token_fraction": without_ratio,
        "train_rollout_logprob_abs_diff_max": MetricRow(ABS_DIFF_MAX),
        "train_rollout_logprob_abs_diff_nonzero": MetricRow(IS_DIFFERENT),
        "train_rollout_logprob_abs_diff_invalid": without_ratio,
    }


def _weight_rows(weight: WeightFactor) -> dict[str, MetricRow]:
    log_low, log_high = weight.band.log_low, weight.band.log_high
    if weight.level == "token":
        lowest, highest = LOG_RATIO_MIN, LOG_RATIO_MAX
        before, after = MetricRow(TOKEN_RATIO, USABLE_TOKENS), MetricRow(TOKEN_WEIGHT, USABLE_TOKENS)
        below = MetricRow(TOKEN_BELOW, USABLE_TOKENS, bound=log_low)
        above = MetricRow(TOKEN_ABOVE, USABLE_TOKENS, bound=log_high)
    else:
        lowest = highest = source = _source(weight.level)
        before = MetricRow(SEQUENCE_RATIO, USABLE_TOKENS, source)
        after = MetricRow(SEQUENCE_WEIGHT_BEFORE_SCALE, USABLE_TOKENS)
        below = MetricRow(SEQUENCE_BELOW, USABLE_TOKENS, source, log_low)
        above = MetricRow(SEQUENCE_ABOVE, USABLE_TOKENS, source, log_high)
    return {
        "tis_weight_before_bound": before,
        "tis_weight_after_bound": after,
        "is_ratio_mean_after_tis_rs": after,
        "tis_truncate_fraction": above,
        "tis_clip_fraction_low": below,
        "tis_clip_fraction_high": above,
        "tis_mask_fraction_low": below,
        "tis_mask_fraction_high": above,
        "is_ratio_mean_final": MetricRow(MEAN_FINAL_WEIGHT, USABLE_TOKENS),
        "is_ratio_min_final": MetricRow(FINAL_WEIGHT, USABLE_TOKENS, lowest),
        "is_ratio_max_final": MetricRow(FINAL_WEIGHT, USABLE_TOKENS, highest),
    }


def _gate_rows(gate: GateFactor) -> tuple[MetricRow, MetricRow]:
    log_low, log_high = gate.band.log_low, gate.band.log_high
    if gate.level == "token":
        return MetricRow(TOKEN_BELOW, bound=log_low), MetricRow(TOKEN_ABOVE, bound=log_high)
    if gate.statistic == "proximal_probability":
        return MetricRow(PROBABILITY_BELOW, bound=log_low), MetricRow(SEQUENCE_BELOW, VALID, PROXIMAL_MIN, log_low)
    if gate.level == "sequence_min":
        return MetricRow(TOKEN_BELOW, bound=log_low), MetricRow(SEQUENCE_BELOW, VALID, LOG_RATIO_MIN, log_low)
    if gate.level == "sequence_max":
        return MetricRow(TOKEN_ABOVE, bound=log_high), MetricRow(SEQUENCE_ABOVE, VALID, LOG_RATIO_MAX, log_high)
    source = _source(gate.level)
    return MetricRow(SEQUENCE_BELOW, VALID, source, log_low), MetricRow(SEQUENCE_ABOVE, VALID, source, log_high)


def _source(level: str) -> tl.constexpr:
    return LOG_RATIO_SUM if level == "sequence" else LOG_RATIO_MEAN
