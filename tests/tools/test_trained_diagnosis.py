# SPDX-License-Identifier: Apache-2.0
"""Every cause, alone and in pairs, in tokens of a trained transformer: what is named, and with what share of k3."""

import pytest
from engines import causes, diagnosed
from trained_pairs import DOUBTFUL, JUDGED, KERNELS, MIN_SHARE, RIGHT, WRONG, judged, recorded
from trained_plants import IN_LOG_PROBS, PLANTS, collected, sides_of

from mis_ext.tools.diagnosis import Diagnosis
from mis_ext.tools.report import Part

TOGETHER = ("another chat template", "top-p 0.9")

IN_EVERY_RUN = (
    *IN_LOG_PROBS,
    *("never synced, 6 steps", "prefix of old weights", "fp8 weights", "positions from 92 on", "padded vocabulary"),
    *("another prompt", "another chat template", "temperature 1.05", "top-p 0.9"),
)
"""One plant of each kind, whose tokens take 2 s; `python tests/trained_pairs.py` judges all of them, and all pairs."""


def named(plant: str) -> list[Diagnosis]:
    return collected(plant).diagnoses()


@pytest.mark.whole_run
@pytest.mark.parametrize("plant", IN_EVERY_RUN)
def test_a_cause_alone_is_named_and_no_other(plant) -> None:
    verdict = judged([plant]).verdict
    # Padding looks like a cut.
    assert verdict == (RIGHT if PLANTS[plant].cause else DOUBTFUL) or (plant, verdict) == (
        "padded vocabulary",
        DOUBTFUL,
    )


# Single plants do not see shares that add up to more than all; this pair does.
@pytest.mark.whole_run
def test_what_gives_a_tenth_of_k3_is_named_with_its_share() -> None:
    verdict = judged(TOGETHER)
    assert verdict.sign != WRONG, verdict.verdict
    assert verdict.sign == recorded()[TOGETHER].sign


@pytest.mark.whole_run
def test_bf16_log_probs_are_a_small_part_of_what_kernels_give() -> None:
    shares = {each.cause: each.k3_share for each in named("log-probs in bf16")}
    assert shares["bf16_log_probs"] < MIN_SHARE < 0.5 < shares[KERNELS]


@pytest.mark.whole_run
def test_weights_that_are_never_synced_are_told_by_steps() -> None:
    (found,) = named("never synced, 6 steps")
    assert "k3 grows from" in found.evidence


@pytest.mark.whole_run
def test_padding_looks_like_a_cut_and_like_no_temperature() -> None:
    assert {each.cause for each in named("padded vocabulary")} - {KERNELS} == {"top_p_or_top_k"}


@pytest.mark.whole_run
def test_many_tokens_do_not_make_a_cut_of_another_prompt() -> None:
    """Heavy tails, which a sample misses, leave a mean ratio of 0.986."""
    trainer, engine, *_ = sides_of("another prompt")
    assert causes(*[Part.of_lists(proximal=trainer, behavior=engine)] * 8) == ["stale_prefix_cache"]


@pytest.mark.whole_run
def test_zeros_in_most_samples_are_placeholders_however_far_apart_these_are() -> None:
    trainer, engine, *_ = sides_of("4 placeholders")
    engine = [each - 0.5 * (number > 9) for number, each in enumerate(engine)]
    for number in range(10, len(engine)):
        engine[number][trainer[number].argmin()] = 0.0
    part = Part.of_lists(proximal=trainer, behavior=engine)
    (found,) = [each for each in diagnosed(part) if each.cause == "placeholder_log_probs"]
    assert "54 of" in found.evidence


def test_the_record_has_every_plant_and_every_pair_and_none_is_told_wrong() -> None:
    verdicts = recorded()
    assert tuple(verdicts) == JUDGED
    assert [plants for plants, each in verdicts.items() if each.sign == WRONG] == []
