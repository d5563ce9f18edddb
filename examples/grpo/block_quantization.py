# SPDX-License-Identifier: Apache-2.0
"""Weights in 8 bits with a scale per block, as slime writes them into checkpoints and sends them to SGLang.

An engine that quantizes weights while it loads changes their format, so later updates do not fit. An engine that starts
from quantized weights accepts quantized updates, and multiplies in 8 bits: activations get a scale per token and block
at run time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Block widths with SGLang kernels, the usual one first.
BLOCK_SIZES = (128, 64, 32)
SCALE_SUFFIX = "_scale_inv"
# Keeps the scale of a block of zeros above 0.
SMALLEST_PEAK = 1e-12


@dataclass(frozen=True)
class Format:
    """An 8-bit format: its dtype, and the largest number in use."""

    dtype: torch.dtype
    largest: float


# By SGLang's ``quantization``.
FORMATS = {"fp8": Format(torch.float8_e4m3fn, 448.0), "blockwise_int8": Format(torch.int8, 127.0)}


@dataclass(frozen=True, kw_only=True)
class BlockQuantizer:
    """Quantizes the projections of a decoder. Embeddings, norms, routers and the output matrix are unchanged.

    Attributes:
        method: SGLang's ``quantization``, a key of ``FORMATS``.
        block_size: Rows and columns that share a scale.
        kept: Modules whose matrix is not quantized.
    """

    method: str
    block_size: int
    kept: tuple[str, ...]

    @classmethod
    def create(cls, method: str, shapes: Mapping[str, tuple[int, ...]]) -> BlockQuantizer:
        """Use the largest blocks that fit.

        Args:
            method: A key of ``FORMATS``.
            shapes: Shapes of the unquantized weights, by transformers name.

        Raises:
            ValueError: If there is no such method, or a matrix is not a whole number of blocks.
        """
        if method not in FORMATS:
            raise ValueError(f"quantization={method!r}: its weights cannot be updated; choose {' or '.join(FORMATS)}")
        quantized = {name: tuple(shape) for name, shape in shapes.items() if _is_quantized(name)}
        fitting = [size for size in BLOCK_SIZES if all(side % size == 0 for s in quantized.values() for side in s)]
        if not fitting:
            size = BLOCK_SIZES[-1]
            name, shape = next(pair for pair in quantized.items() if any(side % size for side in pair[1]))
            raise ValueError(
                f"quantization={method!r}: {name} {list(shape)} is not a whole number of blocks of {size} x {size}, "
                "the smallest ones; choose widths that are multiples of it"
            )
        kept = [n.removesuffix(".weight") for n, shape in shapes.items() if len(shape) > 1 and not _is_quantized(n)]
        return cls(method=method, block_size=fitting[0], kept=tuple(sorted(kept)))

    def config(self) -> dict[str, Any]:
        """``quantization_config`` of the checkpoint's ``config.json``."""
        names = {"fp8": "modules_to_not_convert", "blockwise_int8": "ignored_layers"}
        config: dict[str, Any] = {
            "quant_method": self.method,
            "activation_scheme": "dynamic",
            "weight_block_size": [self.block_size, self.block_size],
            names[self.method]: list(self.kept),
        }
        return config | ({"fmt": "e4m3"} if self.method == "fp8" else {})

    def settings(self) -> dict[str, Any]:
        """Arguments of SGLang's server for these blocks. It reads the method from the configuration."""
        # DeepGEMM treats other blocks as 128 x 128.
        needs_triton = self.method == "fp8" and self.block_size != BLOCK_SIZES[0]
        return {"fp8_gemm_runner_backend": "triton"} if needs_triton else {}

    def quantize(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the checkpoint's tensors: the given ones with quantized projections, and their scales.

        Args:
            weights: ``[..., rows, columns]`` by transformers name. Leading dimensions count models.
        """
        result: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if _is_quantized(name):
                quantized = quantize(weight, FORMATS[self.method], self.block_size)
                result[name], result[name + SCALE_SUFFIX] = quantized
            else:
                result[name] = weight
        return result

    def dequantize(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Dequantize the tensors of :meth:`quantize`; quantized ones become float32."""
        return {
            name: dequantize(weight, weights[name + SCALE_SUFFIX], self.block_size) if _is_quantized(name) else weight
            for name, weight in weights.items()
            if not name.endswith(SCALE_SUFFIX)
        }

    def write_config(self, folder: Path) -> None:
        """Add ``quantization_config`` to a checkpoint's ``config.json``."""
        path = folder / "config.json"
        config = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": self.config()}
        path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def quantize(weight: Tensor, form: Format, block_size: int) -> tuple[Tensor, Tensor]:
    """Return 8-bit numbers ``[..., rows, columns]``, and a float32 scale for every block.

    The largest number of a block becomes the largest one of the format.
    """
    blocks = _blocks(weight.float(), block_size)
    scale = blocks.abs().amax((-3, -1)).clamp(min=SMALLEST_PEAK) / form.largest
    scaled = (blocks / _over_blocks(scale)).clamp(-form.largest, form.largest)
    if not form.dtype.is_floating_point:
        scaled = scaled.round()
    return scaled.to(form.dtype).view(weight.shape), scale


def dequantize(weight: Tensor, scale: Tensor, block_size: int) -> Tensor:
    """Dequantize the results of :func:`quantize` to float32."""
    return (_blocks(weight.float(), block_size) * _over_blocks(scale)).view(weight.shape)


def round_inputs(inputs: Tensor, dtype: torch.dtype, block_size: int) -> Tensor:
    """Round activations ``[..., columns]`` in float32 as SGLang's kernels do for weights of ``dtype``.

    Every row has a scale per block. Integers are truncated, not rounded, as in SGLang's Triton kernel.
    """
    form = next(form for form in FORMATS.values() if form.dtype == dtype)
    groups = inputs.float().unflatten(-1, (-1, block_size))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / form.largest
    scaled = (groups / scale).clamp(-form.largest, form.largest)
    return (scaled.to(dtype).float() * scale).flatten(-2)


def _is_quantized(name: str) -> bool:
    return name.endswith("_proj.weight")


def _blocks(matrix: Tensor, size: int) -> Tensor:
    """``[..., row blocks, rows of one, column blocks, columns of one]``."""
    return matrix.contiguous().view(*matrix.shape[:-2], matrix.shape[-2] // size, size, -1, size)


def _over_blocks(scale: Tensor) -> Tensor:
    return scale[..., :, None, :, None]
