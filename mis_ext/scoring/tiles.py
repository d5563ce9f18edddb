# SPDX-License-Identifier: Apache-2.0
"""How large a tile of logits is, and the matrix products that make one and use one."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

TILE = {"cpu": 1 << 20, "cuda": 1 << 26}
"""Logits at a time in the backward pass, in float32: 256 MiB on a GPU."""
SLOPES = {"cpu": 1 << 22, "cuda": 1 << 27}
"""Their gradients at a time, in the dtype of the weight: 256 MiB of bfloat16. The forward pass, which has none, makes
as many logits at a time, which are 512 MiB."""
STATES = {"cpu": 1 << 22, "cuda": 1 << 26}
"""Numbers of the gradient of hidden states that are added up at a time, in float32: 256 MiB."""
TOKENS, COLUMNS = 1 << 14, 1 << 15
"""At a time. More would make no product faster."""


class Tiles(NamedTuple):
    """How many tokens go through a pass together, by so many columns; and in the backward pass so many rows of them."""

    tokens: int
    columns: int
    rows: int


def tiles_of(num_tokens: int, num_columns: int, hidden_NE: Tensor) -> Tiles:
    """Equal tiles within the limits of the device of these hidden states."""
    device = hidden_NE.device.type
    tile, slopes, states = (sizes.get(device, sizes["cuda"]) for sizes in (TILE, SLOPES, STATES))
    tokens = _even(num_tokens, min(states // max(hidden_NE.shape[1], 1), TOKENS))
    columns = _even(num_columns, min(slopes // tokens, COLUMNS))
    return Tiles(tokens, columns, _even(tokens, tile // columns))


def _even(number: int, most: int) -> int:
    """The size of equal parts, none above ``most``; a multiple of 128 where there are several and it can be."""
    if number <= most:
        return max(number, 1)
    most = max(most, 1)
    size = -(-number // -(-number // most))
    return min(-(-size // 128) * 128, most)


def slices(number: int, size: int) -> Iterator[slice]:
    """So many at a time; at least one part, of none."""
    return (slice(begin, min(begin + size, number)) for begin in range(0, max(number, 1), size))


def length(part: slice) -> int:
    """How many a part has."""
    return int(part.stop - part.start)


def view(buffer: Tensor, rows: int, columns: int) -> Tensor:
    """``[rows, columns]``, of the beginning of a flat buffer."""
    return buffer[: rows * columns].view(rows, columns)


def accumulated(operand: Tensor) -> torch.dtype:
    """The dtype of sums: float32, of float64 that."""
    return torch.promote_types(operand.dtype, torch.float32)


def multiply(a: Tensor, b: Tensor, out: Tensor, *, adds: bool = False) -> None:
    """Write ``a @ b``, or add it, with sums in float32 and one rounding to the dtype of ``out``."""
    if a.dtype == out.dtype and (a.is_cuda or a.dtype not in _SHORT):
        torch.addmm(out, a, b, beta=1.0 if adds else 0.0, out=out)
        return
    widens = widening(a.device, a.dtype) if a.is_cuda and out.dtype == torch.float32 else "nothing"
    if adds and widens == "mm and addmm":
        torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    elif not adds and widens != "nothing":
        torch.mm(a, b, out_dtype=torch.float32, out=out)
    else:
        long = accumulated(a)
        product = a.to(long) @ b.to(long) if widens == "nothing" else torch.mm(a, b, out_dtype=torch.float32)
        out.add_(product) if adds else out.copy_(product)


_SHORT = (torch.bfloat16, torch.float16)


@functools.cache
def widening(device: torch.device, dtype: torch.dtype) -> Literal["mm and addmm", "mm", "nothing"]:
    """Which products of short floats this torch writes in float32: since 2.8 some, and later those that it adds."""
    a, out = torch.ones(16, 16, dtype=dtype, device=device), torch.ones(16, 16, device=device)
    try:
        torch.mm(a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return "nothing"
    try:
        torch.addmm(out, a, a, out_dtype=torch.float32, out=out)
    except (RuntimeError, TypeError):
        return "mm"
    return "mm and addmm"
