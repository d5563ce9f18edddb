"""Reductions over rows, a program per row, in blocks from left to right.

Each lane of a block adds up its own column of the blocks, and the lanes are added up last. What is added in which order
so depends on the width of a row alone. For the same reason nothing but softmax, whose sum is one of integers, is
specialised for alignment, which changes how lanes are spread over threads.
"""

import triton
import triton.language as tl

from mis_ext.correction.triton.launch import kernel

# Of a share of a softmax: 2**20 of them fit into 63 bits.
SHARE = tl.constexpr(2.0**42)


@triton.jit
def softmax_kernel(x, out, num_columns, BLOCK: tl.constexpr):
    """Softmax of contiguous rows ``[R, num_columns]``; columns at minus infinity change no bit, wherever they are.

    The shares are added up as integers, in which no order matters, and so no width of a block. Sums of floats would not
    do: masked keys before or between the others, as padding on the left or an attention sink has them, move a share to
    another lane.
    """
    first = tl.program_id(0).to(tl.int64) * num_columns
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + first + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        highest = tl.maximum(highest, value, propagate_nan=tl.PropagateNan.ALL)
    # The sum, an integer, is never NaN. A row with a NaN ends as one with an infinity does.
    row_highest = tl.max(tl.where(highest != highest, float("inf"), highest), 0)
    is_finite = tl.abs(row_highest) < float("inf")
    origin = tl.where(is_finite, row_highest, 0.0)
    total = tl.zeros([BLOCK], tl.int64)
    last = (num_columns - 1) // BLOCK * BLOCK
    for start in range(0, num_columns, BLOCK):
        # Backward: what was read last is still in the cache.
        column = last - start + tl.arange(0, BLOCK)
        value = tl.load(x + first + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        total += (tl.exp(value - origin) * SHARE).to(tl.int64)
    row_total = tl.where(is_finite, tl.sum(total, 0).to(tl.float32) / SHARE, float("nan"))
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < num_columns
        value = tl.load(x + first + column, mask=is_column, other=0.0, eviction_policy="evict_first")
        share = tl.exp(value.to(tl.float32) - origin) / row_total
        tl.store(out + first + column, share.to(out.dtype.element_ty), mask=is_column, eviction_policy="evict_first")


@kernel
def log_softmax_kernel(x, out, num_columns, BLOCK: tl.constexpr):
    """Logarithm of the softmax of contiguous rows ``[R, num_columns]``, in one pass over the row and one to write.

    Each lane keeps the largest value of its columns and the sum below it, and the lanes are brought to one origin last.
    All rows have blocks of one width, so columns at minus infinity behind the others change no bit.
    """
    first = tl.program_id(0).to(tl.int64) * num_columns
    highest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + first + column, mask=column < num_columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, value)
        # Minus infinity until the lane has seen a number, of which no difference may be taken.
        origin = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(highest - origin) + tl.exp(value - origin)
        highest = higher
    row_highest = tl.max(highest, 0)
    row_total = tl.sum(total * tl.exp(highest - tl.where(row_highest == float("-inf"), 0.0, row_highest)), 0)
    log_total = tl.log(row_total)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < num_columns
        shifted = tl.load(x + first + column, mask=is_column, other=0.0).to(tl.float32) - row_highest
        tl.store(out + first + column, (shifted - log_total).to(out.dtype.element_ty), mask=is_column)


@kernel
def softmax_backward_kernel(grad, output, grad_input, num_columns, IS_LOG: tl.constexpr, BLOCK: tl.constexpr):
    """The gradient ``[R, num_columns]`` of :func:`softmax_kernel`, or of its logarithm, from its output.

    The row's sum of slopes is added up as in the module's first lines. So a token's gradient does not depend on the
    other tokens of the batch.
    """
    first = tl.program_id(0).to(tl.int64) * num_columns
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < num_columns
        slope = tl.load(grad + first + column, mask=is_column, other=0.0).to(tl.float32)
        if IS_LOG:
            total += slope
        else:
            total += slope * tl.load(output + first + column, mask=is_column, other=0.0).to(tl.float32)
    row_total = tl.sum(total, 0)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < num_columns
        slope = tl.load(grad + first + column, mask=is_column, other=0.0).to(tl.float32)
        result = tl.load(output + first + column, mask=is_column, other=0.0).to(tl.float32)
        change = slope - tl.exp(result) * row_total if IS_LOG else (slope - row_total) * result
        tl.store(grad_input + first + column, change.to(grad_input.dtype.element_ty), mask=is_column)


@kernel
def sum_kernel(x, out, num_columns, IS_MEAN: tl.constexpr, BLOCK: tl.constexpr):
    """Sum, or mean, of contiguous rows ``[R, num_columns]``: ``out [R]``, rounded once.

    A row is never shared by two programs, however long it is and however few rows there are.
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * num_columns + column, mask=column < num_columns, other=0.0).to(tl.float32)
    result = tl.sum(total, 0)
    if IS_MEAN:
        # Triton's own division need not be the rounded quotient.
        result = tl.math.div_rn(result, num_columns.to(tl.float32))
    tl.store(out + row, result.to(out.dtype.element_ty))


@kernel
def rms_norm_kernel(x, weight, out, eps, num_columns, BLOCK: tl.constexpr):
    """Contiguous rows over their root mean square, rounded to the dtype of ``x``, then times the weight.

    Engines round at different places. This is the order of Llama and Qwen in transformers.
    """
    first = tl.program_id(0).to(tl.int64) * num_columns
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + first + column, mask=column < num_columns, other=0.0).to(tl.float32)
        squares += value * value
    scale = tl.rsqrt(tl.math.div_rn(tl.sum(squares, 0), num_columns.to(tl.float32)) + eps)
    for start in range(0, num_columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        is_column = column < num_columns
        value = tl.load(x + first + column, mask=is_column, other=0.0).to(tl.float32) * scale
        gain = tl.load(weight + column, mask=is_column, other=0.0).to(tl.float32)
        result = value.to(x.dtype.element_ty).to(tl.float32) * gain
        tl.store(out + first + column, result.to(out.dtype.element_ty), mask=is_column)
