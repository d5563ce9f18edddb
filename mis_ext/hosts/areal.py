# SPDX-License-Identifier: Apache-2.0
"""AReaL: the full policy loss of mis_ext replaces the function that has AReaL's clip, mask and clamp."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.own_trainer import keys_in, measured_scalars
from mis_ext.hosts.session import current_run
from mis_ext.hosts.whole_loss import policy_loss_from_log_probs
from mis_ext.keys.reading import Keys
from mis_ext.validation import MismatchWarning


class MisLoss:
    """``ppo_actor_loss_fn = MisLoss(ppo_actor_loss_fn, "mis.yaml")`` below the imports of ``trainer/ppo/actor.py``.

    Args:
        loss_fn: AReaL's ``ppo_actor_loss_fn``, which still reports its statistics. Its settings do not affect the loss
            of mis_ext.
        keys: A mapping, or the path of a YAML file.
    """

    def __init__(self, loss_fn: Any, keys: Keys) -> None:
        self.host, self.keys = loss_fn, keys_in("AReaL", keys, calculate_per_token_loss=True)
        self._has_compared = False

    def __call__(
        self,
        *,
        logprobs: Tensor,
        proximal_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        loss_mask: Tensor,
        cu_seqlens: Tensor | None = None,
        **settings: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the mean loss over this micro-batch's tokens and AReaL's statistics; log metrics to AReaL's tracker.

        Raises:
            ValueError: Packed tokens have no ``cu_seqlens``, as in AReaL's tree training.
        """
        from areal.utils import stats_tracker

        streams = {"proximal_logprobs": proximal_logprobs, "old_logprobs": old_logprobs, "advantages": advantages}
        with torch.no_grad():
            _, statistics = self.host(
                logprobs=logprobs, **streams, loss_mask=loss_mask, cu_seqlens=cu_seqlens, **settings
            )
        self._compare_once(proximal_logprobs, old_logprobs)
        layout = None
        if logprobs.dim() == 1:
            if cu_seqlens is None:
                raise ValueError("cu_seqlens is missing: mis_ext needs it to find the sequences of packed tokens")
            # The lengths are read once from the device. AReaL's own correction reads one or two values there.
            layout = PackedLayout.whole(cu_seqlens.diff().tolist(), device=logprobs.device)
        found = policy_loss_from_log_probs(
            self.keys,
            current_logprobs=logprobs,
            proximal_logprobs=proximal_logprobs,
            behavior_logprobs=old_logprobs,
            advantages=advantages,
            response_mask=loss_mask,
            layout=layout,
        )
        stats_tracker.scalar(**measured_scalars(found.metrics))
        return found.mean, statistics

    def _compare_once(self, proximal: Tensor, behavior: Tensor) -> None:
        if self._has_compared:
            return
        self._has_compared = True
        loss = current_run(self.keys, whole_loss=True).config.loss
        if (loss.has_correction or loss.settings.needs_behavior) and torch.equal(proximal, behavior):
            warnings.warn(
                "proximal_logprobs and old_logprobs are identical, so nothing is corrected: set "
                "actor.use_decoupled_loss: true, unless engine and trainer agree exactly",
                MismatchWarning,
                stacklevel=3,
            )
