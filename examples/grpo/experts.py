# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts out of a dense checkpoint, and the two ways in which transformers names its weights.

In memory transformers joins the experts of a layer: ``mlp.gate.weight`` [E, H], ``mlp.experts.gate_up_proj``
[E, 2 F, H] with the gate above, ``mlp.experts.down_proj`` [E, H, F]. The trainer gives and takes these names.

In a file, from which SGLang reads, each expert has three matrices: ``block_sparse_moe.experts.N.w1.weight`` (gate),
``w3`` (up) and ``w2`` (down).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import MixtralConfig

if TYPE_CHECKING:
    from .pretrained import Pretrained

EXPERTS_PER_TOKEN = 2
_MATRICES = ("gate_proj", "up_proj", "down_proj")


def upcycled(dense: Pretrained, *, num_experts: int, noise: float, seed: int = 0) -> Pretrained:
    """A Mixtral whose experts are noisy copies of each feed-forward layer, with routers drawn at random.

    Copies: "Sparse Upcycling: Training Mixture-of-Experts from Dense Checkpoints", arXiv 2212.05055. Theirs are exact;
    without noise all experts are equal, and which of them a router chooses changes nothing.

    Args:
        dense: A Llama. All other weights stay its own.
        num_experts: Of every layer; a token uses two of them, weighted by the softmax of their two scores.
        noise: Its standard deviation, as a share of that of the matrix that is copied.
        seed: Of noise and routers.

    Raises:
        ValueError: It is no Llama, or has fewer experts than a token uses.
    """
    if dense.config.model_type != "llama":
        raise ValueError(f"model_type {dense.config.model_type!r}: only a llama has what a mixtral has")
    if num_experts < EXPERTS_PER_TOKEN:
        raise ValueError(f"num_experts is {num_experts}, a token uses {EXPERTS_PER_TOKEN}")
    generator = torch.Generator().manual_seed(seed)
    weights = {name: weight for name, weight in dense.weights.items() if ".mlp." not in name}
    for layer in range(dense.config.num_hidden_layers):
        mlp = f"model.layers.{layer}.mlp"
        gate, up, down = (
            _noisy_copies(dense.weights[f"{mlp}.{name}.weight"], num_experts, noise, generator) for name in _MATRICES
        )
        weights[f"{mlp}.experts.gate_up_proj"] = torch.cat([gate, up], 1)
        weights[f"{mlp}.experts.down_proj"] = down
        # Its input is normalised, so scores have about the size of 1.
        router = torch.randn(num_experts, gate.shape[-1], generator=generator) / math.sqrt(gate.shape[-1])
        weights[f"{mlp}.gate.weight"] = router.to(gate.dtype)
    return dataclasses.replace(dense, config=_mixtral_config(dense, num_experts), weights=weights)


def file_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A Mixtral's weights under the names of a checkpoint's file; experts are views."""
    found: dict[str, Tensor] = {}
    for name, weight in weights.items():
        name = name.replace(".mlp.", ".block_sparse_moe.")
        experts, _, kind = name.rpartition(".")
        if kind not in ("gate_up_proj", "down_proj"):
            found[name] = weight
            continue
        for expert, matrix in enumerate(weight):
            parts = zip(("w1", "w3"), matrix.chunk(2), strict=True) if kind == "gate_up_proj" else [("w2", matrix)]
            found |= {f"{experts}.{expert}.{part}.weight": rows for part, rows in parts}
    return found


def _noisy_copies(matrix: Tensor, count: int, noise: float, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(count, *matrix.shape, generator=generator)
    return drawn.mul_(noise * float(matrix.float().std())).add_(matrix).to(matrix.dtype)


def _mixtral_config(dense: Pretrained, num_experts: int) -> MixtralConfig:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    names += ("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "hidden_act")
    names += ("tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
    return MixtralConfig(
        architectures=["MixtralForCausalLM"],
        head_dim=dense.shape.head_dim,
        num_local_experts=num_experts,
        num_experts_per_tok=EXPERTS_PER_TOKEN,
        **{name: getattr(dense.config, name) for name in names},
    )
