# SPDX-License-Identifier: Apache-2.0
"""Who samples responses in words: SGLang, or transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig

from evidence.engines import EngineSpec

Weights = Mapping[str, Tensor]


class Responses(NamedTuple):
    """Sampled tokens, each response up to its end token, and their log-probs as the engine reports them."""

    ids: list[list[int]]
    logprobs: list[list[float]]


class Sampler(Protocol):
    """Samples responses from weights that change."""

    def load(self, weights: Weights) -> None:
        """Take over weights under the names that transformers has for them in memory."""

    def sample(
        self, prompts: Sequence[list[int]], *, num_tokens: int, temperature: float, end_token: int, seed: int
    ) -> Responses:
        """One response to each prompt, of at most ``num_tokens`` tokens; equal seeds draw with equal random numbers."""

    def close(self) -> None:
        """Free what it holds."""


def create_sampler(
    spec: EngineSpec,
    config: PretrainedConfig,
    *,
    batch: int,
    length: int,
    device: torch.device,
    evaluates: bool = False,
) -> Sampler:
    """The engine for ``batch`` prompts of at most ``length`` tokens with their responses; :class:`Unrounded` too.

    Raises:
        ValueError: Transformers has no such setting.
    """
    if spec.kind == "sglang":
        return SGLangSampler(spec, config, batch=batch, length=length, device=device, evaluates=evaluates)
    if (spec.cache, spec.weights) != ("auto", "auto"):
        raise ValueError(f"engine {spec}: only SGLang has caches and weights of other dtypes")
    return TransformersSampler(config, dtype=getattr(torch, spec.dtype), device=device)


class SGLangSampler:
    """SGLang's model runner in this process.

    Attributes:
        spec: How the next weights are rounded on the way to it may be changed.
    """

    def __init__(
        self,
        spec: EngineSpec,
        config: PretrainedConfig,
        *,
        batch: int,
        length: int,
        device: torch.device,
        evaluates: bool = False,
    ) -> None:
        from evidence.sglang_runner import SGLangRunner

        self.spec, self._is_tied = spec, config.tie_word_embeddings
        self._quantizer = None
        if spec.started.weights != "auto":
            with torch.device("meta"):
                shapes = AutoModelForCausalLM.from_config(config).state_dict()
            kept = {name: tuple(weight.shape) for name, weight in shapes.items() if not self._is_alias(name)}
            self._quantizer = spec.quantizer_of(kept)
        self._runner = SGLangRunner(
            config,
            device=device,
            batch_size=batch,
            max_length=length,
            settings={
                "dtype": spec.dtype,
                "kv_cache_dtype": spec.cache,
                # Rows that have ended leave the batch.
                "cuda_graph_bs_decode": sorted({-(-batch // share) for share in (1, 2, 4, 8)}),
                **spec.settings,
            },
            quantizer=self._quantizer,
            cache_scale=spec.cache_scale,
        )
        self._is_widened = evaluates and spec.cache != "auto"
        if self._is_widened:
            self._runner.widen_cache()

    def unrounded_cache(self) -> AbstractContextManager[None]:
        """Inside, keys and values are cached in the engine's dtype."""
        return self._runner.wide_cache() if self._is_widened else nullcontext()

    def load(self, weights: Weights) -> None:
        """See :class:`Sampler`."""
        own = {name: weight for name, weight in weights.items() if not self._is_alias(name)}
        self._runner.load(self._prepared(own))

    def sample(
        self, prompts: Sequence[list[int]], *, num_tokens: int, temperature: float, end_token: int, seed: int
    ) -> Responses:
        """See :class:`Sampler`."""
        self._runner.reseed(seed)
        generated = self._runner.generate(
            [torch.tensor(prompt) for prompt in prompts],
            num_tokens=num_tokens,
            temperature=temperature,
            end_token=end_token,
        )
        return ended(generated.ids, generated.logprobs, end_token)

    def close(self) -> None:
        """See :class:`Sampler`."""
        self._runner.close()

    def _prepared(self, weights: Weights) -> Weights:
        """Quantized where the engine multiplies in 8 bits, its scales computed in float32; or rounded to 8 bits."""
        if self._quantizer is None:
            # It rounds the weights of several models at once.
            rounded = self.spec.rounded({name: weight[None] for name, weight in weights.items()})
            return {name: weight[0] for name, weight in rounded.items()}
        return self._quantizer.quantize({name: weight.float() for name, weight in weights.items()})

    def _is_alias(self, name: str) -> bool:
        """A second name of tied embeddings."""
        return self._is_tied and name == "lm_head.weight"


class Unrounded:
    """The same engine with weights, keys and values that are not rounded."""

    def __init__(self, engine: SGLangSampler) -> None:
        self._engine, self.close = engine, engine.close

    def sample(self, prompts: Sequence[list[int]], **options: Any) -> Responses:
        """See :class:`Sampler`."""
        with self._engine.unrounded_cache():
            return self._engine.sample(prompts, **options)

    def load(self, weights: Weights) -> None:
        """See :class:`Sampler`."""
        spec = self._engine.spec
        self._engine.spec = spec.started
        self._engine.load(weights)
        self._engine.spec = spec


class TransformersSampler:
    """transformers with its own attention and cache; also what evaluates the trainer's policy."""

    def __init__(self, config: PretrainedConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self._device = device
        with torch.random.fork_rng(devices=[device.index or 0] if device.type == "cuda" else []), device:
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        self._held = self._model.state_dict()

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """See :class:`Sampler`."""
        if differing := sorted(weights.keys() ^ self._held.keys()):
            raise ValueError(f"weights: {differing[0]} is missing or unknown ({len(differing)} such names)")
        for name, weight in weights.items():
            self._held[name].copy_(weight)

    @torch.no_grad()
    def sample(
        self, prompts: Sequence[list[int]], *, num_tokens: int, temperature: float, end_token: int, seed: int
    ) -> Responses:
        """See :class:`Sampler`."""
        generator = torch.Generator(self._device).manual_seed(seed)
        width = max(map(len, prompts))
        # The last tokens of all prompts stand one below the other.
        token_BT = torch.tensor([[end_token] * (width - len(prompt)) + prompt for prompt in prompts])
        mask_BT = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        token_BT, mask_BT = token_BT.to(self._device), mask_BT.to(self._device)
        position_BT = (mask_BT.cumsum(1) - 1).clamp(min=0)
        has_ended = torch.zeros(len(prompts), dtype=torch.bool, device=self._device)
        cache, ids, logprobs = DynamicCache(config=self._model.config), [], []
        for _ in range(num_tokens):
            output = self._model(token_BT, mask_BT, position_BT, cache, logits_to_keep=1)
            logprob_BV = (output.logits[:, -1].float() / temperature).log_softmax(-1)
            token_BT = logprob_BV.exp().multinomial(1, generator=generator)
            ids.append(token_BT[:, 0])
            logprobs.append(logprob_BV.gather(1, token_BT)[:, 0])
            has_ended |= ids[-1] == end_token
            if len(ids) % 8 == 0 and has_ended.all():
                break
            mask_BT = torch.cat([mask_BT, torch.ones_like(token_BT)], 1)
            position_BT = position_BT[:, -1:] + 1
        return ended(torch.stack(ids, 1), torch.stack(logprobs, 1), end_token)

    def close(self) -> None:
        """See :class:`Sampler`."""
        del self._model, self._held


def ended(ids_BL: Tensor, logprobs_BL: Tensor, end_token: int) -> Responses:
    """Cut every row behind its first end token."""
    ids, logprobs = ids_BL.tolist(), logprobs_BL.tolist()
    lengths = [row.index(end_token) + 1 if end_token in row else len(row) for row in ids]
    return Responses(
        [row[:length] for row, length in zip(ids, lengths, strict=True)],
        [row[:length] for row, length in zip(logprobs, lengths, strict=True)],
    )
