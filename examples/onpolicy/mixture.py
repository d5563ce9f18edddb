# SPDX-License-Identifier: Apache-2.0
"""Make a transformers MoE layer compute like Megatron-Core, where the order of operations differs."""

from __future__ import annotations

import types

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

MEGATRON_ORDER = "megatron_order"


def align_routers(model: PreTrainedModel) -> None:
    """Make each router choose by its float32 logits, and weight by their softmax over the chosen experts.

    Megatron-Core does so with ``moe_router_dtype="fp32"`` and a softmax after the choice. transformers' Qwen3-MoE
    multiplies in the dtype of the model, and divides a softmax over all experts by the sum over the chosen ones.
    """
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.forward = types.MethodType(_route, module)


def align_experts(model: PreTrainedModel) -> None:
    """Make experts weight a token before their second matmul, and add a token's experts in order of their numbers.

    transformers weights after that matmul. ``eager`` rounds after each addition; the other implementations add the
    largest weight first.
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
