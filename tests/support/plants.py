# SPDX-License-Identifier: Apache-2.0
"""Causes of a mismatch, each planted in tokens that two engines gave."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from engines import COUNT, LENGTH, Engines, engines, top_p
from torch import Tensor

Sides = tuple[list[Tensor], list[Tensor]]
"""Log-probs of the trainer and of the engine."""


@dataclass
class Tokens:
    """Input of a consumer: log-probs, and properties of the samples."""

    proximal: list[Tensor]
    behavior: list[Tensor]
    versions_behind: list[int] | None = None
    other_ids: list[bool] | None = None
    masks: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.masks = self.masks or [torch.ones(len(each)) for each in self.proximal]

    @property
    def ids(self) -> dict[str, list[Tensor] | None]:
        """Token ids that both sides have, as the audit takes them."""
        if self.other_ids is None:
            return {"train_token_ids": None, "rollout_token_ids": None}
        own = [torch.arange(len(each)) for each in self.proximal]
        return {
            "train_token_ids": own,
            "rollout_token_ids": [ids + int(is_other) for ids, is_other in zip(own, self.other_ids, strict=True)],
        }


# --- changes of the sampled distribution


def colder(made: Engines) -> Engines:
    return made._replace(behavior=made.behavior / 0.7)


def warmer(made: Engines) -> Engines:
    return made._replace(behavior=made.behavior / 1.2)


def slightly_warmer(made: Engines) -> Engines:
    return made._replace(behavior=made.behavior / 1.05)


def nucleus(made: Engines) -> Engines:
    return made._replace(behavior=top_p(made.behavior, 0.9))


def top_k(made: Engines) -> Engines:
    lowest = made.behavior.topk(8).values[..., -1:]
    return made._replace(behavior=made.behavior.masked_fill(made.behavior < lowest, -math.inf))


def few_tokens(made: Engines) -> Engines:
    hit = torch.rand(*made.behavior.shape[:2], 1, generator=made.generator) < 5e-4
    return made._replace(behavior=made.behavior + made.noise(1.0) * hit)


def experts(made: Engines, size: float = 0.5) -> Engines:
    hit = torch.rand(*made.behavior.shape[:2], 1, generator=made.generator) < 0.02
    return made._replace(behavior=made.behavior + made.noise(size) * hit)


def stale_prefix(made: Engines, size: float = 0.1) -> Engines:
    fading = torch.exp(-torch.arange(LENGTH) / 16.0)[None, :, None]
    return made._replace(behavior=made.behavior + made.noise(size) * fading)


def very_stale_prefix(made: Engines) -> Engines:
    return stale_prefix(made, 0.5)


def quantized(made: Engines) -> Engines:
    return made._replace(behavior=made.behavior + made.noise(0.12))


def older(made: Engines) -> Engines:
    """Weights of some updates ago."""
    return made._replace(behavior=made.behavior + made.noise(0.5))


def late(made: Engines, size: float = 0.3) -> Engines:
    """Positions beyond the limit of one side."""
    behind = (torch.arange(LENGTH) >= 96)[None, :, None]
    return made._replace(behavior=made.behavior + made.noise(size) * behind)


def decode_only(made: Engines) -> Engines:
    later = (torch.arange(LENGTH) > 0)[None, :, None]
    return made._replace(behavior=torch.where(later, made.behavior, made.proximal))


def not_loaded(made: Engines) -> Engines:
    """The trainer's weights are random: its probabilities are unrelated to the samples."""
    return made._replace(proximal=made.noise(20.0))


# --- changes of the returned log-probs


def each_behavior(change: Callable[[Tensor], Tensor]) -> Callable[[Sides], Sides]:
    return lambda sides: (sides[0], [change(each) for each in sides[1]])


zeros = each_behavior(torch.zeros_like)
negated = each_behavior(torch.neg)
shifted = each_behavior(lambda log_probs: log_probs.roll(1))
rounded = each_behavior(lambda log_probs: log_probs.bfloat16().float())
probabilities = each_behavior(torch.exp)
to_base_2 = each_behavior(lambda log_probs: log_probs / math.log(2.0))
to_base_10 = each_behavior(lambda log_probs: log_probs / math.log(10.0))


def some_sentinels(sides: Sides) -> Sides:
    """In 7 % of the responses."""
    return sides[0], [*sides[1][:-4], *(each * 0 - 9999.0 for each in sides[1][-4:])]


def few_sentinels(sides: Sides) -> Sides:
    """In 4 of 7,168 tokens."""
    for sample in (3, 5):
        sides[1][sample][7:9] = -9999.0
    return sides


def twentieth_sentinels(sides: Sides) -> Sides:
    """In every twentieth token."""
    for behavior in sides[1]:
        behavior[::20] = -9999.0
    return sides


def some_greedy(sides: Sides) -> Sides:
    for proximal, behavior in zip(*(side[:4] for side in sides), strict=True):
        proximal[5], behavior[5] = -3.0, 0.0
    return sides


def dummies(sides: Sides) -> Sides:
    """Zeros on 2 to 15 tokens of tools in each response, to half of which the trainer gives more than 0.37."""
    for number, (proximal, behavior) in enumerate(zip(*sides, strict=True)):
        place = slice(60, 62 + number % 14)
        even = torch.linspace(0.02, 0.95, len(proximal[place]))
        proximal[place], behavior[place] = even.roll(number).log(), 0.0
    return sides


def bonus(size: float) -> Callable[[Sides], Sides]:
    """Added to all tokens of two responses; few of them are above 0 afterwards."""
    return lambda sides: (sides[0], [*(each + size for each in sides[1][:2]), *sides[1][2:]])


def constant_samples(sides: Sides) -> Sides:
    return sides[0], [*(torch.full_like(each, -0.7) for each in sides[1][:3]), *sides[1][3:]]


def some_shifted(sides: Sides) -> Sides:
    """A tenth of the responses."""
    return sides[0], [*(each.roll(1) for each in sides[1][:6]), *sides[1][6:]]


def dropped_before(sides: Sides) -> Sides:
    """In six responses, log-probs of a dropped attempt precede the own ones, and the end is cut off."""
    others = engines(79).sampled()[1]
    lagged = [
        torch.cat([other[:count], own])[:LENGTH]
        for own, other, count in zip(sides[1], others, (2, 7, 12, 20, 33, 41), strict=False)
    ]
    return sides[0], [*lagged, *sides[1][6:]]


def foreign(sides: Sides) -> Sides:
    """Six responses are of another text."""
    return sides[0], [*engines(77).sampled()[1][:6], *sides[1][6:]]


def half_foreign(sides: Sides) -> Sides:
    """Six responses are of another text from their middle on."""
    half = LENGTH // 2
    others = engines(77).sampled()[1]
    mixed = [torch.cat([own[:half], other[half:]]) for own, other in zip(sides[1][:6], others, strict=False)]
    return sides[0], [*mixed, *sides[1][6:]]


def unrelated(sides: Sides) -> Sides:
    return sides[0], engines(78).sampled()[1]


def garbage(sides: Sides) -> Sides:
    """The returned log-probs are unrelated to the samples."""
    return sides[0], planted(79, [not_loaded]).proximal


def other_formula(sides: Sides) -> Sides:
    # As log(softmax) of the same logits: within one rounding.
    return sides[0], [torch.nextafter(each, each * 2) for each in sides[0]]


# --- tokens


def planted(
    seed: int,
    in_engine: Sequence[Callable[[Engines], Engines]] = (),
    in_log_probs: Sequence[Callable[[Sides], Sides]] = (),
    **sizes: Any,
) -> Tokens:
    """Tokens of two engines, one with a changed distribution and then changed log-probs."""
    made = engines(seed, **sizes)
    for change in in_engine:
        made = change(made)
    sides = made.sampled()
    for change in in_log_probs:
        sides = change(sides)
    return Tokens(*map(list, sides))


def padded_head(made: Engines, padding: float = 0.0, count: int = 16) -> Engines:
    """The trainer has additional columns, which the engine never samples."""
    columns = torch.full((*made.behavior.shape[:2], count), padding, dtype=torch.float64)
    proximal = torch.cat([made.proximal, columns], -1)
    return made._replace(
        proximal=proximal, behavior=torch.cat([made.behavior, torch.full_like(columns, -math.inf)], -1)
    )


def padded(seed: int) -> Tokens:
    return Tokens(*padded_head(engines(seed, kernels=1e-5), -4.0, 1).sampled())


def old_versions(seed: int) -> Tokens:
    stale, fresh = engines(seed, kernels=0.3).sampled(), engines(seed + 50).sampled()
    return Tokens(stale[0] + fresh[0], stale[1] + fresh[1], versions_behind=[1] * COUNT + [0] * COUNT)


def other_ids(seed: int) -> Tokens:
    tokens = planted(seed)
    tokens.other_ids = [sample == 5 for sample in range(COUNT)]
    return tokens


def equal_ids(seed: int) -> Tokens:
    """The ids of both sides are recorded, and six samples are apart."""
    tokens = planted(seed, [], [half_foreign])
    tokens.other_ids = [False] * COUNT
    return tokens


SINGLE: dict[str, tuple[str, Callable[[int], Tokens]]] = {
    "all zeros": ("placeholder_log_probs", lambda seed: planted(seed, [], [zeros])),
    "sentinels in some responses": ("placeholder_log_probs", lambda seed: planted(seed, [], [some_sentinels])),
    "5 % sentinels": ("placeholder_log_probs", lambda seed: planted(seed, [], [twentieth_sentinels])),
    "4 sentinels": ("placeholder_log_probs", lambda seed: planted(seed, [], [few_sentinels])),
    "zeros of greedy tokens": ("placeholder_log_probs", lambda seed: planted(seed, [], [some_greedy])),
    "zeros on tokens of tools": ("placeholder_log_probs", lambda seed: planted(seed, [], [dummies])),
    "constant responses": ("placeholder_log_probs", lambda seed: planted(seed, [], [constant_samples])),
    "flipped sign": ("not_log_probs", lambda seed: planted(seed, [], [negated])),
    "probabilities": ("not_log_probs", lambda seed: planted(seed, [], [probabilities])),
    "a bonus of 0.2": ("not_log_probs", lambda seed: planted(seed, [], [bonus(0.2)])),
    "a bonus of 1": ("not_log_probs", lambda seed: planted(seed, [], [bonus(1.0)])),
    "shifted": ("shifted_log_probs", lambda seed: planted(seed, [], [shifted])),
    "a tenth shifted": ("shifted_log_probs", lambda seed: planted(seed, [], [some_shifted])),
    "dropped before": ("other_text", lambda seed: planted(seed, [], [dropped_before])),
    "other ids": ("other_text", other_ids),
    "another text": ("other_text", lambda seed: planted(seed, [], [half_foreign])),
    "another text behind equal ids": ("other_text", equal_ids),
    "another formula": ("equal", lambda seed: planted(seed, [], [other_formula], kernels=0.0)),
    "temperature 0.7": ("temperature", lambda seed: planted(seed, [colder])),
    "temperature 1.2": ("temperature", lambda seed: planted(seed, [warmer])),
    "temperature 1.05": ("temperature", lambda seed: planted(seed, [slightly_warmer])),
    "base 2": ("not_log_probs", lambda seed: planted(seed, [], [to_base_2])),
    "base 10": ("not_log_probs", lambda seed: planted(seed, [], [to_base_10])),
    "a broken trainer": ("broken_trainer", lambda seed: planted(seed, [not_loaded])),
    "a broken engine": ("broken_engine", lambda seed: planted(seed, [], [garbage])),
    "top-p": ("top_p_or_top_k", lambda seed: planted(seed, [nucleus])),
    "top-k": ("top_p_or_top_k", lambda seed: planted(seed, [top_k])),
    "padding": ("top_p_or_top_k", padded),
    "bf16 log-probs": ("bf16_log_probs", lambda seed: planted(seed, [], [rounded], kernels=0.0)),
    "old versions": ("stale_weights", old_versions),
    "another policy": ("stale_weights", lambda seed: planted(seed, kernels=2.0)),
    "unrelated": ("stale_weights", lambda seed: planted(seed, [], [unrelated])),
    "decoding": ("late_positions", lambda seed: planted(seed, [decode_only])),
    "stale prefix": ("stale_prefix_cache", lambda seed: planted(seed, [stale_prefix])),
    "late positions": ("late_positions", lambda seed: planted(seed, [late])),
    "few tokens": ("expert_routing", lambda seed: planted(seed, [few_tokens])),
    "experts": ("expert_routing", lambda seed: planted(seed, [experts])),
    "equal": ("equal", lambda seed: planted(seed, kernels=0.0)),
    "kernels": ("bf16_kernels", planted),
    "a pretrained model's kernels": ("bf16_or_low_precision", lambda seed: planted(seed, kernels=0.07)),
    "quantized": ("low_precision", lambda seed: planted(seed, [quantized])),
    "far apart": ("large_mismatch", lambda seed: planted(seed, [older])),
}
"""The cause that is planted alone, and its tokens."""

IN_ENGINE = {
    colder: "temperature",
    nucleus: "top_p_or_top_k",
    experts: "expert_routing",
    stale_prefix: "stale_prefix_cache",
    very_stale_prefix: "stale_prefix_cache",
    quantized: "low_precision",
    older: "large_mismatch",
}
IN_LOG_PROBS = {
    rounded: "bf16_log_probs",
    few_sentinels: "placeholder_log_probs",
    some_shifted: "shifted_log_probs",
    foreign: "other_text",
}
MIXTURES = (
    *((change, rounded) for change in (older, stale_prefix, experts, quantized, colder, nucleus)),
    *((change, few_sentinels) for change in (colder, nucleus, experts, quantized, older, foreign)),
    *((change, foreign) for change in (nucleus, colder, quantized)),
    *((change, some_shifted) for change in (colder, quantized, nucleus)),
    (quantized, nucleus),
    (stale_prefix, experts),
    (quantized, very_stale_prefix),
    (colder, foreign, few_sentinels),
)
"""Changes that are planted together, in this order."""


def mixed(seed: int, changes: Sequence[Callable], **sizes: Any) -> Tokens:
    """Tokens with several changes."""
    in_engine, in_log_probs = ([each for each in changes if each in kind] for kind in (IN_ENGINE, IN_LOG_PROBS))
    return planted(seed, in_engine, in_log_probs, **sizes)
