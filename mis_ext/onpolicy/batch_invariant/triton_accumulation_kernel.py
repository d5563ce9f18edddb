"""Sums of rows that have one destination, in the order in which the rows lie.

On CUDA torch adds such rows by atomic operations: in the order in which they happen to come, so that two runs differ.
"""

import triton
import triton.language as tl


@triton.jit
def accumulate_kernel(
    out,
    destinations,
    order,
    source,
    N,
    E,
    out_stride,
    source_row_stride,
    source_column_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Adds to ``out [D, E]``: the first of the sorted ``destinations [N]`` that are equal adds up all of them.

    ``order [N]`` says where the rows lie in ``source``; it comes from a stable sort, so equal destinations keep their
    order. One lane carries a sum from the value in ``out`` through all its rows, in float32, and rounds once. So a
    sum depends on its own rows alone, not on how many other rows there are, or on where its own lie between them.
    """
    tiles_e = tl.cdiv(E, BLOCK_E)
    position = (tl.program_id(0) // tiles_e) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = ((tl.program_id(0) % tiles_e) * BLOCK_E + tl.arange(0, BLOCK_E)).to(tl.int64)[None, :]
    destination = tl.load(destinations + position, mask=position < N, other=-1)
    before = tl.load(destinations + position - 1, mask=(position > 0) & (position < N), other=-1)
    is_first = (position < N) & (destination != before)
    is_written = is_first[:, None] & (columns < E)
    into = out + destination[:, None] * out_stride + columns
    total = tl.load(into, mask=is_written, other=0.0).to(tl.float32)
    is_running = is_first
    # As many rounds as the longest sum of the tile has rows: the host need not know it.
    while tl.max(is_running.to(tl.int32)) > 0:
        row = tl.load(order + position, mask=is_running, other=0)
        is_added = is_running[:, None] & (columns < E)
        values = source + row[:, None] * source_row_stride + columns * source_column_stride
        # A sum that is complete stays as it is, also -0.
        total = tl.where(is_added, total + tl.load(values, mask=is_added, other=0.0).to(tl.float32), total)
        position += 1
        following = tl.load(destinations + position, mask=is_running & (position < N), other=-1)
        is_running = is_running & (following == destination)
    tl.store(into, total.to(out.dtype.element_ty), mask=is_written)
