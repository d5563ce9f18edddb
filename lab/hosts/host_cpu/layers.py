# SPDX-License-Identifier: Apache-2.0
"""Layers for the hosts' ``--spec host_cpu.layers layer_spec``: stands for Transformer Engine.

Megatron-LM's own local spec does not do: its attention refuses packed sequences, which slime always has, and slime's
loader of Hugging Face files knows only the parameter names of Transformer Engine's fused layers.
"""

from argparse import Namespace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe import moe_utils, token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import make_sharded_tensor_for_checkpoint
from torch import Tensor
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from .context_parallel import zigzag_places

# Megatron-LM's router checks whether it is None, and without Transformer Engine it is not defined.
moe_utils.__dict__.setdefault("te_general_gemm", None)


_copied = token_dispatcher.maybe_move_tensor_to_cpu


def _as_if_copied(tensor: Any, as_numpy: bool = False, **more: Any) -> Any:
    if as_numpy and isinstance(tensor, Tensor) and tensor.device.type == "cpu":
        return tensor.numpy()
    return _copied(tensor, as_numpy=as_numpy, **more)


# Sizes by which ranks send tokens to each other's experts: it makes numbers of them only when it copies from a GPU.
token_dispatcher.maybe_move_tensor_to_cpu = _as_if_copied


class PackedAttention(MegatronModule):
    """Causal attention, one sequence of the pack after the other.

    With context parallelism every rank gathers all tokens, attends to all, and keeps its own: the numbers of one rank.

    Args:
        config: The host's.
        is_contiguous: Whether a rank has one piece of the whole pack, as with ``--allgather-cp``, and not two chunks of
            every sequence.
        softmax_scale: None for that of the head's dimension.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        is_contiguous: bool,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.is_contiguous = is_contiguous
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
        if self.config.context_parallel_size == 1:
            return self._attend(query, key, value, lengths)
        group = parallel_state.get_context_parallel_group()
        size, rank, num_local = group.size(), group.rank(), len(query)
        # The positions in the pack of the tokens of rank 0, then of rank 1, ...
        places = torch.arange(size * num_local) if self.is_contiguous else zigzag_places(lengths, size)
        order = places.argsort()
        # Its backward sums over the ranks what each found for the tokens of one.
        whole = (gather_from_sequence_parallel_region(part, group=group)[order] for part in (query, key, value))
        return self._attend(*whole, lengths)[places[rank * num_local : (rank + 1) * num_local]]

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, lengths: list[int]) -> Tensor:
        outputs = []
        for parts in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
            q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in parts)
            output = scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale, enable_gqa=True)
            outputs.append(output[0].transpose(0, 1))
        return torch.cat(outputs).flatten(1)


class Norm(torch.nn.RMSNorm):
    """RMSNorm. Megatron-LM's wrapper of it refuses sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps=eps)
        # Each rank sees a part of the tokens: Megatron-LM then sums the gradient.
        self.weight.sequence_parallel = config.sequence_parallel


class NormColumnParallelLinear(ColumnParallelLinear):
    """RMSNorm and a linear layer, with the parameter names of ``TELayerNormColumnParallelLinear``."""

    def __init__(self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size, dtype=config.params_dtype))
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel
        self.eps = config.layernorm_epsilon

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Normalize, then multiply."""
        normed = rms_norm(input_, (input_.shape[-1],), self.layer_norm_weight, self.eps)
        return super().forward(normed, *args, **kwargs)


class Matrices(torch.nn.Module):
    """A matrix for each expert, with the parameter names of ``TEGroupedLinear``."""

    def __init__(self, num_experts: int, rows: int, columns: int, config: TransformerConfig) -> None:
        super().__init__()
        for expert in range(num_experts):
            matrix = torch.nn.Parameter(torch.empty(rows, columns, dtype=config.params_dtype))
            config.init_method(matrix)
            # Other ranks have other experts: Megatron-LM then does not sum their gradients.
            matrix.allreduce = config.expert_model_parallel_size == 1
            self.register_parameter(f"weight{expert}", matrix)


class Experts(MegatronModule):
    """The experts of a layer that this rank has, one after the other."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config=config)
        size, inner = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = Matrices(num_local_experts, 2 * inner, size, config)
        self.linear_fc2 = Matrices(num_local_experts, size, inner, config)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """For Miles' checkpoints: an expert has its number in the layer there, not on its rank."""
        copy = (0, 0, parallel_state.get_expert_data_parallel_rank())
        rank, shards = parallel_state.get_expert_model_parallel_rank(), {}
        for name, module in self.named_children():
            matrices = list(module.parameters())
            for place, matrix in enumerate(matrices):
                key = f"{prefix}{name}.weight{rank * len(matrices) + place}"
                shards[f"{prefix}{name}.weight{place}"] = make_sharded_tensor_for_checkpoint(
                    matrix, key, sharded_offsets, replica_id=copy
                )
        return shards

    def forward(self, hidden: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """Tokens in the order of their experts, each output times its probability."""
        counts, outputs = tokens_per_expert.tolist(), []
        pieces = zip(hidden.split(counts), probs.split(counts), strict=True)
        for expert, (x, p) in enumerate(pieces):
            gate, up = linear(x, getattr(self.linear_fc1, f"weight{expert}")).chunk(2, -1)
            # The probability comes before the last product, in float32, as in Megatron-LM.
            gated = ((silu(gate) * up).float() * p.unsqueeze(-1)).to(x.dtype)
            outputs.append(linear(gated, getattr(self.linear_fc2, f"weight{expert}")))
        return torch.cat(outputs), None


def layer_spec(args: Namespace, config: TransformerConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Decoder layers, those of this pipeline stage, and the final norm."""
    # The tool that writes Miles' checkpoint has no such flag.
    is_contiguous = getattr(args, "allgather_cp", False)
    qk_norm = Norm if args.qk_layernorm else IdentityOp
    attention = SelfAttentionSubmodules(
        linear_qkv=NormColumnParallelLinear,
        core_attention=ModuleSpec(module=PackedAttention, params={"is_contiguous": is_contiguous}),
        linear_proj=RowParallelLinear,
        q_layernorm=qk_norm,
        k_layernorm=qk_norm,
    )
    mlp = ModuleSpec(
        module=MLP,
        submodules=MLPSubmodules(linear_fc1=NormColumnParallelLinear, linear_fc2=RowParallelLinear),
    )
    if config.num_moe_experts:
        mlp = ModuleSpec(module=MoELayer, submodules=MoESubmodules(experts=ModuleSpec(module=Experts)))
    layer = TransformerLayerSubmodules(
        input_layernorm=IdentityOp,
        self_attention=ModuleSpec(
            module=SelfAttention, params={"attn_mask_type": AttnMaskType.causal}, submodules=attention
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=Norm if config.num_moe_experts else IdentityOp,
        mlp=mlp,
        mlp_bda=get_bias_dropout_add,
    )
    num_layers = get_num_layers_to_build(config, vp_stage)
    return TransformerBlockSubmodules(
        layer_specs=[ModuleSpec(module=TransformerLayer, submodules=layer)] * num_layers, layer_norm=Norm
    )
