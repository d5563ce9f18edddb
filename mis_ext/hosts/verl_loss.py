"""Our whole loss with the arguments, the aggregation and the names of verl's policy losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mis_ext.hosts.from_log_probs import policy_loss_from_log_probs
from mis_ext.hosts.scalars import scalars


def whole_loss(given: dict[str, Any], *, is_bypass: bool) -> Callable[..., tuple[Tensor, dict[str, float]]]:
    """A policy loss as verl calls it: the mean over its global batch, and metrics of the micro-batch.

    Args:
        given: The keys.
        is_bypass: What verl calls old log-probs are those of the behavior policy; a method that looks at the proximal
            one is refused.
    """
    by_mode: dict[str, dict[str, Any]] = {}

    def loss(config: Any, loss_agg_mode: str, old_log_prob: Tensor, **more: Any) -> tuple[Tensor, dict[str, float]]:
        per_token, sums = loss_agg_mode in ("token-mean", "token-sum"), "seq-mean-token-sum" in loss_agg_mode
        switches = {"calculate_per_token_loss": per_token, "use_rollout_logprobs": is_bypass}
        found = policy_loss_from_log_probs(
            by_mode.setdefault(loss_agg_mode, given | switches),
            current_logprobs=more["log_prob"],
            proximal_logprobs=old_log_prob,
            behavior_logprobs=old_log_prob if is_bypass else more.get("rollout_is_weights"),
            advantages=more["advantages"],
            response_mask=more["response_mask"],
            divisors=torch.ones_like(old_log_prob[:, 0]) if sums else None,
        )
        info = config.global_batch_info
        size = info.get("batch_num_tokens" if per_token else "global_batch_size") or found.num_terms.clamp_min(1.0)
        size = 1 if loss_agg_mode == "token-sum" else size
        horizon = info.get("loss_scale_factor") or old_log_prob.shape[1] if loss_agg_mode.endswith("norm") else 1
        return found.total * info.get("dp_size", 1) / (size * horizon), scalars(found.metrics, prefix="actor/")

    return loss


def refused(name: str) -> Callable[..., None]:
    """A policy loss that stops a run in which verl's own one would take log-probs for weights."""

    def loss(**_: Any) -> None:
        raise ValueError(
            f"policy_loss.loss_mode: {name} with keys of the whole loss of mis_ext: write loss_mode=mis_ext, or with "
            "bypass_mode: true loss_mode=bypass_mode"
        )

    return loss
