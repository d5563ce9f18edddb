"""Kernels over tiles of tokens, before anything is known about the sequences: statistics, and keep bits."""

import triton
import triton.language as tl

from mis_ext.kernels.launch import kernel
from mis_ext.kernels.rows import (
    LOG_RATIO_MIN,
    LOG_RATIO_SUM,
    NUM_RESPONSE,
    TOKEN_LEVEL,
)
from mis_ext.log_ratio import MAX_LOG_RATIO

LIMIT = tl.constexpr(MAX_LOG_RATIO)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def locate_tile(table, tile, num_tiles, num_pieces, TILE: tl.constexpr):
    """Piece of a tile, its first local token, its first token in the whole responses, and its number of tokens."""
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
    log_ratio = proximal_T - behavior_T
    # False for NaN too.
    valid = response & (tl.abs(log_ratio) < INFINITY)
    return tl.where(valid, log_ratio, 0.0), tl.where(valid, proximal_T, 0.0), tl.where(valid, behavior_T, 0.0), valid


@triton.jit
def bounded_exp(log_value):
    """``exp`` in float64 of what is clipped to +-20."""
    return tl.exp(tl.maximum(tl.minimum(log_value.to(tl.float64), LIMIT), -LIMIT))


@triton.jit
def clip(ratio, LOW: tl.constexpr, HIGH: tl.constexpr):
    """The nearest value in the closed interval."""
    return tl.maximum(tl.minimum(ratio, HIGH), LOW)


@triton.jit
def inside(log_value, LOG_LOW: tl.constexpr, LOG_HIGH: tl.constexpr):
    """Whether the closed interval contains a value."""
    return (log_value >= LOG_LOW) & (log_value <= LOG_HIGH)


@triton.jit
def join4(a, b, c, d):
    """``[T]`` four times to ``[T, 2, 2]``, so that one reduction serves them all."""
    return tl.join(tl.join(a, b), tl.join(c, d))


@triton.jit
def join8(a, b, c, d, e, f, g, h):
    """``[T]`` eight times to ``[T, 2, 2, 2]``."""
    return tl.join(join4(a, b, c, d), join4(e, f, g, h))


@triton.jit
def store4(pointer, reduced, stride):
    """Store the first three of four joined and reduced values, ``stride`` apart."""
    bit = tl.arange(0, 2)
    number = bit[:, None] + 2 * bit[None, :]
    tl.store(pointer + number * stride, reduced.to(tl.float64), mask=number < 3)


@triton.jit
def store8(pointer, reduced, stride, COUNT: tl.constexpr):
    """Store the first ``COUNT`` of eight joined and reduced values, ``stride`` apart."""
    bit = tl.arange(0, 2)
    number = bit[:, None, None] + 2 * bit[None, :, None] + 4 * bit[None, None, :]
    tl.store(pointer + number * stride, reduced, mask=number < COUNT)


@kernel
def token_statistics_kernel(
    proximal,
    behavior,
    response_mask,
    table,
    partials,
    num_tiles,
    num_pieces,
    WEIGHT_LEVEL: tl.constexpr,
    WEIGHT_LOW: tl.constexpr,
    WEIGHT_HIGH: tl.constexpr,
    TOKEN_LOW: tl.constexpr,
    TOKEN_HIGH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Sums and minima of one tile: a column of ``partials``, ``[14, num_tiles]`` float64."""
    tile = tl.program_id(0)
    _, begin, whole_begin, length = locate_tile(table, tile, num_tiles, num_pieces, TILE)
    lane = tl.arange(0, TILE)
    response = tl.load(response_mask + whole_begin + lane, mask=lane < length, other=0) != 0
    log_ratio, proximal_T, behavior_T, valid = load_log_probs(proximal, behavior, begin + lane, response)
    ratio = tl.where(valid, bounded_exp(log_ratio), 0.0)
    keep = valid & inside(log_ratio, TOKEN_LOW, TOKEN_HIGH)
    weight = valid.to(tl.float64)
    if WEIGHT_LEVEL == TOKEN_LEVEL:
        weight = tl.where(valid, clip(ratio, WEIGHT_LOW, WEIGHT_HIGH), 0.0)
    # One reduction each for counts, sums and minima, in the order of the statistics.
    counts = join4(response.to(tl.int32), valid.to(tl.int32), keep.to(tl.int32), tl.zeros([TILE], tl.int32))
    sums = join8(
        log_ratio.to(tl.float64),
        proximal_T.to(tl.float64),
        behavior_T.to(tl.float64),
        ratio,
        ratio * ratio,
        tl.where(valid, ratio * ratio - 1.0, 0.0),
        weight,
        tl.where(keep, weight, 0.0),
    )
    minima = join4(
        tl.where(valid, log_ratio, INFINITY),
        tl.where(valid, -log_ratio, INFINITY),
        tl.where(valid, proximal_T, INFINITY),
        tl.zeros([TILE], tl.float32),
    )
    out = partials + tile
    store4(out + NUM_RESPONSE * num_tiles, tl.sum(counts, 0), num_tiles)
    store8(out + LOG_RATIO_SUM * num_tiles, tl.sum(sums, 0), num_tiles, 8)
    store4(out + LOG_RATIO_MIN * num_tiles, tl.min(minima, 0), num_tiles)


@kernel
def keep_bits_kernel(
    proximal,
    behavior,
    response_mask,
    table,
    whole_table,
    keep_byte,
    keep_bits,
    num_tiles,
    num_pieces,
    num_whole_tiles,
    num_sequences,
    pieces_per_sequence,
    TOKEN_LOW: tl.constexpr,
    TOKEN_HIGH: tl.constexpr,
    TILE: tl.constexpr,
):
    """Bits of one tile of a whole response: set where the token is on this rank and passes the gates on tokens."""
    tile = tl.program_id(0)
    sequence, whole_begin, _, length = locate_tile(whole_table, tile, num_whole_tiles, num_sequences, TILE)
    lane = tl.arange(0, TILE)
    response = tl.load(response_mask + whole_begin + lane, mask=lane < length, other=0) != 0
    start = table + num_tiles + num_pieces + 1
    whole_start = start + num_pieces + 1
    keep = lane < 0
    for part in range(pieces_per_sequence):
        piece = sequence * pieces_per_sequence + part
        begin = tl.load(start + piece)
        within = whole_begin + lane - tl.load(whole_start + piece)
        local = response & (within >= 0) & (within < tl.load(start + piece + 1) - begin)
        log_ratio, _proximal, _behavior, valid = load_log_probs(proximal, behavior, begin + within, local)
        keep = keep | (valid & inside(log_ratio, TOKEN_LOW, TOKEN_HIGH))
    bits = tl.reshape(keep.to(tl.int32), [TILE // 8, 8]) << tl.arange(0, 8)[None, :]
    tile_in_sequence = tile - tl.load(whole_table + num_whole_tiles + sequence)
    first_byte = keep_bits + tl.load(keep_byte + sequence) + tile_in_sequence * (TILE // 8)
    byte = tl.arange(0, TILE // 8)
    tl.store(first_byte + byte, tl.sum(bits, 1).to(tl.uint8), mask=byte * 8 < length)
