"""The whole loss of packed tokens, whoever packed them: what a method needs of them, the correction, the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.pipeline import Correction
from mis_ext.correction.statistics import Policy
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.packing import PackedStreams
from mis_ext.hosts.session import Session
from mis_ext.loss.denominators import num_tokens
from mis_ext.loss.policy import PolicyLoss, Reducer, compute_policy_loss
from mis_ext.loss.settings import LossSettings
from mis_ext.loss.tokens import LossTokens


class GivenTokens(NamedTuple):
    """What a micro-batch holds, packed; None where there is nothing.

    Of the local tokens ``[T]``: log-probs of four policies in nats, the current one's with gradient; advantages;
    entropy in nats; the value of the token's state; a KL that is only reported. Of whole responses ``[R]``: the mask.
    Of sequences ``[S]``: what each one's sum is divided by, by default its response tokens.
    """

    current_T: Tensor
    advantages_T: Tensor
    response_mask_R: Tensor
    behavior_T: Tensor | None = None
    proximal_T: Tensor | None = None
    reference_T: Tensor | None = None
    entropy_T: Tensor | None = None
    state_values_T: Tensor | None = None
    reverse_kl_T: Tensor | None = None
    divisor_S: Tensor | None = None


class Missing(NamedTuple):
    """Names of what can be missing, and what gives it, for messages."""

    behavior: str
    reference: str
    state_values: str


def loss_tokens(
    settings: LossSettings, given: GivenTokens, layout: PackedLayout, groups: Groups, *, missing: Missing
) -> LossTokens:
    """The tokens of a loss. Without proximal log-probs the current ones take their place, detached.

    Raises:
        ValueError: The loss compares with a policy, or weighs a value, that is not given.
    """
    if given.behavior_T is None and settings.needs_behavior is not None:
        raise ValueError(f"{missing.behavior}, with which {settings.needs_behavior} compares")
    needs_reference = settings.needs_reference or ("--use-kl-loss" if settings.kl is not None else None)
    if given.reference_T is None and needs_reference is not None:
        raise ValueError(f"{missing.reference}, with which {needs_reference} compares")
    if given.state_values_T is None and settings.needs_state_values:
        raise ValueError(f"{missing.state_values}, by which {settings.chosen_by} weighs: the mean advantage in a state")
    is_stored = given.proximal_T is not None and settings.proximal == "stored"
    proximal_T = given.proximal_T if is_stored else given.current_T.detach()
    policies: dict[Policy, Tensor | None] = {
        "current": given.current_T,
        "behavior": given.behavior_T,
        "proximal": proximal_T,
        "reference": given.reference_T if needs_reference is not None else None,
    }
    entropy_T = given.entropy_T
    if settings.entropy_coef == 0.0 and entropy_T is not None:
        entropy_T = entropy_T.detach()
    return LossTokens(
        log_probs={policy: values_T for policy, values_T in policies.items() if values_T is not None},
        advantages_T=given.advantages_T,
        entropy_T=entropy_T,
        response_mask_R=given.response_mask_R,
        divisor_S=_divisor(given, layout),
        reverse_kl_T=given.reverse_kl_T,
        layout=layout,
        cp_group=groups.cp_group,
        cp_rank=groups.cp_rank,
        dp_group=groups.dp_group,
        state_values_T=given.state_values_T if settings.needs_state_values else None,
    )


def _divisor(given: GivenTokens, layout: PackedLayout) -> Tensor:
    mask_R, divisor_S = given.response_mask_R, given.divisor_S
    dtype = torch.promote_types(given.current_T.dtype, torch.float32)
    if divisor_S is None:
        divisor_S = num_tokens(mask_R, layout)
    return divisor_S.to(mask_R.device, dtype, non_blocking=True).clamp_min(1.0)


def loss_of_tokens(
    settings: LossSettings,
    tokens: LossTokens,
    *,
    session: Session | None,
    groups: Groups,
    make_reducer: Callable[[Correction | None], Reducer | None] | None = None,
    extra_metrics: frozenset[str] = frozenset(),
) -> PolicyLoss:
    """Correct the tokens, and compute their loss.

    Args:
        settings: What the loss is.
        tokens: The micro-batch.
        session: Of the correction; None for no correction.
        groups: The ranks that share it.
        make_reducer: From the correction to a reducer of the user's own.
        extra_metrics: See :func:`~mis_ext.loss.policy.compute_policy_loss`.
    """
    correction: Correction | None = None
    token_metrics: Mapping[str, Tensor] | None = None
    if session is not None:
        correction, token_metrics = _correct(settings, session, tokens, groups)
    return compute_policy_loss(
        settings,
        tokens,
        correction=correction,
        token_metrics=token_metrics,
        reducer=None if make_reducer is None else make_reducer(correction),
        extra_metrics=extra_metrics,
    )


def _correct(
    settings: LossSettings, session: Session, tokens: LossTokens, groups: Groups
) -> tuple[Correction | None, Mapping[str, Tensor]]:
    """The correction between the behavior policy and the one whose ratio to it is not in the loss yet; its metrics."""
    layout, log_probs = tokens.layout, tokens.log_probs
    if "behavior" not in log_probs:
        mask_R = tokens.response_mask_R
        session.join_without_data(layout.response_lengths, groups=groups, device=mask_R.device)
        not_measured_T = torch.where(layout.local_part(mask_R) != 0, torch.nan, 0.0)
        return None, dict.fromkeys(session.config.metric_names, not_measured_T)
    trainer: Policy = "proximal" if settings.uses_proximal else "current"
    streams = PackedStreams(log_probs[trainer].detach(), log_probs["behavior"], tokens.response_mask_R, layout)
    correction = session.correct(streams, groups=groups, token_metrics=True)
    return correction, correction.token_metrics
