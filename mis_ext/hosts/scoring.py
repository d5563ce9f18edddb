"""The current policy's log-probs of the response tokens, where no host has a function for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.groups import Groups, initialized_megatron
from mis_ext.scoring import EntropyUse, Scores, score_tokens
from mis_ext.scoring.places import response_places


def tensor_parallel_place() -> tuple[Group | None, int]:
    """Megatron-Core's tensor-parallel group and this rank in it; None for a group of one."""
    megatron = initialized_megatron()
    if megatron is None or megatron.get_tensor_model_parallel_world_size() == 1:
        return None, 0
    return megatron.get_tensor_model_parallel_group(), megatron.get_tensor_model_parallel_rank()


def score_logits(
    logits: Tensor,
    batch: Mapping[str, Any],
    layout: PackedLayout,
    *,
    groups: Groups,
    is_padded: bool = False,
    temperature: float = 1.0,
    entropy: EntropyUse = "gradient",
    inplace: bool = False,
) -> Scores:
    """Log-probs and entropy of the response tokens.

    Args:
        logits: ``[1, T, V]`` packed or ``[B, L, V]`` padded, this rank's parts of sequences and vocabulary.
        batch: ``unconcat_tokens``, ``total_lengths``, and where samples are padded to other lengths ``max_seq_lens``.
        layout: The local response tokens.
        groups: The ranks that share sequences.
        is_padded: Whether the logits are ``[B, L, V]``.
        temperature: Of the rollout, by which the logits are divided.
        entropy: Whether the entropy is wanted, and with gradient.
        inplace: The gradient takes the place of the logits.
    """
    padded_lengths = None
    if is_padded:
        padded_lengths = batch.get("max_seq_lens") or [logits.shape[1] * groups.cp_size] * len(logits)
    places = response_places(
        layout,
        total_lengths=batch["total_lengths"],
        padded_lengths=padded_lengths,
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
    )
    tp_group, tp_rank = tensor_parallel_place()
    return score_tokens(
        logits,
        torch.cat([*batch["unconcat_tokens"]]).to(logits.device).index_select(0, places.token_T),
        row_T=places.row_T,
        temperature=temperature,
        entropy=entropy,
        inplace=inplace,
        tp_group=tp_group,
        tp_rank=tp_rank,
    )
