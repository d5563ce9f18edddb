"""Kernels that write what leaves the correction: weights, masks and metrics per token."""

import triton
import triton.language as tl

from mis_ext.kernels.launch import kernel
from mis_ext.kernels.metric_kernels import group_value, sequence_value, token_value
from mis_ext.kernels.metric_rows import FIRST_GROUP_OPERATION, FIRST_SEQUENCE_OPERATION, RESPONSE, USABLE_TOKENS
from mis_ext.kernels.rows import (
    KEEP,
    NUM_RESPONSE,
    NUM_VALID,
    SEQUENCE_WEIGHT,
    TOKEN_LEVEL,
    TOTAL_KEPT_TERMS,
    TOTAL_NUM_MEASURED_SEQUENCES,
    TOTAL_NUM_RESPONSE_SEQUENCES,
    TOTAL_NUM_USABLE_SEQUENCES,
    TOTAL_ORIGINAL_TERMS,
    TOTAL_WEIGHT_COUNT,
    TOTAL_WEIGHT_SUM,
    USABLE,
)
from mis_ext.kernels.token_kernels import bounded_exp, clip, inside, load_log_probs, locate_tile


@triton.jit
def ratio_or_one(numerator, denominator):
    """The ratio of two numbers, from pointers, float32; 1 where nothing was counted."""
    numerator, denominator = tl.load(numerator).to(tl.float64), tl.load(denominator).to(tl.float64)
    counted = (denominator > 0) & (numerator > 0)
    return tl.where(counted, numerator / tl.where(counted, denominator, 1.0), 1.0).to(tl.float32)


@kernel
def output_kernel(
    proximal,
    behavior,
    response_mask,
    table,
    rows,
    totals,
    over_group,
    rollout_mean_weight,
    rollout_denominator_factor,
    weights,
    loss_mask,
    metrics,
    num_tiles,
    num_pieces,
    num_sequences,
    num_tokens,
    pieces_per_sequence,
    WEIGHT_LEVEL: tl.constexpr,
    WEIGHT_LOW: tl.constexpr,
    WEIGHT_HIGH: tl.constexpr,
    TOKEN_LOW: tl.constexpr,
    TOKEN_HIGH: tl.constexpr,
    IS_NORMALIZED: tl.constexpr,
    HAS_KEPT_DENOMINATOR: tl.constexpr,
    IS_CORRECTED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    SCOPE_IS_GROUP: tl.constexpr,
    SCOPE_IS_ROLLOUT: tl.constexpr,
    OPERATIONS: tl.constexpr,
    POPULATIONS: tl.constexpr,
    SOURCES: tl.constexpr,
    BOUNDS: tl.constexpr,
    METRIC_MAX: tl.constexpr,
    TILE: tl.constexpr,
):
    """Weights, loss mask and metric rows ``[M, T]`` of one tile.

    ``totals`` are this call's, ``over_group`` those of the data-parallel group. The loss mask is left to
    :func:`whole_mask_kernel` where responses are not whole.
    """
    tile = tl.program_id(0)
    piece, begin, whole_begin, length = locate_tile(table, tile, num_tiles, num_pieces, TILE)
    lane = tl.arange(0, TILE)
    is_token = lane < length
    response = tl.load(response_mask + whole_begin + lane, mask=is_token, other=0) != 0
    log_ratio, proximal_T, _, valid = load_log_probs(proximal, behavior, begin + lane, response)
    column = rows + piece // pieces_per_sequence
    # Spread before they are compared: the interpreter cannot spread a bool.
    in_usable = tl.full([TILE], tl.load(column + USABLE * num_sequences), tl.float32) != 0
    in_kept = tl.full([TILE], tl.load(column + KEEP * num_sequences), tl.float32) != 0

    scope_totals = over_group if SCOPE_IS_GROUP else totals
    mean_weight = tl.full([], 1.0, tl.float32)
    denominator_factor = tl.full([], 1.0, tl.float32)
    if IS_NORMALIZED:
        if SCOPE_IS_ROLLOUT:
            mean_weight = tl.load(rollout_mean_weight)
        else:
            mean_weight = ratio_or_one(scope_totals + TOTAL_WEIGHT_SUM, scope_totals + TOTAL_WEIGHT_COUNT)
    if HAS_KEPT_DENOMINATOR:
        if SCOPE_IS_ROLLOUT:
            denominator_factor = tl.load(rollout_denominator_factor)
        else:
            denominator_factor = ratio_or_one(scope_totals + TOTAL_ORIGINAL_TERMS, scope_totals + TOTAL_KEPT_TERMS)
    scale_factor = denominator_factor.to(tl.float64) / mean_weight

    ratio = bounded_exp(log_ratio)
    weight = tl.full([TILE], 1.0, tl.float64)
    if WEIGHT_LEVEL == TOKEN_LEVEL:
        weight = clip(ratio, WEIGHT_LOW, WEIGHT_HIGH)
    usable = valid & in_usable
    keep = valid & inside(log_ratio, TOKEN_LOW, TOKEN_HIGH) & in_kept
    scaled = weight * (tl.load(column + SEQUENCE_WEIGHT * num_sequences) * scale_factor)
    token = begin + lane
    if IS_CORRECTED:
        tl.store(weights + token, tl.where(usable, scaled, 0.0).to(tl.float32), mask=is_token)
    if IS_CORRECTED and IS_WHOLE:
        tl.store(loss_mask + token, tl.where(keep, 1.0, 0.0), mask=is_token)

    num_response = tl.load(column + NUM_RESPONSE * num_sequences).to(tl.float64)
    num_valid = tl.load(column + NUM_VALID * num_sequences).to(tl.float64)
    num_with_response = tl.load(totals + TOTAL_NUM_RESPONSE_SEQUENCES).to(tl.float64)
    num_measured = tl.load(totals + TOTAL_NUM_MEASURED_SEQUENCES).to(tl.float64)
    num_usable = tl.load(totals + TOTAL_NUM_USABLE_SEQUENCES).to(tl.float64)
    for index in tl.static_range(len(OPERATIONS)):
        if OPERATIONS[index] < FIRST_GROUP_OPERATION:
            # The host divides by all response tokens and samples: what was measured stands in for what was not.
            if POPULATIONS[index] == RESPONSE:
                population, is_measured = response, num_response > 0
                count, of_samples = num_response, num_with_response / num_with_response
            elif POPULATIONS[index] == USABLE_TOKENS:
                population, is_measured = usable, tl.load(column + USABLE * num_sequences) != 0
                count, of_samples = num_valid, num_with_response / num_usable
            else:
                population, is_measured = valid, num_valid > 0
                count, of_samples = num_valid, num_with_response / num_measured
        if OPERATIONS[index] < FIRST_SEQUENCE_OPERATION:
            value = token_value(
                log_ratio, ratio, proximal_T, weight, valid, keep, OPERATIONS[index], BOUNDS[index], METRIC_MAX
            )
            of_tokens = num_response / tl.maximum(count, 1.0)
            spread = tl.where(population, value, 0.0) * (of_tokens * of_samples).to(tl.float32)
        elif OPERATIONS[index] < FIRST_GROUP_OPERATION:
            value = sequence_value(
                column,
                num_sequences,
                scale_factor,
                OPERATIONS[index],
                SOURCES[index],
                BOUNDS[index],
                METRIC_MAX,
                WEIGHT_LEVEL,
                WEIGHT_LOW,
                WEIGHT_HIGH,
            )
            spread = (tl.where(is_measured, value, 0.0) * of_samples).to(tl.float32)
        else:
            spread = group_value(over_group, mean_weight, denominator_factor, OPERATIONS[index]).to(tl.float32)
        row = metrics + index * num_tokens.to(tl.int64) + token
        tl.store(row, tl.where(response, spread, 0.0), mask=is_token)


@kernel
def whole_mask_kernel(
    response_mask,
    whole_table,
    keep_byte,
    keep_bits,
    rows,
    loss_mask,
    num_whole_tiles,
    num_sequences,
    HAS_BITS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Loss mask of one tile of a whole response, whose tokens may lie on other ranks."""
    tile = tl.program_id(0)
    sequence, begin, _, length = locate_tile(whole_table, tile, num_whole_tiles, num_sequences, TILE)
    lane = tl.arange(0, TILE)
    is_token = lane < length
    keep = tl.load(response_mask + begin + lane, mask=is_token, other=0) != 0
    keep = keep & (tl.full([TILE], tl.load(rows + KEEP * num_sequences + sequence), tl.float32) != 0)
    if HAS_BITS:
        tile_in_sequence = tile - tl.load(whole_table + num_whole_tiles + sequence)
        first_byte = keep_bits + tl.load(keep_byte + sequence) + tile_in_sequence * (TILE // 8)
        bits = tl.load(first_byte + lane // 8, mask=is_token, other=0).to(tl.int32)
        keep = keep & (((bits >> (lane % 8)) & 1) != 0)
    tl.store(loss_mask + begin + lane, keep.to(tl.float32), mask=is_token)


@kernel
def weigh_kernel(values, weights, weighed, num_tokens, BLOCK: tl.constexpr):
    """Values times weights, 0 where the weight is 0, whatever the value."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    weight = tl.load(weights + token, mask=mask, other=0.0)
    value = tl.load(values + token, mask=mask, other=0.0)
    tl.store(weighed + token, tl.where(weight != 0, value * weight, 0.0), mask=mask)
