"""A Llama decoder as Megatron-Core's ``GPTModel``: on its local layers, or on Transformer Engine's; equal weights."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

with warnings.catch_warnings():
    # Megatron-Core reports at import what is not installed.
    warnings.simplefilter("ignore")
    from grpo.attention import GatheredAttention
    from grpo.cpu import megatron_device
    from grpo.layout import ModelInputs
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a Llama configuration of transformers says."""

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_length: int
    norm_eps: float
    rope_base: float
    is_tied: bool

    @classmethod
    def of(cls, config: Any) -> Shape:
        """Read a ``LlamaConfig``."""
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab_size=config.vocab_size,
            max_length=config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_base=config.rope_parameters["rope_theta"],
            is_tied=config.tie_word_embeddings,
        )


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How the decoder is built and called.

    Attributes:
        layers: ``local``: Megatron-Core's, of torch's modules. ``gathered``: the same with the example's attention
            for packed sequences. ``te``: Transformer Engine's.
        packed: Sequences lie one after the other (``thd``), not padded (``bshd``).
        dtype: Of the weights and the products.
        fp8: Transformer Engine's recipe under Megatron-Core's name, or None.
        warm: Score after a pass with gradients: scales of the recipe ``delayed`` come from the pass before.
    """

    layers: Literal["local", "gathered", "te"]
    packed: bool
    dtype: torch.dtype = torch.bfloat16
    fp8: Literal["delayed", "tensorwise", "blockwise"] | None = None
    warm: bool = False


VARIANTS = {
    "local, float32": Variant(layers="local", packed=False, dtype=torch.float32),
    "te, float32": Variant(layers="te", packed=False, dtype=torch.float32),
    "local": Variant(layers="local", packed=False),
    "gathered, packed": Variant(layers="gathered", packed=True),
    "gathered, packed, float32": Variant(layers="gathered", packed=True, dtype=torch.float32),
    "te": Variant(layers="te", packed=False),
    "te, packed": Variant(layers="te", packed=True),
    "te, packed, fp8 delayed, cold": Variant(layers="te", packed=True, fp8="delayed"),
    "te, packed, fp8 delayed": Variant(layers="te", packed=True, fp8="delayed", warm=True),
    "te, packed, fp8 current": Variant(layers="te", packed=True, fp8="tensorwise"),
    "te, packed, fp8 blockwise": Variant(layers="te", packed=True, fp8="blockwise"),
}


class Decoder:
    """The model of a variant, and how its logits become log-probs of the response."""

    def __init__(
        self,
        variant: Variant,
        shape: Shape,
        weights: dict[str, Tensor],
        device: torch.device,
        *,
        layer_alone: bool = False,
    ) -> None:
        """With ``layer_alone`` Megatron-Core chooses the norm after the last layer."""
        self.variant, self.device = variant, device
        config = _config(variant, shape, device)
        with megatron_device(device):
            layer = _layer(variant)
            norm = {} if variant.layers == "te" else {"layer_norm": WrappedTorchNorm}
            if variant.layers == "te":
                from megatron.core.extensions.transformer_engine import TENorm

                norm = {"layer_norm": TENorm}
            self.model = GPTModel(
                config,
                layer if layer_alone else TransformerBlockSubmodules(layer_specs=[layer] * shape.num_layers, **norm),
                vocab_size=shape.vocab_size,
                max_sequence_length=shape.max_length,
                position_embedding_type="rope",
                rotary_base=int(shape.rope_base),
                # Every rank keeps its part of the vocabulary, as in a host.
                parallel_output=True,
                share_embeddings_and_output_weights=shape.is_tied,
            ).to(device=device, dtype=variant.dtype)
        load_weights(self.model, weights, shape)

    def logits(self, inputs: ModelInputs) -> Tensor:
        """``[1, T, V / TP]`` packed, or ``[B, L, V / TP]``."""
        with megatron_device(self.device):
            return self.model(inputs.tokens, inputs.positions, None, packed_seq_params=inputs.packed_seq_params)

    def log_probs(self, logits: Tensor, inputs: ModelInputs) -> Tensor:
        """Of this rank's response tokens, by Megatron-Core's cross entropy, as a host computes them. ``[R]``."""
        rows = logits.flatten(0, 1)[inputs.logit_index_R].float()
        with megatron_device(self.device):
            return -vocab_parallel_cross_entropy(rows.unsqueeze(1), inputs.target_R.unsqueeze(1)).squeeze(1)


def _layer(variant: Variant) -> Any:
    if variant.layers == "te":
        return get_gpt_layer_with_transformer_engine_spec()
    spec = get_gpt_layer_local_spec(normalization="RMSNorm")
    if variant.layers == "gathered":
        spec.submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec


def _config(variant: Variant, shape: Shape, device: torch.device) -> TransformerConfig:
    quantised = {} if variant.fp8 is None else {"fp8": "hybrid", "fp8_recipe": variant.fp8}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        pipeline_dtype=variant.dtype,
        params_dtype=variant.dtype,
        bf16=variant.dtype == torch.bfloat16,
        use_cpu_initialization=device.type == "cpu",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **quantised,
    )


@torch.no_grad()
def load_weights(model: GPTModel, weights: dict[str, Tensor], shape: Shape) -> None:
    """Fill the model from weights under their transformers names; every tensor-parallel rank takes its part.

    Raises:
        ValueError: Heads or vocabulary cannot be split, or a parameter of the model got no weight.
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
        # Transformer Engine's linear layers normalise their input themselves.
        is_fused = f"{layer}.mlp.linear_fc1.layer_norm_weight" in left
        norms = (
            ("self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight")
            if is_fused
            else ("input_layernorm.weight", "pre_mlp_layernorm.weight")
        )
        put(f"{layer}.{norms[0]}", weights[f"{of}.input_layernorm.weight"])
        put(f"{layer}.{norms[1]}", weights[f"{of}.post_attention_layernorm.weight"])
        put(f"{layer}.self_attention.linear_qkv.weight", _qkv(weights, of, shape), 0)
        put(f"{layer}.self_attention.linear_proj.weight", weights[f"{of}.self_attn.o_proj.weight"], 1)
        gate, up = (weights[f"{of}.mlp.{name}_proj.weight"].chunk(size)[rank] for name in ("gate", "up"))
        put(f"{layer}.mlp.linear_fc1.weight", torch.cat([gate, up]))
        put(f"{layer}.mlp.linear_fc2.weight", weights[f"{of}.mlp.down_proj.weight"], 1)
    if left:
        raise ValueError(f"no weights for {sorted(left)}")


def _qkv(weights: dict[str, Tensor], of: str, shape: Shape) -> Tensor:
    """Megatron stores, for each key-value head, its queries, its key and its value."""
    query, key, value = (weights[f"{of}.self_attn.{name}_proj.weight"] for name in "qkv")
    parts = [part.view(shape.num_kv_heads, -1, shape.head_dim, shape.hidden_size) for part in (query, key, value)]
    return torch.cat(parts, 1).reshape(-1, shape.hidden_size)
