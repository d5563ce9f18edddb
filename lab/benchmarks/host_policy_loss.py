# SPDX-License-Identifier: Apache-2.0
"""The computation of slime and Miles after the log-probs, written again: a loop over samples for every metric.

Written from their behavior, for a timing comparison with ``mis_ext.policy_loss`` on equal inputs, where both must give
equal results. ``lab/peers/host_losses/record.py`` compares the frameworks' own functions with ours.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Hook = Callable[..., tuple[Tensor, list[Tensor], dict[str, Tensor]]]


def sum_of_sample_means(values: Tensor, masks: list[Tensor], divisors: Tensor) -> Tensor:
    """The frameworks' reducer."""
    lengths = [len(mask) for mask in masks]
    means = [
        (sample * mask).sum() / torch.clamp_min(divisor, 1)
        for sample, mask, divisor in zip(values.split(lengths), masks, divisors, strict=True)
    ]
    return torch.stack(means).sum() if not means else sum(means[1:], means[0])


def policy_loss(args: Namespace, batch: dict[str, Any], hook: Hook) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO with a hook, entropy and a k3 penalty, and the names that slime reports."""
    current, old, rollout, reference, advantages, entropy = (
        torch.cat(batch[key])
        for key in ("current", "log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "entropy")
    )
    divergence = old - current
    ratio = (-divergence).exp()
    plain = -ratio * advantages
    clipped = -ratio.clamp(1.0 - args.eps_clip, 1.0 + args.eps_clip_high) * advantages
    loss = torch.maximum(plain, clipped)
    is_clipped = (clipped > plain).float()
    masks, divisors = batch["loss_masks"], batch["rollout_mask_sums"]
    loss, kept, metrics = hook(
        args=args,
        pg_loss=loss,
        train_log_probs=batch["log_probs"],
        rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=masks,
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    policy = sum_of_sample_means(loss, kept, divisors)
    found = {
        "pg_clipfrac": sum_of_sample_means(is_clipped, kept, divisors),
        "ppo_kl": sum_of_sample_means(divergence, kept, divisors),
    }
    entropy_loss = sum_of_sample_means(entropy, kept, divisors)
    distance = reference - current
    penalty = sum_of_sample_means(distance.exp() - 1.0 - distance, kept, divisors)
    total = policy - args.entropy_coef * entropy_loss + args.kl_loss_coef * penalty
    gap = sum_of_sample_means((old - rollout).abs(), kept, divisors)
    reported = {
        "loss": total,
        "pg_loss": policy,
        "entropy_loss": entropy_loss,
        **found,
        "train_rollout_logprob_abs_diff": gap,
        "kl_loss": penalty,
        "ois": sum_of_sample_means(ratio, masks, divisors),
        **{name: sum_of_sample_means(values, masks, divisors) for name, values in metrics.items()},
    }
    return total, {name: value.clone().detach() for name, value in reported.items()}
