# SPDX-License-Identifier: Apache-2.0
"""SkyRL: the full policy loss of mis_ext in its registry of policy losses."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mis_ext.hosts.own_trainer import keys_in, scalars
from mis_ext.hosts.whole_loss import policy_loss_from_log_probs
from mis_ext.keys.reading import Keys


class _Number(float):
    """A metric of a micro-batch. The mean, maximum or minimum over micro-batches skips one that measured nothing.

    SkyRL computes ``sum(numbers) / len(numbers)``, ``max(numbers)``, or ``min(numbers)``, which could become NaN. A
    name must not be omitted: it could be missing on only one rank, and the ranks reduce one name after the other.
    """

    terms: list[float]

    def __new__(cls, *numbers: float) -> _Number:
        terms = [number for number in numbers if number == number]
        mean = super().__new__(cls, sum(terms) / len(terms) if terms else math.nan)
        mean.terms = terms
        return mean

    def __radd__(self, _start: float) -> _Number:
        return self

    def __add__(self, other: _Number) -> _Number:  # type: ignore[override]
        return _Number(*self.terms, *other.terms)

    def __truediv__(self, _count: float) -> float:
        return float(self)

    def __gt__(self, other: float) -> bool:
        return other != other or super().__gt__(other)

    def __lt__(self, other: float) -> bool:
        return other != other or super().__lt__(other)


def register(keys: Keys) -> None:
    """Register the policy loss ``mis_ext``, before SkyRL starts its workers and sends them its registry.

    Raises:
        OSError: The file of keys cannot be read.
        TypeError: The keys are not a mapping.
    """
    from skyrl.backends.skyrl_train.utils.ppo_utils import PolicyLossRegistry, register_policy_loss

    given = keys_in("SkyRL", keys, calculate_per_token_loss=True)

    def loss(
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        if loss_mask is None:
            raise ValueError("loss_mask is missing: mis_ext needs it to find the tokens of the response")
        # SkyRL divides its advantages by the batch size, so it expects the sum over tokens.
        found = policy_loss_from_log_probs(
            given,
            current_logprobs=log_probs,
            proximal_logprobs=old_log_probs,
            behavior_logprobs=rollout_logprobs,
            advantages=advantages,
            response_mask=loss_mask,
        )
        # SkyRL reports its loss itself. It sums metrics whose name has "loss" over micro-batches, so a mean is wrong.
        metrics = {name: metric for name, metric in found.metrics.items() if not name.endswith("loss")}
        return found.total, {name: _Number(number) for name, number in scalars(metrics, prefix="").items()}

    if "mis_ext" in PolicyLossRegistry.list_available():
        PolicyLossRegistry.unregister("mis_ext")
    register_policy_loss("mis_ext")(loss)
