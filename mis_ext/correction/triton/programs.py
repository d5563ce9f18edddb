"""The kernels of a plan, with their compile-time arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from mis_ext.correction.plan import Plan
from mis_ext.correction.triton import kernels
from mis_ext.correction.triton.generate import generate_namespace, row_names, specialised
from mis_ext.correction.triton.launch import BoundKernel, kernel
from mis_ext.correction.triton.tiles import TILE

SEQUENCES_PER_BLOCK = 256


class Programs(NamedTuple):
    """What the backend launches, and the sizes of the buffers between.

    ``rows`` are the plan's columns and decisions, one number per sequence each; ``keep_row`` is the place of the
    decision whether it stays in the mask.
    """

    token_statistics: BoundKernel
    sequence_statistics: BoundKernel
    keep_bits: BoundKernel
    decisions: Callable[[int], BoundKernel]
    merge_totals: BoundKernel
    outputs: BoundKernel
    rows: tuple[str, ...]
    keep_row: int


@functools.lru_cache(maxsize=32)
def programs_of(plan: Plan, *, is_whole: bool) -> Programs:
    """The kernels of ``plan``, for whole responses or parts of them."""
    namespace = generate_namespace(plan)
    rows = row_names(plan)

    def bound(function: Callable[..., None], **constants: object) -> BoundKernel:
        return BoundKernel(kernel(specialised(function, namespace)), **constants)

    def decisions(num_ranks: int) -> BoundKernel:
        return bound(kernels.decisions_kernel, NUM_RANKS=num_ranks, BLOCK=SEQUENCES_PER_BLOCK)

    num_columns, num_totals = len(plan.columns), len(plan.totals) + 1
    sizes = {"SEGMENTS": len(plan.segment_names), "TILE": TILE}
    ((scatter, count, total),) = plan.scatters or ((-1, -1, -1),)
    return Programs(
        token_statistics=bound(kernels.token_statistics_kernel, **sizes),
        sequence_statistics=bound(
            kernels.sequence_statistics_kernel,
            NUM_SUMS=plan.num_sum_columns,
            NUM_COLUMNS=num_columns,
            ROWS=_power_of_two(num_columns + 1),
            BLOCK=64,
        ),
        keep_bits=bound(kernels.keep_bits_kernel, **sizes),
        decisions=functools.cache(decisions),
        merge_totals=bound(
            kernels.merge_totals_kernel,
            NUM_SUMS=plan.num_sum_totals,
            NUM_TOTALS=num_totals,
            SCATTER=scatter,
            COUNT=count,
            TOTAL=total,
            COLUMNS=_power_of_two(num_totals),
            BLOCK=64,
        ),
        outputs=bound(
            kernels.output_kernel,
            WEIGHTED_ROW=rows.index("weighted_sequence"),
            KEEP_ROW=rows.index("keep_sequence"),
            WEIGHT_ROW=rows.index("sequence_weight"),
            IS_CORRECTED=not plan.config.metrics_only,
            IS_WHOLE=is_whole,
            **sizes,
        ),
        rows=rows,
        keep_row=rows.index("keep_sequence"),
    )


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
