# SPDX-License-Identifier: Apache-2.0
"""ROLL: weights and masks of mis_ext replace its train-infer correction."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mis_ext.hosts.own_trainer import correct_padded, scalars, session_beside
from mis_ext.keys.reading import Keys


def register(keys: Keys) -> None:
    """Replace the function that computes ROLL's correction, because ROLL has no registry for it.

    It is replaced in this process, the driver. With ``enable_old_logprobs_recompute: true`` ROLL corrects a whole batch
    there. Without that setting, its workers correct in their own processes, and mis_ext does not run.

    Raises:
        ValueError: A key belongs to the full policy loss, but ROLL keeps its own loss.
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
