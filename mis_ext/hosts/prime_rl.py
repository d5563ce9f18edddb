# SPDX-License-Identifier: Apache-2.0
"""prime-rl: the full policy loss of mis_ext as its custom loss, one packed sample per call."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch

from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.own_trainer import keys_in, measured_scalars
from mis_ext.hosts.whole_loss import policy_loss_from_log_probs
from mis_ext.keys.reading import Keys


def loss(inputs: Any, *, keys: Keys) -> Any:
    """The sum over the tokens of a sample, which prime-rl divides by the tokens of the whole batch.

    Args:
        inputs: prime-rl's ``LossInputs``. It has no proximal log-probs: a method that needs them raises an error.
        keys: A mapping or the path of a YAML file, under ``[trainer.loss.kwargs]``.

    Returns:
        Its ``LossOutputs``, with the metrics of the sample.
    """
    from prime_rl.trainer.rl.loss import LossOutputs

    given = _keys_in(keys) if isinstance(keys, Mapping) else _keys_of_file(keys)
    # In prime-rl a weight multiplies the loss of a token, like a fractional mask here.
    mask = inputs.loss_mask.float() if inputs.loss_weights is None else inputs.loss_mask * inputs.loss_weights
    found = policy_loss_from_log_probs(
        given,
        current_logprobs=inputs.trainer_logprobs,
        behavior_logprobs=inputs.inference_logprobs,
        reference_logprobs=inputs.ref_logprobs,
        advantages=inputs.advantages,
        response_mask=mask,
        layout=PackedLayout.whole([len(mask)], device=mask.device),
    )
    # prime-rl averages over samples. Samples of its empty micro-batches have no token.
    numbers = measured_scalars(found.metrics)
    # prime-rl adds its own loss of a micro-batch to the same list under this name.
    numbers.pop("loss", None)
    return LossOutputs(loss=found.total, metrics={name: torch.tensor(value) for name, value in numbers.items()})


_keys_in = functools.partial(keys_in, "prime-rl", calculate_per_token_loss=True, use_rollout_logprobs=True)
_keys_of_file = functools.cache(_keys_in)
"""Cached by path, because the loss is called for each sample."""
