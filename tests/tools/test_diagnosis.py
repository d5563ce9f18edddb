# SPDX-License-Identifier: Apache-2.0
"""One table of causes: report and audit give the same name for the same tokens, with the share it explains."""

import math
import re
from functools import cache, partial

import plants
import pytest
import torch
from engines import COUNT, LENGTH, engines, sampled_ids, top_p
from plants import IN_ENGINE, IN_LOG_PROBS, MIXTURES, SINGLE, Tokens, mixed, planted
from torch import Tensor

from mis_ext.onpolicy import audit_logprobs
from mis_ext.tools.diagnosis import CAUSES, Diagnosis
from mis_ext.tools.report import Collector, Origin, Part


def part_of(tokens: Tokens, samples: slice = slice(None)) -> Part:
    count = len(tokens.proximal)
    behind = tokens.versions_behind or [math.nan] * count
    other = tokens.other_ids or [None] * count
    return Part.of_lists(
        proximal=tokens.proximal[samples],
        behavior=tokens.behavior[samples],
        masks=tokens.masks[samples],
        origins=[
            Origin(versions_behind=float(lag), has_other_ids=is_other)
            for lag, is_other in zip(behind[samples], other[samples], strict=True)
        ],
    )


def collected(tokens: Tokens, num_parts: int = 1) -> Collector:
    """In parts as of the files of a run."""
    collector = Collector()
    for number in range(num_parts):
        collector.add(part_of(tokens, slice(number, None, num_parts)))
    return collector


def by_report(tokens: Tokens) -> list[Diagnosis]:
    return collected(tokens).diagnoses()


def by_audit(tokens: Tokens) -> tuple[Diagnosis, ...]:
    behind = tokens.versions_behind
    return audit_logprobs(
        tokens.proximal,
        tokens.behavior,
        masks=tokens.masks,
        train_weight_version=None if behind is None else 9,
        rollout_weight_versions=None if behind is None else [9 - lag for lag in behind],
        **tokens.ids,
    ).diagnoses


MISTAKES = {
    "placeholder_log_probs",
    "shifted_log_probs",
    "not_log_probs",
    "other_text",
    "packed_responses",
    "penalties",
    "temperature",
    "broken_trainer",
    "broken_engine",
    "top_p_or_top_k",
}
"""The log-probs are not those of the policy that sampled: a weight would be of another distribution."""


@pytest.mark.parametrize("plant", SINGLE)
def test_the_report_names_the_planted_cause_and_nothing_else(plant) -> None:
    cause, make = SINGLE[plant]
    tokens = make(0)
    named = [(found.cause, found.is_fault) for found in collected(tokens, num_parts=3).diagnoses()]
    assert named == [(cause, cause in MISTAKES)]


AUDITED = {"quantized", "equal", "old versions", "another text"}


# It measures sample by sample, 20 times as long, and then asks the same table: what shows in whole samples is planted
# here, in all of them and in none.
@pytest.mark.parametrize("plant", sorted(AUDITED))
def test_the_audit_names_the_planted_cause_and_nothing_else(plant) -> None:
    cause, make = SINGLE[plant]
    # Of equal streams it has a verdict, and no cause of a difference.
    assert [found.cause for found in by_audit(make(0))] == ([] if cause == "equal" else [cause])


def k3_of(tokens: Tokens) -> float:
    d = torch.cat(tokens.proximal).double() - torch.cat(tokens.behavior).double()
    # No ratio counts as more than exp(20).
    return float((d.clamp(max=20.0).expm1() - d).mean())


CAUSED_BY = IN_ENGINE | IN_LOG_PROBS


@pytest.mark.whole_run
@pytest.mark.parametrize("mixture", MIXTURES, ids=lambda mixture: "-".join(each.__name__ for each in mixture))
def test_a_small_cause_does_not_hide_a_large_one(mixture) -> None:
    tokens, causes = mixed(0, mixture, count=112), {CAUSED_BY[change] for change in mixture}
    found, left = collected(tokens, num_parts=3).search()
    assert {each.cause for each in found} == causes
    # What each gives alone, to engines that are equal otherwise.
    alone = {CAUSED_BY[change]: k3_of(mixed(0, [change], kernels=0.0, count=112)) for change in mixture}
    # Of the tokens that are left, in the order of the table.
    outs = {each.cause for each in found if each.takes_out}
    taken_out = [name for name in CAUSES if name in outs]
    for each in found:
        gone = taken_out[: taken_out.index(each.cause)] if each.takes_out else taken_out
        truth = alone[each.cause] / sum(k3 for name, k3 in alone.items() if name not in gone)
        assert each.k3_share == pytest.approx(truth, rel=0.0, abs=0.05) or 0.5 < each.k3_share / truth < 2.0
    # Of temperature a line through the log-probs shows half.
    assert left.k3 < 1e-3 or left.explained > 0.5


SIZED = {
    "padding, a mixture": (
        partial(plants.padded_head, count=12),
        partial(plants.experts, size=1.0),
        ("top_p_or_top_k", "expert_routing"),
    ),
    "old weights, late positions": (plants.older, partial(plants.late, size=0.5), ("stale_weights", "late_positions")),
    "top-p, a mixture": (plants.nucleus, partial(plants.experts, size=1.7), ("top_p_or_top_k", "expert_routing")),
}
"""Two changes, and the cause of each."""


@pytest.mark.parametrize(("first", "second", "causes"), SIZED.values(), ids=SIZED)
def test_each_of_two_causes_has_its_share_within_a_factor_of_2(first, second, causes) -> None:
    kernels, whole = k3_of(planted(0, count=112)), k3_of(tokens := planted(0, [first, second], count=112))
    shares = {each.cause: each.k3_share for each in by_report(tokens)}
    assert {*shares} == {*causes}
    for change, cause in zip((first, second), causes, strict=True):
        true = (k3_of(planted(0, [change], count=112)) - kernels) / whole
        assert true > 0.15
        assert 0.5 < shares[cause] / true < 2.0


def test_what_a_line_or_a_place_may_be_stands_among_the_alternatives() -> None:
    """Where something else differs too much to name them."""
    of_line = planted(0, [plants.warmer, plants.older], count=112)
    assert any("a temperature above 1 together with it" in words for words in alternatives(of_line))
    ends = (1.0 - 0.7 * (torch.arange(LENGTH) >= 76))[None, :, None]
    of_place = planted(0, [lambda made: made._replace(behavior=made.behavior + made.noise(0.2) * ends)], count=112)
    assert any("begins at a position" in words for words in alternatives(of_place))
    assert not any(
        "together with it" in words or "position" in words for words in alternatives(planted(0, [plants.quantized]))
    )


def test_a_cut_beside_a_temperature_below_1_has_up_to_its_share() -> None:
    """Both move the same tokens, so that its share is the most that it may have."""
    (alone,), (cut, _) = by_report(planted(0, [plants.nucleus])), by_report(planted(0, [plants.colder, plants.nucleus]))
    assert (alone.cause, alone.is_up_to) == (cut.cause, not cut.is_up_to) == ("top_p_or_top_k", False)
    assert "a temperature below 1 together with it, which moves the same tokens" in cut.alternatives
    assert "a temperature above 1 together with it" in alone.alternatives


def test_a_cut_of_much_is_no_temperature_beside_one() -> None:
    """It fits a power with -1."""
    cut = planted(0, [plants.colder, lambda made: made._replace(behavior=top_p(made.behavior, 0.8))])
    found = {each.cause for each in by_report(cut)}
    assert "top_p_or_top_k" in found
    assert "temperature" not in found


def test_rounded_log_probs_have_the_share_that_rounding_alone_gives() -> None:
    alone, beside = (planted(0, [], [plants.rounded], kernels=size) for size in (0.0, 0.02))
    found, _ = by_report(beside)
    assert found.cause == "bf16_log_probs"
    assert found.k3_share == pytest.approx(k3_of(alone) / k3_of(beside), rel=0.1)


def test_log_probs_of_which_a_tenth_is_not_rounded_are_not_called_rounded() -> None:
    tokens, rounded = planted(0), planted(0, [], [plants.rounded])
    for mine, other in zip(tokens.behavior, rounded.behavior, strict=True):
        mine[: int(0.9 * LENGTH)] = other[: int(0.9 * LENGTH)]
    assert [found.cause for found in by_report(tokens)] == ["bf16_kernels"]


def alternatives(tokens: Tokens) -> list[str]:
    return [words for found in by_report(tokens) for words in found.alternatives]


def test_the_usual_case_comes_first_alone_and_last_behind_a_cause_that_shows_itself() -> None:
    (alone,), (shown, rest) = (
        by_report(planted(0, kernels=0.07)),
        by_report(planted(0, [plants.slightly_warmer], kernels=0.07)),
    )
    assert (alone.cause, alone.confidence, alone.k3_share) == ("bf16_or_low_precision", "likely", 1.0)
    assert (shown.cause, rest.cause, rest.confidence) == ("temperature", "bf16_or_low_precision", "possible")
    assert rest.k3_share == pytest.approx(1.0 - shown.k3_share)


def test_placeholders_do_not_hide_a_shift_of_all() -> None:
    tokens = planted(0, [], [plants.shifted])
    for behavior in tokens.behavior:
        behavior[::3] = -9999.0
    expected = ["placeholder_log_probs", "shifted_log_probs"]
    assert [found.cause for found in by_report(tokens)] == expected


@pytest.mark.parametrize(("steps", "cause"), [(1, "equal"), (2, "bf16_kernels")])
def test_another_formula_gives_one_step_of_float32_and_no_two(steps, cause) -> None:
    tokens = planted(0, kernels=0.0)
    for _ in range(steps):
        tokens.behavior = [torch.nextafter(each, 2.0 * each) for each in tokens.behavior]
    assert [found.cause for found in by_report(tokens)] == [cause]


@pytest.mark.parametrize(("first", "has_placeholders"), [(0, False), (20, True)])
def test_zeros_of_another_text_are_of_that_text(first, has_placeholders) -> None:
    """The first six responses are of another text, the others are not."""
    tokens = planted(0, [], [plants.foreign])
    for behavior in tokens.behavior[first : first + 6]:
        behavior[::9] = 0.0
    causes = {found.cause for found in by_report(tokens)}
    assert causes == {"other_text"} | ({"placeholder_log_probs"} if has_placeholders else set())


def test_zeros_that_a_shift_puts_beside_improbable_tokens_are_no_placeholders() -> None:
    tokens = planted(0)
    for number, (proximal, behavior) in enumerate(zip(tokens.proximal, tokens.behavior, strict=True)):
        behavior[proximal > -0.1] = 0.0
        if number < 30:
            behavior[:] = behavior.roll(1)
    assert [found.cause for found in by_report(tokens)] == ["shifted_log_probs"]


def test_what_both_sides_call_impossible_is_no_placeholder() -> None:
    tokens = planted(0)
    for log_probs in (*tokens.proximal, *tokens.behavior):
        log_probs[7:9] = -9999.0
    assert [found.cause for found in by_report(tokens)] == ["bf16_kernels"]


def test_placeholders_are_counted_once_and_by_their_side() -> None:
    tokens = planted(0)
    proximal, behavior = tokens.proximal[0], tokens.behavior[0]
    # One token of a greedy engine, which the trainer never samples; padding on both sides; the engine's own.
    proximal[7], behavior[7] = -1e9, 0.0
    assert "placeholder_log_probs" not in {found.cause for found in by_report(tokens)}
    proximal[2:4] = behavior[2:4] = -1e9
    behavior[5:7] = -1e4
    found = next(each for each in by_report(tokens) if each.cause == "placeholder_log_probs")
    first, second = found.evidence.split("; ")
    assert first.startswith("2 of ")
    assert " behavior log-probs " in first
    assert second.startswith("1 of ")
    assert " proximal log-probs " in second


def test_the_share_of_placeholders_is_that_of_their_tokens() -> None:
    tokens = SINGLE["zeros of greedy tokens"][1](0)
    d = torch.cat(tokens.proximal).double() - torch.cat(tokens.behavior).double()
    k3 = torch.expm1(d) - d
    share = float(k3[torch.cat(tokens.behavior) == 0.0].sum() / k3.sum())
    (found,) = by_report(tokens)
    assert share < 0.99
    assert found.k3_share == pytest.approx(share, rel=1e-4)


@pytest.mark.parametrize("kernels", [0.07, 0.12])
def test_zeros_of_tools_leave_what_there_is_besides_as_it_was(kernels) -> None:
    (alone,) = by_report(planted(0, kernels=kernels))
    _, besides = by_report(planted(0, [], [plants.dummies], kernels=kernels))
    assert (besides.cause, besides.confidence) == (alone.cause, alone.confidence)


def test_samples_whose_ids_differ_are_left_out_and_no_others_however_far_apart_these_are() -> None:
    (proximal, behavior), fresh = engines(0, kernels=2.0).sampled(), engines(50).sampled()
    sides, versions = (proximal + fresh[0], behavior + fresh[1]), [1] * COUNT + [0] * COUNT
    (alone,) = by_report(Tokens(*sides, versions))
    other = Tokens(
        sides[0] + proximal[:1], sides[1] + [proximal[0] - 0.2], [*versions, 0], [False] * 2 * COUNT + [True]
    )
    # One sample of 113 with less than 1 % of k3 is no certain fault.
    stale, found = by_report(other)
    assert (found.cause, found.confidence, stale.cause) == ("other_text", "possible", "stale_weights")
    assert stale.k3_share == alone.k3_share


def test_tokens_that_are_taken_out_leave_the_evidence_of_the_others_as_it_was() -> None:
    alone, mixture = (by_report(mixed(3, changes)) for changes in ([plants.nucleus], [plants.nucleus, plants.foreign]))
    (one,), (other, _) = alone, mixture
    assert one.cause == other.cause == "top_p_or_top_k"
    assert other.k3_share == pytest.approx(one.k3_share, abs=0.01)


@cache
def drawn_logits(kind: str) -> tuple[Tensor, Tensor]:
    """And where the generator is after them."""
    generator = torch.Generator().manual_seed(0)
    shape = (32, 80, 1000 if kind == "many" else 64)
    logits = torch.randn(shape, generator=generator)
    openness = torch.rand(*shape[:2], 1, generator=generator)
    # All positions alike; from open to certain; a vocabulary of language, each position with its own order.
    scale = {"flat": 2.0 + 0.0 * openness, "peaked": 0.5 + 6.0 * openness, "many": 0.7}[kind]
    logits = logits * scale
    if kind == "many":
        logits = logits - (0.5 + 3.0 * openness) * (torch.arange(shape[-1]) + 1.0).log()
    return logits, generator.get_state()


def pair_of(
    kind: str, *, engine: float = 1.0, trainer: float = 1.0, sampler: float = 0.0, noise: float = 0.0, cap: str = ""
) -> Tokens:
    """Both sides of drawn logits, each at a temperature, with noise in the trainer's; 0: sampled from the engine's."""
    logits, state = drawn_logits(kind)
    shape, generator = logits.shape, torch.Generator()
    generator.set_state(state)
    noisy = logits + noise * torch.randn(shape, generator=generator) if noise else logits
    sides = {"proximal": (noisy / trainer).log_softmax(-1), "behavior": (logits / engine).log_softmax(-1)}
    if cap:
        height = 2.0 * float(logits.std())
        sides[cap] = (height * (logits / height).tanh()).log_softmax(-1)
    sampled = sides["behavior"] if not sampler else (logits / sampler).log_softmax(-1)
    ids = sampled_ids(sampled.exp(), generator)
    return Tokens(**{name: [*each.gather(-1, ids)[..., 0]] for name, each in sides.items()})


def named_temperature(found: Diagnosis) -> tuple[float, float, float]:
    """What it is near to, and from where to where it may be."""
    assert found.cause == "temperature"
    near, low, high = re.search(r"near ([\d.]+) times .*\(([\d.]+) to ([\d.]+),", found.evidence).groups()
    return float(near), float(low), float(high)


@pytest.mark.parametrize("kind", ["flat", "peaked", "many"])
@pytest.mark.parametrize(
    ("sides", "true"),
    [
        ({"engine": 0.9}, 0.9),
        ({"trainer": 0.7}, 1.0 / 0.7),
        # The engine returns log-probs of its logits as they are, and the trainer divides.
        ({"trainer": 1.5, "sampler": 1.5}, 1.5),
    ],
)
def test_a_temperature_of_one_side_is_named_alone_and_known_to_5_percent_for_any_logits(kind, sides, true) -> None:
    for noise in (0.0, 0.02):
        (found,) = by_report(pair_of(kind, **sides, noise=noise))
        near, low, high = named_temperature(found)
        assert (near, found.confidence) == (pytest.approx(true, rel=0.05), "likely")
        assert low - 0.005 <= true <= high + 0.005
        assert ("from the trainer's distribution" in found.evidence) == ("sampler" in sides)


def test_a_temperature_that_noise_may_hide_is_given_with_the_room_that_it_leaves() -> None:
    found, _ = by_report(pair_of("peaked", engine=1.05, noise=0.15))
    _, low, high = named_temperature(found)
    assert low < 1.05 < high
    assert found.confidence == "possible"
    assert high - low > 0.03


def test_the_slope_of_a_power_is_that_of_the_tokens_by_hand() -> None:
    tokens = pair_of("peaked", engine=1.2)
    s, o = (torch.cat(side).double() for side in (tokens.behavior, tokens.proximal))
    w = (o - s).exp() - 1.0
    slope = float((w * (o - o.mean())).sum() / (w * (s - s.mean())).sum())
    left = o - o.mean() - slope * (s - s.mean())
    along = float((w * (s - s.mean())).sum())
    power = collected(tokens).search()[1].powers[0]
    assert power.slope == pytest.approx(slope, rel=1e-5)
    assert power.error == pytest.approx(float((w * left).square().sum().sqrt()) / along, rel=1e-4)
    assert power.fit == pytest.approx(float((w * left * left).sum() / (w.abs() * left * left).sum()), abs=1e-4)
    assert power.excess == pytest.approx(float(w.mean()), abs=1e-6)


@pytest.mark.parametrize(
    ("kind", "side", "base"),
    [("flat", "behavior", 2.0), ("peaked", "behavior", 10.0), ("flat", "proximal", 10.0), ("peaked", "proximal", 2.0)],
)
def test_a_base_of_logarithms_is_certain_on_either_side_with_noise_beside_it(kind, side, base) -> None:
    tokens = pair_of(kind, noise=0.05)
    for values in getattr(tokens, side):
        values /= math.log(base)
    (found,) = by_report(tokens)
    name = {"behavior": "engine", "proximal": "trainer"}[side]
    assert (found.cause, found.confidence) == ("not_log_probs", "certain")
    assert found.evidence.startswith(f"the {name}'s log-probs are logarithms to the base {base:g}")


def cut_of(scale: float, temperature: float, share: float, trainer: str, engine: str) -> Tokens:
    """Log-probs of tokens that were sampled at a temperature and with top-p; of what, each side says."""
    generator = torch.Generator().manual_seed(1)
    raw = (scale * torch.randn(32, 80, 64, generator=generator)).log_softmax(-1)
    divided = (raw / temperature).log_softmax(-1)
    kept = top_p(divided, share).log_softmax(-1)
    ids = sampled_ids(kept.exp(), generator)
    sides = {"raw": raw, "divided": divided, "kept": kept}
    return Tokens(*([*sides[name].gather(-1, ids)[..., 0]] for name in (trainer, engine)))


@pytest.mark.parametrize(
    "drawn",
    [
        *((0.7, temperature, 0.3, "raw", "kept") for temperature in (1.25, 1.4)),
        # Undone, a base makes the mean ratio 1 by chance; or the engine's log-probs are not of what it sampled from.
        (2.0, 0.71, 0.1, "raw", "divided"),
        (5.0, 2.0, 1.0, "divided", "raw"),
    ],
)
def test_neither_a_cut_of_tokens_that_are_alike_nor_a_temperature_is_a_base(drawn) -> None:
    assert "not_log_probs" not in {each.cause for each in by_report(cut_of(*drawn))}


@pytest.mark.parametrize("beside", ["noise, flat", "noise, peaked", "a cut"])
def test_a_base_beside_much_noise_or_a_cut_is_possible(beside) -> None:
    is_cut = beside == "a cut"
    tokens = cut_of(2.0, 1.0, 0.9, "raw", "kept") if is_cut else pair_of(beside.split()[1], noise=0.5)
    for values in tokens.behavior:
        values /= math.log(2.0)
    (found,) = by_report(tokens)
    assert (found.cause, found.confidence) == ("not_log_probs", "possible")
    assert not is_cut or any("top-p" in words for words in found.alternatives)


@pytest.mark.parametrize(("kind", "side"), [("flat", "behavior"), ("peaked", "proximal")])
def test_a_soft_cap_on_logits_is_no_likely_temperature(kind, side) -> None:
    found, *rest = by_report(pair_of(kind, cap=side))
    assert {each.confidence for each in (found, *rest)} == {"possible"}
    assert found.cause == "temperature"
    assert "The fit is bad" in found.evidence
    assert "another change of the logits, such as a soft cap" in found.alternatives


@pytest.mark.parametrize("side", ["behavior", "proximal"])
def test_log_probs_that_are_clamped_are_no_cut(side) -> None:
    tokens = pair_of("flat", noise=0.02)
    for values in getattr(tokens, side):
        values.clamp_min_(-3.0)
    found, *rest = by_report(tokens)
    assert (found.cause, found.confidence) == ("placeholder_log_probs", "certain")
    assert "as after a clamp" in found.evidence
    assert {each.cause for each in rest} <= {"bf16_kernels"}


@pytest.mark.parametrize("side", ["behavior", "proximal"])
def test_probabilities_of_an_open_model_are_all_wrong(side) -> None:
    tokens = pair_of("flat", noise=0.02)
    for values in getattr(tokens, side):
        values.exp_()
    assert 0.1 < float((torch.cat(getattr(tokens, side)) > 0.1).float().mean()) < 0.5
    (found,) = by_report(tokens)
    assert (found.cause, found.k3_share) == ("not_log_probs", 1.0)


@pytest.mark.parametrize(("kind", "noise"), [("flat", 0.01), ("peaked", 0.1), ("many", 1.0)])
def test_precision_of_any_size_is_named_or_among_the_alternatives(kind, noise) -> None:
    """One model's limits of k3 are not another's."""
    said = [words for each in by_report(pair_of(kind, noise=noise)) for words in (each.title, *each.alternatives)]
    assert any("low precision" in words or "lower precision" in words for words in said)
    assert noise == 1.0 or any("kernels" in words for words in said)


@pytest.mark.parametrize("change", ["late_positions", "stale_prefix_cache", "expert_routing"])
def test_a_place_or_a_tail_may_be_that_of_low_precision_in_another_model(change) -> None:
    made = {"late_positions": plants.late, "stale_prefix_cache": plants.stale_prefix, "expert_routing": plants.experts}
    (found,) = by_report(planted(0, [made[change]]))
    assert (found.cause, found.confidence) == (change, "possible")
    assert any("low precision" in words for words in found.alternatives)


@pytest.mark.parametrize(("kind", "noise"), [("flat", 0.3), ("peaked", 0.1)])
def test_a_temperature_beside_another_cause_explains_up_to_all_and_says_what_it_may_be_beside(kind, noise) -> None:
    alone, beside = (by_report(pair_of(kind, engine=0.8, noise=each))[0] for each in (0.0, noise))
    assert (alone.cause, beside.cause) == ("temperature", "temperature")
    # Where positions are all alike, no other temperature leaves room for another cause.
    assert alone.share_in_words == f"explains {'' if kind == 'flat' else 'up to '}100 % of k3"
    assert beside.share_in_words.startswith("explains up to ")
    assert any("penalties" in words for words in beside.alternatives)


def test_what_a_temperature_may_leave_to_another_cause_is_said_as_far_as_its_interval_goes() -> None:
    """A smaller one in its interval leaves as much of k3: precision beside it is an alternative."""
    (found,) = by_report(pair_of("peaked", engine=1.3, noise=0.1))
    near, low, _ = named_temperature(found)
    assert ((low - 1.0) / (near - 1.0)) ** 2 < 0.87
    assert found.is_up_to
    assert any("low precision" in words for words in found.alternatives)


def test_what_no_two_policies_give_is_said_to_fit_badly() -> None:
    tokens = pair_of("flat")
    noise = torch.randn(32, 80, generator=torch.Generator().manual_seed(1))
    tokens.proximal = [side + 0.5 * each for side, each in zip(tokens.proximal, noise, strict=True)]
    *_, found = by_report(tokens)
    assert any("they fit badly" in each for each in found.alternatives)
    (found,) = by_report(pair_of("flat", noise=0.5))
    assert not any("they fit badly" in each for each in found.alternatives)


def test_a_cut_has_at_least_the_share_that_its_lost_mass_needs() -> None:
    """Of noise with a few large squares, which hide that the others fall."""
    generator = torch.Generator().manual_seed(0)
    behavior = -0.3 - 2.0 * torch.rand(100, 100, generator=generator)
    far = torch.randn(100, 100, generator=generator) * (torch.rand(100, 100, generator=generator) < 0.01)
    tokens = Tokens([*(behavior - 0.05 + 0.7 * far)], [*behavior])
    d = torch.cat(tokens.proximal) - torch.cat(tokens.behavior)
    truth = 0.05**2 / 2.0 / float((d.expm1() - d).mean())
    (share,) = [each.k3_share for each in by_report(tokens) if each.cause == "top_p_or_top_k"]
    assert share == pytest.approx(truth, rel=0.3)


@pytest.mark.parametrize(("kind", "share", "side"), [("peaked", 0.03, "proximal"), ("many", 0.3, "behavior")])
def test_dummy_zeros_of_either_side_are_placeholders_and_leave_the_rest_as_it_was(kind, share, side) -> None:
    tokens = pair_of(kind, noise=0.06)
    (alone,) = by_report(tokens)
    generator = torch.Generator().manual_seed(1)
    for values in getattr(tokens, side):
        values[torch.rand(len(values), generator=generator) < share] = 0.0
    other = {"proximal": "behavior", "behavior": "proximal"}[side]
    found, rest = by_report(tokens)
    assert (found.cause, rest.cause, rest.confidence) == ("placeholder_log_probs", alone.cause, alone.confidence)
    assert f" {side} log-probs on trainable tokens are 0, where the {other} ones are below -1" in found.evidence
    assert f" {other} log-probs on" not in found.evidence


def test_a_cut_that_takes_something_else_from_each_position_has_its_share_beside_noise() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (100, 100)
    behavior, noise = -0.3 - 2.0 * torch.rand(shape, generator=generator), torch.randn(shape, generator=generator)
    proximal = behavior + 0.02 * noise - 0.08 * torch.rand(shape, generator=generator)
    (share,) = [each.k3_share for each in by_report(Tokens([*proximal], [*behavior])) if each.cause == "top_p_or_top_k"]
    assert share == pytest.approx(16.0 / 19.0, rel=0.05)


@pytest.mark.parametrize("lag", [3, -2])
def test_log_probs_that_are_several_tokens_off_are_shifted(lag) -> None:
    moved = plants.each_behavior(lambda log_probs: log_probs.roll(lag))
    (found,) = by_report(planted(0, [], [moved]))
    assert (found.cause, found.confidence) == ("shifted_log_probs", "certain")
    assert f"when one of them is shifted by {abs(lag)} tokens" in found.evidence
    far = plants.each_behavior(lambda log_probs: log_probs.roll(4))
    assert "shifted_log_probs" not in {each.cause for each in by_report(planted(0, [], [far]))}


@pytest.mark.parametrize(("kernels", "is_sure"), [(0.05, True), (0.3, False)])
def test_few_tokens_are_certain_only_with_a_tenth_of_k3(kernels, is_sure) -> None:
    tokens = planted(0, kernels=kernels)
    for proximal, behavior in zip(tokens.proximal[:4], tokens.behavior, strict=False):
        proximal[5], behavior[5] = -3.0, 0.0
    found = next(each for each in by_report(tokens) if each.cause == "placeholder_log_probs")
    assert (found.k3_share >= 0.1, found.confidence) == (is_sure, "certain" if is_sure else "possible")


@pytest.mark.parametrize(
    ("kernels", "count", "size", "cause"),
    [
        (0.01, 2, 6, "bf16_kernels"),
        (0.01, 3, 6, "expert_routing"),
        (0.0, 1, 6, "expert_routing"),
        (0.0, 2, 24, "expert_routing"),
    ],
)
def test_two_far_tokens_are_no_tail_unless_all_others_are_equal(kernels, count, size, cause) -> None:
    tokens = planted(0, kernels=kernels, count=size)
    for proximal, behavior in zip(tokens.proximal[:count], tokens.behavior, strict=False):
        proximal[9], behavior[9] = -1.4, -1.1
    (found,) = by_report(tokens)
    assert found.cause == cause
    assert found.evidence.endswith("uncertain tokens differ, the others are equal") == (kernels == 0.0)


@pytest.mark.parametrize(("step", "is_named"), [(2, True), (9, False)])
def test_zeros_at_the_end_of_some_responses_are_placeholders(step, is_named) -> None:
    """The others are ended by a length limit."""
    tokens = planted(0)
    for proximal, behavior in zip(tokens.proximal[::step], tokens.behavior[::step], strict=True):
        proximal[-1], behavior[-1] = -0.5, 0.0
    found = [each.evidence for each in by_report(tokens) if each.cause == "placeholder_log_probs"]
    assert any("at the last tokens of responses" in words for words in found) == is_named
