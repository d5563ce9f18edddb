# SPDX-License-Identifier: Apache-2.0
"""The whole loss in plain PyTorch, one sample after the other: read it before :mod:`mis_ext.loss.policy`.

It begins where ``naive_correction.py`` ends. It is ``mis_loss_mode: decoupled`` with any correction, a k3
penalty and an entropy bonus. The rest of this folder computes the same for every mode and method, in one pass, over
ranks. A test holds both against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from naive_correction import naive_correction
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig


def naive_policy_loss(
    *,
    current: Sequence[Tensor],
    proximal: Sequence[Tensor],
    behavior: Sequence[Tensor],
    reference: Sequence[Tensor],
    entropies: Sequence[Tensor],
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor],
    correction: CorrectionConfig,
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
    weights, keeps = naive_correction(proximal=proximal, behavior=behavior, masks=masks, config=correction)
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
