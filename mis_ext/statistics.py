"""Per-sequence statistics: each rank's share, and what the shares of all context-parallel ranks add up to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.log_ratio import TokenRatios, bounded_exp, mask_as_float, squared_excess
from mis_ext.token_index import TokenIndex

NUM_SUMS = 11
"""The first so many of :class:`SequenceStatistics` are sums over tokens, the others extremes."""


class SequenceStatistics(NamedTuple):
    """Whole-sequence numbers ``[S]``, equal on every context-parallel rank, over valid tokens of the original mask.

    ``num_response_S`` counts response tokens with or without a ratio. ``squared_ratio_excess_S`` sums ``ratio**2 - 1``,
    which has the digits that a sum of squares near 1 has lost. Extremes of a sequence without a valid token are +inf
    (min) and -inf (max).
    """

    num_response_S: Tensor
    num_valid_S: Tensor
    num_token_kept_S: Tensor
    log_ratio_sum_S: Tensor
    proximal_sum_S: Tensor
    behavior_sum_S: Tensor
    ratio_sum_S: Tensor
    squared_ratio_sum_S: Tensor
    squared_ratio_excess_S: Tensor
    token_weight_sum_S: Tensor
    token_weight_kept_sum_S: Tensor
    log_ratio_min_S: Tensor
    log_ratio_max_S: Tensor
    proximal_min_S: Tensor

    @property
    def log_ratio_mean_S(self) -> Tensor:
        """Log of the geometric mean ratio; 0 without a valid token."""
        return self.log_ratio_sum_S / self.num_valid_S.clamp_min(1.0)


def local_statistics(tokens: TokenRatios, *, token_weight_T: Tensor, token_keep_T: Tensor, index: TokenIndex) -> Tensor:
    """``[14, S]``: this rank's share of :class:`SequenceStatistics`, 11 sums and 3 minima.

    Args:
        tokens: Log-ratios of the local tokens.
        token_weight_T: ``[T]``, the token-level part of the weight; 0 where a token has no ratio.
        token_keep_T: ``[T]`` bool, valid tokens that pass every token-level gate.
        index: Where the local tokens belong.
    """
    sums_T = _summed_rows(tokens, token_weight_T, token_keep_T)
    return torch.cat([index.reduce(sums_T, "sum"), index.reduce(_least_rows(tokens), "min")])


def _summed_rows(tokens: TokenRatios, token_weight_T: Tensor, token_keep_T: Tensor) -> Iterator[Tensor]:
    # One at a time, so that on a CPU the next row takes the memory of the last, which is still in the cache.
    valid_T, kept_T = mask_as_float(tokens.valid_mask_T), mask_as_float(token_keep_T)
    yield mask_as_float(tokens.response_mask_T)
    yield valid_T
    yield kept_T
    yield tokens.log_ratio_T
    yield tokens.proximal_T
    yield tokens.behavior_T
    ratio_T = bounded_exp(tokens.log_ratio_T) * valid_T
    yield ratio_T
    yield ratio_T.square()
    yield squared_excess(tokens.ratio_excess_T)
    yield token_weight_T
    yield token_weight_T * kept_T


def _least_rows(tokens: TokenRatios) -> Iterator[Tensor]:
    # 0 on valid tokens, else infinity.
    never_T = mask_as_float(tokens.valid_mask_T).reciprocal() - 1.0
    yield never_T + tokens.log_ratio_T
    yield never_T - tokens.log_ratio_T
    yield never_T + tokens.proximal_T


def merge_statistics(gathered_NKS: Tensor) -> SequenceStatistics:
    """Statistics of whole sequences from the shares of the ``N`` context-parallel ranks."""
    sums_KS = gathered_NKS[:, :NUM_SUMS].sum(0)
    minimum_S, negated_maximum_S, proximal_minimum_S = gathered_NKS[:, NUM_SUMS:].amin(0)
    return SequenceStatistics._make([*sums_KS.unbind(), minimum_S, -negated_maximum_S, proximal_minimum_S])
