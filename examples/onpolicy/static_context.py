# SPDX-License-Identifier: Apache-2.0
"""Megatron-Core's own inference as an engine of the demonstration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import Any

import torch
from grpo.cpu import megatron_device
from grpo.engine import Completion
from grpo.model import build_model, transformer_config
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn

from mis_ext.onpolicy.recording.compare import Parts
from mis_ext.onpolicy.recording.recorder import Recorder, record
from mis_ext.onpolicy.recording.rows import Rows

from .names import trainer_modules
from .pieces import FixedBlockAttention, Piece, Pieces, align_norms, products, sampled_log_probs
from .policy import Policy
from .trainer import Trainer


class StaticContext:
    """Megatron-Core's own inference: the trainer's model class with a static cache; equally long prompts run together.

    Attributes:
        cuda_graphs: Whether to replay decodes as CUDA graphs, which do not call hooks of modules. Default: on a GPU,
            with attention in fixed blocks.
    """

    pieces = frozenset({Piece.TRAINER_ATTENTION, Piece.ENGINE_ATTENTION, Piece.PRODUCTS})
    names: Mapping[str, str | Parts] = {}
    # One table for all positions.
    unpaired = ("rotary_pos_emb",)

    def __init__(self, policy: Policy, pieces: Pieces, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        shape = policy.shape
        self._pieces, self._device, self._version = pieces, device, 0
        self._max_length = shape.max_length
        self._modules = trainer_modules(shape)
        config = transformer_config(shape, context_parallel_size=1, calculate_per_token_loss=False, dtype=dtype)
        core_attention = FixedBlockAttention if Piece.ENGINE_ATTENTION in pieces else None
        with megatron_device(device):
            self.model = build_model(shape, config, seed=seed, core_attention=core_attention)
        self.model.to(device=device, dtype=dtype).eval()
        if Piece.NORM in pieces:
            align_norms(self.model)
        # Megatron-Core drops a position table after 32 other tables, but graphs would still read it.
        self.model.rotary_pos_emb.forward = lru_cache(maxsize=None)(self.model.rotary_pos_emb.forward)
        # Megatron-Core's own attention uses a buffer that any larger call replaces, and needs random states.
        self.cuda_graphs = device.type == "cuda" and core_attention is not None
        self._decoders: dict[int, _Decoder] = {}
        self._generator = torch.Generator(device).manual_seed(seed)

    def update_weights(self, trainer: Trainer, *, version: int) -> None:
        """See :class:`Engine`."""
        self.model.load_state_dict(trainer.model.state_dict())
        self._version = version

    def generate(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[Completion]:
        """See :class:`Engine`."""
        by_length = defaultdict(list)
        for index, prompt in enumerate(prompts):
            by_length[len(prompt)].append(index)
        completions: dict[int, Completion] = {}
        for indices in by_length.values():
            batch = torch.tensor([prompts[index] for index in indices], device=self._device)
            for index, tokens, log_probs in zip(indices, *self._generate(batch, max_new_tokens), strict=True):
                completions[index] = Completion(token_ids=tokens, log_probs=log_probs, weight_version=self._version)
        return [completions[index] for index in range(len(prompts))]

    @torch.no_grad()
    def _generate(self, tokens: Tensor, max_new_tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        size = tokens.shape[0]
        if size not in self._decoders:
            self._decoders[size] = _Decoder(self.model, tokens.new_zeros(size, 1), self._max_length)
        decoder = self._decoders[size]
        decoder.reset()
        sampled, log_probs = [], []
        with ExitStack() as stack:
            stack.enter_context(megatron_device(self._device))
            stack.enter_context(products(self._pieces, self.model))
            for _ in range(max_new_tokens):
                logits = decoder.advance(tokens, cuda_graphs=self.cuda_graphs)
                tokens = logits.float().softmax(-1).multinomial(1, generator=self._generator)
                sampled.append(tokens[:, 0])
                log_probs.append(sampled_log_probs(logits, tokens[:, 0], self._pieces))
        return torch.stack(sampled, 1).tolist(), torch.stack(log_probs, 1).tolist()

    @contextmanager
    def record(self) -> Iterator[Recorder]:
        """See :class:`Engine`."""

        def rows_of(_: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> Rows:
            position = args[1]
            last = torch.tensor([position.shape[1] - 1])
            return Rows(sequence=torch.zeros_like(position), position=position, kept=last)

        usual, self.cuda_graphs = self.cuda_graphs, False
        with record(self.model, modules=self._modules, rows_of=rows_of, layout="sbh") as recorder:
            yield recorder
        self.cuda_graphs = usual

    def close(self) -> None:
        """See :class:`Engine`."""


class _Decoder:
    """Forwards of a fixed number of sequences in one static cache.

    Megatron-Core keeps the cache position as a Python number, so every position has its own CUDA graph.
    """

    def __init__(self, model: GPTModel, tokens: Tensor, max_length: int) -> None:
        """Allocate a tensor ``[B, 1]`` for the tokens that graphs read."""
        self._model, self._tokens = model, tokens
        self._context = StaticInferenceContext(tokens.shape[0], max_length)
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}

    def reset(self) -> None:
        """Start with new sequences."""
        self._context.reset()

    def advance(self, tokens: Tensor, *, cuda_graphs: bool) -> Tensor:
        """Logits ``[B, vocabulary]`` after the next tokens ``[B, T]``. Read them before the next call."""
        position = self._context.sequence_len_offset
        if cuda_graphs and position in self._graphs:
            self._tokens.copy_(tokens)
            graph, logits = self._graphs[position]
            graph.replay()
        else:
            logits = self._forward(tokens)
            if cuda_graphs and position > 0:
                self._graphs[position] = self._capture()
        self._context.sequence_len_offset += tokens.shape[1]
        self._context.enable_decode_mode()
        return logits

    def _forward(self, tokens: Tensor) -> Tensor:
        start, stop = self._context.sequence_len_offset, self._context.sequence_len_offset + tokens.shape[1]
        position = torch.arange(start, stop, device=tokens.device).expand_as(tokens)
        return self._model(tokens, position, None, inference_context=self._context, runtime_gather_output=True)[:, -1]

    def _capture(self) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Capture a position after its first forward, because the first forward compiles."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values()))[0].pool() if self._graphs else None
        with torch.cuda.graph(graph, pool=pool):
            logits = self._forward(self._tokens)
        return graph, logits
