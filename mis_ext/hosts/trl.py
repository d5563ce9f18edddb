"""TRL: our weights in the losses of its ``GRPOTrainer``, or our whole loss; the keys say which."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from mis_ext.hosts.padded import correct_padded
from mis_ext.hosts.runs import run_of
from mis_ext.hosts.trl_loss import WholeLoss, log_metrics, session_for
from mis_ext.keys.given import Keys, read_keys, says_whole_loss


class MisTrainer:
    """``class Trainer(MisTrainer, GRPOTrainer): pass``, with the argument ``mis_keys``: a mapping, or a path of YAML.

    Raises:
        ValueError: A key is wrong, which is said before the model loads, or a setting of the trainer does not fit.
    """

    def __init__(self: Any, *args: Any, mis_keys: Keys, **kwargs: Any) -> None:
        given = read_keys(mis_keys)
        run_of(given, whole_loss=says_whole_loss(given))
        super().__init__(*args, **kwargs)
        self.mis_loss = WholeLoss(self, given) if says_whole_loss(given) else None
        self.mis_session = None if self.mis_loss else session_for(self, given)

    def _generate_and_score_completions(self: Any, inputs: Any) -> dict[str, Any]:
        if self.mis_session and not (self.use_vllm and self.vllm_importance_sampling_correction):
            raise ValueError(
                "TRL computes no ratio that mis_ext could replace: set use_vllm=True and vllm_importance_sampling_"
                "correction=True; with a rollout_func that returns log-probs without vLLM give keys of a whole loss"
            )
        found: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        if self.mis_session is None:
            return found
        mask = found["completion_mask"] * found.get("tool_mask", 1)
        trainer, engine = found["old_per_token_logps"], found["sampling_per_token_logps"]
        streams = {"proximal_logprobs": trainer, "behavior_logprobs": engine, "response_mask": mask}
        correction = correct_padded(self.mis_session, **streams, dp_group=dist.group.WORLD)
        log_metrics(self, correction.metrics)
        weights = torch.where(correction.keep_mask, correction.weights, 0.0)
        # VESPO sums logarithms over padding too: there a ratio of 1 adds nothing.
        return found | {"importance_sampling_ratio": torch.where(mask > 0, weights, 1.0)}

    def _get_per_token_logps_and_entropies(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        self._mis_scores = scores if self.mis_loss else None
        return scores

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if self.mis_loss is None:
            return loss
        (current, entropy, *_), self._mis_scores = self._mis_scores, None
        loss, metrics = self.mis_loss(current, entropy, inputs)
        log_metrics(self, metrics)
        return loss
