# SPDX-License-Identifier: Apache-2.0
"""The framework's side of the interface: reducers, the policy loss, and the call of the custom correction."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor


@cache
def load_function(path: str) -> Callable[..., Any]:
    """Import an object by dotted path. The part before the last dot is the module."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@dataclass(frozen=True, kw_only=True)
class PolicyBatch:
    """One micro-batch of responses, as input of the policy loss on one rank.

    Lists have one entry per sample. Log-probs and advantages cover this context-parallel rank's tokens; masks cover the
    whole response.

    Attributes:
        train_log_probs: Scored by the trainer before the rollout's first optimizer step.
        rollout_log_probs: Reported by the engine.
        advantages: Of each token.
        loss_masks: 1 for every token with a loss.
        response_indices: Indices of the response tokens on this rank.
        total_lengths: Tokens of prompt and response.
        response_lengths: Tokens of the response.
        max_seq_lens: The length that each sample is padded to (bshd); None when samples are packed (thd).
    """

    train_log_probs: list[Tensor]
    rollout_log_probs: list[Tensor]
    advantages: list[Tensor]
    loss_masks: list[Tensor]
    response_indices: list[Tensor]
    total_lengths: list[int]
    response_lengths: list[int]
    max_seq_lens: list[int] | None


@dataclass(frozen=True, kw_only=True)
class Reducer:
    """Reduces token values to a sum over samples of per-sample means, or to a sum over tokens.

    The numerator uses the given masks. The denominator of a sample is always its original number of trainable tokens,
    so a rejected token adds nothing but still counts. With context parallelism, a rank's value is its share: the sum
    over all ranks is the value without context parallelism.
    """

    token_weights_T: Tensor

    @classmethod
    def build(
        cls, masks: list[Tensor], *, original_masks: list[Tensor], response_indices: list[Tensor], per_token: bool
    ) -> "Reducer":
        """Prepare a reduction.

        Args:
            masks: Numerator mask of each whole response.
            original_masks: 1 for every trainable token of each whole response.
            response_indices: Indices of each response's tokens on this rank.
            per_token: Sum tokens instead of averaging them per sample.
        """
        weights = []
        for mask, original, index in zip(masks, original_masks, response_indices, strict=True):
            denominator = 1.0 if per_token else original.sum().clamp(min=1)
            weights.append(mask[index] / denominator)
        return cls(token_weights_T=torch.cat(weights))

    def __call__(self, values_T: Tensor) -> Tensor:
        """Reduce ``[T]`` to a scalar."""
        return (values_T * self.token_weights_T).sum()


def clipped_policy_loss(
    ratio_T: Tensor, advantages_T: Tensor, *, eps_clip: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    """Return the PPO loss of every token, and 1 for every clipped token.

    "Proximal Policy Optimization Algorithms", arXiv 1707.06347; the separate upper bound is DAPO's, arXiv 2503.14476.

    Args:
        ratio_T: Target over proximal probability. ``[T]``.
        advantages_T: ``[T]``.
        eps_clip: The ratio is clipped to at least ``1 - eps_clip``.
        eps_clip_high: The ratio is clipped to at most ``1 + eps_clip_high``.
    """
    unclipped_T = -ratio_T * advantages_T
    clipped_T = -ratio_T.clamp(1 - eps_clip, 1 + eps_clip_high) * advantages_T
    return torch.maximum(unclipped_T, clipped_T), (clipped_T > unclipped_T).float()


def policy_loss(args: Namespace, batch: PolicyBatch, log_probs_T: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute a micro-batch's loss and logged values, each a share of a sum over samples (or tokens) of all ranks.

    Args:
        args: Arguments of the run, passed to the correction unchanged.
        batch: The micro-batch.
        log_probs_T: Log-probs of the policy being trained, of all samples one after the other. ``[T]``.

    Returns:
        The loss, which carries gradient, and the values by name.
    """
    denominators = batch.rollout_log_probs if args.use_rollout_logprobs else batch.train_log_probs
    ratio_T = (log_probs_T - torch.cat(denominators)).exp()
    pg_loss_T, clipped_T = clipped_policy_loss(
        ratio_T, torch.cat(batch.advantages), eps_clip=args.eps_clip, eps_clip_high=args.eps_clip_high
    )

    masks, correction_metrics = batch.loss_masks, {}
    padding = {} if batch.max_seq_lens is None else {"max_seq_lens": batch.max_seq_lens}
    if args.use_tis or args.get_mismatch_metrics:
        pg_loss_T, masks, correction_metrics = load_function(args.custom_tis_function_path)(
            args=args,
            pg_loss=pg_loss_T,
            train_log_probs=batch.train_log_probs,
            rollout_log_probs=batch.rollout_log_probs,
            loss_masks=batch.loss_masks,
            total_lengths=batch.total_lengths,
            response_lengths=batch.response_lengths,
            **padding,
        )

    reducer = partial(
        Reducer.build,
        original_masks=batch.loss_masks,
        response_indices=batch.response_indices,
        per_token=args.calculate_per_token_loss,
    )
    reduce_original, reduce_kept = reducer(batch.loss_masks), reducer(masks)
    loss = reduce_kept(pg_loss_T)
    mismatch_T = torch.cat(batch.train_log_probs) - torch.cat(batch.rollout_log_probs)
    values = {
        "loss": loss.detach(),
        "pg_clipfrac": reduce_kept(clipped_T),
        "ppo_kl": reduce_kept((torch.cat(denominators) - log_probs_T).detach()),
        "train_rollout_logprob_abs_diff": reduce_kept(mismatch_T.abs()),
    }
    values |= {name: reduce_original(metric_T) for name, metric_T in correction_metrics.items()}
    return loss, values
