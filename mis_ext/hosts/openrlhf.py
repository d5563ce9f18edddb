# SPDX-License-Identifier: Apache-2.0
"""OpenRLHF: the full policy loss of mis_ext replaces its fixed ``PolicyLoss``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mis_ext.hosts.own_trainer import keys_in
from mis_ext.hosts.session import current_run
from mis_ext.hosts.whole_loss import policy_loss_from_log_probs
from mis_ext.keys.reading import Keys


class MisLoss:
    """``actor_loss_fn = MisLoss(actor_loss_fn, "mis.yaml")`` in ``ppo_actor.py``.

    Args:
        loss_fn: OpenRLHF's ``PolicyLoss``. Its ``token_level_loss`` affects the loss of mis_ext. Its other settings
            affect only the metrics that it still reports.
        keys: A mapping, or the path of a YAML file.
    """

    def __init__(self, loss_fn: Any, keys: Keys) -> None:
        self.host, self.keys = loss_fn, keys_in("OpenRLHF", keys, calculate_per_token_loss=loss_fn.token_level_loss)
        self.metrics: dict[str, Tensor] = {}
        """Metrics of the last call, each 0-dim, for ``experience.info``."""

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        action_mask: Tensor,
        rollout_log_probs: Tensor | None = None,
        **sizes: Any,
    ) -> tuple[Tensor, ...]:
        """Return the loss and OpenRLHF's metrics: three, or four since 0.11.2.

        Raises:
            ValueError: The keys need engine log-probs, but OpenRLHF has not requested them.
        """
        streams = log_probs, old_log_probs, advantages, action_mask, rollout_log_probs
        with torch.no_grad():
            _, *metrics = self.host(*streams, **sizes)
        if rollout_log_probs is None:
            loss = current_run(self.keys, whole_loss=True).config.loss
            if loss.has_correction or loss.settings.needs_behavior:
                raise ValueError(
                    "OpenRLHF requests engine log-probs only if its own correction is on, which has no effect on "
                    "the loss of mis_ext: use --algo.advantage.is_correction_enable, or in OpenRLHF 0.11.2 and "
                    "newer --algo.advantage.is_correction_level token"
                )
        found = policy_loss_from_log_probs(
            self.keys,
            current_logprobs=log_probs,
            proximal_logprobs=old_log_probs,
            behavior_logprobs=rollout_log_probs,
            advantages=advantages,
            response_mask=action_mask,
        )
        # OpenRLHF multiplies them by the tokens of the micro-batch. NaN times 0 is NaN, so use 0 here; it is never
        # counted.
        self.metrics = {
            name: torch.where(found.num_terms > 0.0, metric.value(), 0.0) for name, metric in found.metrics.items()
        }
        size = sizes.get("batch_num_tokens" if self.host.token_level_loss else "global_batch_size")
        return found.mean if size is None else found.total / size * sizes.get("dp_size", 1), *metrics
