# SPDX-License-Identifier: Apache-2.0
"""How an engine is set, and how its weights are rounded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from grpo.block_quantization import BlockQuantizer
from torch import Tensor

from mis_ext.rollout import SamplingParameters, define_log_probs
from mis_ext.rollout.comparable_log_probs import kept_mask

Weights = Mapping[str, Tensor]
# How SGLang calls them.
BLOCKS = {"fp8_blocks": "fp8", "int8_blocks": "blockwise_int8"}


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """An engine with its settings.

    Attributes:
        kind: ``sglang``, or ``transformers``, which has none of the settings below.
        dtype: Of the weights and of the computation: ``float32`` or ``bfloat16``.
        cache: Dtype of keys and values; ``auto`` is ``dtype``. Also ``fp8_e5m2`` and ``fp8_e4m3``.
        weights: ``fp8_e4m3`` rounds every matrix but routers to it, with one scale per row, before the engine gets it.
            ``fp8_blocks`` and ``int8_blocks`` quantize the projections in blocks, and the engine multiplies in 8 bits.
            ``mantissa_N`` rounds every matrix but routers to N bits of mantissa, ``int4`` the projections to integers
            of 4 bits with a scale for 32 in a row; the engine multiplies them in its dtype.
        cache_scale: Keys and values are divided by it before a cache of 8 bits rounds them.
        settings: Further arguments of its server.
    """

    kind: str = "transformers"
    dtype: str = "bfloat16"
    cache: str = "auto"
    weights: str = "auto"
    cache_scale: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def started(self) -> EngineSpec:
        """The settings of the started engine: SGLang gets rounded weights without knowing it."""
        is_rounded = self.kind == "sglang" and self.weights not in BLOCKS
        return replace(self, weights="auto") if is_rounded else self

    def quantizer_of(self, shapes: Mapping[str, tuple[int, ...]]) -> BlockQuantizer | None:
        """The quantizer of weights of these shapes, by transformers name, in blocks; None: no quantization."""
        return BlockQuantizer.create(BLOCKS[self.weights], shapes) if self.weights in BLOCKS else None

    def rounded(self, weights: Weights) -> Weights:
        """The weights as the engine is to have them; those in blocks are left to the quantizer.

        Raises:
            ValueError: ``weights`` says none of the ways to round.
        """
        if self.weights == "auto" or self.weights in BLOCKS:
            return {name: weight.detach() for name, weight in weights.items()}
        kind, _, bits = self.weights.partition("_")
        if self.weights == "fp8_e4m3":
            rounding, is_kept = _in_e4m3, _is_router
        elif kind == "mantissa":
            rounding, is_kept = partial(to_mantissa, bits=int(bits)), _is_router
        elif self.weights == "int4":
            rounding, is_kept = to_int4, lambda name: not name.endswith("_proj.weight")
        else:
            raise ValueError(
                f"weights {self.weights!r}: expected auto, fp8_e4m3, mantissa_N, int4 or {', '.join(BLOCKS)}"
            )
        # With a first dimension for several models: norms have two.
        return {
            name: weight.detach() if weight.dim() < 3 or is_kept(name) else rounding(weight.detach())
            for name, weight in weights.items()
        }


def kept_tokens(scaled: Tensor, top_p: float) -> Tensor:
    """The tokens, bool, that SGLang's sampler keeps of ``[..., V]`` logits at the sampling temperature."""
    definition = define_log_probs(SamplingParameters(top_p=top_p), server="sglang", sampling_backend="pytorch")
    kept_TV = kept_mask(scaled.flatten(0, -2).softmax(-1), definition.sampled.truncation)
    return kept_TV.view(scaled.shape)


def _is_router(name: str) -> bool:
    return name.endswith("mlp.gate.weight")


def to_mantissa(weight: Tensor, *, bits: int) -> Tensor:
    """Rounded to so many bits behind the leading one, half away from zero; float32 has 23, bf16 has 7."""
    dropped = 23 - bits
    whole = weight.float().view(torch.int32) + (1 << (dropped - 1))
    return (whole & -(1 << dropped)).view(torch.float32).to(weight.dtype)


def to_int4(weight: Tensor, *, block: int = 32) -> Tensor:
    """Round to integers from -7 to 7 times a scale per block; its largest number is 7 times the scale."""
    blocks = weight.float().unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return ((blocks / scale).round() * scale).flatten(-2).to(weight.dtype)


def _in_e4m3(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale
