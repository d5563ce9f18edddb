# SPDX-License-Identifier: Apache-2.0
"""A trainer of long responses: passes of as many tokens as fit, logits of responses alone, scored in one fused pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from grpo.layout import build_inputs
from grpo.trainer import MicroBatch, Trainer, split_samples
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mis_ext import score_tokens


class CompactTrainer(Trainer):
    """Of padded batches whose samples are sorted by length, on one rank.

    A vocabulary of 150,000 makes logits larger than all other activations: rows of prompts and padding are never
    computed, and the gradient of a row takes the place of its logits. Of a layer only its input is kept, and the
    optimizer needs no memory of its own: two runs of 1.5 billion weights fit 80 GB.
    """

    def _build_model(self, config: TransformerConfig) -> GPTModel:
        model = super()._build_model(config)
        for layer in model.decoder.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
        return model

    def reset_optimizer(self, *, lr: float) -> None:
        """See :class:`~grpo.trainer.Trainer`."""
        super().reset_optimizer(lr=lr)
        for group in self._optimizer.param_groups:
            group |= {"fused": True, "foreach": False}

    def micro_batches(self, data: dict[str, Any]) -> list[MicroBatch]:
        """See :class:`~grpo.trainer.Trainer`; each micro-batch is padded to its own longest sample."""
        lengths = data["total_lengths"]
        return [
            MicroBatch(
                samples=slice(start, stop),
                inputs=build_inputs(
                    data["tokens"][start:stop],
                    data["response_lengths"][start:stop],
                    max_seq_lens=[max(lengths[start:stop])] * (stop - start),
                    cp_rank=0,
                    cp_size=1,
                    device=self._ranks.device,
                ),
            )
            for start, stop in pairwise(cuts(lengths, self._args.max_tokens))
        ]

    def _logits(self, model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        """Of the tokens of responses only, ``[1, R, V]``."""
        row_R = batch.inputs.logit_index_R

        def chosen(_: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            hidden_SBH, *rest = args
            return hidden_SBH.transpose(0, 1).flatten(0, 1).index_select(0, row_R).unsqueeze(1), *rest

        hook = self._model.module.output_layer.register_forward_pre_hook(chosen)
        try:
            return super()._logits(model, batch)
        finally:
            hook.remove()

    def _rows(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        return logits.flatten(0, 1)

    def _policy_loss(self, data: dict[str, Any], batch: MicroBatch, logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Responses that have no scores yet get them from the pass that trains on them."""
        log_prob_T = self._log_probs(logits, batch)
        if data["log_probs"][batch.samples.start] is None:
            data["log_probs"][batch.samples] = split_samples(log_prob_T.detach(), batch)
        return super()._policy_loss(data, batch, log_prob_T)

    def _log_probs(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        if logits.dim() == 1:
            return logits
        scores = score_tokens(
            self._rows(logits, batch),
            batch.inputs.target_R,
            temperature=self._args.rollout_temperature,
            entropy="none",
            inplace=True,
        )
        return scores.log_prob_T


def cuts(lengths: Sequence[int], max_tokens: int) -> list[int]:
    """Where micro-batches begin, and the end of the last one: each takes samples as long as they fit, at least one."""
    starts = [0]
    for index in range(len(lengths)):
        count = index + 1 - starts[-1]
        if count > 1 and count * max(lengths[starts[-1] : index + 1]) > max_tokens:
            starts.append(index)
    return [*starts, len(lengths)]
