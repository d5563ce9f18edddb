# SPDX-License-Identifier: Apache-2.0
"""How much of n optimizer steps reaches weights that are rounded to 16 or 8 bits?

    python lab/benchmarks/rounding_of_updates.py MODEL [--lr 1e-5 1e-6]

A trainer in bf16 or fp16 updates a copy in float32 and computes with what is rounded from it. MODEL is a folder in
Hugging Face's format. Its weights are numbers of bf16: each lies in the middle of what is rounded to it. Adam's first
steps move each weight by about the learning rate; here n of them go in one direction, drawn for each weight. Prints
Markdown: the displacement of the rounded weights along that of the copy, as a share of it, and how many weights moved.
``bfloat16, e4m3`` and ``float16, e4m3`` are an engine's weights of 8 bits, in blocks of 128, rounded from a trainer's
of 16. ``bfloat16, dithered`` begins with a copy of random numbers that are rounded to the checkpoint's.
Measured in training by "Understanding and Exploiting Weight Update Sparsity for Communication-Efficient Distributed RL"
(arXiv 2602.03839).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mis_ext.hosts.master_weights import dithered

STEPS = (1, 3, 10, 20, 40, 60, 200)
BLOCK = 128
# Of each matrix: enough for two digits.
LARGEST = 20_000
LARGEST_E4M3 = torch.finfo(torch.float8_e4m3fn).max


def bf16(weight: Tensor) -> Tensor:
    """Rounded to bf16."""
    return weight.bfloat16().float()


def fp16(weight: Tensor) -> Tensor:
    """Rounded to fp16."""
    return weight.half().float()


def e4m3(weight: Tensor) -> Tensor:
    """Rounded to e4m3, with a scale for each block."""
    blocks = torch.nn.functional.pad(weight, (0, -len(weight) % BLOCK)).unflatten(0, (-1, BLOCK))
    scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12) / LARGEST_E4M3
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten()[: len(weight)]


def shares(weights: list[Tensor], rounding: Callable[[Tensor], Tensor], distance: float) -> tuple[float, float]:
    """Of the displacement, and of the weights, what is left after rounding."""
    generator = torch.Generator().manual_seed(0)
    along = torch.zeros((), dtype=torch.float64)
    moved = 0
    for weight in weights:
        sign = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        difference = rounding(weight + sign * distance) - rounding(weight)
        along += (difference * sign).double().sum()
        moved += int((difference != 0).sum())
    count = sum(weight.numel() for weight in weights)
    return float(along) / (distance * count), moved / count


def main() -> None:
    """Parse the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, metavar="MODEL")
    parser.add_argument("--lr", type=float, nargs="+", default=[1e-5, 1e-6])
    options = parser.parse_args()
    tensors = [tensor for file in sorted(options.model.glob("*.safetensors")) for tensor in load_file(file).values()]
    if not tensors:
        parser.error(f"{options.model}: no *.safetensors")
    generator = torch.Generator().manual_seed(1)
    weights = [
        flat[torch.randint(flat.numel(), (LARGEST,), generator=generator)].float()
        if flat.numel() > LARGEST
        else flat.float()
        for flat in (tensor.flatten() for tensor in tensors)
    ]
    spread = [dithered(weight, torch.rand(weight.shape, generator=generator)) for weight in weights]
    rows: dict[str, tuple[list[Tensor], Callable[[Tensor], Tensor]]] = {
        "bfloat16": (weights, bf16),
        "float16": (weights, fp16),
        "bfloat16, e4m3": (weights, lambda weight: e4m3(bf16(weight))),
        "float16, e4m3": (weights, lambda weight: e4m3(fp16(weight))),
        "bfloat16, dithered": (spread, bf16),
    }
    print(f"| learning rate | weights | {' | '.join(f'{n} steps' if n > 1 else '1 step' for n in STEPS)} |")
    print("|---" * (2 + len(STEPS)) + "|")
    for rate in options.lr:
        for name, (start, rounding) in rows.items():
            cells = [shares(start, rounding, rate * n) for n in STEPS]
            shown = " | ".join(f"{along:.0%}, {moved:.0%}" for along, moved in cells)
            print(f"| {rate:g} | {name} | {shown} |")


if __name__ == "__main__":
    main()
