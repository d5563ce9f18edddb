# SPDX-License-Identifier: Apache-2.0
"""ROLL: our weights and masks instead of its train-infer correction."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mis_ext.hosts.own_trainer import correct_padded, scalars, session_beside
from mis_ext.keys.reading import Keys


def register(keys: Keys) -> None:
    """Replace the one function that computes ROLL's correction, for ROLL has no registration of it.

    It acts in this process, the driver: ROLL corrects a whole batch there with ``enable_old_logprobs_recompute: true``.
    Without that setting its workers correct, in processes of their own, and nothing of ours runs.

    Raises:
        ValueError: A key is of the full policy loss, which stays ROLL's.
    """
    from roll.utils import train_infer_corrections

    session = session_beside(keys, keeps_loss="ROLL's worker")

    def correct(
        cfg: Any, response_mask: Tensor, old_log_probs: Tensor, infer_log_probs: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor, dict[str, float]]:
        if session.config.weight is not None and not cfg.is_weight.enabled:
            raise ValueError(
                "train_infer_correction.is_weight.enabled is False: ROLL would drop the weights; set it to true"
            )
        streams = {"proximal_logprobs": old_log_probs, "behavior_logprobs": infer_log_probs}
        found = correct_padded(session, **streams, response_mask=response_mask)
        return found.weights, found.keep_mask.long(), scalars(found.metrics, prefix="actor/")

    train_infer_corrections.compute_train_infer_correction = correct
