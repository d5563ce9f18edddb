# SPDX-License-Identifier: Apache-2.0
"""The trainer: a Megatron-Core ``GPTModel`` on its local layer spec, trained by policy gradient."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from grpo.conversion import export_weights, load_weights
from grpo.cpu import megatron_device
from grpo.model import build_model, transformer_config
from torch import Tensor

from mis_ext.onpolicy import simulate_kv_cache
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.recordings import Recording
from mis_ext.onpolicy.recording.rows import Rows

from .names import trainer_modules
from .pieces import FixedBlockAttention, Piece, Pieces, align_norms, products, sampled_log_probs
from .policy import Policy

# A random model's logits are nearly equal. With these values its distribution has peaks, and norm weights have an
# effect.
LOGIT_SCALE = 8.0
NORM_SPREAD = 0.1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A prompt and its response, as token ids."""

    prompt: list[int]
    response: list[int]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response."""
        return self.prompt + self.response


class Trainer:
    """Scores and trains on padded batches of samples; AdamW on float32 copies of the weights.

    ``cache``: the engine's 8-bit cache format, ``fp8_e4m3`` or ``fp8_e5m2``; None: the dtype of the model.
    """

    def __init__(
        self,
        policy: Policy,
        pieces: Pieces,
        *,
        dtype: torch.dtype,
        device: torch.device,
        seed: int,
        lr: float,
        cache: str | None = None,
    ) -> None:
        shape = policy.shape
        self._shape, self._pieces, self._dtype, self._device = shape, pieces, dtype, device
        config = transformer_config(shape, context_parallel_size=1, calculate_per_token_loss=False, dtype=dtype)
        core_attention = FixedBlockAttention if Piece.TRAINER_ATTENTION in pieces else None
        with megatron_device(device):
            self.model = build_model(shape, config, seed=seed, core_attention=core_attention)
            if policy.weights is None:
                self._shake(seed)
            else:
                load_weights(self.model, policy.weights, shape)
            self.model.to(device=device, dtype=dtype)
        if Piece.NORM in pieces:
            align_norms(self.model)
        if Piece.CACHE in pieces and cache is not None:
            simulate_kv_cache(self.model, cache)
        self._masters = {name: p.detach().float().clone() for name, p in self.model.named_parameters()}
        self._optimizer = torch.optim.AdamW(self._masters.values(), lr=lr)

    @torch.no_grad()
    def _shake(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.model.parameters():
            if parameter.dim() == 1:
                parameter.add_(NORM_SPREAD * torch.randn(parameter.shape, generator=generator))
        self.model.output_layer.weight.mul_(LOGIT_SCALE)

    def log_probs(self, samples: list[Sample]) -> list[Tensor]:
        """Log-probs of each response's tokens, float32, with gradient if enabled."""
        longest = max(len(sample.token_ids) for sample in samples)
        tokens = torch.zeros(len(samples), longest, dtype=torch.long)
        for row, sample in zip(tokens, samples, strict=True):
            row[: len(sample.token_ids)] = torch.tensor(sample.token_ids)
        tokens = tokens.to(self._device)
        positions = torch.arange(longest, device=self._device).expand_as(tokens)
        with ExitStack() as stack:
            stack.enter_context(megatron_device(self._device))
            stack.enter_context(products(self._pieces, self.model))
            logits = self.model(tokens, positions, None)
        scored = []
        for index, sample in enumerate(samples):
            first, last = len(sample.prompt), len(sample.token_ids)
            # The logits at a position score the token after it.
            scored.append(
                sampled_log_probs(logits[index, first - 1 : last - 1], tokens[index, first:last], self._pieces)
            )
        return scored

    def backward(self, samples: list[Sample], rewards: list[float]) -> None:
        """Forward and backward of the policy gradient with centered rewards."""
        advantages = torch.tensor(rewards) - sum(rewards) / len(rewards)
        pairs = zip(self.log_probs(samples), advantages.tolist(), strict=True)
        loss = -torch.stack([advantage * scored.mean() for scored, advantage in pairs]).mean()
        loss.backward()

    def step(self) -> None:
        """Apply the gradients of one :meth:`backward`."""
        parameters = dict(self.model.named_parameters())
        for name, master in self._masters.items():
            master.grad = parameters[name].grad.float()
            parameters[name].grad = None
        torch.nn.utils.clip_grad_norm_(self._masters.values(), 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for name, master in self._masters.items():
                parameters[name].copy_(master)

    def record(self, sample: Sample) -> Recording:
        """Record the modules with an equivalent while one sample is scored as sequence 0.

        Its last token is omitted, because no engine computes the logits after it.
        """
        position = torch.arange(len(sample.token_ids))
        position[-1] = -1
        rows = Rows(sequence=torch.zeros(1, 1, dtype=torch.long), position=position[None])
        with record(self.model, modules=trainer_modules(self._shape), layout="sbh") as recorder, recorder.rows(rows):
            with torch.no_grad():
                self.log_probs([sample])
            return recorder.recording()

    def export_weights(self) -> dict[str, Tensor]:
        """The weights by transformers name."""
        return export_weights(self.model, self._shape)
