"""Every cause, alone and in pairs, in tokens of a trained transformer: what is named, and with what share of k3."""

import pytest
from test_documentation import assert_page_holds
from trained_plants import AMONG_ALTERNATIVES, CAUSE_OF, EXPERTS, LIMITS, PAIRS, collected, named, sides_of

from mis_ext.diagnosis import CAUSES
from mis_ext.report import Collector, Part

KERNELS = "bf16_kernels"
"""In all tokens. Named where little else is."""
MIN_SHARE = 0.1


@pytest.mark.parametrize("plant", CAUSE_OF)
def test_a_cause_alone_is_named_and_no_other(plant) -> None:
    found = named([plant])
    assert {each.cause for each in found} - {KERNELS} == {CAUSE_OF[plant]}
    shares = {each.cause: each.k3_share for each in found}
    share = shares[CAUSE_OF[plant]]
    if plant == "log-probs in bf16":
        # Kernels give most of k3.
        assert share < MIN_SHARE < 0.5 < shares[KERNELS]
    else:
        assert share > 0.8


def k3_left_alone(name: str, *, is_gone: bool) -> float:
    """What a plant gives to the k3 of the tokens that are not taken out."""
    if is_gone:
        return 0.0
    return collected(name, kernels=name == EXPERTS).summary().overall.k3


@pytest.mark.parametrize("plants", PAIRS, ids="-".join)
def test_what_gives_a_tenth_of_k3_is_named_with_its_share(plants) -> None:
    found = {each.cause: each.k3_share for each in named(plants)}
    causes = {CAUSE_OF[plant] for plant in plants}
    gone = {CAUSE_OF[plant] for plant in plants if CAUSES[CAUSE_OF[plant]].takes_out}
    k3 = {CAUSE_OF[plant]: k3_left_alone(plant, is_gone=CAUSE_OF[plant] in gone) for plant in plants}
    share = {cause: 1.0 if cause in gone else each / sum(k3.values()) for cause, each in k3.items()}
    wrong = {*found} - causes - {KERNELS}
    wrong |= {cause for cause in causes - {*found} if share[cause] >= MIN_SHARE}
    assert wrong == LIMITS.get(plants, set())
    for cause in causes & {*found} - gone:
        if plants not in LIMITS and share[cause] >= MIN_SHARE:
            assert 0.5 < found[cause] / share[cause] < 2.0


@pytest.mark.parametrize(("plant", "alternative"), AMONG_ALTERNATIVES.items())
def test_what_looks_like_another_cause_is_among_its_alternatives(plant, alternative) -> None:
    (found,) = named([plant])
    assert found.confidence == "possible"
    assert any(alternative in each for each in found.alternatives)


def test_a_temperature_is_given_in_numbers() -> None:
    (found,) = named(["temperature 1.05"])
    assert "near 1.05 times" in found.evidence


def test_logarithms_to_base_2_are_no_temperature() -> None:
    (found,) = named(["base 2"])
    assert "the engine's are logarithms to the base 2" in found.evidence


def test_many_tokens_do_not_make_a_cut_of_another_prompt() -> None:
    """Heavy tails, which a sample misses, leave a mean ratio of 0.986."""
    trainer, engine = sides_of("another prompt")
    collector = Collector()
    for _ in range(8):
        collector.add(Part.of_lists(proximal=trainer, behavior=engine))
    assert {each.cause for each in collector.diagnoses()} == {"stale_prefix_cache"}


def test_zeros_in_most_samples_are_placeholders_however_far_apart_these_are() -> None:
    trainer, engine = sides_of("4 placeholders")
    engine = [each - 0.5 * (number > 9) for number, each in enumerate(engine)]
    for number in range(10, len(engine)):
        engine[number][trainer[number].argmin()] = 0.0
    collector = Collector()
    collector.add(Part.of_lists(proximal=trainer, behavior=engine))
    (found,) = [each for each in collector.diagnoses() if each.cause == "placeholder_log_probs"]
    assert "54 of" in found.evidence


def test_the_page_says_what_is_named() -> None:
    assert_page_holds("plants")
