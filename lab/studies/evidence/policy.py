# SPDX-License-Identifier: Apache-2.0
"""Many decoders of one shape at once: every weight has the run as its first dimension.

Shapes: R runs, B sequences, S tokens of prompt and response, P of the prompt, L of the response, V vocabulary, M all
tokens of a run (B x S), D numbers of a head, N layers, E experts, K experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .mixture import mix

Weights = dict[str, Tensor]
"""By name of the checkpoint format of transformers, ``[R, ...]``."""

Product = Callable[[Tensor, Tensor], Tensor]
"""Of inputs ``[R, M, I]`` with a matrix ``[R, O, I]``."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Qwen3 decoder: RMSNorm, SwiGLU, rotary positions, grouped queries with normalised heads.

    With ``num_experts`` every layer's SwiGLU is Qwen3-MoE's mixture of experts, and ``ffn_size`` is not used.
    """

    num_layers: int = 2
    hidden_size: int = 64
    ffn_size: int = 128
    num_experts: int = 0
    experts_per_token: int = 2
    expert_ffn_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    vocab_size: int = 32
    max_length: int = 1024
    norm_eps: float = 1e-6
    rope_base: float = 10_000.0

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of one run, by name."""
        hidden, head = self.hidden_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (self.vocab_size, hidden)}
        for index in range(self.num_layers):
            layer = {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (self.num_heads * head, hidden),
                "self_attn.k_proj": (self.num_kv_heads * head, hidden),
                "self_attn.v_proj": (self.num_kv_heads * head, hidden),
                "self_attn.q_norm": (head,),
                "self_attn.k_norm": (head,),
                "self_attn.o_proj": (hidden, self.num_heads * head),
                "post_attention_layernorm": (hidden,),
            }
            if self.num_experts:
                layer["mlp.gate"] = (self.num_experts, hidden)
            for block, size in self._blocks().items():
                layer |= {f"{block}.{name}_proj": (size, hidden) for name in ("gate", "up")}
                layer[f"{block}.down_proj"] = (hidden, size)
            shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
        shapes |= {"model.norm": (hidden,), "lm_head": (self.vocab_size, hidden)}
        return {f"{name}.weight": shape for name, shape in shapes.items()}

    def _blocks(self) -> dict[str, int]:
        """A layer's SwiGLU blocks and their widths."""
        if not self.num_experts:
            return {"mlp": self.ffn_size}
        return {f"mlp.experts.{expert}": self.expert_ffn_size for expert in range(self.num_experts)}


def new_weights(shape: Shape, seeds: list[int], device: torch.device) -> Weights:
    """Weights of one run per seed: matrices N(0, 0.02^2), those into the residual stream smaller, norms 1."""
    weights: Weights = {}
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    for name, size in shape.weight_shapes().items():
        if len(size) == 1:
            weights[name] = torch.ones(len(seeds), *size, device=device)
            continue
        std = 0.02 / math.sqrt(2 * shape.num_layers) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        drawn = [torch.randn(size, generator=generator) * std for generator in generators]
        weights[name] = torch.stack(drawn).to(device)
    return weights


class Cache(NamedTuple):
    """Keys and values ``[R * B, kv heads, S, D]`` of one layer, in the dtype that they are kept in."""

    keys: Tensor
    values: Tensor


def new_caches(shape: Shape, num_sequences: int, length: int, dtype: torch.dtype, device: torch.device) -> list[Cache]:
    """Empty caches of all layers."""
    size = (num_sequences, shape.num_kv_heads, length, shape.head_dim)
    return [
        Cache(torch.zeros(size, device=device).to(dtype), torch.zeros(size, device=device).to(dtype))
        for _ in range(shape.num_layers)
    ]


class Output(NamedTuple):
    """What a forward returns.

    Attributes:
        logits: ``[R, B, S, V]`` in the weights' dtype.
        experts: ``[R, B, S, N, K]``, which the routers chose, likeliest first; None without experts.
    """

    logits: Tensor
    experts: Tensor | None


def _linear(x_RMI: Tensor, weight_ROI: Tensor) -> Tensor:
    return torch.bmm(x_RMI, weight_ROI.mT)


def forward(
    shape: Shape,
    weights: Weights,
    ids_RBS: Tensor,
    *,
    caches: list[Cache] | None = None,
    start: int = 0,
    replayed_RBSNK: Tensor | None = None,
    project: Product = _linear,
) -> Output:
    """Run the decoder.

    With caches, the tokens are those from position ``start`` on: earlier keys and values come from the caches, and the
    new ones are stored there. New tokens see each other as computed, not as stored, as in an engine's prefill.

    With ``replayed_RBSNK`` these experts are used instead of the routers' own choice, with the routers' probabilities
    (R3, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers", arXiv 2510.11370).

    ``project`` multiplies with the matrices of attention and SwiGLU; experts are multiplied with as they are.
    """
    num_runs, batch, length = ids_RBS.shape
    runs_R11 = torch.arange(num_runs, device=ids_RBS.device)[:, None, None]
    hidden = F.embedding(
        (ids_RBS + runs_R11 * shape.vocab_size).flatten(1), weights["model.embed_tokens.weight"].flatten(0, 1)
    )
    cos_sin = _rotation(shape, start, length, hidden)
    chosen = []
    for index in range(shape.num_layers):
        prefix = f"model.layers.{index}."
        layer = {name.removeprefix(prefix): w for name, w in weights.items() if name.startswith(prefix)}
        cache = None if caches is None else caches[index]
        normed = _norm(hidden, layer["input_layernorm.weight"][:, None], shape.norm_eps)
        hidden = hidden + _attention(shape, layer, normed, batch, cos_sin, cache, start, project)
        normed = _norm(hidden, layer["post_attention_layernorm.weight"][:, None], shape.norm_eps)
        if shape.num_experts:
            replayed = None if replayed_RBSNK is None else replayed_RBSNK[..., index, :].flatten(1, 2)
            mixed, own_RMK = mix(layer, normed, shape.num_experts, shape.experts_per_token, replayed)
            hidden = hidden + mixed
            chosen.append(own_RMK.view(num_runs, batch, length, -1))
            continue
        gated = F.silu(project(normed, layer["mlp.gate_proj.weight"])) * project(normed, layer["mlp.up_proj.weight"])
        hidden = hidden + project(gated, layer["mlp.down_proj.weight"])
    hidden = _norm(hidden, weights["model.norm.weight"][:, None], shape.norm_eps)
    logits = _linear(hidden, weights["lm_head.weight"]).view(num_runs, batch, length, -1)
    return Output(logits, torch.stack(chosen, -2) if chosen else None)


class Scores(NamedTuple):
    """``logprobs`` ``[R, B, L]`` in nats, float32, of softmax(logits / T), and ``experts`` ``[R, B, S - 1, N, K]``."""

    logprobs: Tensor
    experts: Tensor | None


def score(
    shape: Shape,
    weights: Weights,
    ids_RBS: Tensor,
    num_prompt: int,
    *,
    temperature: float,
    replayed: Tensor | None = None,
    kept: Tensor | None = None,
) -> Scores:
    """Score the tokens behind the prompt.

    ``replayed`` as in :func:`forward`, ``[R, B, S - 1, N, K]``. With ``kept`` ``[R, B, L, V]``, which has every token
    that is scored, the log-probs are of the distribution over these tokens only.
    """
    logits, experts = forward(shape, weights, ids_RBS[..., :-1], replayed_RBSNK=replayed)
    scaled = logits[..., num_prompt - 1 :, :].float() / temperature
    if kept is not None:
        scaled = scaled.masked_fill(~kept, -torch.inf)
    return Scores(scaled.log_softmax(-1).gather(-1, ids_RBS[..., num_prompt:, None])[..., 0], experts)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    in_float32 = x.float()
    return weight * (in_float32 * torch.rsqrt(in_float32.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _rotation(shape: Shape, start: int, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
    exponents = torch.arange(0, shape.head_dim, 2, device=like.device) / shape.head_dim
    positions = torch.arange(start, start + length, device=like.device)
    angles = positions[:, None] * shape.rope_base**-exponents
    angles = torch.cat([angles, angles], -1)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def _rotate(x: Tensor, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos_sin[0] + torch.cat([-high, low], -1) * cos_sin[1]


def _attention(
    shape: Shape,
    layer: Weights,
    x_RMH: Tensor,
    batch: int,
    cos_sin: tuple[Tensor, Tensor],
    cache: Cache | None,
    start: int,
    project: Product,
) -> Tensor:
    num_runs, num_tokens, _ = x_RMH.shape
    length = num_tokens // batch

    def heads(name: str) -> Tensor:
        projected = project(x_RMH, layer[f"self_attn.{name}_proj.weight"]).view(
            num_runs, batch, length, -1, shape.head_dim
        )
        if name != "v":
            projected = _norm(projected, layer[f"self_attn.{name}_norm.weight"][:, None, None, None], shape.norm_eps)
        by_head = projected.view(num_runs * batch, length, -1, shape.head_dim).transpose(1, 2)
        return by_head if name == "v" else _rotate(by_head, cos_sin)

    query, key, value = heads("q"), heads("k"), heads("v")
    if cache is not None:
        cache.keys[:, :, start : start + length] = key.to(cache.keys.dtype)
        cache.values[:, :, start : start + length] = value.to(cache.values.dtype)
        if start > 0:
            key, value = (part[:, :, : start + length].to(query.dtype) for part in cache)
    group = shape.num_heads // shape.num_kv_heads
    key, value = (part.repeat_interleave(group, dim=1) for part in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, is_causal=length > 1)
    merged = out.transpose(1, 2).reshape(num_runs, num_tokens, -1)
    return project(merged, layer["self_attn.o_proj.weight"])
