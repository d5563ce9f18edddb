# SPDX-License-Identifier: Apache-2.0
"""A decoder with bitwise equal results in any layout: packed, padded, prefilled or decoded."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.recordings import Recording
from mis_ext.onpolicy.recording.rows import Rows

HIDDEN, FFN, VOCABULARY = 8, 12, 11


class RowLinear(nn.Module):
    """A linear layer that sums each row separately: bitwise equal in any batch."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return (x.unsqueeze(-2) * self.weight).sum(-1)


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class CoreAttention(nn.Module):
    """Causal attention, one token at a time, over keys and values that are kept between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def forward(self, query: Tensor, key: Tensor, value: Tensor, tokens: list[tuple[int, int]]) -> Tensor:
        flat = [x.reshape(-1, HIDDEN) for x in (query, key, value)]
        output = [torch.zeros(HIDDEN) for _ in tokens]
        for index in sorted(range(len(tokens)), key=lambda i: tokens[i]):
            sequence, position = tokens[index]
            if position < 0:
                continue
            cached = self.cache.setdefault(sequence, [])
            cached.append((flat[1][index], flat[2][index]))
            assert len(cached) == position + 1
            keys, values = (torch.stack(x) for x in zip(*cached, strict=True))
            share = (keys * flat[0][index]).sum(-1).softmax(0)
            output[index] = (share[:, None] * values).sum(0)
        return torch.stack(output).view(query.shape)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = RowLinear(HIDDEN, 3 * HIDDEN)
        self.core = CoreAttention()
        self.out = RowLinear(HIDDEN, HIDDEN)

    def forward(self, hidden: Tensor, *, tokens: list[tuple[int, int]]) -> tuple[Tensor, None]:
        return self.out(self.core(*self.qkv(hidden).chunk(3, -1), tokens)), None


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = Norm(), Attention()
        # No SiLU: torch's vectorized exp and its scalar one, for the last elements of a tensor, differ by an ULP.
        self.mlp = nn.Sequential(Norm(), RowLinear(HIDDEN, FFN), nn.ReLU(), RowLinear(FFN, HIDDEN))

    def forward(self, hidden: Tensor, tokens: list[tuple[int, int]]) -> Tensor:
        hidden = hidden + self.attention(self.norm(hidden), tokens=tokens)[0]
        return hidden + self.mlp(hidden)


class TinyDecoder(nn.Module):
    """Ids ``[b, s]`` to logits ``[b, s, V]``; hidden states are ``[s, b, h]`` where ``transposed``, as in Megatron."""

    def __init__(self, *, transposed: bool = False, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.transposed = transposed
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = RowLinear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor, rows: Rows) -> Tensor:
        sequence, position = (x.T if self.transposed else x for x in (rows.sequence, rows.position))
        tokens = [*zip(sequence.flatten().tolist(), position.flatten().tolist(), strict=True)]
        hidden = self.embedding(ids)
        hidden = hidden.transpose(0, 1).contiguous() if self.transposed else hidden
        for layer in self.layers:
            hidden = layer(hidden, tokens)
        logits = self.head(hidden)
        return logits.transpose(0, 1) if self.transposed else logits

    def forget(self) -> None:
        for layer in self.layers:
            layer.attention.core.cache.clear()


SEQUENCES = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]


def padded(sequences: list[list[int]] = SEQUENCES, *, left: bool = False, length: int = 0) -> tuple[Tensor, Rows]:
    """Ids and rows of a padded batch."""
    length = max(length, *map(len, sequences))
    ids = torch.full((len(sequences), length), 10)
    mask = torch.zeros_like(ids)
    for index, sequence in enumerate(sequences):
        where = slice(length - len(sequence), None) if left else slice(len(sequence))
        ids[index, where], mask[index, where] = torch.tensor(sequence), 1
    return ids, Rows.padded(mask)


def packed(sequences: list[list[int]] = SEQUENCES) -> tuple[Tensor, Rows]:
    """Ids and rows of sequences laid end to end."""
    return torch.tensor([token for sequence in sequences for token in sequence])[None], Rows.packed(
        [*map(len, sequences)]
    )


def recording_of(model: TinyDecoder, *batches: tuple[Tensor, Rows], **options: object) -> Recording:
    """The outputs of these forwards, one after the other."""
    model.forget()
    with torch.no_grad(), record(model, **options) as recorder:
        for ids, rows in batches:
            with recorder.rows(rows):
                model(ids, rows)
    return recorder.recording()


@contextmanager
def planted(module: nn.Module, index: tuple[int, ...], *, by: float = 0.0) -> Iterator[None]:
    """One element of the module's (first) output moves to the next number, or further."""

    def plant(_: nn.Module, __: Any, output: Any) -> Any:
        values = (output[0] if isinstance(output, tuple) else output).clone()
        values[index] = torch.nextafter(values[index].detach() + by, torch.tensor(math.inf))
        return (values, *output[1:]) if isinstance(output, tuple) else values

    handle = module.register_forward_hook(plant)
    try:
        yield
    finally:
        handle.remove()
