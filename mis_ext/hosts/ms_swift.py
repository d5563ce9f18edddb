# SPDX-License-Identifier: Apache-2.0
"""ms-swift: weights of mis_ext replace those that its ``GRPOTrainer`` computes from log-probs of vLLM."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mis_ext.hosts.own_trainer import correct_padded, measured_scalars, session_beside
from mis_ext.keys.reading import Keys


def register(keys: Keys) -> None:
    """Replace the method that computes ms-swift's correction, in this process. Call it in an external plugin.

    Raises:
        ValueError: A key belongs to the full policy loss, but ms-swift keeps its own loss.
    """
    from swift.rlhf_trainers.grpo_trainer import GRPOTrainer

    session = session_beside(keys, keeps_loss="ms-swift's trainer")

    def correct(
        self: Any, old_per_token_logps: Tensor, rollout_per_token_logps: Tensor, completion_mask: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        if self.disable_rollout_importance_sampling:
            return None, None
        if self.rollout_importance_sampling_mode is None:
            raise ValueError(
                "rollout_importance_sampling_mode is None: ms-swift would drop the weights; set it to token_truncate"
            )
        streams = {"proximal_logprobs": old_per_token_logps, "behavior_logprobs": rollout_per_token_logps}
        # Either every rank corrects a micro-batch here or none does, and the first rank logs.
        found = correct_padded(session, **streams, response_mask=completion_mask, dp_group=dist.group.WORLD)
        log = self._metrics["train" if self.model.training else "eval"]
        for name, value in measured_scalars(found.metrics, group=dist.group.WORLD).items():
            log[name].append(value)
        log_ratio = old_per_token_logps - rollout_per_token_logps
        return log_ratio, torch.where(found.keep_mask, found.weights, 0.0)

    GRPOTrainer._get_rollout_is_correction = correct
