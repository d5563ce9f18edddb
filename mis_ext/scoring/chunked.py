# SPDX-License-Identifier: Apache-2.0
"""Both passes in PyTorch operations, a few rows at a time. The extra memory does not grow with the logits.

See :class:`~mis_ext.scoring.passes.Backend`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mis_ext.scoring.passes import Coefficients, RowSums, Targets, unpacked

CHUNK = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Number of logits per chunk."""


def row_sums(logits_NV: Tensor, targets: Targets, out: Tensor, *, scale: float, with_product: bool) -> None:
    """Read the rows of the tokens, chunk by chunk."""
    column_T = _columns(targets)
    for part in _parts(len(targets.token_T), logits_NV):
        rows_TV = logits_NV[part] if targets.row_T is None else logits_NV.index_select(0, targets.row_T[part])
        rows_TV = rows_TV[:, : targets.num_columns].to(accumulated(logits_NV))
        kept_TV = _kept(targets, part, column_T[part])
        sums = _sums(rows_TV, column_T[part], kept_TV, scale=scale, with_product=with_product)
        for out_T, sum_T in zip(out, sums, strict=True):
            if sum_T is not None:
                out_T[part] = sum_T


def gradient(logits_NV: Tensor, targets: Targets, coefficients: Coefficients, out_NV: Tensor, *, scale: float) -> None:
    """Write the gradient, chunk by chunk of all rows."""
    if len(targets.token_T) == 0:
        out_NV.zero_()
        return
    token_N = targets.token_of_rows(len(logits_NV))
    column_of_T, num_columns = _columns(targets), targets.num_columns
    for part in _parts(len(logits_NV), logits_NV):
        token_T = token_N[part].clamp_min(0)
        is_scored_T1 = (token_N[part] >= 0).unsqueeze(-1)
        column_T = column_of_T[token_T]
        kept_TV = _kept(targets, token_T, column_T)
        rows_TV = logits_NV[part, :num_columns].to(accumulated(logits_NV))
        slope_TV, is_wanted_T1 = _logit_gradient(
            rows_TV, column_T, kept_TV, coefficients.of_tokens(token_T), scale=scale
        )
        out_NV[part, :num_columns] = torch.where(is_scored_T1 & is_wanted_T1, slope_TV * scale, 0.0)
        out_NV[part, num_columns:] = 0.0


def _sums(rows_TV: Tensor, column_T: Tensor, kept_TV: Tensor | None, *, scale: float, with_product: bool) -> RowSums:
    highest_T, weight_TV, below_TV = _weights(rows_TV, scale)
    product_T = kept_highest_T = kept_total_T = None
    if with_product:
        # A weight of 0 has a logit of -inf, or a negligible one.
        product_T = torch.where(weight_TV == 0.0, 0.0, weight_TV * below_TV).sum(-1)
    if kept_TV is not None:
        kept_highest_T, kept_weight_TV, _ = _weights(rows_TV.masked_fill(~kept_TV, -torch.inf), scale)
        kept_total_T = kept_weight_TV.sum(-1)
    target_T = torch.full_like(highest_T, -torch.inf)
    if rows_TV.shape[-1] > 0:
        own_T = rows_TV.gather(-1, column_T.clamp_min(0).unsqueeze(-1)).squeeze(-1)
        target_T = torch.where(column_T >= 0, own_T, target_T)
    return RowSums(highest_T, weight_TV.sum(-1), target_T, product_T, kept_highest_T, kept_total_T)


def _weights(rows_TV: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The highest logit, each logit's term of the sum relative to it, and each logit's distance below it."""
    if rows_TV.shape[-1] == 0:
        return rows_TV.new_full((len(rows_TV),), -torch.inf), rows_TV, rows_TV
    highest_T = rows_TV.amax(-1)
    # Without a finite logit there is no reference: this part of the vocabulary then adds 0.
    below_TV = rows_TV - torch.where(highest_T == -torch.inf, 0.0, highest_T).unsqueeze(-1)
    return highest_T, (below_TV * scale).exp(), below_TV


def _logit_gradient(
    rows_TV: Tensor, column_T: Tensor, kept_TV: Tensor | None, of_rows: Coefficients, *, scale: float
) -> tuple[Tensor, Tensor]:
    """The gradient of the scaled logits, which the caller multiplies by ``scale``, and ``[T, 1]``: rows that have one.

    ``g (1[v = t] - p_v)`` from the log-prob of token ``t``, and ``-h p_v (log p_v + H)`` from the entropy, with
    ``p = softmax(scale z)``: see :mod:`mis_ext.scoring.scores`.
    """
    slope_TV = torch.zeros_like(rows_TV)
    is_wanted_T1 = torch.zeros(len(rows_TV), 1, dtype=torch.bool, device=rows_TV.device)
    if of_rows.log_prob_grad_T is not None:
        grad_T1 = of_rows.log_prob_grad_T.unsqueeze(-1)
        is_wanted_T1 = grad_T1 != 0.0
        share_TV = _log_shares(rows_TV, of_rows.kept_highest_T, of_rows.kept_log_total_T, scale).exp()
        if kept_TV is not None:
            share_TV = torch.where(kept_TV, share_TV, 0.0)
        slope_TV -= grad_T1 * share_TV
        if rows_TV.shape[-1] > 0:
            place_T1 = column_T.clamp_min(0).unsqueeze(-1)
            own_T1 = slope_TV.gather(-1, place_T1) + torch.where(column_T.unsqueeze(-1) >= 0, grad_T1, 0.0)
            # Not scatter_add_, which deterministic mode forbids on a GPU.
            slope_TV.scatter_(-1, place_T1, own_T1)
    if of_rows.entropy_grad_T is not None:
        assert of_rows.entropy_T is not None
        grad_T1 = of_rows.entropy_grad_T.unsqueeze(-1)
        is_wanted_T1 = is_wanted_T1 | (grad_T1 != 0.0)
        log_share_TV = _log_shares(rows_TV, of_rows.highest_T, of_rows.log_total_T, scale)
        share_TV = log_share_TV.exp()
        surplus_TV = share_TV * (log_share_TV + of_rows.entropy_T.unsqueeze(-1))
        slope_TV -= grad_T1 * torch.where(share_TV == 0.0, 0.0, surplus_TV)
    return slope_TV, is_wanted_T1


def _log_shares(rows_TV: Tensor, highest_T: Tensor, log_total_T: Tensor, scale: float) -> Tensor:
    return (rows_TV - highest_T.unsqueeze(-1)) * scale - log_total_T.unsqueeze(-1)


def _kept(targets: Targets, tokens: Tensor | slice, column_T: Tensor) -> Tensor | None:
    """``[T, V]``: the kept columns of some tokens, including their own; None for all."""
    if targets.bits_TC is None:
        return None
    kept_TV = unpacked(targets.bits_TC[tokens], targets.num_columns)
    return kept_TV | (torch.arange(targets.num_columns, device=column_T.device) == column_T.unsqueeze(-1))


def _columns(targets: Targets) -> Tensor:
    """``[T]``: the column of each token on this rank, -1 if it has none."""
    column_T = targets.token_T - targets.first
    return torch.where((column_T >= 0) & (column_T < targets.num_columns), column_T, -1)


def _parts(num_rows: int, logits_NV: Tensor) -> Iterator[slice]:
    size = max(CHUNK.get(logits_NV.device.type, CHUNK["cuda"]) // max(logits_NV.shape[1], 1), 1)
    return slices(num_rows, size)


def slices(number: int, size: int) -> Iterator[slice]:
    """Slices of ``size`` elements; at least one slice, which may be empty."""
    return (slice(begin, min(begin + size, number)) for begin in range(0, max(number, 1), size))


def accumulated(operand: Tensor) -> torch.dtype:
    """The dtype of sums: float32, or float64 for float64."""
    return torch.promote_types(operand.dtype, torch.float32)
