# SPDX-License-Identifier: Apache-2.0
"""A small transformer, trained on an artificial language, as trainer and engine with planted differences.

Two models of one shape are trained once in a session: dense, and with experts. Tokens are sampled by the model itself,
one after the other, with a cache of keys and values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LAYERS, EXPERTS, ACTIVE = 64, 48, 4, 2, 8, 2
NUM_WORDS, LONGEST_WORD = 120, 6
BATCH, CONTEXT, UPDATES, LEARNING_RATE = 32, 64, 120, 6e-3
PROMPT, WARM_UP = 8, 10

Weights = dict[str, Tensor]


def language(generator: torch.Generator, count: int, length: int) -> Tensor:
    """``[count, length]`` of words, each followed by one of few: within a word most letters are certain."""
    fixed = torch.Generator().manual_seed(1)
    lengths = torch.randint(2, LONGEST_WORD + 1, (NUM_WORDS,), generator=fixed)
    words = torch.randint(1, VOCABULARY, (NUM_WORDS, LONGEST_WORD + 1), generator=fixed)
    words[torch.arange(NUM_WORDS), lengths] = 0
    follows = (2.5 * torch.randn(NUM_WORDS, NUM_WORDS, generator=fixed)).softmax(-1)
    rows = torch.zeros(count, length + LONGEST_WORD + 1, dtype=torch.int64)
    word, end = torch.randint(0, NUM_WORDS, (count,), generator=generator), torch.zeros(count, dtype=torch.int64)
    row, letters = torch.arange(count)[:, None], torch.arange(LONGEST_WORD + 1)
    while int(end.min()) < length:
        rows[row, (end[:, None] + letters).clamp_max(rows.shape[1] - 1)] = words[word]
        end = (end + lengths[word] + 1).clamp_max(length)
        word = torch.multinomial(follows[word], 1, generator=generator)[:, 0]
    return rows[:, :length]


def new_weights(*, experts: bool) -> Weights:
    generator = torch.Generator().manual_seed(2)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-2] ** 0.5

    made = {"embed": drawn(VOCABULARY, WIDTH) * VOCABULARY**0.5, "head": drawn(WIDTH, VOCABULARY)}
    copies = (EXPERTS,) if experts else ()
    for layer in range(LAYERS):
        made[f"{layer}.qkv"], made[f"{layer}.out"] = drawn(WIDTH, 3 * WIDTH), drawn(WIDTH, WIDTH)
        width = 2 * WIDTH if experts else 4 * WIDTH
        made[f"{layer}.up"], made[f"{layer}.down"] = drawn(*copies, WIDTH, width), drawn(*copies, width, WIDTH)
        if experts:
            made[f"{layer}.router"] = drawn(WIDTH, EXPERTS)
    return made


@dataclass(frozen=True)
class Model:
    """One side: its weights, and how it computes with them.

    Attributes:
        slopes: The value that each head subtracts per token of distance.
        late: From this position on, distances count ``late_factor`` times.
        cache_dtype: Of keys and values.
        routing_noise: Of the router's logits.
    """

    weights: Weights
    dtype: torch.dtype = torch.float32
    late: int = 1 << 30
    late_factor: float = 1.0
    cache_dtype: torch.dtype | None = None
    routing_noise: float = 0.0

    def forward(self, tokens: Tensor, past: list[tuple[Tensor, Tensor]] | None = None, begin: int = 0) -> Tensor:
        """Logits ``[S, T, V]`` of tokens from position ``begin`` on; their keys and values are added to ``past``."""
        weights = {name: each.to(self.dtype) for name, each in self.weights.items()}
        x = weights["embed"][tokens]
        position = torch.arange(begin, begin + tokens.shape[1])
        for layer in range(LAYERS):
            x = x + self._attention(weights, layer, _normed(x), position, past)
            x = x + self._experts(weights, layer, _normed(x))
        return (_normed(x) @ weights["head"]).float()

    def _attention(self, weights: Weights, layer: int, x: Tensor, position: Tensor, past) -> Tensor:
        count, length, _ = x.shape
        query, key, value = (x @ weights[f"{layer}.qkv"]).view(count, length, 3, HEADS, -1).unbind(2)
        if self.cache_dtype is not None:
            key, value = (each.to(self.cache_dtype).to(self.dtype) for each in (key, value))
        if past is not None:
            if len(past) > layer:
                key, value = (torch.cat(pair, 1) for pair in zip(past[layer], (key, value), strict=True))
            past[layer : layer + 1] = [(key, value)]
        distance = (position[:, None] - torch.arange(key.shape[1])).to(self.dtype)
        distance = torch.where(position[:, None] >= self.late, distance * self.late_factor, distance)
        slope = 2.0 ** -torch.arange(1.0, HEADS + 1.0)
        bias = torch.where(distance < 0, -math.inf, -slope[:, None, None] * distance).to(self.dtype)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=bias)
        return mixed.transpose(1, 2).reshape(count, length, -1) @ weights[f"{layer}.out"]

    def _experts(self, weights: Weights, layer: int, x: Tensor) -> Tensor:
        up, down = weights[f"{layer}.up"], weights[f"{layer}.down"]
        if f"{layer}.router" not in weights:
            return functional.gelu(x @ up) @ down
        logits = x @ weights[f"{layer}.router"]
        logits = logits + self.routing_noise * torch.randn(logits.shape, dtype=logits.dtype)
        best = logits.topk(ACTIVE, -1)
        share = torch.zeros_like(logits).scatter(-1, best.indices, best.values.softmax(-1).to(logits.dtype))
        every = torch.einsum("stew,ewd->sted", functional.gelu(torch.einsum("std,edw->stew", x, up)), down)
        return torch.einsum("ste,sted->std", share, every)


def _normed(x: Tensor) -> Tensor:
    return x * (x.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt().to(x.dtype)


def updated(weights: Weights, *, num_updates: int, rate: float, seed: int) -> list[Weights]:
    """Weights after each update of Adam on the language."""
    generator = torch.Generator().manual_seed(seed)
    leaves = {name: each.clone().requires_grad_() for name, each in weights.items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=rate)
    kept = []
    for update in range(num_updates):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (update + 1) / WARM_UP)
        tokens = language(generator, BATCH, CONTEXT + 1)
        logits = Model(leaves).forward(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append({name: each.detach().clone() for name, each in leaves.items()})
    return kept
