"""Per-sequence statistics over all context-parallel ranks, in one collective."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.collectives import Group, gather_rows
from mis_ext.layout import PackedLayout
from mis_ext.log_ratio import TokenRatios, bounded_exp, bounded_expm1


class SequenceStatistics(NamedTuple):
    """Whole-sequence numbers ``[S]``, equal on every context-parallel rank, over valid tokens of the original mask.

    ``num_response_S`` counts response tokens with or without a ratio. ``squared_ratio_excess_S`` sums ``ratio**2 - 1``,
    which has the digits that a sum of squares near 1 has lost. Extremes of a sequence without a valid token are +inf
    (min) and -inf (max).
    """

    num_response_S: Tensor
    num_valid_S: Tensor
    log_ratio_sum_S: Tensor
    proximal_sum_S: Tensor
    behavior_sum_S: Tensor
    ratio_sum_S: Tensor
    squared_ratio_sum_S: Tensor
    squared_ratio_excess_S: Tensor
    token_weight_sum_S: Tensor
    num_token_kept_S: Tensor
    token_weight_kept_sum_S: Tensor
    log_ratio_min_S: Tensor
    log_ratio_max_S: Tensor
    proximal_min_S: Tensor

    @property
    def log_ratio_mean_S(self) -> Tensor:
        """Log of the geometric mean ratio; 0 without a valid token."""
        return self.log_ratio_sum_S / self.num_valid_S.clamp_min(1.0)


def sequence_statistics(
    tokens: TokenRatios,
    *,
    response_mask_R: Tensor,
    token_weight_T: Tensor,
    token_keep_T: Tensor,
    layout: PackedLayout,
    cp_group: Group | None,
) -> SequenceStatistics:
    """Reduce local tokens to sequences, and ranks to one: one all-gather of ``[14, S]`` numbers.

    Args:
        tokens: Log-ratios of the local tokens.
        response_mask_R: ``[R]`` bool, the whole responses, equal on every rank.
        token_weight_T: ``[T]``, the token-level part of the weight.
        token_keep_T: ``[T]`` bool, valid tokens that pass every token-level gate.
        layout: Where the local tokens belong.
        cp_group: The ranks that share the sequences.
    """
    valid_T, log_ratio_T = tokens.valid_mask_T, tokens.log_ratio_T
    ratio_T = torch.where(valid_T, bounded_exp(log_ratio_T), 0.0)
    weight_T = torch.where(valid_T, token_weight_T, 0.0)
    sums_KT = torch.stack(
        [
            valid_T.float(),
            log_ratio_T,
            tokens.proximal_T,
            tokens.behavior_T,
            ratio_T,
            ratio_T.square(),
            torch.where(valid_T, bounded_expm1(log_ratio_T, scale=2.0), 0.0),
            weight_T,
            token_keep_T.float(),
            torch.where(token_keep_T, weight_T, 0.0),
        ]
    )
    minima_KT = torch.stack(
        [
            log_ratio_T.masked_fill(~valid_T, torch.inf),
            (-log_ratio_T).masked_fill(~valid_T, torch.inf),
            tokens.proximal_T.masked_fill(~valid_T, torch.inf),
        ]
    )
    local_KS = torch.cat([layout.reduce(sums_KT, "sum"), layout.reduce(minima_KT, "min")])
    gathered_NKS = gather_rows(local_KS, cp_group)
    sums_KS = gathered_NKS[:, : len(sums_KT)].sum(0)
    minimum_S, negated_maximum_S, proximal_minimum_S = gathered_NKS[:, len(sums_KT) :].amin(0)
    num_response_S = layout.reduce_whole(response_mask_R.float().unsqueeze(0)).squeeze(0)
    extremes = minimum_S, -negated_maximum_S, proximal_minimum_S
    return SequenceStatistics._make([num_response_S, *sums_KS.unbind(), *extremes])
