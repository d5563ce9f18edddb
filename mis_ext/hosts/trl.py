# SPDX-License-Identifier: Apache-2.0
"""TRL: weights of mis_ext in the losses of its ``GRPOTrainer``, or the full policy loss of mis_ext, by its keys."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mis_ext.correction.metrics import PREFIX, Mean, Metric
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.own_trainer import correct_padded, keys_in
from mis_ext.hosts.session import Session, current_run
from mis_ext.hosts.whole_loss import policy_loss_from_log_probs
from mis_ext.keys.reading import Keys, config_given, is_whole_loss, read_keys
from mis_ext.validation import MismatchWarning

_TOKEN_SUMS = ("bnpo", "dapo", "dr_grpo", "luspo")
_LOST = {
    "importance_sampling_level": "token",
    "delta": None,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "aux_loss_enabled": False,
}
_UNCUT = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
"""Default sampling of TRL: from the same distribution that its trainer scores."""


class MisTrainer:
    """``class Trainer(MisTrainer, GRPOTrainer): pass``, with the argument ``mis_keys``: a mapping, or a path of YAML.

    Raises:
        ValueError: A key is wrong (checked before the model loads), or a setting of the trainer does not fit.
    """

    def __init__(self: Any, *args: Any, mis_keys: Keys, **kwargs: Any) -> None:
        given = read_keys(mis_keys)
        current_run(given, whole_loss=is_whole_loss(given))
        super().__init__(*args, **kwargs)
        self.mis_loss = WholeLoss(self, given) if is_whole_loss(given) else None
        self.mis_session = None if self.mis_loss else session_for(self, given)

    def _generate_and_score_completions(self: Any, inputs: Any) -> dict[str, Any]:
        if self.mis_session and not (self.use_vllm and self.vllm_importance_sampling_correction):
            raise ValueError(
                "TRL's importance-sampling ratio is disabled: set use_vllm=True and vllm_importance_sampling_"
                "correction=True in GRPOConfig. With a rollout_func without vLLM, set mis_loss_method instead"
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
        # VESPO sums logarithms over padding too, where a ratio of 1 adds nothing.
        return found | {"importance_sampling_ratio": torch.where(mask > 0, weights, 1.0)}

    def _get_per_token_logps_and_entropies(self: Any, *args: Any, **kwargs: Any) -> Any:
        scores = super()._get_per_token_logps_and_entropies(*args, **kwargs)  # type: ignore[misc]
        self._mis_scores = scores if self.mis_loss else None
        return scores

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute TRL's loss. Raise an error if the trainer computes its own loss."""
        # In older versions of TRL, Liger's loss gets our ratio, but not the full policy loss of mis_ext.
        self._mis_is_in_loss = self.mis_loss is None and getattr(self, "use_liger_kernel", False)
        loss = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        if not self._mis_is_in_loss:
            raise ValueError(
                f"{type(self).__name__} computes its loss without TRL's _compute_loss: mis_ext would have no effect"
            )
        return loss

    def _compute_loss(self: Any, model: Any, inputs: dict[str, Any]) -> Any:
        self._mis_is_in_loss = True
        loss = super()._compute_loss(model, inputs)  # type: ignore[misc]
        if self.mis_loss is None:
            return loss
        (current, entropy, *_), self._mis_scores = self._mis_scores, None
        loss, metrics = self.mis_loss(current, entropy, inputs)
        log_metrics(self, metrics)
        return loss


def session_for(trainer: Any, keys: dict[str, Any]) -> Session:
    """The session of the correction whose weights multiply TRL's loss.

    Raises:
        ValueError: VESPO multiplies the ratios of a sequence itself, so it needs the ratios of tokens.
    """
    config = config_given(keys_in("TRL", keys, calculate_per_token_loss=trainer.loss_type not in ("grpo", "sapo")))
    is_of_tokens = config.weight is None or (config.weight.level == "token" and config.normalize_over is None)
    if trainer.loss_type == "vespo" and not is_of_tokens:
        raise ValueError(
            "loss_type=vespo multiplies the weights of a sequence's tokens: use tis_level: token, without "
            "tis_batch_normalize"
        )
    _warn_if_cut(trainer)
    return Session(config)


class WholeLoss:
    """The part of a micro-batch in the mean over a step, and its metrics.

    Raises:
        ValueError: A setting of the trainer would be lost, or its ``loss_type`` does not select a denominator.
    """

    def __init__(self, trainer: Any, keys: dict[str, Any]) -> None:
        for name, value in _LOST.items():
            found = getattr(trainer, name, getattr(trainer.args, name, value))
            if found != value:
                cure = "router_aux_loss_coef=0" if name == "aux_loss_enabled" else f"{name}={value!r}"
                raise ValueError(f"{name}={found}: the loss of mis_ext does not use it; set {cure}")
        if trainer.loss_type not in ("grpo", *_TOKEN_SUMS):
            raise ValueError(
                f"loss_type={trainer.loss_type} with keys of the full policy loss: use grpo, "
                f"{', '.join(_TOKEN_SUMS)}, which only select the denominator here"
            )
        kl = {"use_kl_loss": True, "kl_loss_coef": trainer.beta, "kl_loss_type": "k3"}
        kl |= {"use_unbiased_kl": trainer.args.use_bias_correction_kl}
        self.trainer = trainer
        said: dict[str, Any] = {"calculate_per_token_loss": trainer.loss_type in _TOKEN_SUMS}
        self.keys = keys_in("TRL", keys, **said | (kl if trainer.beta else {}))
        run = current_run(self.keys, whole_loss=True)
        corrects = run.config.loss.has_correction and not run.config.correction.metrics_only
        uses_behavior = run.config.loss.settings.needs_behavior or corrects
        if uses_behavior and not (trainer.use_vllm or trainer.rollout_func):
            raise ValueError(
                "behavior log-probs are missing, but these keys need them: set use_vllm=True, or use a rollout_func "
                "that returns them"
            )
        if uses_behavior:
            _warn_if_cut(trainer)

    def __call__(self, current: Tensor, entropy: Tensor, inputs: dict[str, Any]) -> tuple[Tensor, dict[str, Mean]]:
        """Compute the loss from log-probs with a gradient and a micro-batch of TRL's ``_compute_loss``."""
        found = policy_loss_from_log_probs(
            self.keys,
            current_logprobs=current,
            proximal_logprobs=inputs.get("old_per_token_logps"),
            behavior_logprobs=inputs.get("sampling_per_token_logps"),
            reference_logprobs=inputs.get("ref_per_token_logps"),
            advantages=inputs["advantages"],
            response_mask=inputs["completion_mask"] * inputs.get("tool_mask", 1),
            entropy=entropy,
            groups=Groups.of_process_groups(dp_group=dist.group.WORLD),
        )
        return found.total / self._size(inputs, found.num_terms), found.metrics

    def _size(self, inputs: dict[str, Any], num_terms: Tensor) -> Any:
        trainer, is_training = self.trainer, self.trainer.model.training
        steps = trainer.current_gradient_accumulation_steps if is_training else 1
        if trainer.loss_type == "dapo":
            # TRL counts the tokens of all micro-batches that were generated together.
            size = inputs["num_items_in_batch"].clamp(min=1.0) / trainer.accelerator.num_processes
            return size * steps / trainer.args.steps_per_generation if is_training else size
        if trainer.loss_type == "bnpo":
            return num_terms.clamp(min=1.0) * steps
        num_rows = inputs["completion_mask"].shape[0]
        return num_rows * steps * (trainer.max_completion_length if trainer.loss_type == "dr_grpo" else 1)


def _warn_if_cut(trainer: Any) -> None:
    more = getattr(trainer.args, "generation_kwargs", None) or {}
    found = {name: more.get(name, getattr(trainer, name, uncut)) for name, uncut in _UNCUT.items()}
    # In older TRL and in vLLM, a top_k of -1 or None keeps all tokens.
    is_cut = {name: value is not None and value != _UNCUT[name] and value != -1 for name, value in found.items()}
    named = ", ".join(f"{name}={value}" for name, value in found.items() if is_cut[name])
    if named:
        warnings.warn(
            f"{named}: vLLM normalizes log-probs over the sampled distribution, TRL over the full vocabulary, so every "
            "importance weight is too small. Sample with "
            f"{', '.join(f'{name}={uncut}' for name, uncut in _UNCUT.items() if is_cut[name])}",
            MismatchWarning,
            stacklevel=4,
        )


def log_metrics(trainer: Any, metrics: Mapping[str, Metric]) -> None:
    """Add metrics to the trainer's, as means over all ranks, with the prefix ``mis_loss/`` if TRL may use the name."""
    if not metrics:
        return
    # A group metric is the same on each rank.
    pairs = [
        (m.total, m.count) if isinstance(m, Mean) else (m.number, torch.ones_like(m.number)) for m in metrics.values()
    ]
    sums = trainer.accelerator.reduce(torch.stack([torch.stack(pair).detach().float() for pair in pairs]), "sum")
    log = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in zip(metrics, (sums[:, 0] / sums[:, 1]).tolist(), strict=True):
        log[name if name.startswith(PREFIX) else f"mis_loss/{name}"].append(value)
