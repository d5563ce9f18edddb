"""What kernels and generated code call on the device."""

import triton
import triton.language as tl

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
