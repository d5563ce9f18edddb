# SPDX-License-Identifier: Apache-2.0
"""The trainer's half of an exact agreement with SGLang; the engine's half is ``onpolicy.sglang_scheduler``."""

from __future__ import annotations

import torch
from grpo.model import build_model
from grpo.trainer import MicroBatch, Trainer
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from onpolicy.pieces import ALL, FixedBlockAttention, align_norms, products, sampled_log_probs
from torch import Tensor


class AlignedTrainer(Trainer):
    """Of padded batches: norms, attention, products and log-probs as an aligned SGLang computes them."""

    def _build_model(self, config: TransformerConfig) -> GPTModel:
        model = build_model(self._shape, config, seed=self._args.seed, core_attention=FixedBlockAttention)
        align_norms(model)
        return model

    def _logits(self, model: torch.nn.Module, batch: MicroBatch) -> Tensor:
        with products(ALL, model):
            return super()._logits(model, batch)

    def _log_probs(self, logits: Tensor, batch: MicroBatch) -> Tensor:
        rows_TV = self._rows(logits, batch).float() / self._args.rollout_temperature
        return sampled_log_probs(rows_TV, batch.inputs.target_R, ALL)
