# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts of transformers, computed as Megatron-Core does: what the two do in another order."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

MEGATRON_ORDER = "megatron_order"


def align_routers(model: PreTrainedModel) -> None:
    """Let each router choose by its float32 logits and weight by their softmax over the chosen.

    Megatron-Core does so with ``moe_router_dtype="fp32"`` and a softmax after the choice; transformers' Qwen3-MoE
    multiplies in the dtype of the model, and divides a softmax over all experts by the sum of the chosen.
    """
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = types.MethodType(_route, module)


def align_experts(model: PreTrainedModel) -> None:
    """Let experts weight a token before their second product, and add a token's experts by their numbers.

    transformers weights after that product; ``eager`` rounds after each addition, the others add the largest weight
    first.
    """
    model.set_experts_implementation(MEGATRON_ORDER)


def _route(self: nn.Module, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden = hidden.reshape(-1, hidden.shape[-1])
    logits = F.linear(hidden.float(), self.weight.float())
    chosen, experts = logits.topk(self.top_k)
    return logits, chosen.softmax(-1), experts


def _run_experts(self: nn.Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    tokens, outputs = [], []
    for expert in range(self.num_experts):
        token, place = torch.where(top_k_index == expert)
        gate, up = F.linear(hidden[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
        weighted = (self.act_fn(gate) * up * top_k_weights[token, place, None]).to(hidden.dtype)
        tokens.append(token)
        outputs.append(F.linear(weighted, self.down_proj[expert]))
    return torch.zeros_like(hidden).index_add(0, torch.cat(tokens), torch.cat(outputs))


ExpertsInterface.register(MEGATRON_ORDER, _run_experts)
