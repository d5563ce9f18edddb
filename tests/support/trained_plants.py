# SPDX-License-Identifier: Apache-2.0
"""Causes of a mismatch, each planted in samples of the transformer of `tests/support/trained_engines.py`.

The engine computes in bfloat16, the trainer in float32: kernels alone give a k3 of 8e-5. Changes are applied in the
order of the tables below, which is that of an engine: weights, kernels, sampler, and then the returned log-probs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn import functional
from trained_engines import LEARNING_RATE, PROMPT, UPDATES, VOCABULARY, Model, Weights, language, new_weights, updated

from mis_ext.tools.report import Collector, Origin, Part

COUNT, LENGTH = 64, 160
NUM_STEPS, NUM_MOVED, PADDING = 6, 8, 16
EXPERTS = "mixture of experts"
"""Its experts differ because kernels differ; nothing else is planted."""


@cache
def trained(*, experts: bool) -> Weights:
    rounds = UPDATES // 2 if experts else UPDATES
    return updated(new_weights(experts=experts), num_updates=rounds, rate=LEARNING_RATE, seed=3)[-1]


@cache
def moved(*, experts: bool, seed: int) -> list[Weights]:
    """Weights after one to eight more updates."""
    return updated(trained(experts=experts), num_updates=NUM_MOVED, rate=3e-3, seed=seed)


class Sides(NamedTuple):
    """Log-probs of trainer and engine, and the step and weight lag of each sample."""

    trainer: list[Tensor]
    engine: list[Tensor]
    steps: Sequence[str] = ("0",) * COUNT
    versions_behind: Sequence[float] = (math.nan,) * COUNT

    def collected(self) -> Collector:
        """The evidence of the report for them."""
        collector = Collector()
        for step in dict.fromkeys(self.steps):
            chosen = [number for number, each in enumerate(self.steps) if each == step]
            trainer, engine = ([side[number] for number in chosen] for side in (self.trainer, self.engine))
            origins = [Origin(versions_behind=self.versions_behind[number]) for number in chosen]
            collector.add(Part.of_lists(proximal=trainer, behavior=engine, origins=origins, step=step))
        return collector


@dataclass(frozen=True)
class Pair:
    """Both engines, the sampler, and the context of the trainer before a response.

    Attributes:
        trainers: Each scores as many samples.
        prefill: The engine of the prompt and of ``old`` tokens; None: the same.
        sampler: Changes of the logits, which see the tokens before.
        seen: Maps the prompt to the trainer's context.
        steps: Whether the samples of each trainer are a step.
        versions_behind: Of each trainer, where versions are recorded.
    """

    trainers: tuple[Model, ...]
    engine: Model
    prefill: Model | None = None
    old: int = 0
    sampler: tuple[Callable[[Tensor, Tensor], Tensor], ...] = ()
    seen: Callable[[Tensor, torch.Generator], Tensor] | None = None
    steps: bool = False
    versions_behind: tuple[float, ...] = field(default=())

    @property
    def weights(self) -> Weights:
        return self.engine.weights

    def with_engine(self, change: Callable[[Model], Model]) -> Pair:
        """A change of all computations of the engine."""
        prefill = None if self.prefill is None else change(self.prefill)
        return replace(self, engine=change(self.engine), prefill=prefill)

    def with_trainer(self, change: Callable[[Model], Model]) -> Pair:
        return replace(self, trainers=tuple(map(change, self.trainers)))

    @torch.no_grad()
    def sampled(self, seed: int) -> Sides:
        """Log-probs of tokens that the engine sampled, each behind those before it."""
        generator = torch.Generator().manual_seed(seed)
        prompts, behavior, past = language(generator, COUNT, PROMPT), list[Tensor](), list[tuple[Tensor, Tensor]]()
        tokens = prompts
        for place in range(LENGTH):
            model = self.prefill if self.prefill is not None and place <= self.old else self.engine
            begin = PROMPT + place - 1 if place else 0
            logits = model.forward(tokens[:, begin:], past, begin)[:, -1]
            for change in self.sampler:
                logits = change(logits, tokens[:, PROMPT:])
            log_probs = logits.log_softmax(-1)
            chosen = torch.multinomial(log_probs.exp(), 1, generator=generator)
            behavior.append(log_probs.gather(1, chosen))
            tokens = torch.cat([tokens, chosen], 1)
        response = tokens[:, PROMPT:]
        before = prompts if self.seen is None else self.seen(prompts, generator)
        scored, of_trainer = list[Tensor](), [number * len(self.trainers) // COUNT for number in range(COUNT)]
        for number, trainer in enumerate(self.trainers):
            mine = torch.tensor([each == number for each in of_trainer])
            seen = torch.cat([before, response], 1)[mine]
            logits = trainer.forward(seen[:, :-1])[:, before.shape[1] - 1 :]
            scored += [*logits.log_softmax(-1).gather(-1, response[mine][..., None])[..., 0]]
        sides = Sides(scored, [*torch.cat(behavior, 1)])
        if self.steps:
            sides = sides._replace(steps=[*map(str, of_trainer)])
        if self.versions_behind:
            sides = sides._replace(versions_behind=[self.versions_behind[number] for number in of_trainer])
        return sides


# --- weights of another time


def stale(pair: Pair) -> Pair:
    return pair.with_trainer(lambda each: replace(each, weights=_moved(pair, 4)[3]))


def never_synced(pair: Pair) -> Pair:
    """The trainer is one update farther in each step."""
    weights = [pair.weights, *_moved(pair, 4)]
    trainers = tuple(replace(pair.trainers[0], weights=weights[step]) for step in range(NUM_STEPS))
    return replace(pair, trainers=trainers, steps=True)


def half_behind(pair: Pair) -> Pair:
    """Half of the samples are an update behind, and it is recorded."""
    (trainer,) = pair.trainers
    behind = replace(trainer, weights=_moved(pair, 4)[0])
    return replace(pair, trainers=(trainer, behind), versions_behind=(0.0, 1.0))


def stale_prefix(pair: Pair) -> Pair:
    return replace(pair, prefill=replace(pair.engine, weights=_moved(pair, 6)[7]))


def begun_with_old(pair: Pair) -> Pair:
    """Weights were updated in the middle of the responses."""
    return replace(pair, prefill=replace(pair.engine, weights=_moved(pair, 4)[3]), old=LENGTH // 2)


def _moved(pair: Pair, seed: int) -> list[Weights]:
    return moved(experts="0.router" in pair.weights, seed=seed)


# --- other weights and kernels


def in_fp8(pair: Pair) -> Pair:
    return pair.with_engine(lambda each: replace(each, weights={n: _fp8(w) for n, w in each.weights.items()}))


def _fp8(weight: Tensor) -> Tensor:
    scale = weight.abs().amax() / 448.0
    return (weight / scale).to(torch.float8_e4m3fn).float() * scale


def _cache(dtype: torch.dtype) -> Callable[[Pair], Pair]:
    return lambda pair: pair.with_engine(lambda each: replace(each, cache_dtype=dtype))


def adapter(pair: Pair) -> Pair:
    """The engine has an adapter of rank 4 that the trainer lacks."""
    return pair.with_engine(lambda each: replace(each, weights=_adapted(each.weights)))


def merged_adapter(pair: Pair) -> Pair:
    """The trainer adds what its adapter gives; the engine has the sum, rounded once more."""

    def rounded(weights: Weights) -> Weights:
        return {name: each.bfloat16().float() for name, each in weights.items()}

    pair = pair.with_trainer(lambda each: replace(each, weights=_adapted(rounded(each.weights))))
    return pair.with_engine(lambda each: replace(each, weights=rounded(_adapted(rounded(each.weights)))))


def _adapted(weights: Weights) -> Weights:
    generator, adapted = torch.Generator().manual_seed(8), {**weights}
    for name in (name for name in weights if name.endswith(("qkv", "up"))):
        inputs, outputs = weights[name].shape[-2:]
        low_rank = torch.randn(inputs, 4, generator=generator) @ torch.randn(4, outputs, generator=generator)
        adapted[name] = weights[name] + 0.006 * low_rank
    return adapted


def fp16_kernels(pair: Pair) -> Pair:
    return pair.with_engine(lambda each: replace(each, dtype=torch.float16))


def late(pair: Pair) -> Pair:
    return pair.with_engine(lambda each: replace(each, late=100, late_factor=0.71))


def padded(pair: Pair) -> Pair:
    """The trainer has columns more, of zeros, which no token has."""

    def padded_head(weights: Weights) -> Weights:
        return {**weights, "head": functional.pad(weights["head"], (0, PADDING))}

    return pair.with_trainer(lambda each: replace(each, weights=padded_head(each.weights)))


# --- the context of the trainer


def _seen(seen: Callable[[Tensor, torch.Generator], Tensor]) -> Callable[[Pair], Pair]:
    return lambda pair: replace(pair, seen=seen)


def _other_prompt(prompts: Tensor, generator: torch.Generator) -> Tensor:
    return language(generator, *prompts.shape)


def _other_template(prompts: Tensor, _: torch.Generator) -> Tensor:
    """A system text in front, and two more tokens before the response."""
    fixed = torch.Generator().manual_seed(5)
    system, role = language(fixed, 1, 12), torch.randint(0, VOCABULARY, (1, 2), generator=fixed)
    count = len(prompts)
    return torch.cat([system.expand(count, -1), prompts, role.expand(count, -1)], 1)


# --- the sampler


def _sampler(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Pair], Pair]:
    return lambda pair: replace(pair, sampler=(*pair.sampler, change))


def _presence(logits: Tensor, before: Tensor) -> Tensor:
    return logits - 0.5 * torch.zeros_like(logits).scatter(1, before, 1.0)


def _repetition(logits: Tensor, before: Tensor) -> Tensor:
    is_before = torch.zeros_like(logits).scatter(1, before, 1.0) > 0.0
    return torch.where(is_before, torch.where(logits > 0.0, logits / 1.1, logits * 1.1), logits)


def _divided(by: float, logits: Tensor, _: Tensor) -> Tensor:
    return logits / by


def _top_p(logits: Tensor, _: Tensor) -> Tensor:
    ordered, order = logits.softmax(-1).sort(-1, descending=True)
    is_left = ordered.cumsum(-1) - ordered < 0.9
    return logits.masked_fill(~torch.zeros_like(is_left).scatter(-1, order, is_left), -math.inf)


def _top_k(logits: Tensor, _: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.topk(8).values[..., -1:], -math.inf)


def _min_p(logits: Tensor, _: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) + math.log(0.05), -math.inf)


# --- the log-probs that the engine returns


def _engine(change: Callable[[int, Tensor], Tensor]) -> Callable[[Sides], Sides]:
    """A change of the engine's log-probs of each sample, by its number."""
    return lambda sides: sides._replace(engine=[change(number, each) for number, each in enumerate(sides.engine)])


def _placeholders(number: int, behavior: Tensor) -> Tensor:
    place = torch.arange(len(behavior))
    return behavior.masked_fill((place // 2 == 3) & (number in (3, 5)), -9999.0)


def _greedy(number: int, behavior: Tensor) -> Tensor:
    """Tokens of two samples were sampled without a temperature: their log-prob is 0."""
    return behavior * (number not in (3, 5))


def _tenth(number: int, behavior: Tensor) -> Tensor:
    return behavior if number % 10 else behavior.roll(1)


def _foreign(sides: Sides) -> Sides:
    """Three samples have the log-probs of others."""
    return sides._replace(engine=[*sides.engine[-3:], *sides.engine[3:]])


def _base_10(sides: Sides) -> Sides:
    return sides._replace(trainer=[each / math.log(10.0) for each in sides.trainer])


_Changed = TypeVar("_Changed")


class Plant(NamedTuple, Generic[_Changed]):
    """A cause as it is planted.

    Attributes:
        cause: Its name in the table; empty if log-probs alone do not identify it.
        change: The planted change.
        words: Its name as an alternative in findings with the same evidence.
        is_part: Whether it is an error of some tokens, which are removed.
    """

    cause: str
    change: Callable[[_Changed], _Changed]
    words: str = ""
    is_part: bool = False


_CUT, _HOTTER = "top-p, top-k or min-p", "a temperature above 1"
_STALE, _ADAPTER, _PRECISION = "stale weights", "an adapter that one side lacks", "low precision"
_PENALTY, _PROMPT = "penalties", "another prompt, chat template"

IN_ENGINES: dict[str, Plant[Pair]] = {
    "weights 4 updates old": Plant("", stale, _STALE),
    "never synced, 6 steps": Plant("stale_weights", never_synced, _STALE),
    "half an update behind": Plant("stale_weights", half_behind, _STALE),
    "begun with old weights": Plant("", begun_with_old, _STALE),
    "prefix of old weights": Plant("stale_prefix_cache", stale_prefix, _STALE),
    "adapter on one side": Plant("", adapter, _ADAPTER),
    "adapter merged on one side": Plant("bf16_kernels", merged_adapter),
    "fp8 weights": Plant("low_precision", in_fp8, _PRECISION),
    "fp8 cache (e5m2)": Plant("low_precision", _cache(torch.float8_e5m2), _PRECISION),
    "fp8 cache (e4m3)": Plant("low_precision", _cache(torch.float8_e4m3fn), _PRECISION),
    "fp16 kernels": Plant("bf16_kernels", fp16_kernels),
    "positions from 92 on": Plant("late_positions", late, "begins at a position"),
    "padded vocabulary": Plant("top_p_or_top_k", padded, "padding of the trainer's vocabulary"),
    "another prompt": Plant("", _seen(_other_prompt), _PROMPT),
    "another chat template": Plant("", _seen(_other_template), _PROMPT),
    "presence penalty": Plant("", _sampler(_presence), _PENALTY),
    "repetition penalty": Plant("", _sampler(_repetition), _PENALTY),
    "temperature 0.7": Plant("temperature", _sampler(partial(_divided, 0.7)), "a temperature below 1"),
    "temperature 1.05": Plant("temperature", _sampler(partial(_divided, 1.05)), _HOTTER),
    "temperature 1.2": Plant("temperature", _sampler(partial(_divided, 1.2)), _HOTTER),
    "top-k 8": Plant("top_p_or_top_k", _sampler(_top_k), _CUT),
    "top-p 0.9": Plant("top_p_or_top_k", _sampler(_top_p), _CUT),
    "min-p 0.05": Plant("top_p_or_top_k", _sampler(_min_p), _CUT),
}
IN_LOG_PROBS: dict[str, Plant[Sides]] = {
    "3 samples of others": Plant("other_text", _foreign, is_part=True),
    "all shifted": Plant("shifted_log_probs", _engine(lambda _, each: each.roll(1))),
    "a tenth shifted": Plant(
        "shifted_log_probs", _engine(lambda n, each: each if n % 10 else each.roll(1)), is_part=True
    ),
    "base 2": Plant("not_log_probs", _engine(lambda _, each: each / math.log(2.0)), "logarithms to another base"),
    "the trainer's to base 10": Plant("not_log_probs", _base_10, "logarithms to another base"),
    "negated": Plant("not_log_probs", _engine(lambda _, each: -each)),
    "a bonus in 2 samples": Plant("not_log_probs", _engine(lambda n, each: each + (n in (8, 9))), is_part=True),
    "log-probs in bf16": Plant("bf16_log_probs", _engine(lambda _, each: each.bfloat16().float())),
    "2 greedy samples": Plant("placeholder_log_probs", _engine(_greedy), is_part=True),
    "4 placeholders": Plant("placeholder_log_probs", _engine(_placeholders), is_part=True),
}
OF_ALL = ("all shifted", "base 2", "the trainer's to base 10", "negated")
"""Errors of all log-probs. If one is found, the search ends."""
PLANTS: dict[str, Plant[Pair] | Plant[Sides] | Plant[None]] = {
    **IN_ENGINES,
    EXPERTS: Plant("expert_routing", lambda nothing: nothing, "a mixture of experts"),
    **IN_LOG_PROBS,
}


@cache
def _of_engines(names: tuple[str, ...], seed: int) -> Sides:
    weights = trained(experts=EXPERTS in names)
    pair = Pair((Model(weights),), Model(weights, dtype=torch.bfloat16))
    for name, plant in IN_ENGINES.items():
        pair = plant.change(pair) if name in names else pair
    return pair.sampled(seed)


def sides_of(*names: str, seed: int = 0) -> Sides:
    """Tokens with these plants."""
    sides = _of_engines(tuple(name for name in PLANTS if name in names and name not in IN_LOG_PROBS), seed)
    for name, plant in IN_LOG_PROBS.items():
        sides = plant.change(sides) if name in names else sides
    return sides


@cache
def collected(*names: str, seed: int = 0) -> Collector:
    """The evidence of the report for them."""
    return sides_of(*names, seed=seed).collected()
