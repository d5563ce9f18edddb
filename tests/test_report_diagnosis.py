"""What the report knows besides log-probs: masks, versions, steps, ids. See tests/test_diagnosis.py for the others."""

import torch
from engines import COUNT, LENGTH, engines
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
