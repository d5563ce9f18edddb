# SPDX-License-Identifier: Apache-2.0
"""Turns of a response, and responses to one prompt, in the report."""

import json
import math

import pytest
import torch
from engines import COUNT, LENGTH, diagnosed, engines

from mis_ext.tools.dumps import Dumps
from mis_ext.tools.report import Part, Parts, summarize


def test_responses_of_one_turn_have_no_table_of_turns() -> None:
    part = Part.of_lists(proximal=[torch.zeros(4)], behavior=[torch.zeros(4)])
    assert summarize([part]).by_turn == []


def causes(begins: int, deviation_T: torch.Tensor, *, share: float = 1.0) -> list[tuple[str, str]]:
    """Of conversations, a share of which has an observation of 8 tokens before a second turn that begins there."""
    made, count = engines(5), int(share * COUNT)
    deviation = torch.zeros(COUNT, LENGTH, 1, dtype=torch.float64)
    deviation[:count, :, 0] = deviation_T
    noisy = made._replace(behavior=made.behavior + made.noise(1.0) * deviation).sampled()
    masks = torch.ones(COUNT, LENGTH)
    masks[:count, begins - 8 : begins] = 0.0
    found = diagnosed(Part.of_lists(proximal=noisy[0], behavior=noisy[1], masks=[*masks]))
    return [(each.cause, each.evidence) for each in found]


SINCE = torch.arange(LENGTH) - 40


def test_turns_behind_the_first_point_to_their_prefix() -> None:
    ((cause, evidence),) = causes(40, torch.where(SINCE >= 0, 0.08, 0.0))
    assert cause == "stale_prefix_cache"
    assert "in the first turn" in evidence


def test_a_prefix_of_the_conversation_is_found_though_first_turns_hide_it() -> None:
    fading = torch.where(SINCE >= 0, 0.06 * torch.exp(-SINCE / 24.0), 0.0)
    # Kernels give a part of a k3 this small.
    (cause, evidence), (kernels, _) = causes(40, fading, share=0.2)
    assert (kernels, cause) == ("bf16_kernels", "stale_prefix_cache")
    assert "after the first" in evidence


@pytest.mark.parametrize(
    ("place", "positions"),
    [
        ("the last tokens of responses", [-1]),
        ("the first tokens of responses", [0]),
        ("the last of turns", [31, -1]),
        ("the first of turns", [0, 40]),
    ],
)
def test_zeros_are_named_by_their_place_in_turns(place, positions) -> None:
    proximal, behavior = engines(3).sampled()[:2]
    masks = torch.ones(COUNT, LENGTH)
    masks[:, 32:40] = 0.0
    for number, (trainer, engine) in enumerate(zip(proximal, behavior, strict=True)):
        # A missing log-prob at the place of a zero does not move this place.
        trainer[positions], engine[positions] = -0.5, math.nan if number % 5 else 0.0
    (found,) = (
        each
        for each in diagnosed(Part.of_lists(proximal=proximal, behavior=behavior, masks=[*masks]))
        if each.cause == "placeholder_log_probs"
    )
    assert f"at {place}, and not elsewhere" in found.evidence


def test_noise_that_fades_far_behind_is_no_prefix() -> None:
    """In long responses of an engine: the first 32 tokens differ twice as much as all behind the 64th."""
    generator = torch.Generator().manual_seed(0)
    deviation = torch.where(torch.arange(1024) < 256, 0.1, 0.02)
    behavior = [-2.0 * torch.rand(1024, generator=generator) - 0.1 for _ in range(32)]
    proximal = [each + deviation * torch.randn(1024, generator=generator) * -each.expm1() for each in behavior]
    found = diagnosed(Part.of_lists(proximal=proximal, behavior=behavior))
    assert "stale_prefix_cache" not in {each.cause for each in found}


def of_24_tokens(first: float, deviation_T: torch.Tensor | float = 0.08) -> list[str]:
    """The causes of short responses, of which the first three tokens have another deviation."""
    generator = torch.Generator().manual_seed(0)
    deviation = torch.where(torch.arange(24) < 3, first, deviation_T)
    behavior = [-2.0 * torch.rand(24, generator=generator) - 0.1 for _ in range(96)]
    proximal = [each + deviation * torch.randn(24, generator=generator) * -each.expm1() for each in behavior]
    return [found.cause for found in diagnosed(Part.of_lists(proximal=proximal, behavior=behavior))]


def test_a_prefix_of_short_responses_is_a_step_behind_the_first_tokens() -> None:
    assert of_24_tokens(0.3)[0] == "stale_prefix_cache"
    assert "stale_prefix_cache" not in of_24_tokens(0.14)
    # As stale weights of a pretrained model: the first four tokens differ 1.6 times as much as the next twelve.
    fading = 0.38 * torch.exp(-torch.arange(24) / 17.0)
    assert "stale_prefix_cache" not in of_24_tokens(0.38, fading)


def test_equal_turns_are_no_prefix() -> None:
    assert [cause for cause, _ in causes(40, torch.zeros(LENGTH))] == ["bf16_kernels"]


@pytest.mark.parametrize("known_by", ["group_index", "tokens", "nothing"])
def test_prompts_of_files_are_known_by_their_number_or_by_their_ids(tmp_path, known_by) -> None:
    rows = []
    for number in range(8):
        row = {"log_probs": [-1.0, -1.0], "rollout_log_probs": [-1.0, -1.0]}
        row |= {"group_index": f"task {number // 2}"} if known_by == "group_index" else {}
        row |= {"tokens": [7, number // 2, 1, number]} if known_by == "tokens" else {}
        rows.append(row)
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    summary = summarize(Parts(Dumps([path])))
    assert summary.overall.num_prompts == (8 if known_by == "nothing" else 4)
