# SPDX-License-Identifier: Apache-2.0
"""The kernels: where tokens, sequences and numbers lie. What is computed is generated from the formulas.

First what they and generated code call. A name that is None here is a device function that
:mod:`mis_ext.correction.triton.generate` writes for each configuration. Sums and ratios are float64 within a kernel:
what arrives in float32 is rounded once.
"""

import triton
import triton.language as tl

TILE = 512
"""Tokens per tile; a multiple of 8, so that every tile begins at a whole byte of keep bits."""

INFINITY = tl.constexpr(float("inf"))
NAN = tl.constexpr(float("nan"))


@triton.jit
def locate_tile(table, tile, num_tiles, num_pieces, TILE: tl.constexpr):
    """Piece of a tile, its first local token, its first token in the whole responses, and its number of tokens."""
    # One table for all, so that a layout costs one copy to the device: the piece of each tile, then of each piece its
    # first tile, its first local token, and its first token in the whole responses.
    first_tile = table + num_tiles
    start = first_tile + num_pieces + 1
    whole_start = start + num_pieces + 1
    piece = tl.load(table + tile)
    before = (tile - tl.load(first_tile + piece)) * TILE
    begin = tl.load(start + piece) + before
    length = tl.minimum(tl.load(start + piece + 1) - begin, TILE)
    return piece, begin, tl.load(whole_start + piece) + before, length


@triton.jit
def load_log_probs(proximal, behavior, tokens, response):
    """Log-ratio and log-probs, 0 where a token has no ratio, and the mask of the tokens that have one."""
    proximal_T = tl.load(proximal + tokens, mask=response, other=0.0).to(tl.float32)
    behavior_T = tl.load(behavior + tokens, mask=response, other=0.0).to(tl.float32)
    # In float32 as on the CPU: both backends must agree on which tokens have a ratio.
    log_ratio = proximal_T - behavior_T
    # False for NaN too.
    valid = response & (tl.abs(log_ratio) < INFINITY)
    return tl.where(valid, log_ratio, 0.0), tl.where(valid, proximal_T, 0.0), tl.where(valid, behavior_T, 0.0), valid


@triton.jit
def join2(a, b):
    """``[T]`` twice to ``[T, 2]``, so that one reduction serves both."""
    return tl.join(a, b)


@triton.jit
def join4(a, b, c, d):
    """``[T]`` four times to ``[T, 2, 2]``."""
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def join8(a, b, c, d, e, f, g, h):
    """``[T]`` eight times to ``[T, 2, 2, 2]``."""
    return tl.join(join4(a, b, c, d), join4(e, f, g, h))


@triton.jit
def store1(pointer, reduced, stride, COUNT: tl.constexpr):
    """Store one reduced value; the other arguments make it callable as the joined ones are."""
    tl.store(pointer, reduced)


@triton.jit
def store2(pointer, reduced, stride, COUNT: tl.constexpr):
    """Store the first ``COUNT`` of two joined and reduced values, ``stride`` apart."""
    number = tl.arange(0, 2)
    tl.store(pointer + number * stride, reduced, mask=number < COUNT)


@triton.jit
def store4(pointer, reduced, stride, COUNT: tl.constexpr):
    """Store the first ``COUNT`` of four joined and reduced values, ``stride`` apart."""
    bit = tl.arange(0, 2)
    number = bit[:, None] + 2 * bit[None, :]
    tl.store(pointer + number * stride, reduced, mask=number < COUNT)


@triton.jit
def store8(pointer, reduced, stride, COUNT: tl.constexpr):
    """Store the first ``COUNT`` of eight joined and reduced values, ``stride`` apart."""
    bit = tl.arange(0, 2)
    number = bit[:, None, None] + 2 * bit[None, :, None] + 4 * bit[None, None, :]
    tl.store(pointer + number * stride, reduced, mask=number < COUNT)


@triton.jit
def merged_sum(gathered, mask, stride, NUM_RANKS: tl.constexpr):
    """Sum over ranks in their order, in float64: every rank gets the same bits."""
    total = tl.zeros(mask.shape, tl.float64)
    for rank in tl.static_range(NUM_RANKS):
        total += tl.load(gathered + rank * stride, mask=mask, other=0.0).to(tl.float64)
    return total.to(tl.float32)


@triton.jit
def merged_minimum(gathered, mask, stride, NUM_RANKS: tl.constexpr):
    """Minimum over ranks; a masked lane gets inf."""
    lowest = tl.full(mask.shape, INFINITY, tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        lowest = tl.minimum(lowest, tl.load(gathered + rank * stride, mask=mask, other=INFINITY))
    return lowest


# Written for each plan by generate.py: here stand their names, for the kernels that call them.
store_columns = token_outputs = token_kept = decide = load_scale = store_metrics = None


def token_statistics_kernel(
    proximal,
    behavior,
    response_mask,
    given_rows,
    table,
    partials,
    num_tiles,
    num_pieces,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sums and minima of one tile: a column of ``partials``, ``[F, num_tiles]`` float64."""
    tile = tl.program_id(0)
    _, begin, whole_begin, length = locate_tile(table, tile, num_tiles, num_pieces, TILE)
    lane = tl.arange(0, TILE)
    response = tl.load(response_mask + whole_begin + lane, mask=lane < length, other=0) != 0
    token = begin + lane
    log_ratio, proximal_T, behavior_T, valid = load_log_probs(proximal, behavior, token, response)
    of_token = given_rows + token.to(tl.int64) * GIVEN
    store_columns(partials + tile, num_tiles, log_ratio, proximal_T, behavior_T, valid, response, of_token)


def sequence_statistics_kernel(
    partials,
    table,
    statistics,
    num_tiles,
    num_sequences,
    pieces_per_sequence,
    NUM_SUMS: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add up the tiles of one sequence: a column of ``statistics``, ``[F + 1, S]`` float32, whose last row is inf."""
    sequence = tl.program_id(0)
    first_tile = table + num_tiles + sequence * pieces_per_sequence
    begin, end = tl.load(first_tile), tl.load(first_tile + pieces_per_sequence)
    row = tl.arange(0, ROWS)[:, None]
    is_sum = row < NUM_SUMS
    # Sums and minima share one loop: each row starts from what changes neither.
    identity = tl.where(is_sum, 0.0, INFINITY) + tl.zeros([ROWS, BLOCK], tl.float64)
    total = identity
    # One program per sequence, in the order of its tiles: no atomics, so the same bits on every run.
    for first in range(begin, end, BLOCK):
        tile = first + tl.arange(0, BLOCK)[None, :]
        is_partial = (row < NUM_COLUMNS) & (tile < end)
        value = tl.load(partials + row * num_tiles + tile, mask=is_partial, other=0.0)
        value = tl.where(is_partial, value, identity)
        total = tl.where(is_sum, total + value, tl.minimum(total, value))
    result = tl.where(tl.arange(0, ROWS) < NUM_SUMS, tl.sum(total, 1), tl.min(total, 1))
    # One row more than columns: the status of the rank. Its identity is inf, which says that nothing failed.
    row = tl.arange(0, ROWS)
    tl.store(statistics + row * num_sequences + sequence, result.to(tl.float32), mask=row < NUM_COLUMNS + 1)


def keep_bits_kernel(
    proximal,
    behavior,
    response_mask,
    given_rows,
    table,
    whole_table,
    keep_byte,
    keep_bits,
    num_tiles,
    num_pieces,
    num_whole_tiles,
    num_sequences,
    pieces_per_sequence,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Bits of one tile of a whole response: set where the token is on this rank and passes the gates on tokens."""
    tile = tl.program_id(0)
    sequence, whole_begin, _, length = locate_tile(whole_table, tile, num_whole_tiles, num_sequences, TILE)
    lane = tl.arange(0, TILE)
    response = tl.load(response_mask + whole_begin + lane, mask=lane < length, other=0) != 0
    start = table + num_tiles + num_pieces + 1
    whole_start = start + num_pieces + 1
    # A rank holds few pieces of a response, their number is fixed: the loop does not depend on the data.
    keep = lane < 0
    for part in range(pieces_per_sequence):
        piece = sequence * pieces_per_sequence + part
        begin = tl.load(start + piece)
        within = whole_begin + lane - tl.load(whole_start + piece)
        local = response & (within >= 0) & (within < tl.load(start + piece + 1) - begin)
        token = begin + within
        log_ratio, proximal_T, behavior_T, valid = load_log_probs(proximal, behavior, token, local)
        of_token = given_rows + token.to(tl.int64) * GIVEN
        keep = keep | token_kept(log_ratio, proximal_T, behavior_T, valid, local, of_token)
    # Other ranks need this mask: a bit per token is an eighth of what a byte would send.
    bits = tl.reshape(keep.to(tl.int32), [TILE // 8, 8]) << tl.arange(0, 8)[None, :]
    tile_in_sequence = tile - tl.load(whole_table + num_whole_tiles + sequence)
    first_byte = keep_bits + tl.load(keep_byte + sequence) + tile_in_sequence * (TILE // 8)
    byte = tl.arange(0, TILE // 8)
    tl.store(first_byte + byte, tl.sum(bits, 1).to(tl.uint8), mask=byte * 8 < length)


def decisions_kernel(gathered, rows, block_totals, num_sequences, NUM_RANKS: tl.constexpr, BLOCK: tl.constexpr):
    """Columns of all ranks ``[W, F + 1, S]`` to columns and decisions ``[F, S]``, and a row of ``block_totals``."""
    block = tl.program_id(0)
    sequence = block * BLOCK + tl.arange(0, BLOCK)
    decide(
        gathered + sequence,
        rows + sequence,
        block_totals,
        block,
        sequence < num_sequences,
        num_sequences,
        NUM_RANKS,
    )


def merge_totals_kernel(
    rows,
    totals,
    num_rows,
    NUM_SUMS: tl.constexpr,
    NUM_TOTALS: tl.constexpr,
    SCATTER: tl.constexpr,
    COUNT: tl.constexpr,
    TOTAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``[num_rows, A]`` totals of blocks or of ranks to one row, float32.

    ``SCATTER``, ``COUNT`` and ``TOTAL`` are places of a scatter and of what it is merged from; -1 without one.
    """
    is_sum = tl.arange(0, COLUMNS)[None, :] < NUM_SUMS
    identity = tl.where(is_sum, 0.0, INFINITY) + tl.zeros([BLOCK, COLUMNS], tl.float64)
    total = identity
    # One program for all rows: their order is fixed, and so are the bits of the sums.
    for first in range(0, num_rows, BLOCK):
        row = first + tl.arange(0, BLOCK)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        mask = (row < num_rows) & (column < NUM_TOTALS)
        value = tl.load(rows + row * NUM_TOTALS + column, mask=mask, other=0.0).to(tl.float64)
        value = tl.where(mask, value, identity)
        total = tl.where(is_sum, total + value, tl.minimum(total, value))
    column = tl.arange(0, COLUMNS)
    result = tl.where(column < NUM_SUMS, tl.sum(total, 0), tl.min(total, 0))
    if SCATTER >= 0:
        counted = tl.sum(tl.where(column == COUNT, result, 0.0), 0)
        mean = tl.sum(tl.where(column == TOTAL, result, 0.0), 0) / tl.maximum(counted, 1.0)
        between = tl.zeros([BLOCK], tl.float64)
        for first in range(0, num_rows, BLOCK):
            row = first + tl.arange(0, BLOCK)
            start = rows + row * NUM_TOTALS
            count = tl.load(start + COUNT, mask=row < num_rows, other=0.0).to(tl.float64)
            value = tl.load(start + TOTAL, mask=row < num_rows, other=0.0).to(tl.float64)
            distance = value / tl.maximum(count, 1.0) - mean
            between += count * distance * distance
        result = tl.where(column == SCATTER, result + tl.sum(between, 0), result)
    tl.store(totals + column, result.to(tl.float32), mask=column < NUM_TOTALS)


def output_kernel(
    proximal,
    behavior,
    response_mask,
    given_rows,
    table,
    rows,
    totals,
    over_group,
    weights,
    loss_mask,
    metrics,
    num_tiles,
    num_pieces,
    num_sequences,
    num_tokens,
    pieces_per_sequence,
    WEIGHTED_ROW: tl.constexpr,
    KEEP_ROW: tl.constexpr,
    WEIGHT_ROW: tl.constexpr,
    IS_CORRECTED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    GIVEN: tl.constexpr,
    TILE: tl.constexpr,
):
    """Weights, loss mask and metrics ``[M, T]`` of one tile.

    ``totals`` are this call's, ``over_group`` those of the data-parallel group. The loss mask is left to
    :func:`whole_mask_kernel` where responses are not whole.
    """
    tile = tl.program_id(0)
    piece, begin, whole_begin, length = locate_tile(table, tile, num_tiles, num_pieces, TILE)
    lane = tl.arange(0, TILE)
    is_token = lane < length
    given = tl.load(response_mask + whole_begin + lane, mask=is_token, other=0)
    response = given != 0
    column = rows + piece // pieces_per_sequence
    mean_weight, denominator_factor = load_scale(totals, over_group)
    # Every tile reads the scalars and divides: a kernel of its own for that would cost a launch.
    scale_factor = denominator_factor.to(tl.float64) / mean_weight
    token = begin + lane
    if IS_CORRECTED:
        log_ratio, proximal_T, behavior_T, valid = load_log_probs(proximal, behavior, token, response)
        of_token = given_rows + token.to(tl.int64) * GIVEN
        # Generated from Weight.formula and the gates, see _token_outputs in generate.py.
        weight, weighted, kept = token_outputs(log_ratio, proximal_T, behavior_T, valid, response, of_token)
        # Spread before they are compared: the interpreter cannot spread a bool.
        in_weighted = tl.full([TILE], tl.load(column + WEIGHTED_ROW * num_sequences), tl.float32) != 0
        # The weight of a token is its own times that of its sequence, which decisions_kernel has stored, and the scale.
        # Chosen, not multiplied by a mask: a token without a weight gets exactly 0.
        scaled = weight * (tl.load(column + WEIGHT_ROW * num_sequences) * scale_factor)
        tl.store(weights + token, tl.where(weighted & in_weighted, scaled, 0.0).to(tl.float32), mask=is_token)
        if IS_WHOLE:
            in_kept = tl.full([TILE], tl.load(column + KEEP_ROW * num_sequences), tl.float32) != 0
            # What a kept token counts is the caller's business: a mask of 0.25 comes back as that.
            tl.store(loss_mask + token, tl.where(kept & in_kept, given.to(tl.float32), 0.0), mask=is_token)
    store_metrics(
        metrics + token,
        num_tokens.to(tl.int64),
        is_token,
        response,
        column,
        num_sequences,
        totals,
        over_group,
        mean_weight,
        denominator_factor,
        scale_factor,
    )


def whole_mask_kernel(
    response_mask,
    whole_table,
    keep_byte,
    keep_bits,
    keep_S,
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
    given = tl.load(response_mask + begin + lane, mask=is_token, other=0)
    keep = (given != 0) & (tl.full([TILE], tl.load(keep_S + sequence), tl.float32) != 0)
    if HAS_BITS:
        tile_in_sequence = tile - tl.load(whole_table + num_whole_tiles + sequence)
        first_byte = keep_bits + tl.load(keep_byte + sequence) + tile_in_sequence * (TILE // 8)
        bits = tl.load(first_byte + lane // 8, mask=is_token, other=0).to(tl.int32)
        keep = keep & (((bits >> (lane % 8)) & 1) != 0)
    tl.store(loss_mask + begin + lane, tl.where(keep, given.to(tl.float32), 0.0), mask=is_token)


def weigh_kernel(values, weights, weighed, num_tokens, BLOCK: tl.constexpr):
    """Values times weights, 0 where the weight is 0, whatever the value."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    weight = tl.load(weights + token, mask=mask, other=0.0)
    value = tl.load(values + token, mask=mask, other=0.0)
    # A loss that is not finite under the mask must not reach the sum.
    tl.store(weighed + token, tl.where(weight != 0, value * weight, 0.0), mask=mask)
