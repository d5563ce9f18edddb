# SPDX-License-Identifier: Apache-2.0
"""The inference engines of the demonstration. Each has its own copy of the policy and samples from it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from grpo.engine import Completion, TransformersEngine
from torch import nn
from transformers.generation.continuous_batching.cache import PagedAttentionCache

from mis_ext.onpolicy.kv_cache import DTYPES
from mis_ext.onpolicy.recording.compare import Parts
from mis_ext.onpolicy.recording.recorder import Recorder, record
from mis_ext.onpolicy.recording.recordings import Recording
from mis_ext.onpolicy.recording.rows import Rows

from .names import to_transformers, transformers_modules
from .pieces import Piece, Pieces, align_norms, cast_rotary_frequencies, engine_attention, products
from .policy import Policy
from .trainer import Trainer


class Recorded(Protocol):
    """A recording, made here or in another process."""

    def recording(self) -> Recording:
        """The recording; complete at the end of the context."""
        ...


class Engine(Protocol):
    """An inference engine."""

    pieces: Pieces
    """The pieces that matter with this engine."""

    names: Mapping[str, str | Parts]
    """Map from the trainer's module names to the engine's."""

    unpaired: Sequence[str]
    """Modules whose outputs have no equivalent, or only partly."""

    def update_weights(self, trainer: Trainer, *, version: int) -> None:
        """Load the trainer's weights."""
        ...

    def generate(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[Completion]:
        """Sample one response to each prompt, at temperature 1 from the whole distribution."""
        ...

    def record(self) -> AbstractContextManager[Recorded]:
        """Record the modules with an equivalent while the response to one prompt, sequence 0, is sampled."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


class ContinuousBatching:
    """transformers: paged cache, chunked prefill, several requests in one batch, its own thread.

    It has no 8-bit cache. With ``cache``, keys and values are rounded to 8 bits and back when written.
    """

    # Its activation rounds as the trainer's does.
    pieces = frozenset(Piece) - {Piece.ACTIVATION}
    # The trainer has angles only, no sines.
    unpaired = ("model.rotary_emb",)

    def __init__(
        self,
        policy: Policy,
        pieces: Pieces,
        *,
        dtype: torch.dtype,
        seed: int,
        max_batch_tokens: int,
        cache: str | None = None,
    ) -> None:
        self._engine = TransformersEngine(
            policy.config,
            seed=seed,
            dtype=dtype,
            attention=engine_attention(pieces),
            max_batch_tokens=max_batch_tokens,
        )
        if Piece.NORM in pieces:
            align_norms(self.model)
        if Piece.ROPE not in pieces:
            cast_rotary_frequencies(self.model, dtype)
        self._modules = transformers_modules(policy.shape)
        self.names = to_transformers(policy.shape, dtype, self.model.device)
        self._stack = ExitStack()
        self._stack.enter_context(products(pieces, self.model))
        if cache is not None:
            self._stack.enter_context(_rounded_cache(DTYPES[cache]))

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
        with record(self.model, modules=self._modules, rows_of=rows_of) as recorder:
            yield recorder
        self._engine.cuda_graphs = usual

    def close(self) -> None:
        """See :class:`Engine`."""
        self._engine.close()
        self._stack.close()


@contextmanager
def _rounded_cache(dtype: torch.dtype) -> Iterator[None]:
    """In this context, transformers' paged cache has the values of a cache of that dtype."""
    own = PagedAttentionCache.update

    def update(self: PagedAttentionCache, key_states: Any, value_states: Any, *layer: Any, **places: Any) -> Any:
        rounded = [states.to(dtype).to(states.dtype) for states in (key_states, value_states)]
        return own(self, *rounded, *layer, **places)

    PagedAttentionCache.update = update
    try:
        yield
    finally:
        PagedAttentionCache.update = own
