"""The pipeline: from two streams of log-probs to weights, keep masks and metrics."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mis_ext.collectives import Group, merge_flags
from mis_ext.config import CorrectionConfig
from mis_ext.layout import PackedLayout
from mis_ext.log_ratio import TokenRatios, compute_log_ratio
from mis_ext.metrics import Metric, Outcome, correction_formulas, mismatch_formulas, select
from mis_ext.normalization import GroupTotals, WeightScale, group_totals
from mis_ext.rejection import sequence_keep, token_keep
from mis_ext.statistics import SequenceStatistics, sequence_statistics
from mis_ext.weights import sequence_weights, token_weights


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Correction:
    """Weights and keep masks of one call, detached.

    Attributes:
        weights_T: ``[T]`` float32, what multiplies the loss of each local token. A token that a gate rejects keeps its
            weight: the mask removes it. A token that cannot have one (masked, or without a finite ratio) has 0.
        usable_mask_T: ``[T]`` bool, tokens that have a weight.
        keep_mask_T: ``[T]`` bool, local tokens that stay in the loss.
        keep_mask_R: ``[R]`` bool, the same for whole responses, equal on all context-parallel ranks.
        metrics: Selected metrics by public name.
        tokens: Log-ratios of the local tokens.
        stats: Per-sequence statistics.
        kept_count_S: ``[S]``, tokens that each sequence keeps.
        totals: Sums over this call's sequences on this data-parallel rank.
    """

    weights_T: Tensor
    usable_mask_T: Tensor
    keep_mask_T: Tensor
    keep_mask_R: Tensor
    metrics: dict[str, Metric]
    tokens: TokenRatios
    stats: SequenceStatistics
    kept_count_S: Tensor
    totals: GroupTotals


@torch.no_grad()
def compute_correction(
    *,
    proximal_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    response_mask_R: Tensor,
    layout: PackedLayout,
    config: CorrectionConfig,
    cp_group: Group | None = None,
    dp_group: Group | None = None,
    rollout_scale: WeightScale | None = None,
) -> Correction:
    """Correct for the difference between the policy that sampled and the policy that trains.

    Args:
        proximal_logprobs_T: ``[T]``, nats, the trainer's frozen scoring of this rank's tokens, any float dtype.
        behavior_logprobs_T: ``[T]``, nats, what the inference engine reported for them.
        response_mask_R: ``[R]``, nonzero on tokens that the policy generated, whole responses on every rank.
        layout: Lengths, and where the local tokens lie.
        config: What to compute.
        cp_group: Ranks that hold other parts of the same sequences; None for one rank.
        dp_group: Ranks that hold other sequences, without context parallelism; None for one rank.
        rollout_scale: The factors of the whole rollout; needed, and used, with ``scope: rollout`` only.

    Raises:
        ValueError: Lengths disagree, or a rollout scale is missing.
    """
    _check_lengths(proximal_logprobs_T, behavior_logprobs_T, response_mask_R, layout)
    response_mask_R = response_mask_R != 0
    tokens = compute_log_ratio(
        proximal_logprobs_T=proximal_logprobs_T,
        behavior_logprobs_T=behavior_logprobs_T,
        response_mask_T=layout.local_part(response_mask_R),
    )
    gates = config.all_gates
    token_weight_T = token_weights(tokens.log_ratio_T, config.weight)
    token_keep_T = token_keep(tokens, gates)
    stats = sequence_statistics(
        tokens,
        response_mask_R=response_mask_R,
        token_weight_T=token_weight_T,
        token_keep_T=token_keep_T,
        layout=layout,
        cp_group=cp_group,
    )

    usable_S = _usable_sequences(stats, config)
    keep_S = usable_S & sequence_keep(stats, gates)
    sequence_weight_S = sequence_weights(stats, config.weight)
    totals = group_totals(stats, usable_S=usable_S, keep_S=keep_S, sequence_weight_S=sequence_weight_S, config=config)
    over_group = totals.over_group(dp_group) if config.needs_group_totals else totals
    scale = _scale(config, totals, over_group, rollout_scale)

    usable_mask_T = tokens.valid_mask_T & layout.to_tokens(usable_S)
    weights_T = token_weight_T * layout.to_tokens(sequence_weight_S * scale.factor)
    keep_mask_R = _whole_keep_mask(
        token_keep_T, keep_S, response_mask_R, layout=layout, config=config, cp_group=cp_group
    )
    outcome = Outcome(
        usable_mask_T=usable_mask_T,
        usable_S=usable_S,
        keep_mask_T=token_keep_T & layout.to_tokens(keep_S),
        kept_count_S=torch.where(keep_S, stats.num_token_kept_S, 0.0),
        token_weight_T=token_weight_T,
        sequence_weight_S=sequence_weight_S,
        scale=scale,
    )
    formulas = mismatch_formulas(tokens, stats, over_group, metric_max=config.metric_max)
    formulas |= correction_formulas(tokens, stats, outcome, config)
    return Correction(
        weights_T=torch.where(usable_mask_T, weights_T, 0.0),
        usable_mask_T=usable_mask_T,
        keep_mask_T=outcome.keep_mask_T,
        keep_mask_R=keep_mask_R,
        metrics=select(formulas, config.selected_metrics),
        tokens=tokens,
        stats=stats,
        kept_count_S=outcome.kept_count_S,
        totals=totals,
    )


def _usable_sequences(stats: SequenceStatistics, config: CorrectionConfig) -> Tensor:
    """Sequences that can carry a weight: a statistic of the sequence needs the ratio of every token."""
    usable_S = stats.num_valid_S > 0
    return usable_S & (stats.num_valid_S == stats.num_response_S) if config.rejects_whole_sequences else usable_S


def _scale(
    config: CorrectionConfig, totals: GroupTotals, over_group: GroupTotals, rollout_scale: WeightScale | None
) -> WeightScale:
    if config.scope == "rollout" and rollout_scale is not None:
        scale = rollout_scale
    elif config.scope == "rollout" and (config.normalize_over is not None or config.denominator == "kept"):
        raise ValueError("scope: rollout needs the rollout's scale, see mis_ext.hosts.slime.prepare_rollout")
    else:
        scale = (over_group if config.scope == "data_parallel" else totals).scale()
    one = torch.ones_like(totals.num_valid)
    return WeightScale(
        mean_weight=scale.mean_weight if config.normalize_over is not None else one,
        denominator_factor=scale.denominator_factor if config.denominator == "kept" else one,
    )


def _whole_keep_mask(
    token_keep_T: Tensor,
    keep_S: Tensor,
    response_mask_R: Tensor,
    *,
    layout: PackedLayout,
    config: CorrectionConfig,
    cp_group: Group | None,
) -> Tensor:
    keep_R = response_mask_R & layout.to_whole(keep_S)
    if layout.position_T is None:
        return keep_R & token_keep_T
    single_tokens = not config.rejects_whole_sequences or any(gate.level == "token" for gate in config.all_gates)
    if config.metrics_only or not single_tokens:
        # Nobody uses the mask, or a kept sequence keeps all its tokens: nothing to ask the other ranks.
        return keep_R
    flags_R = torch.zeros_like(response_mask_R).index_copy(0, layout.position_T, token_keep_T)
    return keep_R & merge_flags(flags_R, cp_group)


def _check_lengths(proximal_T: Tensor, behavior_T: Tensor, response_mask_R: Tensor, layout: PackedLayout) -> None:
    for name, length, expected in (
        ("proximal_logprobs_T", proximal_T.numel(), layout.num_local_tokens),
        ("behavior_logprobs_T", behavior_T.numel(), layout.num_local_tokens),
        ("response_mask_R", response_mask_R.numel(), sum(layout.response_lengths)),
    ):
        if length != expected:
            raise ValueError(f"{name} has {length} tokens, the layout says {expected}")
