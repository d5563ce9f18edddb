# SPDX-License-Identifier: Apache-2.0
"""Recordings made by hand, and where the tokens of the tiny decoder's lie."""

import torch
from tiny_decoder import SEQUENCES
from torch import Tensor

from mis_ext.onpolicy.recording.recordings import Recording, RecordingBuilder
from mis_ext.onpolicy.recording.rows import PlacedRows

TOKENS = [(sequence, position) for sequence, ids in enumerate(SEQUENCES) for position in range(len(ids))]
THREE = [(0, 0), (0, 1), (2, 0)]
VALUES = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def entry_of(values: Tensor, tokens: list[tuple[int, int]]) -> PlacedRows:
    sequence, position = torch.tensor(tokens, dtype=torch.long).reshape(-1, 2).unbind(1)
    return PlacedRows(values, sequence, position)


def made(**outputs: tuple[Tensor, list[tuple[int, int]]]) -> Recording:
    builder = RecordingBuilder()
    for name, (values, tokens) in outputs.items():
        builder.add("outputs", name, "", entry_of(values, tokens))
    return builder.build()


X = made(x=(VALUES, THREE))
