# SPDX-License-Identifier: Apache-2.0
"""verl: the correction in its trainer and its bypass mode, or the full policy loss of mis_ext, by its keys."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mis_ext.hosts.own_trainer import agreed_scalars, correct_padded, keys_in
from mis_ext.hosts.session import Session
from mis_ext.hosts.whole_loss import policy_loss_from_log_probs
from mis_ext.keys.reading import Keys, is_whole_loss, read_keys
from mis_ext.methods.catalogue import choose_method
from mis_ext.validation import MismatchWarning, check_choice

PolicyLoss = Callable[..., tuple[Tensor, dict[str, Any]]]
_SEQUENCES = "seq-mean-token-mean"
_MODES = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", _SEQUENCES)
_OWN = {"gspo": "gspo", "sapo": "sapo", "gmpo": "geo_mean"}
"""Methods whose loss in verl may be a mean over sequences for any ``loss_agg_mode``, depending on the version.
"""


def register(keys: Keys) -> None:
    """Install mis_ext in this verl process, also through ``VERL_USE_EXTERNAL_MODULES`` with the file ``MIS_EXT_KEYS``.

    Without a key of the full policy loss, verl's losses get our weights, masks and metrics: the function that computes
    them is replaced, because verl has no registry for it. With such a key, the policy losses ``mis_ext`` (three
    policies) and ``bypass_mode`` (two) are those of mis_ext, and every other name raises an error.
    """
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    given = read_keys(keys)
    session = None if is_whole_loss(given) else Session(given)

    def correct(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, **_: Any) -> tuple[Any, ...]:
        if session is None:
            # This is the only field in which verl passes data of the behavior policy to a loss.
            return DataProto.from_dict({"rollout_is_weights": rollout_log_prob}), response_mask, {}
        streams = {"proximal_logprobs": old_log_prob, "behavior_logprobs": rollout_log_prob}
        found = correct_padded(session, **streams, response_mask=response_mask)
        metrics = agreed_scalars(found.metrics, prefix="rollout_corr/")
        return DataProto.from_dict({"rollout_is_weights": found.weights}), response_mask * found.keep_mask, metrics

    def correct_alone(**_: Any) -> None:
        raise ValueError(
            "a trainer on verl's functions, such as rLLM, requests only weights: mis_ext would get no log-probs, "
            "and its masks would be lost; use rllm.algorithm.rollout_correction: {tis_mode: null, bypass_mode: "
            "true} and rllm.algorithm.loss_fn: bypass_mode, with keys of the full policy loss, or of weights and "
            "filters"
        )

    rollout_corr_helper.compute_rollout_correction_and_rejection_mask = correct
    # verl calls it only in the function that is replaced above.
    rollout_corr_helper.compute_rollout_correction_weights = correct_alone
    if session is None:
        own = own_loss(core_algos, given)
        for name in [*core_algos.POLICY_LOSS_REGISTRY, "mis_ext"]:
            is_ours = name in ("mis_ext", "bypass_mode")
            core_algos.register_policy_loss(name)(
                whole_loss(given, is_bypass=name == "bypass_mode", own=own) if is_ours else refused(name)
            )


def own_loss(core_algos: Any, given: dict[str, Any]) -> PolicyLoss | None:
    """The loss in verl of the method in these keys, if it may not follow ``loss_agg_mode``."""
    method = given.get("mis_loss_method")
    name = None if method is None else choose_method("mis_loss_method", method).name
    return getattr(core_algos, f"compute_policy_loss_{_OWN.get(name or '')}", None)


def whole_loss(given: dict[str, Any], *, is_bypass: bool, own: PolicyLoss | None = None) -> PolicyLoss:
    """A policy loss for verl: the mean over its global batch, and metrics of the micro-batch.

    Args:
        given: The keys.
        is_bypass: verl's old log-probs are those of the behavior policy. A method that needs the proximal policy
            raises an error.
        own: verl's own loss of the same method. If it does not follow ``loss_agg_mode``, ours does not either.
    """
    keys: dict[str, dict[str, Any]] = {}
    modes: dict[str, str] = {}

    def loss(config: Any, loss_agg_mode: str, old_log_prob: Tensor, **more: Any) -> tuple[Tensor, dict[str, float]]:
        if loss_agg_mode not in modes:
            modes[loss_agg_mode] = _mode_that_acts(loss_agg_mode, own, config)
        loss_agg_mode = modes[loss_agg_mode]
        per_token, sums = loss_agg_mode in ("token-mean", "token-sum"), "seq-mean-token-sum" in loss_agg_mode
        if loss_agg_mode not in keys:
            switches = {"calculate_per_token_loss": per_token, "use_rollout_logprobs": is_bypass}
            keys[loss_agg_mode] = keys_in("verl", given, **switches)
        found = policy_loss_from_log_probs(
            keys[loss_agg_mode],
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
        return found.total * info.get("dp_size", 1) / (size * horizon), agreed_scalars(found.metrics, prefix="actor/")

    return loss


def _mode_that_acts(said: str, own: PolicyLoss | None, config: Any) -> str:
    check_choice("loss_agg_mode", said, _MODES)
    if own is None or said == _SEQUENCES or _follows(own, config):
        return said
    warnings.warn(
        f"loss_agg_mode={said} affects entropy and KL, not this policy loss: the loss of verl is a mean over "
        f"sequences ({_SEQUENCES}) in this version, and so is the loss of mis_ext",
        MismatchWarning,
        stacklevel=3,
    )
    return _SEQUENCES


def _follows(own: PolicyLoss, config: Any) -> bool:
    """True if verl's loss gives every token the same slope, as a mean over tokens does."""
    with torch.enable_grad():
        current = torch.zeros(2, 2, requires_grad=True)
        mask = torch.tensor([[1, 0], [1, 1]])
        streams = {"old_log_prob": torch.zeros(2, 2), "log_prob": current, "advantages": torch.ones(2, 2)}
        value, _ = own(**streams, response_mask=mask, loss_agg_mode="token-mean", config=config)
        (slope,) = torch.autograd.grad(value, current)
    # A mean over sequences halves the slope in a response of two tokens.
    return bool(slope[0, 0].abs() < 1.5 * slope[1, 0].abs())


def refused(name: str) -> Callable[..., None]:
    """A policy loss that stops a run in which verl's own loss would use log-probs as weights."""

    def loss(**_: Any) -> None:
        raise ValueError(
            f"policy_loss.loss_mode: {name} with keys of the full policy loss: use loss_mode=mis_ext, or "
            "loss_mode=bypass_mode with bypass_mode: true"
        )

    return loss


if "MIS_EXT_KEYS" in os.environ:
    register(os.environ["MIS_EXT_KEYS"])
