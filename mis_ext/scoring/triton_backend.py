# SPDX-License-Identifier: Apache-2.0
"""Both passes over rows of logits as one Triton kernel each, for any number of samples: one program per row.

A program reads blocks from left to right. Each lane has its own highest logit and its own sums, and the lanes are
summed last. So no lane waits for another, and the order of additions (and thus the bits) depends only on the width of a
row and the dtype.
"""

import triton
import triton.language as tl
from torch import Tensor

from mis_ext.scoring.launch import Launcher, launching_on
from mis_ext.scoring.passes import BITS, Coefficients, Targets

_LOG2_E = 1.4426950408889634
LOG2_E = tl.constexpr(_LOG2_E)
INFINITY = tl.constexpr(float("inf"))
# Replaces minus infinity where it is multiplied by a weight of 0.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def _is_kept(bits, token, column, target, num_words, is_column):
    """True if the columns are in the token's set, which includes the token itself."""
    word = tl.load(bits + token.to(tl.int64) * num_words + column // 32, mask=is_column, other=0)
    return (((word >> (column % 32)) & 1) == 1) | (column == target)


@triton.jit
def _added(highest, total, product, value, scale_log2, WITH_PRODUCT: tl.constexpr):
    """The running sums of each lane after adding ``value`` ``[LANES, PER]``."""
    new = tl.maximum(highest, tl.max(value, 1))
    origin = tl.where(new == -INFINITY, 0.0, new)
    # The shift of the origin; 0 before the first value.
    moved = tl.where(highest == -INFINITY, 0.0, highest - origin)
    shrunk = tl.exp2(moved * scale_log2)
    below = value - origin[:, None]
    weight = tl.exp2(below * scale_log2)
    if WITH_PRODUCT:
        product = shrunk * (product + total * moved) + tl.sum(weight * tl.maximum(below, LOWEST), 1)
    return new, total * shrunk + tl.sum(weight, 1), product


@triton.jit
def _merged(highest, total, product, scale_log2):
    """The sums of all lanes, relative to the highest logit of all."""
    top = tl.max(highest, 0)
    moved = tl.where(highest == -INFINITY, 0.0, highest - tl.where(top == -INFINITY, 0.0, top))
    # A lane without a finite logit has sums of 0.
    shrunk = tl.exp2(moved * scale_log2)
    return top, tl.sum(total * shrunk, 0), tl.sum(shrunk * (product + total * moved), 0)


@triton.jit(do_not_specialize=["scale_log2", "out_stride", "first"])
def row_sums_kernel(
    logits,
    rows,
    tokens,
    bits,
    out,
    out_stride,
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
    """``out`` ``[6, T]``: highest, total, target, product, and highest and total of the kept columns."""
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
    tl.store(out + out_stride + token, whole)
    tl.store(out + 2 * out_stride + token, own)
    if WITH_PRODUCT:
        tl.store(out + 3 * out_stride + token, weighted)
    if HAS_KEPT:
        top, whole, _ = _merged(kept_highest, kept_total, kept_total, scale_log2)
        tl.store(out + 4 * out_stride + token, top)
        tl.store(out + 5 * out_stride + token, whole)


@triton.jit(do_not_specialize=["scale", "first"])
def gradient_kernel(
    logits,
    out,
    token_of_rows,
    tokens,
    bits,
    whole_highest,
    whole_log_total,
    among_highest,
    among_log_total,
    entropy,
    log_prob_slope,
    entropy_slope,
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
    """``token_of_rows`` is -1 for a row that scores no token. The seven arguments before the strides are per token."""
    row = tl.program_id(0)
    base = logits + row.to(tl.int64) * row_stride
    base_out = out + row.to(tl.int64) * out_stride
    token = row
    if HAS_ROWS:
        token = tl.load(token_of_rows + row)
    is_scored = token >= 0
    at = tl.maximum(token, 0)
    slope = 0.0
    of_entropy = 0.0
    if OF_LOG_PROB:
        slope = tl.load(log_prob_slope + at, mask=is_scored, other=0.0)
    if OF_ENTROPY:
        of_entropy = tl.load(entropy_slope + at, mask=is_scored, other=0.0)
    if (slope == 0.0) & (of_entropy == 0.0):
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            tl.store(base_out + column, tl.zeros([BLOCK], out.dtype.element_ty), mask=column < width)
    else:
        highest = tl.load(whole_highest + at)
        log_total = tl.load(whole_log_total + at)
        kept_highest = tl.load(among_highest + at)
        kept_log_total = tl.load(among_log_total + at)
        target = tl.load(tokens + token) - first
        own_entropy = 0.0
        if OF_ENTROPY:
            own_entropy = tl.load(entropy + at)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            is_column = column < num_columns
            value = tl.load(base + column, mask=is_column, other=-INFINITY).to(tl.float32)
            log_share = (value - highest) * scale - log_total
            share = tl.exp2(log_share * LOG2_E)
            found = tl.zeros([BLOCK], tl.float32)
            # The gradient of the logits: g (1[v = t] - p_v) - h p_v (log p_v + H)
            if OF_LOG_PROB:
                among = share
                if HAS_KEPT:
                    among = tl.exp2(((value - kept_highest) * scale - kept_log_total) * LOG2_E)
                    among = tl.where(_is_kept(bits, token, column, target, num_words, is_column), among, 0.0)
                found = slope * (tl.where(column == target, 1.0, 0.0) - among)
            if OF_ENTROPY:
                found -= of_entropy * (share * (tl.maximum(log_share, LOWEST) + own_entropy))
            found = tl.where(is_column, found * scale, 0.0)
            tl.store(base_out + column, found.to(out.dtype.element_ty), mask=column < width)


_row_sums, _gradient = map(Launcher, (row_sums_kernel, gradient_kernel))


def row_sums(logits_NV: Tensor, targets: Targets, out: Tensor, *, scale: float, with_product: bool) -> None:
    """One launch, one program per token."""
    token_T, row_T, first, num_columns, bits_TC = targets
    # 16 bytes per lane at a time.
    per_lane = 16 // logits_NV.element_size()
    block = min(triton.next_power_of_2(max(num_columns, 64)), 1024 * per_lane)
    with launching_on(logits_NV):
        _row_sums(
            len(token_T),
            (logits_NV, _or(row_T, token_T), token_T, _or(bits_TC, token_T), out),
            (out.stride(0), logits_NV.stride(0), first, num_columns, -(-num_columns // BITS), scale * _LOG2_E),
            {
                "HAS_ROWS": row_T is not None,
                "HAS_KEPT": bits_TC is not None,
                "WITH_PRODUCT": with_product,
                "LANES": block // per_lane,
                "PER": per_lane,
            },
            {"num_warps": _num_warps(block)},
        )


def gradient(logits_NV: Tensor, targets: Targets, coefficients: Coefficients, out_NV: Tensor, *, scale: float) -> None:
    """One launch, one program per row; rows without a gradient are not read."""
    token_T, row_T, first, num_columns, bits_TC = targets
    num_rows, width = logits_NV.shape
    if width == 0:
        return
    block = min(triton.next_power_of_2(max(width, 64)), 4096)
    with launching_on(logits_NV):
        _gradient(
            num_rows,
            (
                logits_NV,
                out_NV,
                token_T if row_T is None else targets.token_of_rows(num_rows),
                token_T,
                _or(bits_TC, token_T),
                *(_or(x_T, coefficients.highest_T).contiguous() for x_T in coefficients),
            ),
            (logits_NV.stride(0), out_NV.stride(0), first, num_columns, width, -(-num_columns // BITS), scale),
            {
                "HAS_ROWS": row_T is not None,
                "HAS_KEPT": bits_TC is not None,
                "OF_LOG_PROB": coefficients.log_prob_grad_T is not None,
                "OF_ENTROPY": coefficients.entropy_grad_T is not None,
                "BLOCK": block,
            },
            {"num_warps": _num_warps(block)},
        )


def _or(given: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel needs a tensor argument even if it does not read it."""
    return instead if given is None else given


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 8)
