# SPDX-License-Identifier: Apache-2.0
"""Every cause, alone and in pairs, in tokens of a trained transformer: what is named, and with what share of k3."""

import pytest
from engines import causes, diagnosed
from trained_pairs import DOUBTFUL, KERNELS, MIN_SHARE, RIGHT, WRONG, judged, recorded
from trained_pairs import JUDGED as ALL_JUDGED
from trained_plants import EXPERTS, IN_LOG_PROBS, PLANTS, collected, sides_of

from mis_ext.tools.diagnosis import Diagnosis
from mis_ext.tools.report import Part

JUDGED = (
    *(("weights 4 updates old", other) for other in ("base 2", "log-probs in bf16")),
    ("positions from 92 on", "base 2"),
    ("never synced, 6 steps", "fp8 weights"),
    *((other, "3 samples of others") for other in ("half an update behind", "temperature 1.05")),
    ("prefix of old weights", "fp8 cache (e4m3)"),
    *(("fp8 weights", other) for other in ("positions from 92 on", "temperature 1.05", "a tenth shifted")),
    *(("temperature 0.7", other) for other in ("4 placeholders", "a bonus in 2 samples")),
    ("top-p 0.9", "2 greedy samples"),
    (EXPERTS, "log-probs in bf16"),
    ("another chat template", "top-p 0.9"),
    ("adapter on one side", "another chat template"),
    ("fp8 cache (e4m3)", "padded vocabulary"),
    ("begun with old weights", "positions from 92 on"),
    *((other, "base 2") for other in ("another prompt", "top-k 8")),
    ("another prompt", "temperature 1.2"),
    ("temperature 0.7", "min-p 0.05"),
)
"""The pairs that are judged here; `python tests/trained_pairs.py` judges them all."""

TOGETHER = ("another chat template", "top-p 0.9")

IN_EVERY_RUN = (
    *IN_LOG_PROBS,
    *("never synced, 6 steps", "prefix of old weights", "fp8 weights", "positions from 92 on", "padded vocabulary"),
    *("another prompt", "another chat template", "temperature 1.05", "top-p 0.9"),
)
"""One plant of each kind; tokens of each that is planted in an engine take 2 s, those of experts 15."""

UNTOLD = ("fp8 cache (e4m3)", "padded vocabulary")
"""Plants of which the table has the cause, but log-probs may not tell it: a cache in e4m3 has the size of kernels, and
padding looks like a cut."""


def named(plant: str) -> list[Diagnosis]:
    return collected(plant).diagnoses()


@pytest.mark.whole_run
@pytest.mark.parametrize(
    "plant", [pytest.param(each, marks=() if each in IN_EVERY_RUN else pytest.mark.long_run) for each in PLANTS]
)
def test_a_cause_alone_is_named_and_no_other(plant) -> None:
    verdict = judged([plant]).verdict
    assert verdict == (RIGHT if PLANTS[plant].cause else DOUBTFUL) or (plant in UNTOLD and verdict == DOUBTFUL)


# Single plants do not see shares that add up to more than all; this pair does.
@pytest.mark.whole_run
@pytest.mark.parametrize(
    "plants",
    [pytest.param(each, marks=() if each == TOGETHER else pytest.mark.long_run, id="-".join(each)) for each in JUDGED],
)
def test_what_gives_a_tenth_of_k3_is_named_with_its_share(plants) -> None:
    verdict = judged(plants)
    assert verdict.sign != WRONG, verdict.verdict
    # All of the record is judged anew in a long run.
    assert plants != TOGETHER or verdict.sign == recorded()[plants].sign


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
def test_a_temperature_is_given_in_numbers() -> None:
    (found,) = named("temperature 1.05")
    near = float(found.evidence.split(" near ")[1].split()[0])
    assert (near, found.confidence) == (pytest.approx(1.05, rel=0.01), "likely")


@pytest.mark.whole_run
def test_logarithms_to_base_2_are_no_temperature() -> None:
    (found,) = named("base 2")
    assert found.evidence.startswith("the engine's log-probs are logarithms to the base 2")


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
    assert tuple(verdicts) == ALL_JUDGED
    assert [plants for plants, each in verdicts.items() if each.sign == WRONG] == []


@pytest.mark.whole_run
@pytest.mark.long_run
def test_the_record_is_what_is_judged_now() -> None:
    verdicts = recorded()
    # Kernels of another CPU may move a share that is near its limit.
    assert sum(verdicts[plants].sign != judged(plants).sign for plants in JUDGED) < 4
