# SPDX-License-Identifier: Apache-2.0
"""SGLang's real engine in the demonstration: its own scheduler, radix cache and sampler."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from grpo.engine import Completion
from grpo.engine_settings import Scalar
from grpo.model import ModelShape
from grpo.sglang_engine import SGLangEngine
from torch import Tensor

from mis_ext.onpolicy.recording.compare import Parts
from mis_ext.onpolicy.recording.recordings import Recording

from .pieces import Piece, Pieces
from .policy import Policy
from .sglang_scheduler import run_scheduler
from .trainer import Trainer

MAX_GRAPHED_REQUESTS = 32
"""The number of requests in the largest workload of the demonstration."""


class SGLang:
    """``sglang.Engine`` in its own process. Its scheduler, in another process, runs an aligned model."""

    # On a CPU, its rotary embedding and activation equal those of transformers.
    pieces = frozenset(Piece) - (frozenset() if torch.cuda.is_available() else {Piece.ROPE, Piece.ACTIVATION})
    settings: Mapping[str, Scalar] = {}
    # The trainer has angles, but SGLang has rotated queries and keys. SGLang normalizes all heads of all tokens as one
    # list of rows, and its other norms also return the residual.
    unpaired = ("rotary_pos_emb", "*.q_layernorm", "*.k_layernorm", "model.layers.*_layernorm", "model.norm")

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
        self.names = to_sglang(policy.shape)
        on_gpu = torch.cuda.is_available()
        settings = {**self.settings, "kv_cache_dtype": cache if cache and on_gpu else "auto"}
        if pieces and on_gpu:
            # Prefill attention needs lengths on the CPU. With overlap, an ended request is decoded and recorded once
            # more.
            settings |= {"disable_prefill_cuda_graph": True, "disable_overlap_schedule": True}
        if on_gpu:
            # Every alignment captures all graphs again. Larger decodes would run without graphs.
            settings |= {"cuda_graph_max_bs_decode": MAX_GRAPHED_REQUESTS}
        self._directory, self._engine = _engine_for(policy, dtype, seed, max_batch_tokens, settings)
        # The cache was computed with another alignment.
        self._engine.flush_cache()
        self._engine.call_scheduler(
            "align",
            norms=Piece.NORM in pieces,
            attention=Piece.ENGINE_ATTENTION in pieces,
            products=Piece.PRODUCTS in pieces,
            rotary=Piece.ROPE in pieces,
            activation=Piece.ACTIVATION in pieces,
            formula=bool(pieces),
            rounded_cache=None if on_gpu else cache,
        )

    def update_weights(self, trainer: Trainer, *, version: int) -> None:
        """See :class:`Engine`."""
        self._engine.update_weights(trainer.export_weights(), version=version)

    def generate(self, prompts: Sequence[list[int]], *, max_new_tokens: int) -> list[Completion]:
        """See :class:`Engine`."""
        return self._engine.generate([*prompts], max_new_tokens=max_new_tokens, temperature=1.0)

    @contextmanager
    def record(self) -> Iterator[SavedRecording]:
        """See :class:`Engine`."""
        path = Path(self._directory.name) / "recording.pt"
        self._engine.call_scheduler("start_recording")
        yield SavedRecording(path)
        self._engine.call_scheduler("save_recording", path=str(path))

    def close(self) -> None:
        """See :class:`Engine`."""
        # The next experiment reuses the engine.


class DeterministicSGLang(SGLang):
    """The same in SGLang's own deterministic mode, which its CPU engine does not have."""

    settings: Mapping[str, Scalar] = {"enable_deterministic_inference": True}


class _Running(NamedTuple):
    directory: tempfile.TemporaryDirectory[str]
    engine: SGLangEngine


_running: dict[Hashable, _Running] = {}


def _engine_for(
    policy: Policy, dtype: torch.dtype, seed: int, max_batch_tokens: int, settings: dict[str, Scalar]
) -> _Running:
    """The running engine, if possible from the previous experiment: a start takes longer than an experiment."""
    key = (policy.shape, policy.config.model_type, dtype, seed, max_batch_tokens, *settings.items())
    if key not in _running:
        stop_engine()
        directory = tempfile.TemporaryDirectory(prefix="sglang-on-policy-")
        engine = SGLangEngine(
            hf_config=policy.config,
            seed=seed,
            workdir=Path(directory.name),
            dtype=dtype,
            max_batch_tokens=max_batch_tokens,
            settings=settings,
            run_scheduler=run_scheduler,
        )
        _running[key] = _Running(directory, engine)
    return _running[key]


def stop_engine() -> None:
    """Stop the engine of the last experiment, if any. The interpreter does this at exit too."""
    for directory, engine in _running.values():
        engine.close()
        directory.cleanup()
    _running.clear()


class SavedRecording(NamedTuple):
    """A recording that another process writes."""

    path: Path

    def recording(self) -> Recording:
        """What was recorded."""
        return Recording.load(self.path)


def to_sglang(shape: ModelShape) -> Mapping[str, str | Parts]:
    """Map Megatron-Core's module names to SGLang's, whose fused projection is ordered by kind, not by head."""
    queries = shape.num_heads // shape.num_kv_heads

    def qkv(rows: Tensor) -> dict[str, Tensor]:
        groups = rows.view(len(rows), shape.num_kv_heads, queries + 2, shape.head_dim)
        parts = [part.flatten(1) for part in groups.split([queries, 1, 1], dim=2)]
        return {"model.layers.{layer}.self_attn.qkv_proj": torch.cat(parts, dim=1)}

    def logits(rows: Tensor) -> dict[str, Tensor]:
        # SGLang's logits are float32 for any dtype of the matmul.
        return {"logits_processor": rows.float()}

    return {
        "embedding.word_embeddings": "model.embed_tokens",
        "decoder.layers.{layer}.input_layernorm": "model.layers.{layer}.input_layernorm",
        "decoder.layers.{layer}.self_attention": "model.layers.{layer}.self_attn",
        "decoder.layers.{layer}.self_attention.linear_qkv": qkv,
        "decoder.layers.{layer}.self_attention.linear_proj": "model.layers.{layer}.self_attn.o_proj",
        "decoder.layers.{layer}.pre_mlp_layernorm": "model.layers.{layer}.post_attention_layernorm",
        "decoder.layers.{layer}.mlp": "model.layers.{layer}.mlp",
        "decoder.layers.{layer}.mlp.linear_fc1": "model.layers.{layer}.mlp.gate_up_proj",
        "decoder.layers.{layer}.mlp.linear_fc2": "model.layers.{layer}.mlp.down_proj",
        "decoder.final_layernorm": "model.norm",
        "output_layer": logits,
        "": logits,
    }
