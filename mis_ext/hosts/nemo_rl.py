# SPDX-License-Identifier: Apache-2.0
"""NeMo-RL: the full policy loss of mis_ext around NeMo-RL's own loss, which still reports its metrics."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.metrics import GroupNumber
from mis_ext.hosts.own_trainer import keys_in, scalars
from mis_ext.hosts.whole_loss import policy_loss_from_log_probs
from mis_ext.keys.reading import Keys


class MisLoss:
    """A loss function for ``grpo_train``: ``loss_fn = MisLoss(loss_fn, "mis.yaml")`` after ``setup``.

    Args:
        loss_fn: The ``ClippedPGLossFn`` from NeMo-RL's ``setup``. Two of its settings affect the loss of mis_ext:
            ``token_level_loss``, and ``force_on_policy_ratio``, which leaves no proximal log-probs.
        keys: A mapping, or the path of a YAML file.

    Raises:
        ValueError: NeMo-RL's loss has a KL penalty or positive examples, which would be lost.
    """

    def __init__(self, loss_fn: Any, keys: Keys) -> None:
        for name in ("reference_policy_kl_penalty", "positive_example_nll_weight"):
            if getattr(loss_fn, name, 0) != 0:
                raise ValueError(
                    f"loss_fn.{name}={getattr(loss_fn, name)}: the loss of mis_ext has no such term; set it to 0"
                )
        self.host, self.is_of_tokens = loss_fn, loss_fn.loss_type.value == "token_level"
        self.keys = keys_in("NeMo-RL", keys, calculate_per_token_loss=self.is_of_tokens)

    def __getattr__(self, name: str) -> Any:
        if name in ("host", "__setstate__", "__getstate__"):
            raise AttributeError(name)
        return getattr(self.host, name)

    def __call__(
        self, next_token_logprobs: Tensor, data: Any, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return this micro-batch's part of the mean over the global batch, and metrics on the same scale."""
        with torch.no_grad():
            _, metrics = self.host(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        reference = data.get("reference_policy_logprobs")
        found = policy_loss_from_log_probs(
            self.keys,
            current_logprobs=next_token_logprobs,
            proximal_logprobs=None if self.host.force_on_policy_ratio else data["prev_logprobs"][:, 1:],
            behavior_logprobs=data["generation_logprobs"][:, 1:],
            reference_logprobs=None if reference is None else reference[:, 1:],
            advantages=data["advantages"][:, 1:],
            response_mask=data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1),
        )
        size = global_valid_toks if self.is_of_tokens else global_valid_seqs
        # Together with the metrics, so that the device is read once.
        numbers = scalars({"share": GroupNumber(found.num_terms / size), **found.metrics}, prefix="")
        share = numbers.pop("share")
        ours = {}
        for name, value in numbers.items():
            # NeMo-RL adds the shares over mini-batches, and divides by their number, except for names with these parts.
            # A sample that it excluded measures nothing, and has no share.
            ours[name.replace("_max", "_highest").replace("_min", "_lowest")] = value * share if share else 0.0
        return found.total / size, metrics | ours
