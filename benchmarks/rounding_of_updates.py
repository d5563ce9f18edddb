"""How much of n optimizer steps reaches weights that are rounded to 16 bits?

    python benchmarks/rounding_of_updates.py MODEL [--lr 1e-5 1e-6]

A trainer in bf16 or fp16 updates a copy in float32 and computes with what is rounded from it. MODEL is a folder in
Hugging Face's format. Its weights are numbers of bf16: each lies in the middle of what is rounded to it. Adam's first
steps move each weight by about the learning rate; here n of them go in one direction, drawn for each weight. Prints
Markdown: the displacement of the rounded weights along that of the copy, as a share of it, and how many weights moved.
Measured in training by "Understanding and Exploiting Weight Update Sparsity for Communication-Efficient Distributed RL"
(arXiv 2602.03839).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

STEPS = (1, 3, 10, 20, 40, 60, 200)
# Of each matrix: enough for two digits.
LARGEST = 20_000


def shares(weights: list[Tensor], dtype: torch.dtype, distance: float) -> tuple[float, float]:
    """Of the displacement, and of the weights, what is left after rounding."""
    generator = torch.Generator().manual_seed(0)
    along = torch.zeros((), dtype=torch.float64)
    moved = 0
    for weight in weights:
        sign = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
        rounded = (weight + sign * distance).to(dtype).float() - weight.to(dtype).float()
        along += (rounded * sign).double().sum()
        moved += int((rounded != 0).sum())
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
    print(f"| learning rate | dtype | {' | '.join(f'{n} steps' if n > 1 else '1 step' for n in STEPS)} |")
    print("|---" * (2 + len(STEPS)) + "|")
    for rate in options.lr:
        for dtype in (torch.bfloat16, torch.float16):
            cells = [shares(weights, dtype, rate * n) for n in STEPS]
            shown = " | ".join(f"{along:.0%}, {moved:.0%}" for along, moved in cells)
            print(f"| {rate:g} | {str(dtype).removeprefix('torch.')} | {shown} |")


if __name__ == "__main__":
    main()
