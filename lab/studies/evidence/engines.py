# SPDX-License-Identifier: Apache-2.0
"""Engines that sample for all runs of a group: SGLang, and a sampler whose mismatch is dialled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from grpo.block_quantization import FORMATS, SCALE_SUFFIX, BlockQuantizer, round_inputs
from torch import Tensor

from mis_ext.rollout import SamplingParameters, define_log_probs
from mis_ext.rollout.comparable_log_probs import kept_mask

from .policy import Product, Shape, Weights, forward, new_caches

# How SGLang calls them.
BLOCKS = {"fp8_blocks": "fp8", "int8_blocks": "blockwise_int8"}
HASH_PRIME, TABLE_SIZE = 1_000_003, 1 << 14


class Sampled(NamedTuple):
    """What an engine returns.

    Attributes:
        ids: ``[R, B, L]``.
        logprobs: ``[R, B, L]``, as the engine reports them.
        experts: ``[R, B, P + L - 1, N, K]`` of all tokens but the last, where the engine tells.
        kept: ``[R, B, L, V]``, bool: the tokens that top-p kept. None where it keeps all.
        log_mass: ``[R, B, L]``: log of the probability of the kept tokens together.
    """

    ids: Tensor
    logprobs: Tensor
    experts: Tensor | None
    kept: Tensor | None = None
    log_mass: Tensor | None = None


class Engine(Protocol):
    """Samples responses of one length."""

    def sample(
        self,
        weights: Weights,
        prompts_RBP: Tensor,
        num_tokens: int,
        *,
        temperature: float,
        draw_seeds: list[int],
        top_p: float = 1.0,
    ) -> Sampled:
        """Sample with the weights.

        The log-probs are of the whole distribution, also where top-p leaves only a part of it.
        Runs with equal ``draw_seeds`` draw with the same random numbers, where the engine can.
        """

    def close(self) -> None:
        """Free what the engine holds."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """Which engine with which settings.

    Attributes:
        kind: ``controlled`` or ``sglang``.
        dtype: Of the weights and of the computation: ``float32`` or ``bfloat16``.
        cache: Dtype of keys and values; ``auto`` is ``dtype``. Also ``fp8_e5m2`` and ``fp8_e4m3``.
        weights: ``fp8_e4m3`` rounds every matrix but routers to it, with one scale per row, before the engine gets it.
            ``fp8_blocks`` and ``int8_blocks`` quantise the projections in blocks, and the engine multiplies in 8 bits.
            ``mantissa_N`` rounds every matrix but routers to N bits of mantissa, ``int4`` the projections to integers
            of 4 bits with a scale for 32 in a row; the engine multiplies them in its dtype.
        noise: Controlled only: standard deviation of noise on the logits that is a function of all earlier tokens, so
            that the same state has always the same error.
        cache_scale: SGLang only: keys and values are divided by it before a cache of 8 bits rounds them.
        settings: SGLang only: further arguments of its server.
    """

    kind: str = "controlled"
    dtype: str = "bfloat16"
    cache: str = "auto"
    weights: str = "auto"
    noise: float = 0.0
    cache_scale: float = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def started(self) -> EngineSpec:
        """What the engine is started as: SGLang gets rounded weights, and does not know that they are."""
        is_rounded = self.kind == "sglang" and self.weights not in BLOCKS
        return replace(self, weights="auto") if is_rounded else self

    def quantizer(self, shape: Shape) -> BlockQuantizer | None:
        """What quantises the weights in blocks; None: nothing does.

        Raises:
            ValueError: The shape has experts, or its widths are no whole numbers of blocks.
        """
        if self.weights in BLOCKS and shape.num_experts:
            raise ValueError(
                f"weights={self.weights!r} is for dense decoders, this one has {shape.num_experts} experts"
            )
        return self.quantizer_of(shape.weight_shapes())

    def quantizer_of(self, shapes: Mapping[str, tuple[int, ...]]) -> BlockQuantizer | None:
        """The same for weights of these shapes, by transformers name."""
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
        # Norms of all runs have two dimensions.
        return {
            name: weight.detach() if weight.dim() < 3 or is_kept(name) else rounding(weight.detach())
            for name, weight in weights.items()
        }

    def create(self, shape: Shape, *, batch: int, length: int, device: torch.device) -> Engine:
        """The engine for responses of ``length`` tokens with their prompts."""
        if self.kind == "controlled":
            return ControlledEngine(self, shape, device)
        # SGLang is heavy, and on a machine without it the other engine still runs.
        from .sglang_engine import SGLangEngine

        return SGLangEngine(self, shape, batch=batch, length=length, device=device)


class ControlledEngine:
    """The policy itself, in another dtype, with a cache in yet another one, and with noise."""

    def __init__(self, spec: EngineSpec, shape: Shape, device: torch.device) -> None:
        self._spec, self._shape, self._device = spec, shape, device
        self._dtype = getattr(torch, spec.dtype)
        self._quantizer = spec.quantizer(shape)
        names = {"auto": self._dtype, "fp8_e5m2": torch.float8_e5m2, "fp8_e4m3": torch.float8_e4m3fn}
        self._cache_dtype = names[spec.cache]
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(TABLE_SIZE, shape.vocab_size, generator=generator) * spec.noise
        self._noise = table.to(device) if spec.noise else None

    @torch.no_grad()
    def sample(
        self,
        weights: Weights,
        prompts_RBP: Tensor,
        num_tokens: int,
        *,
        temperature: float,
        draw_seeds: list[int],
        top_p: float = 1.0,
    ) -> Sampled:
        """See :class:`Engine`."""
        num_runs, batch, num_prompt = prompts_RBP.shape
        weights, project = self._prepared(self._spec.rounded(weights))
        length = num_prompt + num_tokens
        caches = new_caches(self._shape, num_runs * batch, length, self._cache_dtype, self._device)
        different = sorted(set(draw_seeds))
        generators = [torch.Generator(self._device).manual_seed(seed) for seed in different]
        draw_of_run = torch.tensor([different.index(seed) for seed in draw_seeds], device=self._device)
        ids = torch.empty(num_runs, batch, length, dtype=torch.int64, device=self._device)
        ids[..., :num_prompt] = prompts_RBP
        logprobs = torch.empty(num_runs, batch, num_tokens, device=self._device)
        state_RB = torch.zeros(num_runs, batch, dtype=torch.int64, device=self._device)
        for token in prompts_RBP.unbind(-1):
            state_RB = _next_state(state_RB, token)
        start, experts, kept, log_mass = 0, [], [], []
        for position in range(num_prompt, length):
            new_ids = ids[..., start:position]
            output = forward(self._shape, weights, new_ids, caches=caches, start=start, **project)
            experts.append(output.experts)
            scaled_RBV = output.logits[..., -1, :].float() / temperature
            if self._noise is not None:
                scaled_RBV = scaled_RBV + self._noise[state_RB % TABLE_SIZE]
            uniform = [
                torch.rand(batch, self._shape.vocab_size, generator=generator, device=self._device)
                for generator in generators
            ]
            gumbel = -(-torch.stack(uniform).clamp(min=1e-20).log()).clamp(min=1e-20).log()
            possible_RBV = scaled_RBV
            if top_p < 1:
                kept.append(kept_tokens(scaled_RBV, top_p))
                possible_RBV = scaled_RBV.masked_fill(~kept[-1], -torch.inf)
                log_mass.append(possible_RBV.logsumexp(-1) - scaled_RBV.logsumexp(-1))
            token_RB = (possible_RBV + gumbel[draw_of_run]).argmax(-1)
            ids[..., position] = token_RB
            logprobs[..., position - num_prompt] = scaled_RBV.log_softmax(-1).gather(-1, token_RB[..., None])[..., 0]
            state_RB = _next_state(state_RB, token_RB)
            start = position
        return Sampled(
            ids[..., num_prompt:],
            logprobs,
            torch.cat(experts, 2) if self._shape.num_experts else None,
            torch.stack(kept, 2) if kept else None,
            torch.stack(log_mass, 2) if kept else None,
        )

    def _prepared(self, weights: Weights) -> tuple[Weights, dict[str, Product]]:
        """Weights in the engine's dtype, and how to multiply with those in blocks: exactly, like the tensor cores."""
        quantizer = self._quantizer
        if quantizer is None:
            return {name: weight.to(self._dtype) for name, weight in weights.items()}, {}
        quantized = quantizer.quantize(weights)
        in_blocks = quantizer.dequantize(quantized)
        held = {name: w if f"{name}{SCALE_SUFFIX}" in quantized else w.to(self._dtype) for name, w in in_blocks.items()}

        def project(inputs: Tensor, weight: Tensor) -> Tensor:
            rounded = round_inputs(inputs, FORMATS[quantizer.method].dtype, quantizer.block_size)
            return torch.bmm(rounded, weight.mT).to(inputs.dtype)

        return held, {"project": project}

    def close(self) -> None:
        """See :class:`Engine`."""


class Engines:
    """One engine at a time, kept for the next group where that needs the same one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._made_for: tuple[object, ...] = ()
        self._engine: Engine | None = None

    def get(self, spec: EngineSpec, shape: Shape, *, batch: int, length: int) -> Engine:
        """See :meth:`EngineSpec.create`; the last engine is closed if it is another."""
        if self._engine is None or self._made_for != (spec, shape, batch, length):
            self.close()
            self._engine = spec.create(shape, batch=batch, length=length, device=self.device)
            self._made_for = (spec, shape, batch, length)
        return self._engine

    def close(self) -> None:
        """Free the engine."""
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def __enter__(self) -> Engines:
        """Itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Free the engine."""
        self.close()


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
    """What integers from -7 to 7 stand for, the largest number of a block being 7 of its scale."""
    blocks = weight.float().unflatten(-1, (-1, block))
    scale = blocks.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return ((blocks / scale).round() * scale).flatten(-2).to(weight.dtype)


def _in_e4m3(weight: Tensor) -> Tensor:
    scale = weight.abs().amax(-1, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def _next_state(state: Tensor, token: Tensor) -> Tensor:
    return (state * 131 + token + 1) % HASH_PRIME
