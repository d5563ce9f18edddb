# SPDX-License-Identifier: Apache-2.0
"""Who is affected, and when it started: groups of responses, rows, files, penalties, and settings of some steps."""

import json
import math
from collections.abc import Callable

import plants
import pytest
import torch
from engines import COUNT, LENGTH, Engines, causes, collected, diagnosed, engines
from torch import Tensor

from mis_ext.onpolicy.audit.log_probs import audit_dumps
from mis_ext.tools.dumps import Dumps
from mis_ext.tools.report import Origin, Part
from mis_ext.tools.report.part import Parts
from mis_ext.tools.report.recommendation import recommend

NO_TEXT = {"other_text", "packed_responses"}


def with_noise(far_S: Tensor, size: float = 0.3, **more) -> Part:
    """Responses of which some differ by noise of a size, the others as kernels do."""
    made = engines(3, count=len(far_S))
    noisy = made._replace(behavior=made.behavior + made.noise(size) * far_S[:, None, None])
    proximal, behavior = noisy.sampled()
    return Part.of_lists(proximal=proximal, behavior=behavior, **more)


def json_lines(part: Part) -> list[dict]:
    sides = {"log_probs": part.streams.proximal_logprobs_T, "rollout_log_probs": part.streams.behavior_logprobs_T}
    rows = zip(*(side_T.split(part.streams.layout.response_lengths) for side_T in sides.values()), strict=True)
    return [dict(zip(sides, map(Tensor.tolist, row), strict=True)) for row in rows]


def some(share: float, count: int = 80) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(1)) < share * count


@pytest.mark.parametrize("share", [0.05, 0.3, 0.52, 0.95])
def test_two_groups_are_told_at_any_share(share) -> None:
    (fault,) = diagnosed(with_noise(some(share)))
    assert (fault.cause, fault.confidence, fault.takes_out) == ("other_text", "possible", True)
    assert fault.evidence.startswith(f"{1 - share:.0%}".replace("%", " %") + " of the 80 responses differ by")
    assert any("score one response alone" in words for words in fault.alternatives)


@pytest.mark.parametrize(
    "sizes",
    [
        torch.full((80,), 0.1),
        # Of one population, however wide.
        torch.logspace(-2, 0, 80),
        0.1 * torch.randn(80, generator=torch.Generator().manual_seed(0)).exp(),
        # Less than three times.
        torch.where(some(0.5), 0.02, 0.05),
    ],
)
def test_one_group_is_no_two(sizes) -> None:
    assert not {*causes(with_noise(sizes, 1.0))} & NO_TEXT


@pytest.mark.parametrize("row", [2, 3, 20])
def test_rows_whose_first_response_is_right_are_packed(row) -> None:
    fault, *_ = diagnosed(with_noise(torch.arange(80) % row > 0))
    assert (fault.cause, fault.is_fault, fault.takes_out) == ("packed_responses", True, True)
    assert f"one in every {row} agrees" in fault.evidence


def test_rows_of_another_order_are_not_called_packed() -> None:
    # The first of each row is wrong; longer rows; a tenth of the responses of another kind.
    assert causes(with_noise(torch.arange(80) % 4 == 0))[0] == "other_text"
    assert causes(with_noise(torch.arange(80) % 23 > 0))[0] == "other_text"
    is_far = torch.arange(80) % 2 > 0
    borderline = is_far ^ some(0.08)
    assert causes(with_noise(borderline))[0] == "packed_responses"
    assert causes(with_noise(is_far ^ some(0.2)))[0] == "other_text"


def test_groups_that_a_file_or_the_canary_tells_apart_are_of_weights() -> None:
    far = torch.arange(80) >= 40
    files = [Origin(source=f"{'ab'[int(each)]}.pt") for each in far]
    (found, *_) = diagnosed(with_noise(far, origins=files))
    assert found.cause == "stale_weights"
    assert "their file separates them, as if one rank or engine differs" in found.evidence
    mixed = [Origin(source=f"{'ab'[number % 2]}.pt") for number in range(80)]
    assert causes(with_noise(some(0.5), origins=mixed))[0] == "other_text"


@pytest.mark.parametrize("is_audit", [False, True])
def test_the_dump_of_one_rank_with_other_weights_is_told_by_its_file(tmp_path, is_audit) -> None:
    lines = [*map(json.dumps, json_lines(with_noise(torch.arange(80) >= 60)))]
    files = [tmp_path / f"0_{rank}.jsonl" for rank in range(4)]
    for rank, file in enumerate(files):
        file.write_text("\n".join(lines[20 * rank : 20 * rank + 20]))
    dumps = Dumps(files)
    found = audit_dumps(dumps).diagnoses if is_audit else diagnosed(*Parts(dumps))
    assert any("their file separates them" in each.evidence for each in found)


@pytest.mark.parametrize("is_audit", [False, True])
def test_a_rollout_from_which_on_responses_are_far_is_told_by_its_number(tmp_path, is_audit) -> None:
    lines = json_lines(with_noise(torch.arange(80) >= 40))
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(json.dumps(line | {"rollout_id": row // 20}) for row, line in enumerate(lines)))
    found = audit_dumps(Dumps([path])).diagnoses if is_audit else diagnosed(*Parts(Dumps([path])))
    assert any("up to step 1 and" in each.evidence for each in found)


def test_a_file_of_its_own_for_each_response_tells_nothing_apart() -> None:
    files = [Origin(source=f"{number}.pt") for number in range(80)]
    assert causes(with_noise(some(0.3), origins=files))[0] == "other_text"


def test_responses_that_are_far_with_hardly_any_k3_are_no_group() -> None:
    # Of log-probs near 0 rounding alone is as large as 1 - p; and groups that both differ less than kernels do.
    proximal, behavior = engines(3, count=80).sampled()
    for number in range(24):
        behavior[number] = torch.full_like(behavior[number], -1e-5)
        proximal[number] = -1e-5 - 1e-5 * torch.rand(LENGTH, generator=torch.Generator().manual_seed(number))
    assert not {*causes(Part.of_lists(proximal=proximal, behavior=behavior))} & NO_TEXT
    assert not {*causes(with_noise(some(0.3), 0.045))} & NO_TEXT


# --- penalties


def penalized(size: float, *, has_ids: bool = True, count: int = COUNT) -> Part:
    """An engine that takes something from the logits of tokens that it has sampled."""
    made = engines(5, count=count)
    generator, behavior = torch.Generator().manual_seed(0), made.behavior.clone()
    before, ids = torch.zeros(len(behavior), behavior.shape[-1], dtype=torch.float64), []
    for place in range(LENGTH):
        behavior[:, place] -= size * before
        ids.append(torch.multinomial(behavior[:, place].softmax(-1), 1, generator=generator))
        before.scatter_(1, ids[-1], 1.0)
    chosen = torch.cat(ids, 1)[..., None]
    sides = [logits.log_softmax(-1).gather(-1, chosen)[..., 0].float() for logits in (made.proximal, behavior)]
    origins = [Origin(token_ids=each[:, 0] if has_ids else None) for each in chosen]
    return Part.of_lists(proximal=[*sides[0]], behavior=[*sides[1]], origins=origins)


@pytest.mark.parametrize("size", [0.2, 1.0])
def test_a_penalty_is_seen_where_ids_are_recorded(size) -> None:
    found = next(each for each in diagnosed(penalized(size)) if each.cause == "penalties")
    assert (found.is_fault, found.confidence) == (True, "likely")
    assert found.k3_share > 0.2
    assert "that occurred before in their response more probable" in found.evidence


def test_no_penalty_is_seen_without_ids_or_of_too_few_tokens_or_where_there_is_none() -> None:
    assert "penalties" not in causes(penalized(1.0, has_ids=False))
    assert "penalties" not in causes(penalized(0.0))
    assert "penalties" not in causes(penalized(0.002))
    # Repeated tokens are up more often than others, beyond chance: by 16 % of them, and not by 25 %.
    assert "penalties" not in causes(penalized(0.006, count=224))
    first = penalized(1.0, count=1)
    few = Part.of_lists(
        proximal=[first.tokens.log_pi[:40]],
        behavior=[first.tokens.log_mu[:40]],
        origins=[Origin(token_ids=first.origins[0].token_ids[:40])],
    )
    assert "penalties" not in causes(few)


# --- settings and places of some steps


def steps_of(*changes: Callable[[Engines], Engines]) -> list[Part]:
    parts = []
    for step, change in enumerate(changes):
        proximal, behavior = change(engines(step)).sampled()
        parts.append(Part.of_lists(proximal=proximal, behavior=behavior, step=str(step)))
    return parts


def same(made: Engines) -> Engines:
    return made


@pytest.mark.parametrize(
    ("change", "cause"), [(plants.warmer, "temperature"), (plants.nucleus, "top_p_or_top_k")], ids=["warmer", "nucleus"]
)
def test_a_setting_is_named_only_if_the_first_steps_show_it(change, cause) -> None:
    assert causes(*steps_of(change, change, change))[0] == cause
    later = diagnosed(*steps_of(same, change, change))
    assert later[0].cause == "stale_weights"
    assert cause not in {each.cause for each in later}
    assert "from step 1 on: the first update broke one side" in later[0].evidence
    # k3 grows, and both have it.
    grown = steps_of(change, lambda made: plants.older(change(made)))
    assert cause in causes(*grown)


def test_a_place_has_nearly_all_that_changes_over_steps() -> None:
    assert causes(*steps_of(same, plants.stale_prefix, plants.stale_prefix))[0] == "stale_prefix_cache"
    both = steps_of(
        same, *[lambda made: plants.stale_prefix(made._replace(behavior=made.behavior + made.noise(0.2)), 1.5)] * 2
    )
    assert causes(*both) == ["stale_weights"]


@pytest.mark.parametrize(("size", "is_named"), [(0.5, True), (0.1, True), (0.03, False), (0.0, False)])
def test_a_stale_prefix_is_seen_in_short_responses(size, is_named) -> None:
    proximal, behavior = plants.stale_prefix(engines(2, count=200), size).sampled()
    short = ([each[:40] for each in side] for side in (proximal, behavior))
    found = diagnosed(Part.of_lists(**dict(zip(("proximal", "behavior"), short, strict=True))))
    assert ("stale_prefix_cache" in {each.cause for each in found}) == is_named
    assert not is_named or any("multimodal" in words for words in found[0].alternatives)


@pytest.mark.parametrize(("is_always", "is_text"), [(True, True), (False, False)])
def test_responses_that_are_apart_only_where_weights_have_moved_are_of_no_text(is_always, is_text) -> None:
    parts = []
    for step, size in enumerate((0.01, 0.02, 0.04, 0.08, 0.12)):
        made = engines(step, kernels=0.0)
        apart = 5.0 if is_always or step >= 3 else 1.0
        size_S = size * torch.where(torch.arange(COUNT) < 6, apart, 1.0)
        proximal, behavior = made._replace(behavior=made.behavior + size_S[:, None, None] * made.noise(1.0)).sampled()
        parts.append(Part.of_lists(proximal=proximal, behavior=behavior, step=str(step)))
    found = causes(*parts)
    assert ("other_text" in found) == is_text
    assert "stale_weights" in found


@pytest.mark.parametrize("is_text", [True, False])
def test_what_a_learned_policy_sets_apart_by_less_than_a_nat_is_no_other_text(is_text) -> None:
    generator = torch.Generator().manual_seed(0)
    proximal, _ = engines(0).sampled()
    # The trainer finds all tokens more probable, those of eight responses twenty times as much.
    sizes = torch.where(torch.arange(COUNT) < 8, 0.6, 0.03)
    behavior = [
        each + size * each.expm1() * torch.rand(len(each), generator=generator)
        for each, size in zip(proximal, sizes, strict=True)
    ]
    if is_text:
        behavior[:8] = engines(77).sampled()[1][:8]
    assert ("other_text" in causes(Part.of_lists(proximal=proximal, behavior=behavior))) == is_text


def test_growth_beyond_chance_is_never_nothing() -> None:
    sizes = (0.05, 0.05, 0.07, 0.07)
    parts = []
    for step, size in enumerate(sizes):
        proximal, behavior = engines(step, kernels=size).sampled()
        parts.append(Part.of_lists(proximal=proximal, behavior=behavior, step=str(step)))
    (found,) = diagnosed(*parts)
    assert found.confidence == "possible"
    assert "more than by chance" in found.evidence
    assert found.advice.startswith("Look at the steps first")
    (same_all,) = diagnosed(*parts[:2])
    assert (same_all.confidence, math.isnan(same_all.k3_share)) == ("likely", False)
    assert "more than by chance" not in same_all.evidence


# --- the headline follows the causes


def headline_of(*parts: Part) -> tuple[str, tuple[str, ...]]:
    collector = collected(*parts)
    found = recommend([], {}, collector.summary(), collector.diagnoses())
    return found.headline, found.reasons


def test_the_headline_names_the_cause_and_a_correction_comes_second() -> None:
    headline, reasons = headline_of(*steps_of(same, plants.older, plants.older))
    assert headline == "Find this first: stale weights, or a tensor that was not sent."
    assert "the first update broke one side" in reasons[0]
    assert reasons[1].startswith("Compare the weights of both sides tensor by tensor")
    assert reasons[-1].startswith("In a pretrained model token TIS gained 0.13 of reward at a staleness of 8 steps")
    # Kernels, of steps that are alike, and of steps that are not.
    assert headline_of(*steps_of(same, same))[0] == "No correction is needed."
    grown = steps_of(same, lambda made: made._replace(behavior=made.behavior + made.noise(0.011)))
    assert headline_of(*grown)[0].startswith("k3 is small and grows: ")
    # However small it is, stale weights are among what it may be.
    assert any(words.startswith("stale weights") for words in diagnosed(*grown)[0].alternatives)
    # Nothing but a size: no cause is made up.
    headline, reasons = headline_of(*steps_of(plants.quantized))
    assert headline.startswith("No candidate")
    assert (len(reasons), "up-to-date weights" in reasons[1], "k3 of 0.03" in reasons[2]) == (3, True, True)
    _, reasons = headline_of(*steps_of(lambda made: made._replace(behavior=made.behavior + made.noise(0.4))))
    assert "are not usable: their effective sample size is" in reasons[-1]
