# SPDX-License-Identifier: Apache-2.0
"""The loss of a micro-batch: its value, the gradient of each log-prob and entropy, and all metrics, in one pass.

    loss = sum_t share_t (policy_t - entropy_coef entropy_t + kl_coef kl_t)

``share_t`` is 1 by the divisor of the token's sample. Nothing here is differentiated by autograd, but a reducer of
yours: the parts of the loss say the slope of each token. No loop over samples, and no reading of values on the host.

With ``D_i`` what the framework divides sample ``i`` by (the sum of the mask of its rollout, which several samples and
micro-batches can share), ``n_i`` the sum of its own mask and ``k_i`` that over its kept tokens:

| denominator | divides by | a rejected token |
|---|---|---|
| ``original`` | ``D_i`` | counts in the denominator: rejection lowers the gradient |
| ``kept`` | ``D_i k_i / n_i`` | leaves it: the mean over kept tokens, in the sample's old share of its rollout |
| ``sequence`` | ``n_i`` | counts; samples that share a rollout count one each |
| ``constant`` | a number | does not matter, nor does the length of the response |

Conversion, sample by sample: ``loss(other) = loss(original) * D_i / divisor``. With ``per_token_loss`` all are 1, as
the framework divides by the tokens of the whole batch. Penalty and entropy keep ``D_i``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mis_ext.correction.collectives import Group
from mis_ext.correction.correct import Correction
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.tokens import MAX_LOG_RATIO, Pair, bounded_exp, k3
from mis_ext.loss.objective import LOW_VAR_CAP, Corrected, Evaluation, LossTokens, Objective, evaluate, objective_of
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.batch import Reductions

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
"""The frameworks' names, in their order; behind them those of the correction, then ``LAST``."""

LAST = ("opsm_clipfrac", "opd_reverse_kl")


class PolicyLoss(NamedTuple):
    """``loss``: 0-dim, this rank's sum over samples, with gradient. ``metrics``: 0-dim each, sums of the same kind.

    ``response_T``: ``[T]`` bool, this rank's tokens that the policy generated. ``measured``: computes of each metric of
    a correction ``[total, count]``, over the samples in which it was measured.
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
    telling: contextlib.AbstractContextManager[None] | None = None,
) -> PolicyLoss:
    """Loss and metrics of a micro-batch.

    Args:
        settings: What the loss is.
        tokens: The micro-batch.
        correction: Weights and masks; None, or one that only measures, for none.
        token_metrics: ``[T]`` each, what a correction reports of each token, 0 outside the response; None without one.
        reducer: From the loss of each local token to its sum, instead of ``settings.denominator``.
        extra_metrics: Of ``MILES_METRICS`` those that are reported too.
        telling: Around the sums: after an error a rank joins those that are left, and leaves it to this to tell.
    """
    dp_group = tokens.dp_group if objective_of(settings).method.averages_over_batch else None
    reductions = Reductions(tokens.layout, cp_group=tokens.cp_group, dp_group=dp_group)
    metrics = token_metrics or {}
    with telling or contextlib.nullcontext():
        try:
            corrected = Corrected.by(correction)
            totals, passed, share_T, response_T = _sums(
                settings, tokens, reductions, correction, corrected, token_metrics, reducer, extra_metrics
            )
        except Exception:
            # What was wrong first is raised, also where a group itself is broken.
            with contextlib.suppress(Exception):
                nothing = Corrected.by(correction, is_empty=True)
                no_metrics = None if token_metrics is None else {name: metrics[name][:0] for name in metrics}
                left = reductions.left_over()
                _sums(settings, tokens.emptied(), left, None, nothing, no_metrics, None, extra_metrics)
            raise
    # Outside of that: recomputation ends here by an exception of torch, which is no error.
    loss: Tensor = _WithSlopes.apply(  # type: ignore[no-untyped-call]
        totals["loss"], tokens.log_probs["current"], passed.slope_T, tokens.entropy_T, passed.entropy_slope_T
    )
    names = [*ORDER, *metrics, *LAST]
    measured = functools.partial(measured_totals, correction, metrics, share_T, response_T)
    return PolicyLoss(loss, {name: totals[name] for name in names if name in totals}, response_T, measured)


def _sums(
    settings: LossSettings,
    tokens: LossTokens,
    reductions: Reductions,
    correction: Correction | None,
    corrected: Corrected | None,
    token_metrics: Mapping[str, Tensor] | None,
    reducer: Reducer | None,
    extra_metrics: frozenset[str],
) -> tuple[dict[str, Tensor], _Passed, Tensor, Tensor]:
    """All totals, the slopes, and ``[T]`` each the share of a token, and whether the policy generated it."""
    layout = tokens.layout
    objective = objective_of(settings)
    with torch.no_grad():
        share_T = _share(settings, tokens, tokens.divisor_S)
        policy_share_T = share_T
        if settings.denominator != "original":
            policy_share_T = _share(settings, tokens, _divisor(settings, tokens, correction))
        response_T = layout.local_part(tokens.response_mask_R) != 0
        passed = _token_pass(
            settings,
            objective,
            tokens.detached(),
            corrected=corrected,
            response_T=response_T,
            reductions=reductions,
            share_T=share_T,
            policy_share_T=policy_share_T,
            reduce=None if reducer is None else functools.partial(_reduced, reducer),
            is_corrected=token_metrics is not None,
            with_kl="train_rollout_kl" in extra_metrics,
        )
        totals = passed.totals | correction_totals(token_metrics or {}, share_T)
        if "ess_ratio" in extra_metrics:
            totals["ess_ratio"] = effective_samples(
                settings, tokens, reductions, log_ratio_T=passed.log_ratio_T, response_T=response_T
            )
    return totals, passed, share_T, response_T


def groups_of_sums(
    settings: LossSettings,
    *,
    cp_group: Group | None,
    dp_group: Group | None,
    extra_metrics: frozenset[str] = frozenset(),
) -> list[Group]:
    """The ranks with which the loss exchanges sums of its own."""
    exchanges = settings.sums_sequences or "ess_ratio" in extra_metrics
    averages = objective_of(settings).method.averages_over_batch
    wanted = ((cp_group, exchanges), (dp_group, averages))
    return [group for group, is_wanted in wanted if is_wanted and group is not None]


class _Passed(NamedTuple):
    """0-dim totals by name; ``[T]`` each: the derivatives of the loss by log-prob and by entropy, log of current / old.

    ``entropy_slope_T`` is None where entropy is no part of the loss.
    """

    totals: dict[str, Tensor]
    slope_T: Tensor
    entropy_slope_T: Tensor | None
    log_ratio_T: Tensor


def _token_pass(
    settings: LossSettings,
    objective: Objective,
    tokens: LossTokens,
    *,
    corrected: Corrected | None,
    response_T: Tensor,
    reductions: Reductions,
    share_T: Tensor,
    policy_share_T: Tensor,
    reduce: Callable[[Tensor], tuple[Tensor, Tensor]] | None,
    is_corrected: bool,
    with_kl: bool,
) -> _Passed:
    found = evaluate(settings, objective, tokens, corrected=corrected, response_T=response_T, reductions=reductions)
    totals = totals_of(token_rows(settings, tokens, found, is_corrected=is_corrected, with_kl=with_kl), share_T)
    if tokens.entropy_T is None:
        totals["entropy_loss"] = torch.zeros_like(totals["pg_loss"])
    if settings.opsm_delta is not None:
        totals["opsm_clipfrac"] = masked_sequences(settings.opsm_delta, objective.pair, tokens, found)
    if reduce is not None:
        totals["pg_loss"], policy_share_T = reduce(found.loss_T)
    elif settings.denominator != "original":
        totals["pg_loss"] = (found.loss_T * policy_share_T).sum()
    slope_T, entropy_slope_T = _slopes(settings, found, share_T, policy_share_T)
    loss = totals["pg_loss"]
    if settings.entropy_coef != 0.0:
        loss = loss.sub(totals["entropy_loss"], alpha=settings.entropy_coef)
    if settings.kl is not None:
        loss = loss.add(totals["kl_loss"], alpha=settings.kl.coefficient)
    totals["loss"] = loss
    return _Passed(totals, slope_T, entropy_slope_T, found.log_ratio_T)


def _reduced(reducer: Reducer, loss_T: Tensor) -> tuple[Tensor, Tensor]:
    """The sum that a function of the user makes, and what it makes of each token."""
    with torch.enable_grad():
        leaf_T = loss_T.detach().requires_grad_()
        total = reducer(leaf_T)
        (share_T,) = torch.autograd.grad(total, leaf_T)
    return total.detach(), share_T


def _share(settings: LossSettings, tokens: LossTokens, divisor_S: Tensor) -> Tensor:
    # As the frameworks' reducers have it: a token counts as much as its mask says.
    mask_T = tokens.layout.local_part(tokens.response_mask_R).to(divisor_S.dtype)
    return mask_T if settings.per_token_loss else mask_T * tokens.layout.spread(divisor_S.reciprocal())


def _divisor(settings: LossSettings, tokens: LossTokens, correction: Correction | None) -> Tensor:
    """``[S]``: of a denominator that is not the framework's."""
    host_S, response_R = tokens.divisor_S, tokens.response_mask_R
    if settings.constant is not None:
        return torch.full_like(host_S, settings.constant)
    own_S = num_tokens(response_R, tokens.layout)
    if settings.denominator == "sequence":
        return own_S.clamp_min(1.0)
    kept_S = num_tokens(response_R if correction is None else correction.loss_mask_R, tokens.layout)
    # Where nothing is kept nothing is divided.
    return torch.where(kept_S > 0.0, host_S * kept_S / torch.where(kept_S > 0.0, own_S, 1.0), host_S)


def num_tokens(mask_R: Tensor, layout: PackedLayout) -> Tensor:
    """``[S]``: sums of a mask of whole responses, equal on all context-parallel ranks without communication."""
    whole = PackedLayout.whole(layout.response_lengths, device=layout.device)
    return whole.sums([mask_R.float()])[0].float()


def _slopes(
    settings: LossSettings, found: Evaluation, share_T: Tensor, policy_share_T: Tensor
) -> tuple[Tensor, Tensor | None]:
    """``[T]`` each: ``g = dL/dlogp`` and ``h = dL/dH``, by entropy; None where entropy is no part of the loss.

    From there to the logits, in the backward pass of ``scoring/scores.py``:
    ``dL/dz_v = (g (1[v = t] - p_v) - h p_v (log p_v + H)) / temperature``.
    """
    slope_T = found.slope(policy_share_T)
    if found.penalty is not None:
        slope_T = slope_T + policy_share_T * found.penalty.slope_T
    if settings.kl is not None and found.kl is not None:
        counted_T = torch.where(found.tokens_of(settings.kl.tokens), share_T, 0.0)
        slope_T = slope_T.addcmul(counted_T, found.kl.slope_T, value=settings.kl.coefficient)
    if settings.entropy_coef == 0.0:
        return slope_T, None
    counted_T = torch.where(found.tokens_of(settings.entropy_tokens), share_T, 0.0)
    return slope_T, -settings.entropy_coef * counted_T


class _WithSlopes(torch.autograd.Function):
    """A number whose derivatives are known."""

    @staticmethod
    def forward(
        ctx: Any,
        loss: Tensor,
        _log_prob_T: Tensor,
        slope_T: Tensor,
        _entropy_T: Tensor | None,
        entropy_slope_T: Tensor | None,
    ) -> Tensor:
        """The number; a copy, because Megatron divides it in place."""
        ctx.save_for_backward(slope_T, entropy_slope_T)
        return loss.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None, Tensor | None, None]:
        """The gradient by log-probs and entropy: ``grad`` times the slopes that the forward saved."""
        slope_T, entropy_slope_T = ctx.saved_tensors
        return None, grad * slope_T, None, None if entropy_slope_T is None else grad * entropy_slope_T, None


class Row(NamedTuple):
    """A metric as the sum over tokens of ``values_T`` where ``mask_T`` is True, times the token's share."""

    name: str
    values_T: Tensor
    mask_T: Tensor


def token_rows(
    settings: LossSettings, tokens: LossTokens, found: Evaluation, *, is_corrected: bool, with_kl: bool
) -> list[Row]:
    """The parts of the loss, and what the frameworks report beside them.

    Args:
        settings: What the loss is.
        tokens: The micro-batch.
        found: What is known of its tokens.
        is_corrected: Whether there is a correction, also one that only measures.
        with_kl: Whether the framework also reports a KL estimate between behavior and proximal policy.
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
        trainer_T = tokens.log_probs["proximal" if settings.uses_proximal and not settings.use_behavior else "current"]
        difference_T = trainer_T - tokens.log_probs["behavior"]
        gap_T = difference_T.abs()
        mask_T = kept_T & (gap_T < torch.inf)
        rows.append(Row("train_rollout_logprob_abs_diff", gap_T, mask_T))
        if with_kl:
            near_T = difference_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
            k3_T = k3(near_T)
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

    For a framework that divides by all samples; those that were not measured are in, see ``Correction.token_metrics``.
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


def effective_samples(
    settings: LossSettings, tokens: LossTokens, reductions: Reductions, *, log_ratio_T: Tensor, response_T: Tensor
) -> Tensor:
    """0-dim: Miles' ``ess_ratio``, ``(sum w)^2 / (n sum w^2)`` of each sample, ``w`` current / old; of the first rank.

    Summed over samples, or with ``per_token_loss`` over tokens.
    """
    ratio_T = torch.where(response_T, bounded_exp(log_ratio_T), 0.0)
    rows_3T = torch.stack([ratio_T, ratio_T.square(), response_T.to(ratio_T.dtype)])
    sum_S, squares_S, count_S = reductions.sums(rows_3T).unbind()
    count_S = count_S.clamp_min(1.0)
    share_S = sum_S.square() / (count_S * squares_S.clamp_min(1e-8))
    total = (share_S * count_S if settings.per_token_loss else share_S).sum()
    return total if tokens.cp_rank == 0 else torch.zeros_like(total)


def masked_sequences(delta: float, pair: Pair, tokens: LossTokens, found: Evaluation) -> Tensor:
    """0-dim: the frameworks' ``opsm_clipfrac``: of each sample, tokens of a masked sequence by response tokens.

    As there, tokens that the policy did not generate count above the line only, and the framework's denominator does
    not enter.
    """
    masked_T = (tokens.advantages_T < 0.0) & (found.batch.statistic("k1", pair, "mean") > delta)
    count_T = found.batch.reductions.count(found.batch.response_T).clamp_min(1.0)
    return torch.where(masked_T, count_T.reciprocal(), 0.0).sum()
