"""Causes of a mismatch, each planted in what the transformer of `tests/trained_engines.py` samples.

The engine computes in bfloat16, the trainer in float32: kernels alone give a k3 of 8e-5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor
from trained_engines import LEARNING_RATE, PROMPT, UPDATES, Model, Weights, language, new_weights, updated

from mis_ext.diagnosis import Diagnosis
from mis_ext.report import Collector, Part

COUNT, LENGTH = 64, 160

Sides = tuple[list[Tensor], list[Tensor]]
"""Log-probs of the trainer and of the engine."""


@cache
def trained(*, experts: bool) -> Weights:
    rounds = UPDATES // 2 if experts else UPDATES
    return updated(new_weights(experts=experts), num_updates=rounds, rate=LEARNING_RATE, seed=3)[-1]


@cache
def moved(*, num_updates: int, seed: int) -> Weights:
    """Weights some updates on."""
    return updated(trained(experts=False), num_updates=num_updates, rate=3e-3, seed=seed)[-1]


@dataclass(frozen=True)
class Pair:
    """Both engines, what samples from the logits, and what the prompt was computed with and scored with."""

    trainer: Model
    engine: Model
    prefill: Model | None = None
    sampler: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()
    has_other_prompt: bool = False

    @torch.no_grad()
    def sampled(self) -> Sides:
        """Log-probs of tokens that the engine sampled, each behind those before it."""
        generator = torch.Generator().manual_seed(0)
        tokens, behavior, past = language(generator, COUNT, PROMPT), list[Tensor](), list[tuple[Tensor, Tensor]]()
        for place in range(LENGTH):
            model = self.prefill if self.prefill is not None and place == 0 else self.engine
            begin = PROMPT + place - 1 if place else 0
            logits = model.forward(tokens[:, begin:], past, begin)[:, -1]
            for change in self.sampler:
                logits = change(logits, tokens[:, PROMPT:])
            log_probs = logits.log_softmax(-1)
            chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
            behavior.append(log_probs.gather(1, chosen))
            tokens = torch.cat([tokens, chosen], 1)
        seen = tokens.clone()
        if self.has_other_prompt:
            seen[:, :PROMPT] = language(generator, COUNT, PROMPT)
        scored = self.trainer.forward(seen[:, :-1])[:, PROMPT - 1 :].log_softmax(-1)
        return [*scored.gather(-1, tokens[:, PROMPT:, None])[..., 0]], [*torch.cat(behavior, 1)]


# --- changes of the engines


def in_fp8(pair: Pair) -> Pair:
    weights = {}
    for name, each in pair.engine.weights.items():
        scale = each.abs().amax() / 448.0
        weights[name] = (each / scale).to(torch.float8_e4m3fn).float() * scale
    return replace(pair, engine=replace(pair.engine, weights=weights))


def in_fp8_cache(pair: Pair) -> Pair:
    return replace(pair, engine=replace(pair.engine, cache_dtype=torch.float8_e5m2))


def adapter(pair: Pair) -> Pair:
    """The engine has an adapter of rank 4 that the trainer lacks."""
    generator, weights = torch.Generator().manual_seed(8), {**pair.engine.weights}
    for name in (name for name in weights if name.endswith(("qkv", "up"))):
        inputs, outputs = weights[name].shape
        low_rank = torch.randn(inputs, 4, generator=generator) @ torch.randn(4, outputs, generator=generator)
        weights[name] = weights[name] + 0.006 * low_rank
    return replace(pair, engine=replace(pair.engine, weights=weights))


def late(pair: Pair) -> Pair:
    return replace(pair, engine=replace(pair.engine, late=100, late_factor=0.71))


def stale(pair: Pair) -> Pair:
    return replace(pair, trainer=replace(pair.trainer, weights=moved(num_updates=4, seed=4)))


def stale_prefix(pair: Pair) -> Pair:
    return replace(pair, prefill=replace(pair.engine, weights=moved(num_updates=8, seed=6)))


def other_prompt(pair: Pair) -> Pair:
    return replace(pair, has_other_prompt=True)


def _sampler(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Pair], Pair]:
    return lambda pair: replace(pair, sampler=(*pair.sampler, change))


def _divided(by: float, logits: Tensor, _: Tensor) -> Tensor:
    return logits / by


def _top_p(logits: Tensor, _: Tensor) -> Tensor:
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    is_left = ordered.cumsum(-1) - ordered < 0.9
    return logits.masked_fill(~torch.zeros_like(is_left).scatter(-1, order, is_left), -math.inf)


def _top_k(logits: Tensor, _: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.topk(8).values[..., -1:], -math.inf)


def _penalty(logits: Tensor, before: Tensor) -> Tensor:
    return logits - 0.5 * torch.zeros_like(logits).scatter(1, before, 1.0)


# --- changes of what the engine returns


def _rounded(sides: Sides) -> Sides:
    return sides[0], [each.bfloat16().float() for each in sides[1]]


def _to_base_2(sides: Sides) -> Sides:
    return sides[0], [each / math.log(2.0) for each in sides[1]]


def _some_shifted(sides: Sides) -> Sides:
    return sides[0], [each if number % 10 else each.roll(1) for number, each in enumerate(sides[1])]


def _placeholders(sides: Sides) -> Sides:
    behavior = [each.clone() for each in sides[1]]
    for number in (3, 5):
        behavior[number][7:9] = -9999.0
    return sides[0], behavior


def _foreign(sides: Sides) -> Sides:
    """Three samples have the log-probs of others."""
    return sides[0], [*sides[1][-3:], *sides[1][3:]]


IN_ENGINES: dict[str, tuple[str, Callable[[Pair], Pair]]] = {
    "temperature 0.7": ("temperature", _sampler(partial(_divided, 0.7))),
    "temperature 1.05": ("temperature", _sampler(partial(_divided, 1.05))),
    "temperature 1.2": ("temperature", _sampler(partial(_divided, 1.2))),
    "top-p 0.9": ("top_p_or_top_k", _sampler(_top_p)),
    "top-k 8": ("top_p_or_top_k", _sampler(_top_k)),
    "weights 4 updates old": ("large_mismatch", stale),
    "prefix of old weights": ("stale_prefix_cache", stale_prefix),
    "another prompt": ("stale_prefix_cache", other_prompt),
    "positions from 92 on": ("late_positions", late),
    "fp8 weights": ("low_precision", in_fp8),
    "fp8 cache": ("low_precision", in_fp8_cache),
    "adapter on one side": ("low_precision", adapter),
    "presence penalty": ("low_precision", _sampler(_penalty)),
}
IN_LOG_PROBS: dict[str, tuple[str, Callable[[Sides], Sides]]] = {
    "log-probs in bf16": ("bf16_log_probs", _rounded),
    "base 2": ("log_base", _to_base_2),
    "a tenth shifted": ("shifted_by_one_token", _some_shifted),
    "4 placeholders": ("placeholder_log_probs", _placeholders),
    "3 samples of others": ("retokenised_samples", _foreign),
}
EXPERTS = "mixture of experts"
"""Its experts differ where kernels do: nothing else is planted."""
CAUSE_OF = {name: cause for name, (cause, _) in (IN_ENGINES | IN_LOG_PROBS).items()} | {EXPERTS: "expert_routing"}

PAIRS = (
    *(("log-probs in bf16", other) for other in ("weights 4 updates old", "prefix of old weights", EXPERTS)),
    *(("log-probs in bf16", other) for other in ("fp8 weights", "positions from 92 on", "temperature 0.7")),
    *(("4 placeholders", other) for other in ("temperature 0.7", "top-p 0.9", "weights 4 updates old")),
    *(("3 samples of others", other) for other in ("temperature 0.7", "fp8 weights", "top-p 0.9")),
    *(("a tenth shifted", other) for other in ("temperature 0.7", "fp8 weights")),
    *(("weights 4 updates old", other) for other in ("temperature 0.7", "temperature 1.2", "top-k 8")),
    *(("fp8 weights", other) for other in ("temperature 0.7", "temperature 1.05", "top-p 0.9", "positions from 92 on")),
    *(("positions from 92 on", other) for other in ("prefix of old weights", "temperature 0.7")),
    ("temperature 0.7", "top-p 0.9"),
)

AMONG_ALTERNATIVES = {
    "another prompt": "another prompt",
    "presence penalty": "penalties",
    "adapter on one side": "an adapter that one side lacks",
    "weights 4 updates old": "stale weights",
}
"""Plants that log-probs alone do not tell from others, and the words that the finding has for them."""
LIMITS = {
    ("positions from 92 on", "temperature 0.7"): {"late_positions", "low_precision"},
}
"""Causes of which pairs are told wrong today: named and not there, or the reverse."""


@cache
def _of_engines(names: tuple[str, ...], kernels: bool) -> Sides:
    weights = trained(experts=EXPERTS in names)
    pair = Pair(Model(weights), Model(weights, dtype=torch.bfloat16 if kernels else torch.float32))
    for name, (_, change) in IN_ENGINES.items():
        pair = change(pair) if name in names else pair
    return pair.sampled()


def sides_of(*names: str, kernels: bool = True) -> Sides:
    """Tokens with these plants."""
    in_engines = tuple(name for name in (*IN_ENGINES, EXPERTS) if name in names)
    sides = _of_engines(in_engines, kernels)
    for name, (_, change) in IN_LOG_PROBS.items():
        sides = change(sides) if name in names else sides
    return sides


@cache
def collected(*names: str, kernels: bool = True) -> Collector:
    """What the report knows of them."""
    sides = sides_of(*names, kernels=kernels)
    collector = Collector()
    collector.add(Part.of_lists(proximal=sides[0], behavior=sides[1]))
    return collector


def named(names: Sequence[str]) -> list[Diagnosis]:
    return collected(*names).diagnoses()
