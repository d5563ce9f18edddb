# SPDX-License-Identifier: Apache-2.0
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
    from grpo.conversion import load_weights
    from grpo.cpu import megatron_device
    from grpo.layout import ModelInputs
    from grpo.model import ModelShape
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
        shape: ModelShape,
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


def _config(variant: Variant, shape: ModelShape, device: torch.device) -> TransformerConfig:
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
