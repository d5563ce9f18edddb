"""Layer spec for slime's ``--spec host_cpu.layers layer_spec``: stands for Transformer Engine.

Megatron-LM's own local spec does not do: its attention refuses packed sequences, which slime always has, and slime's
loader of Hugging Face files knows only the parameter names of Transformer Engine's fused layers.
"""

from argparse import Namespace
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention


class PackedAttention(MegatronModule):
    """Causal attention, one sequence of the pack after the other. No context parallelism."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        if config.context_parallel_size != 1:
            raise ValueError(f"context_parallel_size: {config.context_parallel_size}; this attention takes 1")
        self.scale = softmax_scale

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
        """Attend within each sequence: ``[T, heads, dim]`` to ``[T, heads * dim]``."""
        assert packed_seq_params is not None, "slime packs its batches"
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        outputs = []
        for parts in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
            output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and a linear layer, with the parameter names of ``TELayerNormColumnParallelLinear``."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.eps = config.layernorm_epsilon

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalise, then multiply."""
        normed = rms_norm(input_, (input_.shape[-1],), self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


def layer_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> ModuleSpec:
    """One dense decoder layer."""
    qk_norm = WrappedTorchNorm if args.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=NormColumnParallelLinear,
        core_attention=PackedAttention,
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp = MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear)
    layer = TransformerLayerSubmodules(
        input_layernorm=IdentityOp,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=IdentityOp,
        mlp=ModuleSpec(module=MLP, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
    )
    return ModuleSpec(module=TransformerLayer, submodules=layer)
