"""What the operations of metric rows compute, within the output kernel."""

import triton
import triton.language as tl

from mis_ext.kernels.metric_rows import (
    ABS_DIFF,
    ABS_DIFF_MAX,
    ABS_OF_MEAN,
    CHI2_SEQUENCE,
    CHI2_TOKEN,
    ESS_SEQUENCE,
    ESS_TOKEN,
    EXP_OF_NEGATED_MEAN,
    FINAL_WEIGHT,
    IS_DIFFERENT,
    K3_KL,
    KL,
    LOG_RATIO_MEAN,
    MEAN_FINAL_WEIGHT,
    MEAN_WEIGHT,
    NAN,
    NEGATED_MEAN,
    RATIO_MAX,
    RATIO_MIN,
    SEQUENCE_ABOVE,
    SEQUENCE_BELOW,
    SEQUENCE_RATIO,
    SEQUENCE_WEIGHT_BEFORE_SCALE,
    TOKEN_ABOVE,
    TOKEN_BELOW,
    TOKEN_KEPT,
    TOKEN_RATIO,
    TOKEN_WEIGHT,
    TOTAL_VARIATION,
    WITHOUT_RATIO,
)
from mis_ext.kernels.rows import (
    KEPT_COUNT,
    LOG_RATIO_SUM,
    NUM_VALID,
    SEQUENCE_WEIGHT,
    SQUARED_RATIO_EXCESS,
    TOKEN_LEVEL,
    TOKEN_WEIGHT_SUM,
    TOTAL_LOG_RATIO_MAX,
    TOTAL_LOG_RATIO_MIN,
    TOTAL_NUM_MEASURED_SEQUENCES,
    TOTAL_NUM_VALID,
    TOTAL_RATIO_SUM,
    TOTAL_SEQUENCE_RATIO_SUM,
    TOTAL_SQUARED_RATIO_SUM,
    TOTAL_SQUARED_SEQUENCE_RATIO_SUM,
)
from mis_ext.kernels.token_kernels import bounded_exp, clip


@triton.jit
def token_value(
    log_ratio,
    ratio,
    proximal,
    weight,
    valid,
    keep,
    OPERATION: tl.constexpr,
    BOUND: tl.constexpr,
    METRIC_MAX: tl.constexpr,
):
    """Value of an operation on tokens, float32; ``ratio`` and ``weight`` are float64."""
    value = log_ratio
    if OPERATION == KL:
        value = -log_ratio
    elif OPERATION == K3_KL:
        value = tl.minimum(tl.maximum(ratio - 1.0 - log_ratio, 0.0), METRIC_MAX)
    elif OPERATION == ABS_DIFF:
        value = tl.abs(log_ratio)
    elif OPERATION == IS_DIFFERENT:
        value = tl.where(log_ratio != 0.0, 1.0, 0.0)
    elif OPERATION == TOTAL_VARIATION:
        value = tl.where(log_ratio < 0.0, 1.0 - ratio, 0.0)
    elif OPERATION == WITHOUT_RATIO:
        value = tl.where(valid, 0.0, 1.0)
    elif OPERATION == TOKEN_RATIO:
        value = ratio
    elif OPERATION == TOKEN_WEIGHT:
        value = weight
    elif OPERATION == TOKEN_KEPT:
        value = tl.where(keep, 1.0, 0.0)
    elif OPERATION == TOKEN_BELOW:
        value = tl.where(log_ratio < BOUND, 1.0, 0.0)
    elif OPERATION == TOKEN_ABOVE:
        value = tl.where(log_ratio > BOUND, 1.0, 0.0)
    else:
        value = tl.where(proximal < BOUND, 1.0, 0.0)
    return value.to(tl.float32)


@triton.jit
def load_source(rows, num_sequences, SOURCE: tl.constexpr):
    """What an operation on a sequence reads, float32; ``rows`` points to the sequence's column."""
    if SOURCE == LOG_RATIO_MEAN:
        count = tl.maximum(tl.load(rows + NUM_VALID * num_sequences), 1.0).to(tl.float64)
        source = (tl.load(rows + LOG_RATIO_SUM * num_sequences) / count).to(tl.float32)
    else:
        source = tl.load(rows + SOURCE * num_sequences)
    return source


@triton.jit
def sequence_value(
    rows,
    num_sequences,
    scale_factor,
    OPERATION: tl.constexpr,
    SOURCE: tl.constexpr,
    BOUND: tl.constexpr,
    METRIC_MAX: tl.constexpr,
    WEIGHT_LEVEL: tl.constexpr,
    WEIGHT_LOW: tl.constexpr,
    WEIGHT_HIGH: tl.constexpr,
):
    """Float64 value of an operation on a sequence; ``rows`` points to the sequence's column."""
    count = tl.maximum(tl.load(rows + NUM_VALID * num_sequences), 1.0).to(tl.float64)
    source = load_source(rows, num_sequences, SOURCE)
    value = source.to(tl.float64)
    if OPERATION == NEGATED_MEAN:
        value = -value / count
    elif OPERATION == EXP_OF_NEGATED_MEAN:
        value = bounded_exp(-value / count)
    elif OPERATION == ABS_OF_MEAN:
        value = tl.abs(value)
    elif OPERATION == CHI2_TOKEN:
        value = tl.minimum(tl.load(rows + SQUARED_RATIO_EXCESS * num_sequences) / count, METRIC_MAX)
    elif OPERATION == CHI2_SEQUENCE:
        ratio = bounded_exp(tl.load(rows + LOG_RATIO_SUM * num_sequences))
        value = tl.minimum(ratio * ratio - 1.0, METRIC_MAX)
    elif OPERATION == SEQUENCE_RATIO:
        value = bounded_exp(source)
    elif OPERATION == SEQUENCE_WEIGHT_BEFORE_SCALE:
        value = tl.load(rows + SEQUENCE_WEIGHT * num_sequences).to(tl.float64)
    elif OPERATION == SEQUENCE_BELOW:
        value = (source < BOUND).to(tl.float64)
    elif OPERATION == SEQUENCE_ABOVE:
        value = (source > BOUND).to(tl.float64)
    elif OPERATION == MEAN_FINAL_WEIGHT:
        if WEIGHT_LEVEL == TOKEN_LEVEL:
            value = tl.load(rows + TOKEN_WEIGHT_SUM * num_sequences) / count * scale_factor
        else:
            value = tl.load(rows + SEQUENCE_WEIGHT * num_sequences).to(tl.float64) * scale_factor
    elif OPERATION == FINAL_WEIGHT:
        value = clip(bounded_exp(source), WEIGHT_LOW, WEIGHT_HIGH) * scale_factor
    else:
        value = (tl.load(rows + KEPT_COUNT * num_sequences) > 0).to(tl.float64)
    return value


@triton.jit
def group_value(over_group, mean_weight, denominator_factor, OPERATION: tl.constexpr):
    """Float64 value of a number of the whole group; NaN when nothing was measured."""
    if OPERATION == ESS_TOKEN:
        value = effective_share(
            over_group + TOTAL_RATIO_SUM, over_group + TOTAL_SQUARED_RATIO_SUM, over_group + TOTAL_NUM_VALID
        )
    elif OPERATION == ESS_SEQUENCE:
        value = effective_share(
            over_group + TOTAL_SEQUENCE_RATIO_SUM,
            over_group + TOTAL_SQUARED_SEQUENCE_RATIO_SUM,
            over_group + TOTAL_NUM_MEASURED_SEQUENCES,
        )
    elif OPERATION == RATIO_MAX:
        value = bounded_exp(tl.load(over_group + TOTAL_LOG_RATIO_MAX))
        value = tl.where(tl.load(over_group + TOTAL_NUM_VALID) > 0, value, NAN)
    elif OPERATION == RATIO_MIN:
        value = bounded_exp(tl.load(over_group + TOTAL_LOG_RATIO_MIN))
        value = tl.where(tl.load(over_group + TOTAL_NUM_VALID) > 0, value, NAN)
    elif OPERATION == ABS_DIFF_MAX:
        # Float64 first: the absolute value of a float32 flushes subnormal numbers.
        highest = tl.abs(tl.load(over_group + TOTAL_LOG_RATIO_MAX).to(tl.float64))
        lowest = tl.abs(tl.load(over_group + TOTAL_LOG_RATIO_MIN).to(tl.float64))
        value = tl.maximum(highest, lowest)
        value = tl.where(tl.load(over_group + TOTAL_NUM_VALID) > 0, value, NAN)
    elif OPERATION == MEAN_WEIGHT:
        value = mean_weight.to(tl.float64)
    else:
        value = denominator_factor.to(tl.float64)
    return value


@triton.jit
def effective_share(total, squared_total, count):
    """Kish's effective sample size over the sample size, from pointers; NaN for an empty sample."""
    total, squared_total = tl.load(total).to(tl.float64), tl.load(squared_total).to(tl.float64)
    count = tl.load(count).to(tl.float64)
    share = tl.minimum(total / count * (total / squared_total), 1.0)
    return tl.where(count > 0, share, NAN)
