# SPDX-License-Identifier: Apache-2.0
"""A small MoE decoder in two versions: Megatron-Core's ``GPTModel`` trains it, transformers' Qwen3-MoE samples.

Both run on a CPU. The engine has the trainer's weights, rounded to its own dtype, and decodes with a KV cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mis_ext.onpolicy.routing.experts import RoutedExperts

with warnings.catch_warnings():
    # Megatron-Core reports at import that Transformer Engine and Apex are not installed.
    warnings.simplefilter("ignore")
    from grpo.attention import GatheredAttention
    from grpo.cpu import megatron_device
    from hf_routing import record_hf_routing
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from transformers import GenerationConfig, Qwen3MoeConfig
    from transformers.models.qwen3_moe import Qwen3MoeForCausalLM


@dataclass(frozen=True, kw_only=True)
class MoEShape:
    """A Qwen3-MoE-like decoder; ``init_std`` is that of all matrices, ``router_std`` that of the routers."""

    num_layers: int = 4
    moe_layer_freq: int = 1
    hidden_size: int = 64
    expert_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    num_experts: int = 32
    topk: int = 4
    vocab_size: int = 256
    init_std: float = 0.125
    router_std: float = 0.125
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0


class Rollout(NamedTuple):
    """Sampled sequences of one length: tokens ``[B, T]``, log-probs of the responses ``[B, R]``, and their experts."""

    tokens_BT: Tensor
    log_probs_BR: Tensor
    routed: list[RoutedExperts]


@contextmanager
def megatron_processes(*, store: dist.Store, rank: int, world_size: int, **sizes: int) -> Iterator[None]:
    """Set up Megatron-Core's process groups over gloo, and patches to run MoE layers on a CPU.

    Args:
        store: Store for the rendezvous.
        rank: This process.
        world_size: Their number.
        sizes: Arguments of ``initialize_model_parallel``.
    """
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(**sizes)
    try:
        # Without Transformer Engine, Megatron-Core 0.16.1 forgets to define this name and fails in every router.
        with megatron_device(torch.device("cpu")), patch.object(moe_utils, "te_general_gemm", None, create=True):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def single_process() -> AbstractContextManager[None]:
    """:func:`megatron_processes` for this process alone."""
    return megatron_processes(store=dist.HashStore(), rank=0, world_size=1)


def build_trainer(shape: MoEShape, *, seed: int, **overrides: object) -> GPTModel:
    """Build this rank's part of the trainer's model in float32; call within ``megatron_processes``."""
    settings: dict[str, object] = {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.expert_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_backend": AttnBackend.local,
        "use_cpu_initialization": True,
        "init_method_std": shape.init_std,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "num_moe_experts": shape.num_experts,
        "moe_layer_freq": shape.moe_layer_freq,
        "moe_router_topk": shape.topk,
        "moe_ffn_hidden_size": shape.expert_size,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "moe_token_dispatcher_type": "allgather",
        **overrides,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = TransformerConfig(**settings)
        torch.manual_seed(seed)
        model = GPTModel(
            config,
            _block_spec(config),
            vocab_size=shape.vocab_size,
            max_sequence_length=512,
            position_embedding_type="rope",
            rotary_base=int(shape.rope_base),
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            parallel_output=False,
            share_embeddings_and_output_weights=False,
        )
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            torch.nn.init.normal_(parameter, std=shape.router_std)
    return model


def score(model: GPTModel, tokens_BT: Tensor, *, packed: bool = False) -> Tensor:
    """Return the trainer's log-probs of all tokens except the first, ``[B, T - 1]``."""
    batch, length = tokens_BT.shape
    positions_BT = torch.arange(length).expand(batch, -1)
    if packed:
        boundaries = torch.arange(batch + 1, dtype=torch.int32) * length
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=length,
            max_seqlen_kv=length,
        )
        logits = model(tokens_BT.view(1, -1), positions_BT.reshape(1, -1), None, packed_seq_params=params)
    else:
        logits = model(tokens_BT, positions_BT, None)
    logits = logits.view(batch, length, -1)[:, :-1].float()
    return logits.log_softmax(-1).gather(-1, tokens_BT[:, 1:, None]).squeeze(-1)


def build_engine(model: GPTModel, shape: MoEShape, *, dtype: torch.dtype) -> Qwen3MoeForCausalLM:
    """Build the engine with the trainer's weights, rounded to ``dtype``. Every layer must be an MoE layer."""
    config = Qwen3MoeConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        moe_intermediate_size=shape.expert_size,
        num_experts=shape.num_experts,
        num_experts_per_tok=shape.topk,
        norm_topk_prob=True,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=False,
    )
    engine = Qwen3MoeForCausalLM(config).to(dtype).eval()
    # Rotary frequencies are not weights. Rounding them would be a separate difference.
    rotary = engine.model.rotary_emb
    rotary.inv_freq, _ = rotary.compute_default_rope_parameters(config)
    engine.load_state_dict(_export(model, shape))
    return engine


@torch.no_grad()
def sample(engine: Qwen3MoeForCausalLM, prompts_BT: Tensor, *, new_tokens: int) -> Rollout:
    """Sample from the engine's whole distribution with its own generation loop, and record log-probs and experts."""
    batch, prompt_length = prompts_BT.shape
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    with record_hf_routing(engine) as record:
        output = engine.generate(prompts_BT, attention_mask=torch.ones_like(prompts_BT), generation_config=config)
    log_probs = torch.stack(output.logits, dim=1).float().log_softmax(-1)
    sampled_BR = output.sequences[:, prompt_length:]
    return Rollout(
        tokens_BT=output.sequences,
        log_probs_BR=log_probs.gather(-1, sampled_BR.unsqueeze(-1)).squeeze(-1),
        routed=record.samples([output.sequences.size(1)] * batch),
    )


def _block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = GatheredAttention
    return spec


@torch.no_grad()
def _export(model: GPTModel, shape: MoEShape) -> dict[str, Tensor]:
    weights = {
        "model.embed_tokens.weight": model.embedding.word_embeddings.weight,
        "model.norm.weight": model.decoder.final_layernorm.weight,
        "lm_head.weight": model.output_layer.weight,
    }
    per_group = shape.num_heads // shape.num_kv_heads
    for index, layer in enumerate(model.decoder.layers):
        attention, experts = layer.self_attention, layer.mlp.experts.local_experts
        qkv = attention.linear_qkv.weight.view(shape.num_kv_heads, per_group + 2, shape.head_dim, -1)
        query, key, value = (part.reshape(-1, shape.hidden_size) for part in qkv.split([per_group, 1, 1], dim=1))
        layer_weights = {
            "input_layernorm.weight": layer.input_layernorm.weight,
            "self_attn.q_proj.weight": query,
            "self_attn.k_proj.weight": key,
            "self_attn.v_proj.weight": value,
            "self_attn.q_norm.weight": attention.q_layernorm.weight,
            "self_attn.k_norm.weight": attention.k_layernorm.weight,
            "self_attn.o_proj.weight": attention.linear_proj.weight,
            "post_attention_layernorm.weight": layer.pre_mlp_layernorm.weight,
            "mlp.gate.weight": layer.mlp.router.weight,
            "mlp.experts.gate_up_proj": torch.stack([expert.linear_fc1.weight for expert in experts]),
            "mlp.experts.down_proj": torch.stack([expert.linear_fc2.weight for expert in experts]),
        }
        weights |= {f"model.layers.{index}.{name}": weight for name, weight in layer_weights.items()}
    return weights
