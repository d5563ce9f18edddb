# SPDX-License-Identifier: Apache-2.0
"""Load weights with transformers names into a Megatron-Core ``GPTModel``, and export them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from .model import ModelShape


@torch.no_grad()
def load_weights(model: GPTModel, weights: Mapping[str, Tensor], shape: ModelShape) -> None:
    """Fill the model. Every tensor-parallel rank takes its part.

    Args:
        model: A model with local layers of Megatron-Core, or with those of Transformer Engine.
        weights: By transformers name, in any dtype, on any device.
        shape: Of the model.

    Raises:
        ValueError: If heads or vocabulary cannot be split, or a parameter of the model has no weight.
    """
    rank, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    for name, number in {"key-value heads": shape.num_kv_heads, "vocabulary": shape.vocab_size}.items():
        if number % size:
            raise ValueError(f"{name}: {number} cannot be split over {size} tensor-parallel ranks")
    left = dict(model.named_parameters())

    def put(name: str, weight: Tensor, dim: int | None = None) -> None:
        left.pop(name).copy_(weight if dim is None else weight.chunk(size, dim)[rank])

    put("embedding.word_embeddings.weight", weights["model.embed_tokens.weight"], 0)
    put("decoder.final_layernorm.weight", weights["model.norm.weight"])
    if not shape.is_tied:
        put("output_layer.weight", weights["lm_head.weight"], 0)
    for index in range(shape.num_layers):
        layer, of = f"decoder.layers.{index}", f"model.layers.{index}"
        attention = f"{layer}.self_attention"
        # Transformer Engine's linear layers contain the norm of their input.
        is_fused = f"{layer}.mlp.linear_fc1.layer_norm_weight" in left
        norms = (
            ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
            if is_fused
            else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        )
        put(f"{layer}.{norms[0]}", weights[f"{of}.input_layernorm.weight"])
        put(f"{layer}.{norms[1]}", weights[f"{of}.post_attention_layernorm.weight"])
        put(f"{attention}.linear_qkv.weight", _joined_qkv(weights, of, "weight", shape), 0)
        if shape.has_qkv_bias:
            put(f"{attention}.linear_qkv.bias", _joined_qkv(weights, of, "bias", shape), 0)
        if shape.has_qk_norm:
            put(f"{attention}.q_layernorm.weight", weights[f"{of}.self_attn.q_norm.weight"])
            put(f"{attention}.k_layernorm.weight", weights[f"{of}.self_attn.k_norm.weight"])
        put(f"{attention}.linear_proj.weight", weights[f"{of}.self_attn.o_proj.weight"], 1)
        for mlp, gate, up, down in _feed_forwards(weights, f"{of}.mlp", shape):
            put(f"{layer}.mlp{mlp}.linear_fc1.weight", torch.cat([part.chunk(size)[rank] for part in (gate, up)]))
            put(f"{layer}.mlp{mlp}.linear_fc2.weight", down, 1)
        if shape.num_experts:
            put(f"{layer}.mlp.router.weight", weights[f"{of}.mlp.gate.weight"])
    if left:
        raise ValueError(f"no weights for {sorted(left)}")


@torch.no_grad()
def named_weights(model: GPTModel, shape: ModelShape) -> dict[str, Tensor]:
    """The weights of a one-rank model with local layers, on its device, in its dtype; some are views."""
    embedding = model.embedding.word_embeddings.weight.detach()
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": model.decoder.final_layernorm.weight}
    for index, layer in enumerate(model.decoder.layers):
        for name, weight in _layer_weights(layer, shape).items():
            weights[f"model.layers.{index}.{name}"] = weight
    weights["lm_head.weight"] = embedding if shape.is_tied else model.output_layer.weight
    return {name: weight.detach() for name, weight in weights.items()}


def export_weights(model: GPTModel, shape: ModelShape) -> dict[str, Tensor]:
    """The same as float32 copies on the CPU."""
    return {name: weight.float().cpu().clone() for name, weight in named_weights(model, shape).items()}


def _layer_weights(layer: torch.nn.Module, shape: ModelShape) -> dict[str, Tensor]:
    """Undo Megatron's fusions: heads are stored per key-value group, gate and up projection in one matrix."""
    attention = layer.self_attention
    weights = {
        "input_layernorm.weight": layer.input_layernorm.weight,
        **_split_qkv(attention.linear_qkv.weight, "weight", shape),
        "self_attn.o_proj.weight": attention.linear_proj.weight,
        "post_attention_layernorm.weight": layer.pre_mlp_layernorm.weight,
        **(_experts_weights(layer.mlp) if shape.num_experts else _dense_weights(layer.mlp)),
    }
    if shape.has_qkv_bias:
        weights |= _split_qkv(attention.linear_qkv.bias, "bias", shape)
    if shape.has_qk_norm:
        weights["self_attn.q_norm.weight"] = attention.q_layernorm.weight
        weights["self_attn.k_norm.weight"] = attention.k_layernorm.weight
    return weights


def _dense_weights(mlp: torch.nn.Module) -> dict[str, Tensor]:
    gate, up = mlp.linear_fc1.weight.chunk(2)
    return {
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": mlp.linear_fc2.weight,
    }


def _experts_weights(mlp: torch.nn.Module) -> dict[str, Tensor]:
    """Transformers joins the experts of a layer, see ``experts.py``: these are copies."""
    experts = mlp.experts.local_experts
    return {
        "mlp.gate.weight": mlp.router.weight,
        "mlp.experts.gate_up_proj": torch.stack([expert.linear_fc1.weight for expert in experts]),
        "mlp.experts.down_proj": torch.stack([expert.linear_fc2.weight for expert in experts]),
    }


def _feed_forwards(
    weights: Mapping[str, Tensor], mlp: str, shape: ModelShape
) -> Iterator[tuple[str, Tensor, Tensor, Tensor]]:
    """The Megatron names of each SwiGLU of a layer, with its gate, up and down projection."""
    if not shape.num_experts:
        gate, up, down = (weights[f"{mlp}.{name}_proj.weight"] for name in ("gate", "up", "down"))
        yield "", gate, up, down
        return
    joined = zip(weights[f"{mlp}.experts.gate_up_proj"], weights[f"{mlp}.experts.down_proj"], strict=True)
    for expert, (gate_up, down) in enumerate(joined):
        yield f".experts.local_experts.{expert}", *gate_up.chunk(2), down


def _joined_qkv(weights: Mapping[str, Tensor], of: str, kind: str, shape: ModelShape) -> Tensor:
    """Megatron stores, for each key-value head, its queries, its key and its value."""
    parts = [weights[f"{of}.self_attn.{name}_proj.{kind}"] for name in "qkv"]
    grouped = [part.view(shape.num_kv_heads, -1, shape.head_dim, *part.shape[1:]) for part in parts]
    return torch.cat(grouped, 1).flatten(0, 2)


def _split_qkv(joined: Tensor, kind: str, shape: ModelShape) -> dict[str, Tensor]:
    per_group = shape.num_heads // shape.num_kv_heads
    grouped = joined.view(shape.num_kv_heads, per_group + 2, shape.head_dim, *joined.shape[1:])
    parts = grouped.split([per_group, 1, 1], dim=1)
    return {f"self_attn.{name}_proj.{kind}": part.flatten(0, 2) for name, part in zip("qkv", parts, strict=True)}
