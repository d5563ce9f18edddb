# SPDX-License-Identifier: Apache-2.0
"""Both passes as one Triton kernel each, whatever the number of samples."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mis_ext.correction.triton.launch import Launcher, launching_on
from mis_ext.scoring.passes import BITS, Coefficients, Finished, Normalizer, RowSums, Targets
from mis_ext.scoring.triton_kernels import finish_kernel, gradient_kernel, row_sums_kernel

_row_sums, _finish, _gradient = map(Launcher, (row_sums_kernel, finish_kernel, gradient_kernel))


class TritonBackend:
    """See :class:`~mis_ext.scoring.passes.Backend`."""

    def row_sums(
        self, logits_NV: Tensor, targets: Targets, bits_TC: Tensor | None, *, scale: float, with_product: bool
    ) -> RowSums:
        """One launch, a program per token."""
        token_T, row_T, first, num_columns = targets
        sums = torch.empty(6, len(token_T), dtype=torch.float64, device=logits_NV.device)
        if len(token_T) > 0:
            lanes, num_warps = _lanes(num_columns, logits_NV.element_size())
            with launching_on(logits_NV):
                _row_sums(
                    len(token_T),
                    (logits_NV, _or(row_T, token_T), token_T, _or(bits_TC, token_T), sums),
                    (len(token_T), logits_NV.stride(0), first, num_columns, -(-num_columns // BITS), scale * _LOG2_E),
                    lanes
                    | {"HAS_ROWS": row_T is not None, "HAS_KEPT": bits_TC is not None, "WITH_PRODUCT": with_product},
                    {"num_warps": num_warps},
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

    def finish(self, parts: RowSums, *, temperature: float, dtype: torch.dtype) -> Finished:
        """One launch, a program per 256 tokens."""
        num_ranks, num_tokens = parts.highest_T.shape
        # What the caller gets are tensors of their own, which may be changed in place.
        log_prob_T, entropy_T = (parts.highest_T.new_empty(num_tokens, dtype=dtype) for _ in range(2))
        numbers = parts.highest_T.new_empty(4, num_tokens, dtype=dtype)
        normalizers = numbers.unbind()
        if num_tokens > 0:
            with launching_on(numbers):
                _finish(
                    -(-num_tokens // _TOKENS),
                    (*(_or(each, parts.highest_T) for each in parts), log_prob_T, entropy_T, numbers),
                    (num_tokens, parts.highest_T.stride(0)),
                    {
                        "TEMPERATURE": temperature,
                        "HAS_KEPT": parts.kept_total_T is not None,
                        "WITH_PRODUCT": parts.product_T is not None,
                        "NUM_RANKS": num_ranks,
                        "BLOCK": _TOKENS,
                    },
                    {"num_warps": 4},
                )
        return Finished(
            log_prob_T,
            None if parts.product_T is None else entropy_T,
            Normalizer(*normalizers[:2]),
            Normalizer(*normalizers[2:]),
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
        of_tokens = (*coefficients.whole, *coefficients.among, *coefficients[2:])
        block, num_warps = _block(width)
        with launching_on(logits_NV):
            _gradient(
                num_rows,
                (
                    logits_NV,
                    out_NV,
                    token_T if row_T is None else targets.token_of_rows(num_rows),
                    token_T,
                    _or(bits_TC, token_T),
                    *(_or(each, coefficients.whole.highest_T).contiguous() for each in of_tokens),
                ),
                (logits_NV.stride(0), out_NV.stride(0), first, num_columns, width, -(-num_columns // BITS), scale),
                {
                    "HAS_ROWS": row_T is not None,
                    "HAS_KEPT": bits_TC is not None,
                    "OF_LOG_PROB": coefficients.log_prob_T is not None,
                    "OF_ENTROPY": coefficients.of_entropy_T is not None,
                }
                | block,
                {"num_warps": num_warps},
            )


_LOG2_E = 1.4426950408889634
_TOKENS = 256


def _or(given: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel takes a tensor where it reads none."""
    return instead if given is None else given


def _lanes(num_columns: int, bytes_each: int) -> tuple[dict[str, int], int]:
    """How many lanes a program has, how many logits each reads at a time, which are 16 bytes, and the warps."""
    per_lane = 16 // bytes_each
    block = min(triton.next_power_of_2(max(num_columns, 64)), 1024 * per_lane)
    return {"LANES": block // per_lane, "PER": per_lane}, _num_warps(block)


def _block(num_columns: int) -> tuple[dict[str, int], int]:
    """How many columns a program writes at a time, and how many warps do."""
    block = min(triton.next_power_of_2(max(num_columns, 64)), 4096)
    return {"BLOCK": block}, _num_warps(block)


def _num_warps(block: int) -> int:
    return min(max(block // 512, 1), 8)
