# SPDX-License-Identifier: Apache-2.0
"""The loss of a micro-batch: its value, the gradient of each log-prob and entropy, and all metrics, in one pass.

    loss = sum_t share_t (policy_t - entropy_coef entropy_t + kl_coef kl_t)

``share_t`` is the mask of the token over the divisor of its sample. Autograd differentiates nothing here except a
custom reducer: the parts of the loss give the slope of each token. There is no loop over samples, and no value is read
on the CPU.

``D_i`` is the framework's divisor of sample ``i`` (the sum of the mask of its rollout, which several samples and
micro-batches can share), ``n_i`` the sum of its own mask, and ``k_i`` this sum over its kept tokens:

| ``mis_loss_denominator`` | divides by | a rejected token |
|---|---|---|
| ``original`` | ``D_i`` | counts in the denominator: rejection lowers the gradient |
| ``kept`` | ``D_i k_i / n_i`` | not counted: mean over kept tokens, with the sample's original share of its rollout |
| ``sequence`` | ``n_i`` | counts; samples that share a rollout count one each |
| ``constant`` | a number | does not matter, nor does the length of the response |

Conversion, sample by sample: ``loss(other) = loss(original) * D_i / divisor``. With ``per_token_loss`` all are 1, as
the framework divides by the tokens of the whole batch. Penalty and entropy keep ``D_i``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.correct import Correction
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.tokens import STATISTICS, bounded_exp, k3
from mis_ext.loss.objective import LOW_VAR_CAP, LossTokens, bounds_of, objective_of
from mis_ext.loss.settings import LossSettings
from mis_ext.loss.words import PenaltyTokens
from mis_ext.methods.batch import Batch, Pair, Reductions
from mis_ext.methods.method import Evaluation, LossOfSlopes

Reducer = Callable[[Tensor], Tensor]

MILES_METRICS = frozenset({"ess_ratio", "train_rollout_kl"})
"""Names of the metrics that Miles reports and slime does not."""

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
"""The frameworks' names, in their order. The metrics of the correction follow, then ``LAST``."""

LAST = ("opsm_clipfrac", "opd_reverse_kl")


class PolicyLoss(NamedTuple):
    """``loss``: 0-dim, this rank's sum over samples, with gradient. ``metrics``: 0-dim each, sums on the same scale.

    ``response_T``: ``[T]`` bool, this rank's tokens that the policy generated. ``measured``: computes ``[total,
    count]`` of each metric of a correction, over the samples in which it was measured.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    response_T: Tensor
    measured: Callable[[], dict[str, Tensor]]


def compute_policy_loss(
    settings: LossSettings,
    tokens: LossTokens,
    *,
    correction: Correction | None = None,
    token_metrics: Mapping[str, Tensor] | None = None,
    reducer: Reducer | None = None,
    extra_metrics: frozenset[str] = frozenset(),
    reporting: contextlib.AbstractContextManager[None],
    failed: Exception | None = None,
) -> PolicyLoss:
    """Compute loss and metrics of a micro-batch.

    Args:
        settings: The settings of the loss.
        tokens: The micro-batch.
        correction: Weights and masks; weights 1 and all tokens if it only measures. None: no correction.
        token_metrics: ``[T]`` each, the correction's metrics per token, 0 outside the response; None without a
            correction.
        reducer: Computes the sum from the loss of each local token, instead of ``settings.denominator``.
        extra_metrics: The names in ``MILES_METRICS`` that are also reported.
        reporting: A context around the sums. After an error a rank joins the remaining sums, then reports the error.
        failed: An error of this rank while other ranks already wait in the sums. It is raised after them.
    """
    dp_group = tokens.dp_group if objective_of(settings).method.averages_over_batch else None
    reductions = Reductions(tokens.layout, cp_group=tokens.cp_group, dp_group=dp_group)
    with reporting:
        try:
            if failed is not None:
                raise failed
            found = _sums(settings, tokens, reductions, correction, token_metrics, reducer, extra_metrics)
        except Exception:
            # Raise the first error, even if a group itself fails.
            with contextlib.suppress(Exception):
                _sums(settings, tokens.emptied(), reductions.left_over(), None, None, None, extra_metrics)
            raise
    # Outside of the context, because recomputation ends here with an exception of torch that is not an error.
    loss: Tensor = LossOfSlopes.apply(  # type: ignore[no-untyped-call]
        found.loss, tokens.log_probs["current"], found.slope_T, tokens.entropy_T, found.entropy_slope_T
    )
    metrics = token_metrics or {}
    names = [*ORDER, *metrics, *LAST]
    measured = functools.partial(measured_totals, correction, metrics, found.share_T)
    reported = {name: found.totals[name] for name in names if name in found.totals}
    return PolicyLoss(loss, reported, found.response_T, measured)


class _Sums(NamedTuple):
    """0-dim: the loss, and totals by name; ``[T]``: its derivatives by log-prob and by entropy, and a token's share.

    ``entropy_slope_T`` is None if the loss has no entropy term. ``response_T``: bool, tokens that the policy generated.
    """

    loss: Tensor
    totals: dict[str, Tensor]
    slope_T: Tensor
    entropy_slope_T: Tensor | None
    share_T: Tensor
    response_T: Tensor


@torch.no_grad()
def _sums(
    settings: LossSettings,
    tokens: LossTokens,
    reductions: Reductions,
    correction: Correction | None,
    token_metrics: Mapping[str, Tensor] | None,
    reducer: Reducer | None,
    extra_metrics: frozenset[str],
) -> _Sums:
    """All totals and slopes, in one pass over the tokens."""
    method, kl, pair, reduce = objective_of(settings)
    response_T = tokens.layout.local_part(tokens.response_mask_R) != 0
    used = dict.fromkeys((*pair, *method.policies, *chain.from_iterable(kl.pairs if kl is not None else ())))
    batch = method.batch_of(
        {policy: tokens.log_probs[policy] for policy in used},
        advantages_T=tokens.advantages_T,
        response_mask_T=response_T,
        reductions=reductions,
        state_values_T=tokens.state_values_T,
    )
    log_ratio_T = batch.log_ratio(pair, reduce)
    weights_T = keep_mask_T = None
    if correction is not None:
        weights_T, keep_mask_T = correction.weights_T, correction.keep_mask_T
        if settings.mode == "bypass" and correction.config.weight is not None:
            # Remove the part of the weight that the ratio of the surrogate already has.
            weights_T = weights_T / bounded_exp(log_ratio_T)
    found = method.evaluate(batch, weights_T=weights_T, keep_mask_T=keep_mask_T)
    penalty = None if kl is None else kl.evaluate(batch)

    def counted(which: PenaltyTokens) -> Tensor:
        return found.kept_T if which == "kept" else batch.valid_T

    # name: [T] value and mask. Each row is summed over tokens, times their share.
    rows = {
        "pg_loss": (found.loss_T, batch.valid_T),
        "pg_clipfrac": (
            _clipped(settings, found, log_ratio_T).float(),
            found.kept_T if settings.method is None else batch.valid_T,
        ),
        "ppo_kl": (-log_ratio_T, found.kept_T),
    }
    if tokens.entropy_T is not None:
        rows["entropy_loss"] = tokens.entropy_T, counted(settings.entropy_tokens)
    if settings.kl is not None and penalty is not None:
        rows["kl_loss"] = penalty.value_T, counted(settings.kl.tokens)
    if "behavior" in tokens.log_probs:
        # Between the behavior policy and the trainer: the current policy if the loss uses no other.
        trainer_T = tokens.log_probs["proximal" if settings.uses_proximal and not settings.use_behavior else "current"]
        difference_T = trainer_T - tokens.log_probs["behavior"]
        known_T = found.kept_T & (difference_T.abs() < torch.inf)
        rows["train_rollout_logprob_abs_diff"] = difference_T.abs(), known_T
        if "train_rollout_kl" in extra_metrics:
            rows["train_rollout_kl"] = k3(difference_T).clamp_max(LOW_VAR_CAP), known_T
    if token_metrics is not None:
        rows["ois"] = bounded_exp(log_ratio_T), batch.valid_T
    if tokens.reverse_kl_T is not None:
        rows["opd_reverse_kl"] = tokens.reverse_kl_T, found.kept_T

    share_T = policy_share_T = _share(settings, tokens, tokens.divisor_S)
    if settings.denominator != "original":
        policy_share_T = _share(settings, tokens, _divisor(settings, tokens, correction, found))
    values, masks = zip(*rows.values(), strict=True)
    values_FT = torch.where(torch.stack(masks), torch.stack(values), 0.0)
    totals = dict(zip(rows, (values_FT * share_T).sum(-1).unbind(), strict=True))
    if token_metrics:
        # They are 0 outside of the response, and meant for division by all samples: see Correction.token_metrics.
        sums = (torch.stack([*token_metrics.values()]) * share_T).sum(-1)
        totals |= dict(zip(token_metrics, sums.unbind(), strict=True))
    if tokens.entropy_T is None:
        totals["entropy_loss"] = torch.zeros_like(totals["pg_loss"])
    if settings.opsm_delta is not None:
        totals["opsm_clipfrac"] = _masked_sequences(settings.opsm_delta, pair, tokens, batch)
    if "ess_ratio" in extra_metrics:
        totals["ess_ratio"] = _effective_samples(settings, tokens, batch, log_ratio_T)
    if reducer is not None:
        totals["pg_loss"], policy_share_T = _reduced(reducer, found.loss_T)
    elif settings.denominator != "original":
        totals["pg_loss"] = (found.loss_T * policy_share_T).sum()

    # loss = policy + kl_coef kl - entropy_coef entropy, and its derivatives g = dL/dlogp and h = dL/dH. LossOfSlopes of
    # methods/method.py gives them to autograd, which calls the backward pass of scoring/scores.py, or of the framework
    # with mis_loss_scoring: host. There dL/dz_v = (g (1[v = t] - p_v) - h p_v (log p_v + H)) / temperature.
    totals["loss"], slope_T, entropy_slope_T = totals["pg_loss"], found.slope(policy_share_T), None
    if settings.entropy_coef != 0.0:
        totals["loss"] = totals["loss"].sub(totals["entropy_loss"], alpha=settings.entropy_coef)
        entropy_slope_T = -settings.entropy_coef * torch.where(counted(settings.entropy_tokens), share_T, 0.0)
    if settings.kl is not None and penalty is not None:
        totals["loss"] = totals["loss"].add(totals["kl_loss"], alpha=settings.kl.coefficient)
        counted_T = torch.where(counted(settings.kl.tokens), share_T, 0.0)
        slope_T = slope_T.addcmul(counted_T, penalty.slope_T, value=settings.kl.coefficient)
    # A copy: the framework may divide the loss in place, and not the metric of that name.
    return _Sums(totals["loss"].clone(), totals, slope_T, entropy_slope_T, share_T, response_T)


def _clipped(settings: LossSettings, found: Evaluation, log_ratio_T: Tensor) -> Tensor:
    """``[T]`` bool: PPO's clip, or CISPO's bounds, are active; the dual clip does not count.

    For a published method: the clip of its surrogate, or one of its masks, stops the token's policy gradient.
    """
    clipped_T, batch = found.surrogate.is_clipped_T, found.batch
    if settings.method is not None:
        return clipped_T | ~found.live_T
    if settings.ratios == "detached":
        low, high = (STATISTICS["ratio"].edge(bound or 0.0) for bound in bounds_of(settings))
        return (log_ratio_T > high) | (log_ratio_T < low)
    if settings.eps_clip_c is not None:
        # Only the dual clip is active where the ratio moves against the advantage.
        return clipped_T & ((log_ratio_T > 0.0) == (batch.advantages_T > 0.0))
    return clipped_T


def groups_of_sums(
    settings: LossSettings,
    *,
    cp_group: Group | None,
    dp_group: Group | None,
    extra_metrics: frozenset[str] = frozenset(),
) -> list[Group]:
    """The groups over which the loss exchanges sums. A status is exchanged before and after the sums."""
    exchanges = settings.sums_sequences or "ess_ratio" in extra_metrics
    averages = objective_of(settings).method.averages_over_batch
    wanted = ((cp_group, exchanges), (dp_group, averages))
    return [group for group, is_wanted in wanted if is_wanted and group is not None]


def _reduced(reducer: Reducer, loss_T: Tensor) -> tuple[Tensor, Tensor]:
    """The sum from a function of the user, and its derivative by each token's loss."""
    with torch.enable_grad():
        leaf_T = loss_T.detach().requires_grad_()
        total = reducer(leaf_T)
        (share_T,) = torch.autograd.grad(total, leaf_T)
    return total.detach(), share_T


def _share(settings: LossSettings, tokens: LossTokens, divisor_S: Tensor) -> Tensor:
    # As in the reducers of the frameworks, the value of the mask is the weight of a token.
    mask_T = tokens.layout.local_part(tokens.response_mask_R).to(divisor_S.dtype)
    return mask_T if settings.per_token_loss else mask_T * tokens.layout.spread(divisor_S.reciprocal())


def _divisor(settings: LossSettings, tokens: LossTokens, correction: Correction | None, found: Evaluation) -> Tensor:
    """``[S]``: the divisor of a denominator other than the framework's."""
    host_S, response_R = tokens.divisor_S, tokens.response_mask_R
    if settings.constant is not None:
        return torch.full_like(host_S, settings.constant)
    own_S = num_tokens(response_R, tokens.layout)
    if settings.denominator == "sequence":
        return own_S.clamp_min(1.0)
    if settings.divides_by_kept:
        # Each rank knows which of its tokens the method keeps.
        mask_T = tokens.layout.local_part(response_R).to(host_S.dtype)
        kept_S = found.batch.reductions.over_sequences(mask_T, found.kept_T)
    else:
        kept_S = num_tokens(response_R if correction is None else correction.loss_mask_R, tokens.layout)
    # If no token is kept, the divisor does not matter.
    return torch.where(kept_S > 0.0, host_S * kept_S / torch.where(kept_S > 0.0, own_S, 1.0), host_S)


def num_tokens(mask_R: Tensor, layout: PackedLayout) -> Tensor:
    """``[S]``: sums of a mask of whole responses, equal on all context-parallel ranks without communication."""
    whole = PackedLayout.whole(layout.response_lengths, device=layout.device)
    return whole.sums([mask_R.float()])[0].float()


def measured_totals(
    correction: Correction | None, token_metrics: Mapping[str, Tensor], share_T: Tensor
) -> dict[str, Tensor]:
    """``[total, count]`` of each metric of a correction, over the samples in which it was measured; 0 without any."""
    if correction is None:
        return {name: share_T.new_zeros(2) for name in token_metrics}
    found = {}
    for name, is_measured_S in correction.measured.items():
        # A group metric is NaN if nothing was measured.
        known_T = correction.layout.spread(is_measured_S) & ~token_metrics[name].isnan()
        pair_2T = torch.stack([token_metrics[name], torch.ones_like(share_T)])
        found[name] = (torch.where(known_T, pair_2T, 0.0) * share_T).sum(-1)
    return found


def _effective_samples(settings: LossSettings, tokens: LossTokens, batch: Batch, log_ratio_T: Tensor) -> Tensor:
    """0-dim: Miles' ``ess_ratio``, ``(sum w)^2 / (n sum w^2)`` per sample, ``w`` current / old; only on the first rank.

    Summed over samples, or with ``per_token_loss`` over tokens.
    """
    ratio_T = torch.where(batch.valid_T, bounded_exp(log_ratio_T), 0.0)
    rows_3T = torch.stack([ratio_T, ratio_T.square(), batch.valid_T.to(ratio_T.dtype)])
    sum_S, squares_S, count_S = batch.reductions.sums(rows_3T).unbind()
    count_S = count_S.clamp_min(1.0)
    share_S = sum_S.square() / (count_S * squares_S.clamp_min(1e-8))
    total = (share_S * count_S if settings.per_token_loss else share_S).sum()
    return total if tokens.cp_rank == 0 else torch.zeros_like(total)


def _masked_sequences(delta: float, pair: Pair, tokens: LossTokens, batch: Batch) -> Tensor:
    """0-dim: the frameworks' ``opsm_clipfrac``: per sample, tokens of a masked sequence / response tokens.

    As there, tokens that the policy did not generate count only in the numerator, and the framework's denominator is
    not used.
    """
    masked_T = (tokens.advantages_T < 0.0) & (batch.statistic("k1", pair, "mean") > delta)
    count_T = batch.reductions.count(batch.response_T).clamp_min(1.0)
    return torch.where(masked_T, count_T.reciprocal(), 0.0).sum()
