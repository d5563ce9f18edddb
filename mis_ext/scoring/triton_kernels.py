"""The two passes over rows of logits, a program per row, in blocks from left to right.

Each lane has its own highest logit and its own sums, and the lanes are added up last. So nothing waits for another
lane on the way, and the order, and with it the bits, depend on the width of a row and the dtype alone.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))
# In place of minus infinity where it is multiplied by a weight of 0.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _is_kept(bits, token, column, target, num_words, is_column):
    """Whether the columns are among those of the token's set, to which the token itself belongs."""
    word = tl.load(bits + token.to(tl.int64) * num_words + column // 32, mask=is_column, other=0)
    return (((word >> (column % 32)) & 1) == 1) | (column == target)


@triton.jit
def _added(highest, total, product, value, scale_log2, WITH_PRODUCT: tl.constexpr):
    """The running sums of each lane with ``value`` ``[LANES, PER]`` more of its logits."""
    new = tl.maximum(highest, tl.max(value, 1))
    origin = tl.where(new == -INFINITY, 0.0, new)
    # How far the origin moves; nothing has been added to the first one.
    moved = tl.where(highest == -INFINITY, 0.0, highest - origin)
    shrunk = tl.exp2(moved * scale_log2)
    below = value - origin[:, None]
    weight = tl.exp2(below * scale_log2)
    if WITH_PRODUCT:
        product = shrunk * (product + total * moved) + tl.sum(weight * tl.maximum(below, LOWEST), 1)
    return new, total * shrunk + tl.sum(weight, 1), product


@triton.jit
def _merged(highest, total, product, scale_log2):
    """The sums of all lanes over the highest logit of all."""
    top = tl.max(highest, 0)
    moved = tl.where(highest == -INFINITY, 0.0, highest - tl.where(top == -INFINITY, 0.0, top))
    # A lane without a finite logit has sums of 0.
    shrunk = tl.exp2(moved * scale_log2)
    return top, tl.sum(total * shrunk, 0), tl.sum(shrunk * (product + total * moved), 0)


@triton.jit(do_not_specialize=["scale_log2", "num_tokens", "first"])
def row_sums_kernel(
    logits,
    rows,
    tokens,
    bits,
    out,
    num_tokens,
    row_stride,
    first,
    num_columns,
    num_words,
    scale_log2,
    HAS_ROWS: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    WITH_PRODUCT: tl.constexpr,
    LANES: tl.constexpr,
    PER: tl.constexpr,
):
    """``out`` ``[6, num_tokens]``: highest, total, target, product, and highest and total of the kept columns."""
    token = tl.program_id(0)
    row = token
    if HAS_ROWS:
        row = tl.load(rows + token)
    base = logits + row.to(tl.int64) * row_stride
    target = tl.load(tokens + token) - first
    highest = tl.full([LANES], -INFINITY, tl.float32)
    total = tl.zeros([LANES], tl.float32)
    product = tl.zeros([LANES], tl.float32)
    kept_highest = tl.full([LANES], -INFINITY, tl.float32)
    kept_total = tl.zeros([LANES], tl.float32)
    place = tl.arange(0, LANES)[:, None] * PER + tl.arange(0, PER)[None, :]
    for start in range(0, num_columns, LANES * PER):
        column = start + place
        is_column = column < num_columns
        value = tl.load(base + column, mask=is_column, other=-INFINITY).to(tl.float32)
        highest, total, product = _added(highest, total, product, value, scale_log2, WITH_PRODUCT)
        if HAS_KEPT:
            is_kept = _is_kept(bits, token, column, target, num_words, is_column)
            value = tl.where(is_kept, value, -INFINITY)
            kept_highest, kept_total, _ = _added(kept_highest, kept_total, kept_total, value, scale_log2, False)
    is_here = (target >= 0) & (target < num_columns)
    own = tl.load(base + target, mask=is_here, other=-INFINITY).to(tl.float32)
    top, whole, weighted = _merged(highest, total, product, scale_log2)
    tl.store(out + token, top)
    tl.store(out + num_tokens + token, whole)
    tl.store(out + 2 * num_tokens + token, own)
    if WITH_PRODUCT:
        tl.store(out + 3 * num_tokens + token, weighted)
    if HAS_KEPT:
        top, whole, _ = _merged(kept_highest, kept_total, kept_total, scale_log2)
        tl.store(out + 4 * num_tokens + token, top)
        tl.store(out + 5 * num_tokens + token, whole)


@triton.jit(do_not_specialize=["scale", "num_tokens", "first"])
def gradient_kernel(
    logits,
    out,
    token_of_rows,
    tokens,
    bits,
    numbers,
    num_tokens,
    row_stride,
    out_stride,
    first,
    num_columns,
    width,
    num_words,
    scale,
    HAS_ROWS: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    OF_LOG_PROB: tl.constexpr,
    OF_ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``numbers`` ``[7, num_tokens]``: highest and log of the total, both of the kept columns, entropy, two slopes."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    base_out = out + row.to(tl.int64) * out_stride
    token = row
    if HAS_ROWS:
        token = tl.load(token_of_rows + row)
    is_scored = token >= 0
    at = numbers + tl.maximum(token, 0)
    slope = 0.0
    of_entropy = 0.0
    if OF_LOG_PROB:
        slope = tl.load(at + 5 * num_tokens, mask=is_scored, other=0.0)
    if OF_ENTROPY:
        of_entropy = tl.load(at + 6 * num_tokens, mask=is_scored, other=0.0)
    if (slope == 0.0) & (of_entropy == 0.0):
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(base_out + column, tl.zeros([BLOCK], out.dtype.element_ty), mask=column < width)
    else:
        highest = tl.load(at)
        log_total = tl.load(at + num_tokens)
        kept_highest = tl.load(at + 2 * num_tokens)
        kept_log_total = tl.load(at + 3 * num_tokens)
        entropy = tl.load(at + 4 * num_tokens)
        target = tl.load(tokens + token) - first
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            is_column = column < num_columns
            value = tl.load(base + column, mask=is_column, other=-INFINITY).to(tl.float32)
            log_share = (value - highest) * scale - log_total
            share = tl.exp2(log_share * LOG2_E)
            found = tl.zeros([BLOCK], tl.float32)
            if OF_LOG_PROB:
                among = share
                if HAS_KEPT:
                    among = tl.exp2(((value - kept_highest) * scale - kept_log_total) * LOG2_E)
                    among = tl.where(_is_kept(bits, token, column, target, num_words, is_column), among, 0.0)
                found = slope * (tl.where(column == target, 1.0, 0.0) - among)
            if OF_ENTROPY:
                found -= of_entropy * (share * (tl.maximum(log_share, LOWEST) + entropy))
            found = tl.where(is_column, found * scale, 0.0)
            tl.store(base_out + column, found.to(out.dtype.element_ty), mask=column < width)
