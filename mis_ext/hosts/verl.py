"""verl: our correction in its trainer and its bypass mode, or our whole loss; the keys say which."""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor

from mis_ext.hosts.padded import correct_padded
from mis_ext.hosts.scalars import scalars
from mis_ext.hosts.session import Session
from mis_ext.hosts.verl_loss import own_loss, refused, whole_loss
from mis_ext.keys.given import Keys, read_keys, says_whole_loss


def register(keys: Keys) -> None:
    """Put mis_ext into this process of verl; as one of ``VERL_USE_EXTERNAL_MODULES`` with the file ``MIS_EXT_KEYS``.

    Without a key of the whole loss, verl's losses get our weights, masks and metrics: its function that computes them
    is replaced, for verl has no registration of it. With one, the policy losses ``mis_ext`` (three policies) and
    ``bypass_mode`` (two) are ours, and every other name raises.
    """
    from verl.protocol import DataProto
    from verl.trainer.ppo import core_algos, rollout_corr_helper

    given = read_keys(keys)
    session = None if says_whole_loss(given) else Session(given)

    def correct(old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, **_: Any) -> tuple[Any, ...]:
        if session is None:
            # This field is the only one in which verl hands anything of the behavior policy on to a loss.
            return DataProto.from_dict({"rollout_is_weights": rollout_log_prob}), response_mask, {}
        streams = {"proximal_logprobs": old_log_prob, "behavior_logprobs": rollout_log_prob}
        found = correct_padded(session, **streams, response_mask=response_mask)
        metrics = scalars(found.metrics, prefix="rollout_corr/")
        return DataProto.from_dict({"rollout_is_weights": found.weights}), response_mask * found.keep_mask, metrics

    rollout_corr_helper.compute_rollout_correction_and_rejection_mask = correct
    if session is None:
        own = own_loss(core_algos, given)
        for name in [*core_algos.POLICY_LOSS_REGISTRY, "mis_ext"]:
            is_ours = name in ("mis_ext", "bypass_mode")
            core_algos.register_policy_loss(name)(
                whole_loss(given, is_bypass=name == "bypass_mode", own=own) if is_ours else refused(name)
            )


if "MIS_EXT_KEYS" in os.environ:
    register(os.environ["MIS_EXT_KEYS"])
