# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in place of a decoder's SwiGLU. Shapes as in ``policy.py``."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor


def mix(
    layer: Mapping[str, Tensor], x_RMH: Tensor, num_experts: int, experts_per_token: int, replayed_RMK: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output ``[R, M, H]`` of Qwen3-MoE's experts, and which the router chose ``[R, M, K]``.

    All experts compute every token, and those that are not used have weight 0. The weight comes before the last
    projection, which is linear: only the rounding differs from Qwen3-MoE.

    Args:
        layer: Weights of one layer by their names in it.
        x_RMH: Input.
        num_experts: E.
        experts_per_token: K.
        replayed_RMK: Experts to use instead of those that the router chose.
    """

    def joined(name: str, dim: int) -> Tensor:
        return torch.cat([layer[f"mlp.experts.{expert}.{name}_proj.weight"] for expert in range(num_experts)], dim)

    probability_RME = torch.bmm(x_RMH, layer["mlp.gate.weight"].mT).float().softmax(-1)
    own_RMK = probability_RME.topk(experts_per_token, dim=-1).indices
    used_RMK = own_RMK if replayed_RMK is None else replayed_RMK
    share_RMK = probability_RME.gather(-1, used_RMK)
    share_RMK = share_RMK / share_RMK.sum(-1, keepdim=True)
    weight_RME = torch.zeros_like(probability_RME).scatter(-1, used_RMK, share_RMK).to(x_RMH.dtype)
    gated = F.silu(torch.bmm(x_RMH, joined("gate", 1).mT)) * torch.bmm(x_RMH, joined("up", 1).mT)
    weighted = gated.unflatten(-1, (num_experts, -1)) * weight_RME[..., None]
    return torch.bmm(weighted.flatten(-2), joined("down", 2).mT), own_RMK


def differ(experts: Tensor, others: Tensor) -> Tensor:
    """``[R, B, S]``: whether some layer of a token has other experts, in any order. Both are ``[R, B, S, N, K]``."""
    return (experts.sort(-1).values != others.sort(-1).values).flatten(-2).any(-1)
