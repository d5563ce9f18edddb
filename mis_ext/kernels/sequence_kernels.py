"""Kernels over sequences: statistics from tiles, decisions from the statistics of all ranks, totals from decisions."""

import triton
import triton.language as tl

from mis_ext.kernels.launch import kernel
from mis_ext.kernels.rows import (
    BEHAVIOR_SUM,
    GEOMETRIC_LEVEL,
    KEEP,
    KEPT_COUNT,
    LOG_RATIO_MAX,
    LOG_RATIO_MIN,
    LOG_RATIO_SUM,
    NUM_RESPONSE,
    NUM_STATISTICS,
    NUM_TOKEN_KEPT,
    NUM_TOTALS,
    NUM_VALID,
    PROXIMAL_MIN,
    PROXIMAL_SUM,
    RATIO_SUM,
    SEQUENCE_LEVEL,
    SEQUENCE_WEIGHT,
    SQUARED_RATIO_EXCESS,
    SQUARED_RATIO_SUM,
    TOKEN_LEVEL,
    TOKEN_WEIGHT_KEPT_SUM,
    TOKEN_WEIGHT_SUM,
    TOTAL_LOG_RATIO_MAX,
    TOTAL_LOG_RATIO_MIN,
    USABLE,
)
from mis_ext.kernels.token_kernels import INFINITY, bounded_exp, clip, inside, join8, store8

# The first so many statistics are sums, the others minima.
NUM_SUMS = tl.constexpr(11)


@kernel
def sequence_statistics_kernel(
    partials,
    table,
    statistics,
    num_tiles,
    num_sequences,
    pieces_per_sequence,
    BLOCK: tl.constexpr,
):
    """Add up the tiles of one sequence: a column of ``statistics``, ``[14, S]`` float32."""
    sequence = tl.program_id(0)
    first_tile = table + num_tiles + sequence * pieces_per_sequence
    begin, end = tl.load(first_tile), tl.load(first_tile + pieces_per_sequence)
    row = tl.arange(0, 16)[:, None]
    is_sum = row < NUM_SUMS
    identity = tl.where(is_sum, 0.0, INFINITY) + tl.zeros([16, BLOCK], tl.float64)
    total = identity
    for first in range(begin, end, BLOCK):
        tile = first + tl.arange(0, BLOCK)[None, :]
        is_partial = (row < NUM_STATISTICS) & (tile < end)
        value = tl.load(partials + row * num_tiles + tile, mask=is_partial, other=0.0)
        value = tl.where(is_partial, value, identity)
        total = tl.where(is_sum, total + value, tl.minimum(total, value))
    result = tl.where(tl.arange(0, 16) < NUM_SUMS, tl.sum(total, 1), tl.min(total, 1))
    row = tl.arange(0, 16)
    tl.store(statistics + row * num_sequences + sequence, result.to(tl.float32), mask=row < NUM_STATISTICS)


@triton.jit
def merged_sum(gathered, mask, stride, NUM_RANKS: tl.constexpr):
    """Sum over ranks, in their order."""
    total = tl.zeros(mask.shape, tl.float64)
    for rank in tl.static_range(NUM_RANKS):
        total += tl.load(gathered + rank * stride, mask=mask, other=0.0).to(tl.float64)
    return total.to(tl.float32)


@triton.jit
def merged_minimum(gathered, mask, stride, NUM_RANKS: tl.constexpr):
    """Minimum over ranks."""
    lowest = tl.full(mask.shape, INFINITY, tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        lowest = tl.minimum(lowest, tl.load(gathered + rank * stride, mask=mask, other=INFINITY))
    return lowest


@kernel
def decisions_kernel(
    gathered,
    rows,
    block_totals,
    num_sequences,
    WEIGHT_LEVEL: tl.constexpr,
    WEIGHT_LOW: tl.constexpr,
    WEIGHT_HIGH: tl.constexpr,
    SEQUENCE_LOW: tl.constexpr,
    SEQUENCE_HIGH: tl.constexpr,
    GEOMETRIC_LOW: tl.constexpr,
    GEOMETRIC_HIGH: tl.constexpr,
    VETO_LOW: tl.constexpr,
    VETO_HIGH: tl.constexpr,
    VETO_PROBABILITY: tl.constexpr,
    REJECTS_WHOLE_SEQUENCES: tl.constexpr,
    NORMALIZE_OVER_KEPT: tl.constexpr,
    PER_TOKEN_LOSS: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Statistics of all ranks ``[N, 14, S]`` to statistics and decisions ``[18, S]``, and a row of ``block_totals``."""
    block = tl.program_id(0)
    sequence = block * BLOCK + tl.arange(0, BLOCK)
    mask = sequence < num_sequences
    stride = NUM_STATISTICS * num_sequences
    column = gathered + sequence
    num_response = merged_sum(column + NUM_RESPONSE * num_sequences, mask, stride, NUM_RANKS)
    num_valid = merged_sum(column + NUM_VALID * num_sequences, mask, stride, NUM_RANKS)
    log_ratio_sum = merged_sum(column + LOG_RATIO_SUM * num_sequences, mask, stride, NUM_RANKS)
    proximal_sum = merged_sum(column + PROXIMAL_SUM * num_sequences, mask, stride, NUM_RANKS)
    behavior_sum = merged_sum(column + BEHAVIOR_SUM * num_sequences, mask, stride, NUM_RANKS)
    ratio_sum = merged_sum(column + RATIO_SUM * num_sequences, mask, stride, NUM_RANKS)
    squared_ratio_sum = merged_sum(column + SQUARED_RATIO_SUM * num_sequences, mask, stride, NUM_RANKS)
    squared_ratio_excess = merged_sum(column + SQUARED_RATIO_EXCESS * num_sequences, mask, stride, NUM_RANKS)
    token_weight_sum = merged_sum(column + TOKEN_WEIGHT_SUM * num_sequences, mask, stride, NUM_RANKS)
    num_token_kept = merged_sum(column + NUM_TOKEN_KEPT * num_sequences, mask, stride, NUM_RANKS)
    token_weight_kept_sum = merged_sum(column + TOKEN_WEIGHT_KEPT_SUM * num_sequences, mask, stride, NUM_RANKS)
    log_ratio_min = merged_minimum(column + LOG_RATIO_MIN * num_sequences, mask, stride, NUM_RANKS)
    log_ratio_max = -merged_minimum(column + LOG_RATIO_MAX * num_sequences, mask, stride, NUM_RANKS)
    proximal_min = merged_minimum(column + PROXIMAL_MIN * num_sequences, mask, stride, NUM_RANKS)

    log_ratio_mean = (log_ratio_sum.to(tl.float64) / tl.maximum(num_valid, 1.0)).to(tl.float32)
    measured = num_valid > 0
    usable = measured
    if REJECTS_WHOLE_SEQUENCES:
        usable = measured & (num_valid == num_response)
    keep = usable & inside(log_ratio_sum, SEQUENCE_LOW, SEQUENCE_HIGH)
    keep = keep & inside(log_ratio_mean, GEOMETRIC_LOW, GEOMETRIC_HIGH)
    keep = keep & (log_ratio_min >= VETO_LOW) & (log_ratio_max <= VETO_HIGH) & (proximal_min >= VETO_PROBABILITY)
    sequence_weight = tl.full(mask.shape, 1.0, tl.float64)
    if WEIGHT_LEVEL == SEQUENCE_LEVEL:
        sequence_weight = clip(bounded_exp(log_ratio_sum), WEIGHT_LOW, WEIGHT_HIGH)
    if WEIGHT_LEVEL == GEOMETRIC_LEVEL:
        sequence_weight = clip(bounded_exp(log_ratio_mean), WEIGHT_LOW, WEIGHT_HIGH)
    kept_count = tl.where(keep, num_token_kept, 0.0)

    out = rows + sequence
    tl.store(out + NUM_RESPONSE * num_sequences, num_response, mask=mask)
    tl.store(out + NUM_VALID * num_sequences, num_valid, mask=mask)
    tl.store(out + LOG_RATIO_SUM * num_sequences, log_ratio_sum, mask=mask)
    tl.store(out + PROXIMAL_SUM * num_sequences, proximal_sum, mask=mask)
    tl.store(out + BEHAVIOR_SUM * num_sequences, behavior_sum, mask=mask)
    tl.store(out + RATIO_SUM * num_sequences, ratio_sum, mask=mask)
    tl.store(out + SQUARED_RATIO_SUM * num_sequences, squared_ratio_sum, mask=mask)
    tl.store(out + SQUARED_RATIO_EXCESS * num_sequences, squared_ratio_excess, mask=mask)
    tl.store(out + TOKEN_WEIGHT_SUM * num_sequences, token_weight_sum, mask=mask)
    tl.store(out + NUM_TOKEN_KEPT * num_sequences, num_token_kept, mask=mask)
    tl.store(out + TOKEN_WEIGHT_KEPT_SUM * num_sequences, token_weight_kept_sum, mask=mask)
    tl.store(out + LOG_RATIO_MIN * num_sequences, log_ratio_min, mask=mask)
    tl.store(out + LOG_RATIO_MAX * num_sequences, log_ratio_max, mask=mask)
    tl.store(out + PROXIMAL_MIN * num_sequences, proximal_min, mask=mask)
    tl.store(out + USABLE * num_sequences, usable.to(tl.float32), mask=mask)
    tl.store(out + KEEP * num_sequences, keep.to(tl.float32), mask=mask)
    tl.store(out + SEQUENCE_WEIGHT * num_sequences, sequence_weight.to(tl.float32), mask=mask)
    tl.store(out + KEPT_COUNT * num_sequences, kept_count, mask=mask)

    counted, num_tokens, token_weights = usable, num_valid, token_weight_sum
    if NORMALIZE_OVER_KEPT:
        counted, num_tokens, token_weights = keep, num_token_kept, token_weight_kept_sum
    if WEIGHT_LEVEL == TOKEN_LEVEL:
        weight_sum = tl.where(counted, token_weights, 0.0).to(tl.float64)
        weight_count = tl.where(counted, num_tokens, 0.0)
    else:
        counted = counted & (num_tokens > 0)
        weight_sum = tl.where(counted, sequence_weight, 0.0)
        weight_count = counted.to(tl.float32)
    has_response = num_response > 0
    if PER_TOKEN_LOSS:
        original_terms, kept_terms = num_response, kept_count.to(tl.float64)
    else:
        original_terms = has_response.to(tl.float32)
        kept_terms = kept_count.to(tl.float64) / tl.maximum(num_response, 1.0)
    sequence_ratio = tl.where(measured, bounded_exp(log_ratio_sum), 0.0)
    total = block_totals + block * NUM_TOTALS
    # In the order of the totals.
    first = join8(
        ratio_sum.to(tl.float64),
        squared_ratio_sum.to(tl.float64),
        num_valid.to(tl.float64),
        sequence_ratio,
        sequence_ratio * sequence_ratio,
        measured.to(tl.float64),
        usable.to(tl.float64),
        num_response.to(tl.float64),
    )
    second = join8(
        has_response.to(tl.float64),
        kept_count.to(tl.float64),
        (kept_count > 0).to(tl.float64),
        weight_sum,
        weight_count.to(tl.float64),
        original_terms.to(tl.float64),
        kept_terms,
        tl.zeros(mask.shape, tl.float64),
    )
    store8(total, tl.sum(first, 0), 1, 8)
    store8(total + 8, tl.sum(second, 0), 1, 7)
    tl.store(total + TOTAL_LOG_RATIO_MIN, tl.min(tl.where(mask, log_ratio_min, INFINITY), 0))
    tl.store(total + TOTAL_LOG_RATIO_MAX, tl.max(tl.where(mask, log_ratio_max, -INFINITY), 0))


@kernel
def merge_totals_kernel(rows, totals, num_rows, BLOCK: tl.constexpr):
    """``[num_rows, 17]`` totals of blocks or of ranks to one row, float32."""
    column = tl.arange(0, 32)[None, :]
    is_minimum, is_maximum = column == TOTAL_LOG_RATIO_MIN, column == TOTAL_LOG_RATIO_MAX
    identity = tl.where(is_minimum, INFINITY, tl.where(is_maximum, -INFINITY, 0.0)) + tl.zeros([BLOCK, 32], tl.float64)
    total = identity
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)[:, None]
        mask = (row < num_rows) & (column < NUM_TOTALS)
        value = tl.load(rows + row * NUM_TOTALS + column, mask=mask, other=0.0).to(tl.float64)
        value = tl.where(mask, value, identity)
        extreme = tl.where(is_minimum, tl.minimum(total, value), tl.maximum(total, value))
        total = tl.where(is_minimum | is_maximum, extreme, total + value)
    column = tl.arange(0, 32)
    is_minimum, is_maximum = column == TOTAL_LOG_RATIO_MIN, column == TOTAL_LOG_RATIO_MAX
    extreme = tl.where(is_minimum, tl.min(total, 0), tl.max(total, 0))
    result = tl.where(is_minimum | is_maximum, extreme, tl.sum(total, 0))
    tl.store(totals + column, result.to(tl.float32), mask=column < NUM_TOTALS)
