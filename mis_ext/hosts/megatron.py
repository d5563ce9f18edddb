"""The whole policy loss for a plain Megatron-Core training loop, whose ranks share sequences, batch and vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.batches import (
    Batch,
    Host,
    VocabularyPart,
    batch_loss,
    chosen_loss,
    fused_scores,
    positive_temperature,
)
from mis_ext.hosts.groups import Groups, find_groups, initialized_megatron
from mis_ext.hosts.runs import current_run
from mis_ext.keys.run_config import RunConfig
from mis_ext.scoring import Scores

LossFunc = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


def make_loss_func(args: Any, batch: Mapping[str, Any], *, groups: Groups | None = None) -> LossFunc:
    """``loss_func(output_tensor)`` of a micro-batch, which a ``forward_step`` returns together with the logits.

    Megatron-Core divides the loss by the number that ``loss_func`` returns, and averages over data- and
    context-parallel ranks. With ``calculate_per_token_loss`` it sums, and divides by the sum of the numbers. The loss
    is scaled for this. So the gradient is that of the mean over samples of per-sample means, or of the mean over
    tokens. Log-probs and entropy are computed here, with Megatron-Core's tensor-parallel group if it is initialised.

    Args:
        args: A namespace or a mapping with the keys of docs/policy_loss.md; the same object for every micro-batch of a
            run. ``calculate_per_token_loss`` must have the same value as in Megatron-Core's configuration.
        batch: The batch of :func:`~mis_ext.policy_loss`: lists per sample of ``unconcat_tokens``, ``loss_masks``,
            ``advantages`` and log-probs, with ``total_lengths`` and ``response_lengths``.
        groups: The ranks; by default Megatron-Core's.

    Returns:
        A function of the logits, ``[1, T, V / TP]`` packed, or ``[B, L, V / TP]`` with ``qkv_format: bshd``. It returns
        the loss, the number of samples or of this rank's response tokens (0-dim, int32), and ``[total, count]`` of
        every metric. These are exact under any sum over micro-batches, data- and context-parallel ranks. Metrics of the
        correction count only the samples in which they were measured.
    """
    host = Host(find_groups() if groups is None else groups, plain_scores)
    run, cp_size = current_run(args, whole_loss=True), host.groups.cp_size
    per_token = run.config.correction.per_token_loss

    def loss_func(output_tensor: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        found = batch_loss(run, host, batch, output_tensor)
        number = found.response_T.sum()
        if per_token:
            loss, count = found.loss, number
        else:
            number = torch.full_like(number, len(batch["response_lengths"]))
            # Every context-parallel rank counts all samples, and Megatron-Core averages over these ranks.
            loss, count = found.loss * cp_size, number / cp_size
        values = torch.stack([*found.metrics.values()])
        pairs = torch.stack([values, count.to(values.dtype).expand_as(values)], dim=1)
        # Here no host divides by samples of which nothing is known.
        return loss, number.int(), dict(zip(found.metrics, pairs.unbind(), strict=True)) | found.measured()

    return loss_func


def plain_scores(config: RunConfig, batch: Batch, logits: Tensor, layout: PackedLayout, groups: Groups) -> Scores:
    """Log-probs and entropy from logits as the hosts compute them, for a batch outside of a host.

    Raises:
        ValueError: A key asks for the function of a host.
    """
    refuse_host_scoring(config)
    part, temperature = megatron_vocabulary(), positive_temperature(config)
    return fused_scores(config, batch, logits, layout, groups, part=part, temperature=temperature)


def refuse_host_scoring(config: RunConfig) -> None:
    """Refuse a key that asks for the function of a host."""
    if chosen_loss(config).scoring.said == "host":
        raise ValueError(
            "mis_loss_scoring: host: neither slime nor Miles runs here, so no host can score; remove the key"
        )


def megatron_vocabulary() -> VocabularyPart:
    """This rank's part of the vocabulary, where Megatron-Core is initialised; else all of it."""
    megatron = initialized_megatron()
    if megatron is None:
        return VocabularyPart()
    return VocabularyPart.of_place(
        megatron.get_tensor_model_parallel_rank(),
        megatron.get_tensor_model_parallel_world_size(),
        megatron.get_tensor_model_parallel_group(),
    )
