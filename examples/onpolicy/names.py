# SPDX-License-Identifier: Apache-2.0
"""Map modules of the trainer to modules of the engine."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from grpo.model import ModelShape
from torch import Tensor

from mis_ext.onpolicy.recording.compare import Parts

# Core attention is not a module in transformers, so a difference in it is a difference of ``self_attention``.
_TRAINER_MODULES = (
    "",
    "embedding.word_embeddings",
    "rotary_pos_emb",
    "decoder.layers.*.input_layernorm",
    "decoder.layers.*.self_attention",
    "decoder.layers.*.self_attention.linear_qkv",
    "decoder.layers.*.self_attention.q_layernorm",
    "decoder.layers.*.self_attention.k_layernorm",
    "decoder.layers.*.self_attention.linear_proj",
    "decoder.layers.*.pre_mlp_layernorm",
    "decoder.layers.*.mlp",
    "decoder.layers.*.mlp.linear_fc1",
    "decoder.layers.*.mlp.linear_fc2",
    "decoder.final_layernorm",
    "output_layer",
)
_TRANSFORMERS_MODULES = (
    "",
    "model.embed_tokens",
    "model.rotary_emb",
    "model.layers.*_layernorm",
    "model.layers.*.self_attn",
    "model.layers.*_proj",
    "model.layers.*_norm",
    "model.layers.*.mlp",
    "model.norm",
    "lm_head",
)


def trainer_modules(shape: ModelShape) -> list[str]:
    """Modules of Megatron-Core's model to record."""
    heads = ("decoder.layers.*.self_attention.q_layernorm", "decoder.layers.*.self_attention.k_layernorm")
    return [name for name in _TRAINER_MODULES if shape.has_qk_norm or name not in heads]


def transformers_modules(shape: ModelShape) -> list[str]:
    """Modules of transformers' model to record."""
    return [name for name in _TRANSFORMERS_MODULES if shape.has_qk_norm or name != "model.layers.*_norm"]


def to_transformers(shape: ModelShape, dtype: torch.dtype, device: torch.device) -> Mapping[str, str | Parts]:
    """Map Megatron-Core's module names to transformers' on ``device``. Fused projections are split."""
    queries = shape.num_heads // shape.num_kv_heads

    def qkv(rows: Tensor) -> dict[str, Tensor]:
        groups = rows.view(len(rows), shape.num_kv_heads, queries + 2, shape.head_dim)
        parts = zip(("q_proj", "k_proj", "v_proj"), groups.split([queries, 1, 1], dim=2), strict=True)
        return {f"model.layers.{{layer}}.self_attn.{name}": part.flatten(1) for name, part in parts}

    def gate_up(rows: Tensor) -> dict[str, Tensor]:
        gate, up = rows.chunk(2, dim=-1)
        return {"model.layers.{layer}.mlp.gate_proj": gate, "model.layers.{layer}.mlp.up_proj": up}

    def rotary(rows: Tensor) -> dict[str, Tensor]:
        # Angles; transformers has their cosines here, rounded by its device.
        return {"model.rotary_emb": rows.to(device).cos().to(dtype).cpu()}

    norms_of_heads = {
        f"decoder.layers.{{layer}}.self_attention.{name}_layernorm": f"model.layers.{{layer}}.self_attn.{name}_norm"
        for name in ("q", "k") * shape.has_qk_norm
    }
    return {
        "embedding.word_embeddings": "model.embed_tokens",
        "rotary_pos_emb": rotary,
        "decoder.layers.{layer}.input_layernorm": "model.layers.{layer}.input_layernorm",
        "decoder.layers.{layer}.self_attention": "model.layers.{layer}.self_attn",
        "decoder.layers.{layer}.self_attention.linear_qkv": qkv,
        **norms_of_heads,
        "decoder.layers.{layer}.self_attention.linear_proj": "model.layers.{layer}.self_attn.o_proj",
        "decoder.layers.{layer}.pre_mlp_layernorm": "model.layers.{layer}.post_attention_layernorm",
        "decoder.layers.{layer}.mlp": "model.layers.{layer}.mlp",
        "decoder.layers.{layer}.mlp.linear_fc1": gate_up,
        "decoder.layers.{layer}.mlp.linear_fc2": "model.layers.{layer}.mlp.down_proj",
        "decoder.final_layernorm": "model.norm",
        "output_layer": "lm_head",
    }
