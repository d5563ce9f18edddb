# SPDX-License-Identifier: Apache-2.0
"""The decoder: one shape, as a Megatron-Core ``GPTModel`` and as a transformers configuration with the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from transformers import PretrainedConfig, Qwen3Config

from .attention import GatheredAttention
from .task import VOCAB_SIZE

# Optional parts of each family: a bias of queries, keys and values; a norm of queries and keys.
FAMILIES = {
    "llama": {"has_qkv_bias": False, "has_qk_norm": False},
    "qwen2": {"has_qkv_bias": True, "has_qk_norm": False},
    "qwen3": {"has_qkv_bias": False, "has_qk_norm": True},
    "mixtral": {"has_qkv_bias": False, "has_qk_norm": False},
}


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder with RMSNorm, SwiGLU, rotary positions and grouped queries; by default with Qwen3's normalized heads.

    With ``num_experts``, every SwiGLU is a mixture of this many experts of width ``ffn_hidden_size``.
    """

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
    is_tied: bool = False
    has_qkv_bias: bool = False
    has_qk_norm: bool = True
    num_experts: int = 0
    experts_per_token: int = 2

    @classmethod
    def of(cls, config: PretrainedConfig, *, max_length: int | None = None) -> ModelShape:
        """Read a configuration of transformers.

        Args:
            config: Configuration of Llama, Qwen2, Qwen3 or Mixtral.
            max_length: Tokens of the longest sequence, if the model supports more.

        Raises:
            ValueError: If this example cannot build the model as Megatron-Core's ``GPTModel``.
        """
        family = FAMILIES.get(config.model_type)
        if family is None:
            raise ValueError(f"model_type {config.model_type!r}: expected one of {', '.join(FAMILIES)}")
        rope = config.rope_parameters
        # Options with which transformers would compute something else than this decoder.
        unlike = {
            "rope_type": (rope.get("rope_type", "default"), "default"),
            "partial_rotary_factor": (rope.get("partial_rotary_factor", 1.0), 1.0),
            "hidden_act": (config.hidden_act, "silu"),
            "mlp_bias": (getattr(config, "mlp_bias", False), False),
            "attention_bias": (getattr(config, "attention_bias", False), False),
            "use_sliding_window": (getattr(config, "use_sliding_window", False), False),
        }
        experts = {}
        if config.model_type == "mixtral":
            unlike["sliding_window"] = (config.sliding_window, None)
            experts = {"num_experts": config.num_local_experts, "experts_per_token": config.num_experts_per_tok}
        for key, (found, expected) in unlike.items():
            if found != expected:
                raise ValueError(f"{key} is {found!r}: the trainer's model has {expected!r} only")
        return cls(
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            ffn_hidden_size=config.intermediate_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocab_size=config.vocab_size,
            max_length=max_length or config.max_position_embeddings,
            norm_eps=config.rms_norm_eps,
            rope_base=float(rope["rope_theta"]),
            is_tied=config.tie_word_embeddings,
            **family,
            **experts,
        )


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
    """Describe the decoder to Megatron-Core, without kernels that need a GPU.

    Routers compute in float32, as in slime's model settings, and weight the chosen experts by the softmax of their
    scores. There is no balancing loss, and no token is dropped.
    """
    experts: dict[str, Any] = {
        "num_moe_experts": shape.num_experts,
        "moe_router_topk": shape.experts_per_token,
        "moe_ffn_hidden_size": shape.ffn_hidden_size,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": "allgather",
    }
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        ffn_hidden_size=shape.ffn_hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        qk_layernorm=shape.has_qk_norm,
        add_bias_linear=False,
        add_qkv_bias=shape.has_qkv_bias,
        gated_linear_unit=True,
        activation_func=F.silu,
        attention_backend=AttnBackend.local,
        context_parallel_size=context_parallel_size,
        calculate_per_token_loss=calculate_per_token_loss,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **(experts if shape.num_experts else {}),
    )


def build_model(
    shape: ModelShape, config: TransformerConfig, *, seed: int, core_attention: type | None = GatheredAttention
) -> GPTModel:
    """Build the trainer's model with equal weights on every rank. Without ``core_attention``, it is Megatron's own."""
    # Without Transformer Engine, Megatron-Core 0.16 forgets to define this name, which its routers look up.
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts or None, normalization="RMSNorm", qk_layernorm=shape.has_qk_norm
    )
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    # Given only a layer spec, Megatron-Core takes the final norm from Transformer Engine if installed.
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
        share_embeddings_and_output_weights=shape.is_tied,
    )
