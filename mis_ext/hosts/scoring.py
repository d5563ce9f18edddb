"""The current policy's log-probs of the response tokens, from a host's batch in one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.groups import Groups, initialized_megatron
from mis_ext.hosts.packing import pack
from mis_ext.scoring import EntropyUse, KeptColumns, Scores, score_tokens
from mis_ext.scoring.places import response_places


class VocabularyPart(NamedTuple):
    """The tensor-parallel ranks, each of which has a part of the vocabulary, and this rank among them; None for one."""

    group: Group | None = None
    rank: int = 0

    @classmethod
    def of_place(cls, rank: int, size: int, group: Group) -> VocabularyPart:
        """From what a host states; a group of one rank becomes None."""
        return cls(group, rank) if size > 1 else cls()

    @classmethod
    def of_megatron(cls) -> VocabularyPart:
        """Megatron-Core's, where it is initialised."""
        megatron = initialized_megatron()
        if megatron is None:
            return cls()
        return cls.of_place(
            megatron.get_tensor_model_parallel_rank(),
            megatron.get_tensor_model_parallel_world_size(),
            megatron.get_tensor_model_parallel_group(),
        )


def score_logits(
    logits: Tensor,
    batch: Mapping[str, Any],
    layout: PackedLayout,
    *,
    groups: Groups,
    part: VocabularyPart,
    is_padded: bool = False,
    temperature: float = 1.0,
    entropy: EntropyUse = "gradient",
    kept: KeptColumns | None = None,
    inplace: bool = False,
) -> Scores:
    """Log-probs and entropy of the response tokens.

    Args:
        logits: ``[1, T, V]`` packed or ``[B, L, V]`` padded, this rank's parts of sequences and vocabulary.
        batch: ``unconcat_tokens``, ``total_lengths``, and where samples are padded to other lengths ``max_seq_lens``.
        layout: The local response tokens.
        groups: The ranks that share sequences.
        part: This rank's part of the vocabulary.
        is_padded: Whether the logits are ``[B, L, V]``.
        temperature: Of the rollout, by which the logits are divided.
        entropy: Whether the entropy is wanted, and with gradient.
        kept: The tokens among which each one was drawn; None for all.
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
    all_tokens = pack("unconcat_tokens", batch["unconcat_tokens"], batch["total_lengths"], device=logits.device)
    return score_tokens(
        logits,
        # Of no samples at all there are no integers.
        all_tokens.long().index_select(0, places.token_T),
        row_T=places.row_T,
        temperature=temperature,
        entropy=entropy,
        kept=kept,
        inplace=inplace,
        tp_group=part.group,
        tp_rank=part.rank,
    )
