"""A planted cause is named, and nothing else is."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from engines import COUNT, LENGTH, engines, top_p
from torch import Tensor

from mis_ext.report import Collector, Origin, Part

Sides = tuple[list[Tensor], list[Tensor]]


def diagnosed(*parts: Part) -> list[str]:
    collector = Collector()
    for part in parts:
        collector.add(part)
    return [found.cause for found in collector.diagnoses()]


def part_of(sides: Sides, **more) -> Part:
    return Part.of_lists(proximal=sides[0], behavior=sides[1], **more)


def with_behavior(change: Callable[[list[Tensor]], Sequence[Tensor]], seed: int) -> Sides:
    proximal, behavior = engines(seed).sampled()
    return proximal, [*change(behavior)]


def zeros(seed: int) -> Sides:
    return with_behavior(lambda behavior: [torch.zeros_like(each) for each in behavior], seed)


def some_sentinels(seed: int) -> Sides:
    return with_behavior(lambda behavior: [*behavior[:-8], *(each * 0 - 9999.0 for each in behavior[-8:])], seed)


def few_sentinels(seed: int) -> Sides:
    proximal, behavior = engines(seed).sampled()
    behavior[3][7:9] = -9999.0
    return proximal, behavior


def some_greedy(seed: int) -> Sides:
    proximal, behavior = engines(seed).sampled()
    for each in proximal[:4]:
        each[5] = -3.0
    for each in behavior[:4]:
        each[5] = 0.0
    return proximal, behavior


def unrelated(seed: int) -> Sides:
    return engines(seed).sampled()[0], engines(seed + 100).sampled()[1]


def negated(seed: int) -> Sides:
    return with_behavior(lambda behavior: [-each for each in behavior], seed)


def shifted(seed: int) -> Sides:
    return with_behavior(lambda behavior: [each.roll(1) for each in behavior], seed)


def other_text(seed: int) -> Sides:
    proximal, behavior = engines(seed).sampled()
    _, foreign = engines(seed + 100).sampled()
    half = LENGTH // 2
    mixed = [torch.cat([own[:half], other[half:]]) for own, other in zip(behavior[:6], foreign, strict=False)]
    return proximal, [*mixed, *behavior[6:]]


def other_formula(seed: int) -> Sides:
    made = engines(seed, kernels=0.0)
    proximal, _ = made.sampled()
    # As log(softmax) of the same logits: within one rounding.
    return proximal, [torch.nextafter(each, each * 2) for each in proximal]


def colder(seed: int) -> Sides:
    made = engines(seed)
    return made._replace(behavior=made.behavior / 0.7).sampled()


def warmer(seed: int) -> Sides:
    made = engines(seed)
    return made._replace(behavior=made.behavior / 1.2).sampled()


def nucleus(seed: int) -> Sides:
    made = engines(seed)
    return made._replace(behavior=top_p(made.behavior, 0.9)).sampled()


def top_k(seed: int) -> Sides:
    made = engines(seed)
    lowest = made.behavior.topk(8).values[..., -1:]
    return made._replace(behavior=made.behavior.masked_fill(made.behavior < lowest, -math.inf)).sampled()


def padded(seed: int) -> Sides:
    made = engines(seed, kernels=1e-5)
    padding = torch.full((COUNT, LENGTH, 1), -1.0, dtype=torch.float64)
    impossible = torch.full_like(padding, -math.inf)
    proximal = torch.cat([made.proximal + 3.0, padding], -1)
    return made._replace(behavior=torch.cat([made.behavior + 3.0, impossible], -1), proximal=proximal).sampled()


def rounded(seed: int) -> Sides:
    return with_behavior(lambda behavior: [each.bfloat16() for each in behavior], seed)


def few_tokens(seed: int) -> Sides:
    made = engines(seed)
    hit = torch.rand(COUNT, LENGTH, 1, generator=made.generator) < 5e-4
    return made._replace(behavior=made.behavior + made.noise(1.0) * hit).sampled()


def experts(seed: int) -> Sides:
    made = engines(seed)
    hit = torch.rand(COUNT, LENGTH, 1, generator=made.generator) < 0.02
    return made._replace(behavior=made.behavior + made.noise(0.5) * hit).sampled()


def prefix(seed: int) -> Sides:
    made = engines(seed)
    fading = torch.exp(-torch.arange(LENGTH) / 16.0)[None, :, None]
    return made._replace(behavior=made.behavior + made.noise(0.1) * fading).sampled()


def quantised(seed: int) -> Sides:
    return engines(seed, kernels=0.12).sampled()


def bf16_kernels(seed: int) -> Sides:
    return engines(seed).sampled()


def another_policy(seed: int) -> Sides:
    return engines(seed, kernels=2.0).sampled()


def equal(seed: int) -> Sides:
    return engines(seed, kernels=0.0).sampled()


PLANTED = {
    zeros: "placeholder_log_probs",
    some_sentinels: "placeholder_log_probs",
    few_sentinels: "placeholder_log_probs",
    some_greedy: "placeholder_log_probs",
    negated: "placeholder_log_probs",
    shifted: "shifted_by_one_token",
    other_text: "retokenised_samples",
    other_formula: "log_prob_formula",
    colder: "temperature",
    warmer: "temperature",
    nucleus: "top_p_or_top_k",
    top_k: "top_p_or_top_k",
    padded: "vocabulary_padding",
    rounded: "bf16_log_probs",
    few_tokens: "few_tokens",
    experts: "expert_routing",
    prefix: "stale_prefix_cache",
    quantised: "low_precision",
    bf16_kernels: "bf16_kernels",
    another_policy: "stale_weights",
    unrelated: "stale_weights",
    equal: "equal",
}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_cause_is_named_and_nothing_else(plant, seed) -> None:
    assert diagnosed(part_of(plant(seed))) == [PLANTED[plant]]


def test_a_stale_prefix_shows_at_the_beginning_of_a_turn_and_not_of_the_response() -> None:
    made = engines(2)
    since = torch.arange(LENGTH) - 48
    fading = torch.where(since < 0, 0.0, torch.exp(-since / 16.0))[None, :, None]
    sides = made._replace(behavior=made.behavior + made.noise(0.15) * fading).sampled()
    tool = ((since < -8) | (since >= 0)).int()
    assert diagnosed(part_of(sides, masks=[tool] * COUNT)) == ["stale_prefix_cache"]


def test_stale_samples_are_named_by_their_versions() -> None:
    stale, fresh = engines(3, kernels=0.3).sampled(), engines(4).sampled()
    parts = [
        part_of(sides, origins=[Origin(versions_behind=behind)] * COUNT)
        for sides, behind in ((stale, 1.0), (fresh, 0.0))
    ]
    assert diagnosed(*parts) == ["stale_weights"]


def test_a_stale_step_among_fresh_ones_is_named() -> None:
    parts = [part_of(engines(seed).sampled(), step=str(seed)) for seed in range(3)]
    parts.append(part_of(engines(3, kernels=0.3).sampled(), step="3"))
    assert diagnosed(*parts) == ["stale_weights"]


def test_ids_that_differ_are_certain() -> None:
    origins = [Origin(has_other_ids=number == 5) for number in range(COUNT)]
    collector = Collector()
    collector.add(part_of(engines(1).sampled(), origins=origins))
    (found,) = collector.diagnoses()
    assert (found.cause, found.confidence, found.is_fault) == ("retokenised_samples", "certain", True)
    assert f"1 of {COUNT}" in found.evidence
