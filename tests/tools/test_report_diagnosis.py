# SPDX-License-Identifier: Apache-2.0
"""What the report knows besides log-probs: positions, masks, versions, steps, ids. See test_diagnosis.py for others."""

import math
import re

import pytest
import torch
from engines import COUNT, LENGTH, causes, collected, diagnosed, engines
from torch import Tensor

from mis_ext.tools.diagnosis import Diagnosis
from mis_ext.tools.report import Origin, Part
from mis_ext.tools.report.recommendation import recommend

Sides = tuple[list[Tensor], list[Tensor]]


def part_of(sides: Sides, **more) -> Part:
    return Part.of_lists(proximal=sides[0], behavior=sides[1], **more)


def test_a_stale_prefix_shows_at_the_beginning_of_a_turn_and_not_of_the_response() -> None:
    made = engines(2)
    since = torch.arange(LENGTH) - 48
    fading = torch.where(since < 0, 0.0, torch.exp(-since / 16.0))[None, :, None]
    sides = made._replace(behavior=made.behavior + made.noise(0.15) * fading).sampled()
    tool = ((since < -8) | (since >= 0)).int()
    assert causes(part_of(sides, masks=[tool] * COUNT)) == ["stale_prefix_cache"]


def only(*parts: Part) -> tuple[Diagnosis, list[float]]:
    """The one cause of parts, one per step, and the k3 of each step."""
    collector = collected(*parts)
    (found,) = collector.diagnoses()
    return found, [step.k3 for step in collector.summary().steps.values()]


def test_stale_samples_are_named_by_their_versions_and_explain_what_is_above_fresh_ones() -> None:
    found, (stale, fresh) = only(
        part_of(engines(3, kernels=0.024).sampled(), origins=[Origin(versions_behind=1.0)] * COUNT, step="0"),
        part_of(engines(4, kernels=0.012).sampled(), origins=[Origin(versions_behind=0.0)] * COUNT, step="1"),
    )
    assert found.cause == "stale_weights"
    assert stale < 5.0 * fresh
    # As many tokens in both.
    assert found.k3_share == pytest.approx((stale - fresh) / (stale + fresh), rel=1e-4)


def test_a_stale_step_among_fresh_ones_is_named_and_explains_what_is_above_them() -> None:
    parts = [part_of(engines(seed).sampled(), step=str(seed)) for seed in range(6)]
    parts.append(part_of(engines(6, kernels=0.06).sampled(), step="6"))
    found, k3s = only(*parts)
    assert found.cause == "stale_weights"
    usual = sorted(k3s)[len(k3s) // 2]
    assert found.k3_share == pytest.approx(sum(max(k3 - usual, 0.0) for k3 in k3s) / sum(k3s), rel=1e-2)
    assert found.k3_share < 0.9


def test_ids_that_differ_are_certain() -> None:
    origins = [Origin(has_other_ids=number == 5) for number in range(COUNT)]
    (found,) = diagnosed(part_of(engines(1).sampled(), origins=origins))
    assert (found.cause, found.confidence, found.is_fault) == ("other_text", "certain", True)
    assert f"1 of {COUNT}" in found.evidence


@pytest.mark.parametrize(
    ("factor", "every", "cause"),
    [
        (16.0, 97, "expert_routing"),
        (60.0, 997, "expert_routing"),
        # More than 3 %; less than 12 times as far; less than 60 % of k3.
        (16.0, 17, None),
        (10.0, 49, None),
        (20.0, 490, None),
    ],
)
def test_a_tail_is_at_most_3_percent_of_tokens_12_times_as_far_apart_with_60_percent_of_k3(
    factor, every, cause
) -> None:
    generator = torch.Generator().manual_seed(0)
    behavior = -0.2 - 2.0 * torch.rand(100, 100, generator=generator)
    # In units of 1 - p all are as far apart as is typical, but for a few.
    size = torch.full((100, 100), 2e-3)
    size.view(-1)[::every] *= factor
    sign = torch.where(torch.rand(100, 100, generator=generator) < 0.5, -1.0, 1.0)
    proximal = behavior + sign * size * (1.0 - behavior.exp())
    found = {*causes(part_of(([*proximal], [*behavior])))} & {"expert_routing"}
    assert found == ({cause} if cause else set())


@pytest.mark.parametrize(("largest_id", "cause"), [(63, "broken_trainer"), (9_999, "stale_weights")])
def test_what_a_uniform_guess_gives_depends_on_the_vocabulary(largest_id, cause) -> None:
    made = engines(3)
    # Noise of a deviation of 2 squares to 2 nats below a uniform guess among 48 tokens.
    sides = made._replace(proximal=made.noise(2.0)).sampled()
    origins = [Origin(token_ids=[0, largest_id])] * COUNT
    assert causes(part_of(sides, origins=origins)) == [cause]


def test_a_nearly_uniform_policy_is_not_broken() -> None:
    made = engines(3)
    flat = made._replace(behavior=made.noise(0.05), proximal=made.noise(0.05))
    assert causes(part_of(flat.sampled(), origins=[Origin(token_ids=[47])] * COUNT)) == ["bf16_or_low_precision"]


@pytest.mark.parametrize("is_gradual", [False, True])
def test_samples_of_another_text_stand_apart(is_gradual) -> None:
    proximal, behavior = engines(1).sampled()
    gaps = torch.logspace(-2, 0.5, 60) if is_gradual else torch.tensor([0.05] * 50 + [2.0] * 10)
    moved = [side - gap * (torch.arange(LENGTH) % 2) for side, gap in zip(proximal, gaps, strict=False)]
    sides = moved, [*behavior[: len(gaps)]]
    assert ("other_text" in causes(part_of(sides))) == (not is_gradual)


@pytest.mark.parametrize(("count", "is_named"), [(15, False), (16, True)])
def test_samples_of_another_text_are_looked_for_among_16_or_more(count, is_named) -> None:
    proximal, behavior = engines(1).sampled()
    others = torch.rand(2, LENGTH, generator=torch.Generator().manual_seed(0))
    sides = [*proximal[:count]], [*(-4.0 * others), *behavior[2:count]]
    assert ("other_text" in causes(part_of(sides))) == is_named


def late_of(global_noise: Tensor, late_noise: float, begins: int = 60) -> list[Diagnosis]:
    """Of engines that differ everywhere, by position, and by more from a position on."""
    made = engines(7, count=112)
    is_late = (torch.arange(LENGTH) >= begins)[None, :, None]
    noisy = made.behavior + made.noise(global_noise[None, :, None]) + made.noise(late_noise) * is_late
    return diagnosed(part_of(made._replace(behavior=noisy).sampled()))


@pytest.mark.parametrize("noise", [0.15, 0.3])
def test_a_place_where_something_begins_is_found_beside_what_differs_everywhere_as_much(noise) -> None:
    """Squares of independent noise add up: behind it tokens differ 1.4 times as much, and half of their k3 is of it."""
    (late, rest) = late_of(torch.full((LENGTH,), noise), noise)
    assert (late.cause, rest.cause) == ("late_positions", "low_precision")
    share = (LENGTH - 60) / (2 * LENGTH - 60)
    assert late.k3_share == pytest.approx(share, abs=0.08)
    assert 53 < int(re.search(r"after position (\d+) ", late.evidence)[1]) < 64


@pytest.mark.parametrize("rise", [0.0, 0.2, 0.4])
def test_what_grows_along_the_positions_begins_nowhere(rise) -> None:
    octave = (torch.arange(LENGTH) + 1.0).log2() - 5.0
    found = late_of(0.2 * (1.0 + rise * octave.clamp_min(0.0)), 0.0)
    assert [each.cause for each in found] == ["low_precision"]


def test_late_positions_are_found_behind_a_prefix_that_hides_them_only_in_later_turns() -> None:
    fading = 1.5 * torch.exp(-torch.arange(LENGTH) / 8.0)
    assert [each.cause for each in late_of(fading, 0.15)] == ["stale_prefix_cache", "late_positions"]


def cut_to_zeros(kind: str, cut: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Trainer's and engine's log-probs of drawn logits that a cut leaves without an alternative at many positions."""
    size = int(64 * (2_000 / 64) ** torch.rand((), generator=generator))
    logits = torch.randn(8, 96, size, generator=generator)
    openness = torch.rand(8, 96, 1, generator=generator)
    if kind == "peaked":
        logits = logits * (0.5 + 6.0 * openness)
    else:
        logits[..., 0] += openness[..., 0] * math.log(size)
    ordered = logits.log_softmax(-1).sort(-1, descending=True).values
    if cut == "min-p":
        is_left = ordered >= ordered[..., :1] + math.log(0.7)
    else:
        # Of half of the positions one token is left, however improbable it is.
        least = float(ordered[..., 0].exp().median())
        is_left = ordered.exp().cumsum(-1) - ordered.exp() < least
    behavior = ordered.masked_fill(~is_left, -math.inf).log_softmax(-1)
    ids = torch.multinomial(behavior.exp().flatten(0, 1), 1, generator=generator).view(8, 96, 1)
    proximal = ordered.gather(-1, ids)[..., 0]
    noise = 0.01 * torch.randn(8, 96, generator=generator) * -proximal.expm1()
    return (proximal + noise).clamp_max(0.0), behavior.gather(-1, ids)[..., 0]


@pytest.mark.parametrize(("kind", "cut"), [("flat", "top-p"), ("peaked", "min-p")])
def test_zeros_of_a_cut_are_no_placeholders_whatever_the_logits_and_the_vocabulary(kind, cut) -> None:
    generator = torch.Generator().manual_seed(0)
    num_zeros = 0
    for _ in range(2):
        proximal, behavior = cut_to_zeros(kind, cut, generator)
        is_zero = (behavior == 0.0) & (proximal < -1.0)
        num_zeros += int(is_zero.sum())
        assert "placeholder_log_probs" not in causes(part_of(([*proximal], [*behavior])))
        # The same on the other side: a trainer that cuts its logits has legitimate zeros.
        assert "placeholder_log_probs" not in causes(part_of(([*behavior], [*proximal])))
    assert num_zeros > 50


@pytest.mark.parametrize(("share", "confidence"), [(0.4, "certain"), (0.02, "certain"), (0.005, "possible")])
@pytest.mark.parametrize("side", [0, 1])
def test_tokens_without_a_finite_log_prob_are_told_first(side, share, confidence) -> None:
    sides = engines(3).sampled()
    spoilt = sides[side][5:]
    for number, values in enumerate(spoilt):
        values[torch.rand(LENGTH, generator=torch.Generator().manual_seed(number)) < share] = math.nan
    collector = collected(part_of(sides))
    first = max(collector.diagnoses(), key=lambda found: found.cause == "placeholder_log_probs")
    assert (first.cause, first.confidence) == ("placeholder_log_probs", confidence)
    missing = [values.isnan() for values in spoilt]
    said = f"{sum(int(each.sum()) for each in missing)} {('proximal', 'behavior')[side]} log-probs"
    affected = sum(bool(each.any()) for each in missing)
    assert first.evidence.startswith(said)
    assert first.evidence.endswith(f"in {affected} of {COUNT} responses")
    headline = recommend([], {}, collector.summary(), collector.diagnoses()).headline
    assert headline.startswith("Repair this first") == (confidence == "certain")
    # They have no k3, and hide nothing.
    assert {found.cause for found in collector.diagnoses()} == {"placeholder_log_probs", "bf16_kernels"}
    assert not first.share_in_words


def with_zeros(place: str, side: int, *, every: int = 1, cut: float = 1.0) -> list[str]:
    """Of tokens that were appended with a log-prob of 0, and are mostly sure to the other side."""
    sides = engines(4).sampled()
    masks = [torch.ones(LENGTH) for _ in range(COUNT)]
    probabilities = torch.rand(COUNT, 2, generator=torch.Generator().manual_seed(0)) ** 0.15
    for number, (zeros, others, mask) in enumerate(zip(sides[side], sides[1 - side], masks, strict=True)):
        if place.endswith("turn"):
            mask[60:70] = 0.0
        places = {"first": [0], "last": [-1], "first of a turn": [0, 70], "last of a turn": [59, -1]}[place]
        others[places] = probabilities[number, : len(places)].log()
        zeros[places] = 0.0 if number % every == 0 else others[places]
        zeros[others > math.log(cut)] = 0.0
    return causes(part_of(sides, masks=masks))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("place", ["first", "last", "first of a turn", "last of a turn"])
def test_zeros_at_one_place_of_all_responses_are_placeholders(place, side) -> None:
    assert "placeholder_log_probs" in with_zeros(place, side)


def test_zeros_of_a_cut_or_of_some_responses_are_no_placeholders_of_a_place() -> None:
    assert "placeholder_log_probs" not in with_zeros("last", 1, cut=0.5)
    assert "placeholder_log_probs" not in with_zeros("last", 1, every=9)


@pytest.mark.parametrize("ahead", [0.0, 0.9, 1.2])
@pytest.mark.parametrize("ratio", [0.8, 0.9, 0.97])
def test_responses_that_repeat_themselves_are_not_shifted(ratio, ahead) -> None:
    """In a loop each token is surer than the one before it, and newer weights are a token ahead."""
    place, generator = torch.arange(120.0), torch.Generator().manual_seed(0)
    sides = engines(6).sampled()
    for size in (1.0, 1.5, 2.0):
        for side, moved in zip(sides, (ahead, 0.0), strict=True):
            noise = 1.0 + 0.03 * torch.randn(120, generator=generator)
            side.append(-size * ratio ** (place + moved) * noise)
    assert "shifted_log_probs" not in causes(part_of(sides))


@pytest.mark.parametrize(("halves", "is_named"), [(((0, 64), (64, 128)), True), (((0, 64),), False)])
def test_a_shift_of_some_responses_shows_in_either_half_of_each(halves, is_named) -> None:
    proximal, behavior = engines(6).sampled()
    for number in range(6):
        certain = torch.full((LENGTH,), -1e-3)
        for begin, end in halves:
            certain[begin:end] = proximal[number][begin:end]
        proximal[number], behavior[number] = certain, certain.roll(1)
    assert ("shifted_log_probs" in causes(part_of((proximal, behavior)))) == is_named


def test_a_fault_stands_before_the_size_of_the_rest_which_says_what_it_is_of() -> None:
    sides, others = engines(4, kernels=0.03).sampled(), engines(8).sampled()
    sides[0][:4] = others[0][:4]
    collector = collected(part_of(sides))
    fault, rest = found = collector.diagnoses()
    assert [each.cause for each in found] == ["other_text", "bf16_kernels"]
    # By their confidence the rest would come first.
    assert (fault.confidence, rest.confidence) == ("possible", "likely")
    assert "of the rest" not in fault.share_in_words
    assert rest.share_in_words == "explains up to 100 % of the k3 of the rest"
    headline = recommend([], {}, collector.summary(), found).headline
    assert headline == f"Repair this first: {fault.title}."
