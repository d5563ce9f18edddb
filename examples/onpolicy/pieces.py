# SPDX-License-Identifier: Apache-2.0
"""The pieces that must be equal on both sides for bitwise equality."""

from __future__ import annotations

import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from mis_ext.onpolicy.batch_invariant import attention, batch_invariant_forward, is_batch_invariant, rms_norm

PAGED_ATTENTION = "fixed_block"
# A name that gets a mask in every version, and that nothing else uses here.
OWN_ATTENTION = "paged|eager"


class Piece(str, Enum):
    """One operation that both sides must compute in the same way."""

    NORM = "norm rounding"
    TRAINER_ATTENTION = "trainer attention"
    ENGINE_ATTENTION = "engine attention"
    ROPE = "rotary frequencies"
    ACTIVATION = "activation rounding"
    PRODUCTS = "fixed-tile products"
    FORMULA = "log-prob formula"
    # Only for an engine with an 8-bit cache: the trainer rounds keys and values like the engine.
    CACHE = "cache rounding"


Pieces = frozenset[Piece]
ALL: Pieces = frozenset(Piece)
NONE: Pieces = frozenset()
TRAINER_PIECES = (Piece.NORM, Piece.TRAINER_ATTENTION, Piece.PRODUCTS, Piece.FORMULA)
"""The pieces that change the trainer's own computation."""


def align_norms(model: nn.Module) -> None:
    """Give every RMSNorm of a model, Megatron-Core's or transformers', the same function."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_norm_forward, module)


def _norm_forward(self: nn.Module, x: Tensor) -> Tensor:
    eps = self.eps if isinstance(self, nn.RMSNorm) else self.variance_epsilon
    return rms_norm(x, self.weight, eps)


class FixedBlockAttention(MegatronModule):
    """Core attention for Megatron-Core's layer spec, which the engine also uses."""

    def __init__(self, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend causally within each sequence. The last query is aligned with the last key.

        Args:
            query: ``[S, B, heads, dim]``.
            key: The same with the number of key-value heads; longer when a cache comes before.
            value: As ``key``.
            attention_mask: Not used: padding is on the right, where causal attention excludes it.
            attn_mask_type: Not used.
            attention_bias: Not used.
            packed_seq_params: Must be None: this example pads.

        Returns:
            ``[S, B, heads * dim]``.
        """
        assert packed_seq_params is None
        (num_q, batch), num_k = query.shape[:2], key.shape[0]
        output = attention(
            *(x.transpose(0, 1).flatten(0, 1) for x in (query, key, value)),
            cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32, device=query.device) * num_q,
            cu_seqlens_k=torch.arange(batch + 1, dtype=torch.int32, device=query.device) * num_k,
            max_seqlen_q=num_q,
            max_seqlen_k=num_k,
        )
        return output.unflatten(0, (batch, num_q)).transpose(0, 1).flatten(2)


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of transformers' continuous batching: keys and values from its paged cache, in the trainer's blocks."""
    key, value = _cached(module, key, value, kwargs)
    # Their names before transformers 5.19.
    longest = "max_length" if "max_length_q" in kwargs else "max_seqlen"
    output = attention(
        *(x.squeeze(0).transpose(0, 1) for x in (query, key, value)),
        cu_seqlens_q=kwargs["cu_seq_lens_q"],
        cu_seqlens_k=kwargs["cu_seq_lens_k"],
        max_seqlen_q=kwargs[f"{longest}_q"],
        max_seqlen_k=kwargs[f"{longest}_k"],
        scale=scaling,
    )
    return output.unsqueeze(0), None


def _cached(module: nn.Module, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Keys and values ``[1, heads, K, dim]``, including those of earlier tokens.

    Before transformers 5.19, attention writes to and reads from the paged cache; from then on, the model does.
    """
    if (cache := kwargs.pop("cache", None)) is None:
        return key, value
    places = {name: kwargs[name] for name in ("read_index", "write_index")}
    states = cache.update(key, value, module.layer_idx, **places)
    return tuple(x.transpose(0, 1).unsqueeze(0) for x in states)


def own_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """The engine's own attention, that of torch, even if the mode is on: it runs in another thread without the mode."""
    states = query, *_cached(module, key, value, kwargs)
    if not is_batch_invariant():
        return sdpa_attention_forward(module, *states, attention_mask, **kwargs)
    stream = torch.cuda.current_stream() if torch.cuda.is_available() else None

    @torch.no_grad()
    def outside() -> tuple[Tensor, None]:
        with torch.cuda.stream(stream):
            return sdpa_attention_forward(module, *states, attention_mask, **kwargs)

    return _other_thread.submit(outside).result()


_other_thread = ThreadPoolExecutor(max_workers=1)
AttentionInterface.register(PAGED_ATTENTION, paged_attention)
AttentionInterface.register(OWN_ATTENTION, own_attention)


def engine_attention(pieces: Pieces) -> str:
    """Name of the attention that transformers' continuous batching uses."""
    return PAGED_ATTENTION if Piece.ENGINE_ATTENTION in pieces else OWN_ATTENTION


def cast_rotary_frequencies(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Emulate the cast of ``model.to(dtype)`` on the buffer of inverse frequencies, which should stay in float32."""
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.to(dtype)


def products(pieces: Pieces, model: nn.Module) -> AbstractContextManager[None]:
    """Run a model's forwards in the batch-invariant mode, if that piece is aligned."""
    return batch_invariant_forward(model) if Piece.PRODUCTS in pieces else nullcontext()


def sampled_log_probs(logits: Tensor, token_ids: Tensor, pieces: Pieces) -> Tensor:
    """Log-probs of tokens ``[T]`` from logits ``[T, vocabulary]``, with the engine's formula or the usual one.

    transformers' continuous batching takes the logarithm of the sampled probability.
    """
    logits = logits.float()
    if Piece.FORMULA in pieces:
        return logits.softmax(-1).gather(-1, token_ids[:, None]).log().squeeze(-1)
    return logits.log_softmax(-1).gather(-1, token_ids[:, None]).squeeze(-1)
