# SPDX-License-Identifier: Apache-2.0
"""The hosts' metrics: rows over tokens that share one weighted sum, and two numbers that are made of sequences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.collectives import sum_over_ranks
from mis_ext.correction.formula import MAX_LOG_RATIO, NamedValues, bounded_exp
from mis_ext.correction.pipeline import Correction
from mis_ext.correction.statistics import TOKEN_FORMULAS, Pair
from mis_ext.loss.objective import LOW_VAR_CAP, Evaluation, LossTokens
from mis_ext.loss.settings import LossSettings

ORDER = (
    "loss",
    "pg_loss",
    "entropy_loss",
    "pg_clipfrac",
    "ppo_kl",
    "ess_ratio",
    "train_rollout_logprob_abs_diff",
    "train_rollout_kl",
    "kl_loss",
    "ois",
)
"""The hosts' names, in their order; behind them those of the correction, then ``LAST``."""

LAST = ("opsm_clipfrac", "opd_reverse_kl")


class Row(NamedTuple):
    """A metric as the sum over tokens of ``values_T`` where ``mask_T`` is True, times the token's share."""

    name: str
    values_T: Tensor
    mask_T: Tensor


def token_rows(
    settings: LossSettings, tokens: LossTokens, found: Evaluation, *, is_corrected: bool, with_kl: bool
) -> list[Row]:
    """The parts of the loss, and what the hosts report beside them.

    Args:
        settings: What the loss is.
        tokens: The micro-batch.
        found: What is known of its tokens.
        is_corrected: Whether there is a correction, also one that only measures.
        with_kl: Whether the host also reports a KL estimate between behavior and proximal policy.
    """
    kept_T, valid_T = found.kept_T, found.batch.valid_T
    rows = [
        Row("pg_loss", found.loss_T, kept_T if found.penalty is None else valid_T),
        Row("pg_clipfrac", found.clipped_T.float(), kept_T if settings.method is None else valid_T),
        Row("ppo_kl", -found.log_ratio_T, kept_T),
    ]
    if tokens.entropy_T is not None:
        rows.append(Row("entropy_loss", tokens.entropy_T, found.tokens_of(settings.entropy_tokens)))
    if settings.kl is not None and found.kl is not None:
        rows.append(Row("kl_loss", found.kl.value_T, found.tokens_of(settings.kl.tokens)))
    if "behavior" in tokens.log_probs:
        # Between the behavior policy and the trainer: the current policy where no other is compared.
        trainer_T = tokens.log_probs["current" if settings.old_is_behavior else "proximal"]
        difference_T = trainer_T - tokens.log_probs["behavior"]
        gap_T = difference_T.abs()
        mask_T = kept_T & (gap_T < torch.inf)
        rows.append(Row("train_rollout_logprob_abs_diff", gap_T, mask_T))
        if with_kl:
            near_T = difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            k3_T = NamedValues({"log_ratio": near_T}, TOKEN_FORMULAS)["k3"]
            rows.append(Row("train_rollout_kl", k3_T.clamp_max(LOW_VAR_CAP), mask_T))
    if is_corrected:
        rows.append(Row("ois", bounded_exp(found.log_ratio_T), valid_T))
    if tokens.reverse_kl_T is not None:
        rows.append(Row("opd_reverse_kl", tokens.reverse_kl_T, kept_T))
    return rows


def totals_of(rows: list[Row], share_T: Tensor) -> dict[str, Tensor]:
    """0-dim each: sums over this rank's tokens of value times share; ``share_T`` is 1 by the divisor of its sample."""
    names, values, masks = zip(*rows, strict=True)
    values_FT = torch.where(torch.stack(masks), torch.stack(values), 0.0)
    return dict(zip(names, (values_FT * share_T).sum(-1).unbind(), strict=True))


def correction_totals(token_metrics: Mapping[str, Tensor], share_T: Tensor) -> dict[str, Tensor]:
    """0-dim each: sums of value times share of a correction's metrics, ``[T]``, which are 0 outside the response.

    For a host that divides by all samples; those that were not measured are in, see ``Correction.token_metrics``.
    """
    if not token_metrics:
        return {}
    sums = (torch.stack([*token_metrics.values()]) * share_T).sum(-1)
    return dict(zip(token_metrics, sums.unbind(), strict=True))


def measured_totals(
    correction: Correction | None, token_metrics: Mapping[str, Tensor], share_T: Tensor, response_T: Tensor
) -> dict[str, Tensor]:
    """``[total, count]`` of each metric of a correction, over the samples in which it was measured; 0 without any."""
    if correction is None:
        return {name: share_T.new_zeros(2) for name in token_metrics}
    layout = correction.layout
    masks_T: dict[int, Tensor] = {}
    found = {}
    for name, is_measured_S in correction.measured.items():
        key = id(is_measured_S)
        if key not in masks_T:
            masks_T[key] = response_T & layout.spread(is_measured_S)
        # A number of the group is NaN where nothing of it was measured.
        known_T = masks_T[key] & ~token_metrics[name].isnan()
        pair_2T = torch.stack([token_metrics[name], torch.ones_like(share_T)])
        found[name] = (torch.where(known_T, pair_2T, 0.0) * share_T).sum(-1)
    return found


def effective_samples(settings: LossSettings, tokens: LossTokens, *, log_ratio_T: Tensor, response_T: Tensor) -> Tensor:
    """0-dim: Miles' ``ess_ratio``, ``(sum w)^2 / (n sum w^2)`` of each sample, ``w`` current / old; of the first rank.

    Summed over samples, or with ``per_token_loss`` over tokens.
    """
    ratio_T = torch.where(response_T, bounded_exp(log_ratio_T), 0.0)
    local_3S = tokens.layout.sum_over_sequences(torch.stack([ratio_T, ratio_T.square(), response_T.to(ratio_T.dtype)]))
    sum_S, squares_S, count_S = sum_over_ranks(local_3S, tokens.cp_group).unbind()
    count_S = count_S.clamp_min(1.0)
    share_S = sum_S.square() / (count_S * squares_S.clamp_min(1e-8))
    total = (share_S * count_S if settings.per_token_loss else share_S).sum()
    return total if tokens.cp_rank == 0 else torch.zeros_like(total)


def masked_sequences(delta: float, pair: Pair, tokens: LossTokens, found: Evaluation) -> Tensor:
    """0-dim: the hosts' ``opsm_clipfrac``: of each sample, tokens of a masked sequence by response tokens.

    As there, tokens that the policy did not generate count above the line only, and the host's denominator does not
    enter.
    """
    masked_T = (tokens.advantages_T < 0.0) & (found.batch.statistic("k1", pair, "mean") > delta)
    count_T = found.batch.reductions.count(found.batch.response_T).clamp_min(1.0)
    return torch.where(masked_T, count_T.reciprocal(), 0.0).sum()
