# SPDX-License-Identifier: Apache-2.0
"""The full loss, one response after the other: ``mis_loss_mode: decoupled`` with any correction, k3 and entropy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

import mis_ext


def naive_policy_loss(
    *,
    current: Sequence[Tensor],
    proximal: Sequence[Tensor],
    behavior: Sequence[Tensor],
    reference: Sequence[Tensor],
    entropies: Sequence[Tensor],
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor],
    correction: mis_ext.CorrectionConfig,
    eps_clip: float = 0.2,
    eps_clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Tensor:
    """0-dim, with gradient: the sum over samples of per-sample means.

    Args:
        current: Per sample ``[R_i]``, as all of these: log-probs of the policy that is trained, in nats, with gradient.
        proximal: Log-probs of the trainer before the update, in nats.
        behavior: Log-probs of the engine that sampled, in nats.
        reference: Log-probs of the reference policy, in nats.
        entropies: Of the current policy, in nats, with gradient.
        advantages: Of each token.
        masks: Nonzero on tokens that the policy generated: how much each counts.
        correction: Of the difference between proximal and behavior.
        eps_clip: PPO's ratio current / proximal is at least ``1 - eps_clip``.
        eps_clip_high: It is at most ``1 + eps_clip_high``.
        kl_coef: What the penalty is multiplied by.
        entropy_coef: What the entropy is multiplied by.

    References:
        Hilton et al., Batch size-invariance for policy optimization, arXiv:2110.00641 (decoupled PPO).
    """
    lengths = [len(mask) for mask in masks]
    found = mis_ext.compute_correction(
        proximal_logprobs_T=torch.cat([*proximal]),
        behavior_logprobs_T=torch.cat([*behavior]),
        response_mask_R=torch.cat([*masks]),
        layout=mis_ext.PackedLayout.whole(lengths),
        config=correction,
    )
    weights, keeps = found.weights_T.split(lengths), found.keep_mask_R.split(lengths)
    total = torch.zeros(())
    for i, keep in enumerate(keeps):
        # A rejected sample adds nothing, and still counts among the samples that the host divides by.
        if not keep.any():
            continue
        advantage = advantages[i][keep]
        # r_t = pi_theta / pi_prox, and PPO's min(r A, clip(r) A)
        ratio = (current[i] - proximal[i])[keep].exp()
        clipped = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
        gain = weights[i][keep] * torch.minimum(ratio * advantage, clipped * advantage)
        # k3 of d = log pi_theta - log pi_ref: exp(-d) - 1 + d
        distance = (current[i] - reference[i])[keep]
        penalty = (-distance).exp() - 1.0 + distance
        loss = -gain + kl_coef * penalty - entropy_coef * entropies[i][keep]
        # So does a rejected token among the tokens of its sample.
        total = total + (masks[i][keep] * loss).sum() / masks[i].sum()
    return total
