"""The decoder: one shape, as a Megatron-Core ``GPTModel`` and as a transformers configuration with the same weights."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor
from transformers import Qwen3Config

from .attention import GatheredAttention
from .task import VOCAB_SIZE


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A Qwen3-like decoder: RMSNorm, SwiGLU, rotary positions, grouped queries with normalised heads."""

    num_layers: int = 2
    hidden_size: int = 64
    ffn_hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = VOCAB_SIZE
    max_length: int = 512
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0


def hf_config(shape: ModelShape) -> Qwen3Config:
    """Describe the decoder to transformers and SGLang. Without an end token, sampling stops at the given length."""
    return Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.ffn_hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_length,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def transformer_config(
    shape: ModelShape,
    *,
    context_parallel_size: int,
    calculate_per_token_loss: bool,
    dtype: torch.dtype = torch.float32,
) -> TransformerConfig:
    """Describe the decoder to Megatron-Core, without kernels that need a GPU."""
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_backend=AttnBackend.local,
        context_parallel_size=context_parallel_size,
        calculate_per_token_loss=calculate_per_token_loss,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )


def build_model(
    shape: ModelShape, config: TransformerConfig, *, seed: int, core_attention: type | None = GatheredAttention
) -> GPTModel:
    """Build the trainer's model with the same weights on every rank; without a core attention, with Megatron's own."""
    spec = get_gpt_layer_local_spec(normalization="RMSNorm", qk_layernorm=True)
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    # Given a layer alone, Megatron-Core takes the last norm from Transformer Engine where that is installed.
    block = TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=WrappedTorchNorm)
    torch.manual_seed(seed)
    return GPTModel(
        config,
        block,
        vocab_size=shape.vocab_size,
        max_sequence_length=shape.max_length,
        position_embedding_type="rope",
        rotary_base=shape.rope_base,
        parallel_output=False,
        share_embeddings_and_output_weights=False,
    )


@torch.no_grad()
def export_weights(model: GPTModel, shape: ModelShape) -> dict[str, Tensor]:
    """Return the weights under their transformers names: float32 copies, on the CPU."""
    weights = {
        "model.embed_tokens.weight": model.embedding.word_embeddings.weight,
        "model.norm.weight": model.decoder.final_layernorm.weight,
        "lm_head.weight": model.output_layer.weight,
    }
    for index, layer in enumerate(model.decoder.layers):
        for name, weight in _layer_weights(layer, shape).items():
            weights[f"model.layers.{index}.{name}.weight"] = weight
    return {name: weight.detach().float().cpu().clone() for name, weight in weights.items()}


def _layer_weights(layer: torch.nn.Module, shape: ModelShape) -> dict[str, Tensor]:
    """Undo Megatron's fusions: heads are stored per key-value group, gate and up projection in one matrix."""
    queries_per_group = shape.num_heads // shape.num_kv_heads
    attention = layer.self_attention
    qkv = attention.linear_qkv.weight.view(shape.num_kv_heads, queries_per_group + 2, shape.head_dim, shape.hidden_size)
    query, key, value = (part.reshape(-1, shape.hidden_size) for part in qkv.split([queries_per_group, 1, 1], dim=1))
    gate, up = layer.mlp.linear_fc1.weight.chunk(2)
    return {
        "input_layernorm": layer.input_layernorm.weight,
        "self_attn.q_proj": query,
        "self_attn.k_proj": key,
        "self_attn.v_proj": value,
        "self_attn.q_norm": attention.q_layernorm.weight,
        "self_attn.k_norm": attention.k_layernorm.weight,
        "self_attn.o_proj": attention.linear_proj.weight,
        "post_attention_layernorm": layer.pre_mlp_layernorm.weight,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.mlp.linear_fc2.weight,
    }
