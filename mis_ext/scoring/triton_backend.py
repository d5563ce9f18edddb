"""Both passes as one Triton kernel each, whatever the number of samples."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mis_ext.correction.triton.launch import launching_on
from mis_ext.scoring.kept import BITS
from mis_ext.scoring.passes import Coefficients, RowSums, Targets
from mis_ext.scoring.triton_kernels import gradient_kernel, row_sums_kernel


class TritonBackend:
    """See :class:`~mis_ext.scoring.passes.Backend`."""

    def row_sums(
        self, logits_NV: Tensor, targets: Targets, bits_TC: Tensor | None, *, scale: float, with_product: bool
    ) -> RowSums:
        """One launch, a program per token."""
        token_T, row_T, first, num_columns = targets
        sums = torch.empty(6, len(token_T), dtype=torch.float64, device=logits_NV.device)
        if len(token_T) > 0:
            with launching_on(logits_NV):
                row_sums_kernel[(len(token_T),)](
                    logits_NV,
                    token_T if row_T is None else row_T,
                    token_T,
                    token_T if bits_TC is None else bits_TC,
                    sums,
                    len(token_T),
                    logits_NV.stride(0),
                    first,
                    num_columns,
                    -(-num_columns // BITS),
                    scale * _LOG2_E,
                    HAS_ROWS=row_T is not None,
                    HAS_KEPT=bits_TC is not None,
                    WITH_PRODUCT=with_product,
                    **_lanes(num_columns, logits_NV.element_size()),
                )
        highest_T, total_T, target_T, product_T, kept_highest_T, kept_total_T = sums.unbind()
        return RowSums(
            highest_T,
            total_T,
            target_T,
            product_T if with_product else None,
            None if bits_TC is None else kept_highest_T,
            None if bits_TC is None else kept_total_T,
        )

    def gradient(
        self,
        logits_NV: Tensor,
        targets: Targets,
        bits_TC: Tensor | None,
        coefficients: Coefficients,
        *,
        scale: float,
        out_NV: Tensor,
    ) -> None:
        """One launch, a program per row; rows without a gradient are not read."""
        token_T, row_T, first, num_columns = targets
        num_rows, width = logits_NV.shape
        if num_rows == 0 or width == 0:
            return
        numbers = [*coefficients.whole, *coefficients.among, *coefficients[2:]]
        with launching_on(logits_NV):
            gradient_kernel[(num_rows,)](
                logits_NV,
                out_NV,
                token_T if row_T is None else targets.token_of_rows(num_rows),
                token_T,
                token_T if bits_TC is None else bits_TC,
                torch.stack([coefficients.whole.highest_T if x_T is None else x_T for x_T in numbers]).float(),
                len(token_T),
                logits_NV.stride(0),
                out_NV.stride(0),
                first,
                num_columns,
                width,
                -(-num_columns // BITS),
                scale,
                HAS_ROWS=row_T is not None,
                HAS_KEPT=bits_TC is not None,
                OF_LOG_PROB=coefficients.log_prob_T is not None,
                OF_ENTROPY=coefficients.of_entropy_T is not None,
                **_block(width),
            )


_LOG2_E = 1.4426950408889634


def _lanes(num_columns: int, bytes_each: int) -> dict[str, int]:
    """How many lanes a program has, how many logits each reads at a time, which are 16 bytes, and the warps."""
    per_lane = 16 // bytes_each
    block = min(triton.next_power_of_2(max(num_columns, 64)), 1024 * per_lane)
    return {"LANES": block // per_lane, "PER": per_lane, "num_warps": _num_warps(block)}


def _block(num_columns: int) -> dict[str, int]:
    """How many columns a program writes at a time, and how many warps do."""
    block = min(triton.next_power_of_2(max(num_columns, 64)), 4096)
    return {"BLOCK": block, "num_warps": _num_warps(block)}


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 8)
