"""Totals, and what follows from them: self-normalisation and denominators, over one call, a group, or a rollout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.config import CorrectionConfig
from mis_ext.log_ratio import bounded_exp
from mis_ext.statistics import SequenceStatistics


class WeightScale(NamedTuple):
    """What the weights are scaled by: divided by ``mean_weight``, multiplied by ``denominator_factor`` (0-dim)."""

    mean_weight: Tensor
    denominator_factor: Tensor

    @property
    def factor(self) -> Tensor:
        """The one number that multiplies every weight."""
        return self.denominator_factor / self.mean_weight


class GroupTotals(NamedTuple):
    """Sums (0-dim, float32) over the sequences of this call, or of all data-parallel ranks.

    Counts are sums of ones, exact up to 2**24 per rank. Token sums come from per-sequence sums, which are equal on
    every context-parallel rank: so the data-parallel group, without context parallelism, is right for all of them.
    """

    ratio_sum: Tensor
    squared_ratio_sum: Tensor
    num_valid: Tensor
    sequence_ratio_sum: Tensor
    squared_sequence_ratio_sum: Tensor
    num_measured_sequences: Tensor
    num_usable_sequences: Tensor
    num_response: Tensor
    num_response_sequences: Tensor
    num_kept: Tensor
    num_kept_sequences: Tensor
    weight_sum: Tensor
    weight_count: Tensor
    original_terms: Tensor
    kept_terms: Tensor
    log_ratio_min: Tensor
    log_ratio_max: Tensor

    def scale(self) -> WeightScale:
        """Mean weight and denominator factor, each 1 where nothing was counted."""
        return WeightScale(
            mean_weight=_ratio_or_one(self.weight_sum, self.weight_count),
            denominator_factor=_ratio_or_one(self.original_terms, self.kept_terms),
        )


def merge_totals(gathered_NK: Tensor) -> Tensor:
    """``[K]`` totals of all ranks from the ``[N, K]`` of each."""
    extremes = gathered_NK[:, -2].amin(), gathered_NK[:, -1].amax()
    return torch.cat([gathered_NK[:, :-2].sum(0), torch.stack(extremes)])


def weight_scale(
    config: CorrectionConfig, totals: GroupTotals, over_group: GroupTotals, rollout_scale: WeightScale | None
) -> WeightScale:
    """The scale of the configured scope; a factor that is not configured is 1."""
    if config.scope == "rollout" and rollout_scale is not None:
        scale = rollout_scale
    else:
        scale = (over_group if config.scope == "data_parallel" else totals).scale()
    one = torch.ones_like(totals.num_valid)
    return WeightScale(
        mean_weight=scale.mean_weight if config.normalize_over is not None else one,
        denominator_factor=scale.denominator_factor if config.denominator == "kept" else one,
    )


def group_totals(
    stats: SequenceStatistics,
    *,
    usable_S: Tensor,
    keep_S: Tensor,
    sequence_weight_S: Tensor,
    config: CorrectionConfig,
) -> Tensor:
    """``[K]``: :class:`GroupTotals` over the sequences of this call.

    Args:
        stats: Per-sequence statistics.
        usable_S: Sequences that can carry a weight.
        keep_S: Those of them that pass the gates on sequences.
        sequence_weight_S: The sequence-level part of the weight.
        config: Says over what the mean weight is taken, and how the host weighs its terms.
    """
    measured_S = stats.num_valid_S > 0
    kept_tokens_S = torch.where(keep_S, stats.num_token_kept_S, 0.0)
    weight_sum_S, weight_count_S = _weight_terms(stats, usable_S, keep_S, sequence_weight_S, config)
    has_response_S = stats.num_response_S > 0
    if config.per_token_loss:
        original_S, kept_S = stats.num_response_S, kept_tokens_S
    else:
        # The host gives every response token of a sequence the weight 1 / num_response.
        original_S, kept_S = has_response_S.float(), kept_tokens_S / stats.num_response_S.clamp_min(1.0)
    sequence_ratio_S = torch.where(measured_S, bounded_exp(stats.log_ratio_sum_S), 0.0)
    sums = torch.stack(
        [
            stats.ratio_sum_S,
            stats.squared_ratio_sum_S,
            stats.num_valid_S,
            sequence_ratio_S,
            sequence_ratio_S.square(),
            measured_S.float(),
            usable_S.float(),
            stats.num_response_S,
            has_response_S.float(),
            kept_tokens_S,
            (kept_tokens_S > 0).float(),
            weight_sum_S,
            weight_count_S,
            original_S,
            kept_S,
        ]
    ).sum(-1)
    # Padded, so that a micro-batch without sequences has extremes too.
    minimum = torch.nn.functional.pad(stats.log_ratio_min_S, (0, 1), value=torch.inf).amin()
    maximum = torch.nn.functional.pad(stats.log_ratio_max_S, (0, 1), value=-torch.inf).amax()
    return torch.cat([sums, torch.stack([minimum, maximum])])


def _weight_terms(
    stats: SequenceStatistics, usable_S: Tensor, keep_S: Tensor, sequence_weight_S: Tensor, config: CorrectionConfig
) -> tuple[Tensor, Tensor]:
    """Per sequence: what it adds to the sum of weights, and to their count."""
    over_kept = config.normalize_over == "kept"
    counted_S = keep_S if over_kept else usable_S
    tokens_S = stats.num_token_kept_S if over_kept else stats.num_valid_S
    token_weights_S = stats.token_weight_kept_sum_S if over_kept else stats.token_weight_sum_S
    if config.weight is not None and config.weight.level == "token":
        return torch.where(counted_S, token_weights_S, 0.0), torch.where(counted_S, tokens_S, 0.0)
    counted_S = counted_S & (tokens_S > 0)
    return torch.where(counted_S, sequence_weight_S, 0.0), counted_S.float()


def _ratio_or_one(numerator: Tensor, denominator: Tensor) -> Tensor:
    counted = (denominator > 0) & (numerator > 0)
    return torch.where(counted, numerator / torch.where(counted, denominator, 1.0), 1.0)
