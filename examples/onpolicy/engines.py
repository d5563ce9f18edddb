"""The inference engines of the demonstration: each holds its own copy of the policy and samples from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from grpo.cpu import megatron_device
from grpo.engine import Completion, TransformersEngine
from grpo.model import ModelShape, build_model, hf_config, transformer_config
from megatron.core.inference.contexts import StaticInferenceContext
from torch import Tensor, nn

from mis_ext.onpolicy.recording.name_map import Parts
from mis_ext.onpolicy.recording.recorder import Recorder, record
from mis_ext.onpolicy.recording.recordings import Recording
from mis_ext.onpolicy.recording.rows import Rows

from .names import TRAINER_MODULES, TRANSFORMERS_MODULES, to_transformers
from .pieces import (
    FixedBlockAttention,
    Piece,
    Pieces,
    align_norms,
    cast_rotary_frequencies,
    engine_attention,
    products,
    sampled_log_probs,
)
from .trainer import Trainer


class Recorded(Protocol):
    """What was recorded, here or in another process."""

    def recording(self) -> Recording:
        """What was recorded, complete when recording is over."""
        ...


class Engine(Protocol):
    """An inference engine."""

    pieces: Pieces
    """The pieces that matter with this engine."""

    names: Mapping[str, str | Parts]
    """From the trainer's module names to the engine's."""

    unpaired: Sequence[str]
    """Modules whose outputs have no counterpart, or not all of them."""

    def update_weights(self, trainer: Trainer, *, version: int) -> None:
        """Take over the trainer's weights."""
        ...

    def generate(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[Completion]:
        """Sample one response to each prompt, at temperature 1 from the whole distribution."""
        ...

    def record(self) -> AbstractContextManager[Recorded]:
        """Record the modules that have a counterpart while the response to a single prompt, sequence 0, is sampled."""
        ...

    def close(self) -> None:
        """Release what the engine holds."""
        ...


class ContinuousBatching:
    """transformers: paged cache, chunked prefill, several requests in one batch, a thread of its own."""

    # Its activation rounds as the trainer's does.
    pieces = frozenset(Piece) - {Piece.ACTIVATION}
    # The trainer has angles only, no sines.
    unpaired = ("model.rotary_emb",)

    def __init__(
        self, shape: ModelShape, pieces: Pieces, *, dtype: torch.dtype, seed: int, max_batch_tokens: int
    ) -> None:
        self._engine = TransformersEngine(
            hf_config(shape),
            seed=seed,
            dtype=dtype,
            attention=engine_attention(pieces),
            max_batch_tokens=max_batch_tokens,
        )
        if Piece.NORM in pieces:
            align_norms(self.model)
        if Piece.ROPE not in pieces:
            cast_rotary_frequencies(self.model, dtype)
        self.names = to_transformers(shape, dtype, self.model.device)
        self._stack = ExitStack()
        self._stack.enter_context(products(pieces, self.model))

    @property
    def model(self) -> nn.Module:
        """The model that generates."""
        return self._engine.model

    def update_weights(self, trainer: Trainer, *, version: int) -> None:
        """See :class:`Engine`."""
        self._engine.update_weights(trainer.export_weights(), version=version)

    def generate(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[Completion]:
        """See :class:`Engine`."""
        return self._engine.generate([*prompts], max_new_tokens=max_new_tokens, temperature=1.0)

    @contextmanager
    def record(self) -> Iterator[Recorder]:
        """See :class:`Engine`."""

        def rows_of(_: nn.Module, __: tuple[Any, ...], kwargs: dict[str, Any]) -> Rows:
            position = kwargs["position_ids"]
            return Rows(sequence=torch.zeros_like(position), position=position, kept=kwargs["logits_indices"])

        usual, self._engine.cuda_graphs = self._engine.cuda_graphs, False
        with record(self.model, modules=TRANSFORMERS_MODULES, rows_of=rows_of) as recorder:
            yield recorder
        self._engine.cuda_graphs = usual

    def close(self) -> None:
        """See :class:`Engine`."""
        self._engine.close()
        self._stack.close()


class StaticContext:
    """Megatron-Core's own inference: the trainer's model class with a static cache, prompts of one length together."""

    pieces = frozenset({Piece.TRAINER_ATTENTION, Piece.ENGINE_ATTENTION, Piece.PRODUCTS})
    names: Mapping[str, str | Parts] = {}
    # One table for all positions.
    unpaired = ("rotary_pos_emb",)

    def __init__(
        self, shape: ModelShape, pieces: Pieces, *, dtype: torch.dtype, device: torch.device, seed: int
    ) -> None:
        self._pieces, self._device, self._version = pieces, device, 0
        config = transformer_config(shape, context_parallel_size=1, calculate_per_token_loss=False, dtype=dtype)
        core_attention = FixedBlockAttention if Piece.ENGINE_ATTENTION in pieces else None
        with megatron_device(device):
            self.model = build_model(shape, config, seed=seed, core_attention=core_attention)
        self.model.to(device=device, dtype=dtype).eval()
        if Piece.NORM in pieces:
            align_norms(self.model)
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
        batch, length = tokens.shape
        context = StaticInferenceContext(batch, length + max_new_tokens)
        position = torch.arange(length, device=self._device).expand_as(tokens)
        sampled, log_probs = [], []
        with ExitStack() as stack:
            stack.enter_context(megatron_device(self._device))
            stack.enter_context(products(self._pieces, self.model))
            for _ in range(max_new_tokens):
                logits = self.model(tokens, position, None, inference_context=context, runtime_gather_output=True)[
                    :, -1
                ]
                context.sequence_len_offset += tokens.shape[1]
                context.enable_decode_mode()
                tokens = logits.float().softmax(-1).multinomial(1, generator=self._generator)
                sampled.append(tokens[:, 0])
                log_probs.append(sampled_log_probs(logits, tokens[:, 0], self._pieces))
                position = torch.full_like(tokens, context.sequence_len_offset)
        return torch.stack(sampled, 1).tolist(), torch.stack(log_probs, 1).tolist()

    @contextmanager
    def record(self) -> Iterator[Recorder]:
        """See :class:`Engine`."""

        def rows_of(_: nn.Module, args: tuple[Any, ...], __: dict[str, Any]) -> Rows:
            position = args[1]
            last = torch.tensor([position.shape[1] - 1])
            return Rows(sequence=torch.zeros_like(position), position=position, kept=last)

        with record(self.model, modules=TRAINER_MODULES, rows_of=rows_of, layout="sbh") as recorder:
            yield recorder

    def close(self) -> None:
        """See :class:`Engine`."""
