# SPDX-License-Identifier: Apache-2.0
"""Where the trainer's routers choose other experts than the engine's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from grpo.trainer import MicroBatch, split_samples
from torch import Tensor


@dataclass(frozen=True)
class Flips:
    """Of one scoring; empty where nothing was compared.

    Attributes:
        by_answer: For each answer and token, whether some layer has other experts at the position that predicts it.
        choices: ``[T]``: for each of these tokens, the share of its choices, over all layers, that differ.
    """

    by_answer: list[Tensor] = field(default_factory=list)
    choices: Tensor | None = None

    @classmethod
    def of(cls, own: Sequence[Tensor], batches: Sequence[MicroBatch]) -> Flips:
        """Compare what the trainer's routers chose, ``[rows, layers, K]`` of each pass, with the engine's experts."""
        by_answer, choices = [], []
        for own_NLK, batch in zip(own, batches, strict=True):
            assert batch.routing is not None
            rows_T = _rows(batch)
            own_TLK, engine_TLK = own_NLK[rows_T], batch.routing.experts_TLK.to(own_NLK.device)[rows_T]
            # Experts of a token have no order.
            differs_TC = (own_TLK[..., None] != engine_TLK[..., None, :]).all(-1).flatten(1)
            by_answer += split_samples(differs_TC.any(1), batch)
            choices.append(differs_TC.float().mean(1))
        return cls(by_answer, torch.cat(choices))

    def shares(self) -> dict[str, float]:
        """Of tokens with other experts in some layer, and of choices; nothing where nothing was compared."""
        if self.choices is None:
            return {}
        tokens = torch.cat(self.by_answer).float().mean()
        return {"routing_flips": float(tokens), "routing_choices": float(self.choices.mean())}


def _rows(batch: MicroBatch) -> Tensor:
    """Which rows of the routers predict the tokens of answers: Megatron-Core turns ``[B, S]`` into ``[S, B]``."""
    index_T = batch.inputs.logit_index_R
    if batch.inputs.packed_seq_params is not None:
        return index_T
    num_rows, width = batch.inputs.tokens.shape
    return index_T % width * num_rows + index_T // width
