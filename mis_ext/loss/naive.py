"""The whole loss in plain PyTorch, one sample after the other: read it before :mod:`mis_ext.loss.policy`.

It is ``mis_loss_mode: decoupled`` with truncated token weights, a gate on the geometric mean of a sequence, a k3
penalty and an entropy bonus. The rest of this folder computes the same for every mode and method, in one pass, over
ranks, and says what becomes of log-probs that are not finite. A test holds both against each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def naive_policy_loss(
    *,
    current: Sequence[Tensor],
    proximal: Sequence[Tensor],
    behavior: Sequence[Tensor],
    reference: Sequence[Tensor],
    entropies: Sequence[Tensor],
    advantages: Sequence[Tensor],
    masks: Sequence[Tensor],
    eps_clip: float = 0.2,
    eps_clip_high: float = 0.2,
    upper_bound: float = 2.0,
    band: tuple[float, float] = (0.99, 1.01),
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
        eps_clip: PPO's ratio current / proximal is at least ``1 - eps_clip``.
        eps_clip_high: It is at most ``1 + eps_clip_high``.
        upper_bound: Of the weight proximal / behavior of a token (TIS).
        band: Of the geometric mean of that ratio over a sample: outside, the sample is rejected.
        kl_coef: What the penalty is multiplied by.
        entropy_coef: What the entropy is multiplied by.

    References:
        Hilton et al., Batch size-invariance for policy optimization, arXiv:2110.00641 (decoupled PPO); Yao et al., Your
        Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025 (token TIS).
    """
    total = torch.zeros(())
    for i, mask in enumerate(masks):
        trained = mask != 0
        log_ratio = (proximal[i] - behavior[i])[trained]
        # A rejected sample adds nothing, and still counts among the samples that the host divides by.
        if not band[0] <= log_ratio.mean().exp() <= band[1]:
            continue
        weight = log_ratio.exp().clamp(max=upper_bound)
        ratio = (current[i] - proximal[i])[trained].exp()
        clipped = ratio.clamp(1.0 - eps_clip, 1.0 + eps_clip_high)
        gain = weight * torch.minimum(ratio * advantages[i][trained], clipped * advantages[i][trained])
        distance = (current[i] - reference[i])[trained]
        penalty = (-distance).exp() - 1.0 + distance
        loss = -gain + kl_coef * penalty - entropy_coef * entropies[i][trained]
        total = total + (mask[trained] * loss).sum() / mask.sum()
    return total
