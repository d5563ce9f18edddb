# SPDX-License-Identifier: Apache-2.0
"""The evidence harness: grades, intervals, conditions, and what its exact enumeration says."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from evidence import mismatch
from evidence.archives import Archives
from evidence.engines import EngineSpec
from evidence.enumerable import Enumerated
from evidence.floor import Floor
from evidence.group import Group, Method
from evidence.outcomes import Condition, Difference, benjamini_hochberg, holm, pareto_k
from evidence.results import Results, settings
from evidence.studies import STUDIES, Study
from evidence.task import Problems, grade
from evidence_runs import NONE

pytestmark = pytest.mark.usefixtures("one_thread")


def test_grading() -> None:
    problems = Problems.draw(50, 20, torch.Generator().manual_seed(0))
    solved = problems.solve()
    assert grade(problems.prompts_BP, solved, problems.mask_BL).tolist() == [1.0] * 50
    broken = solved.clone()
    broken[:, 3] = 11
    share = grade(problems.prompts_BP, broken, problems.mask_BL)
    torch.testing.assert_close(share, 1 - 2 / problems.mask_BL.sum(-1))


def test_differences_are_judged_by_their_intervals() -> None:
    difference = Difference.of_pairs([0.1, 0.2, 0.3, 0.2])
    assert difference[:4] == pytest.approx((0.2, 0.2 - 0.1299, 0.2 + 0.1299, 4), abs=1e-3)
    assert difference.verdict(0.02) == "better"
    assert Difference.of_pairs([-0.2, -0.21, -0.19]).verdict(0.02) == "worse"
    assert Difference.of_pairs([0.001, -0.001, 0.002]).verdict(0.02) == "no difference"
    assert Difference.of_pairs([0.3, -0.3, 0.1]).verdict(0.02) == "not resolved"
    assert Difference.of_pairs([0.3]).verdict(0.02) == "not resolved"


def test_conditions_pair_seeds_and_see_a_fall() -> None:
    rewards = {"none": {1: [0.5] * 40, 2: [0.9] * 40}, "better": {1: [0.6] * 40, 2: [1.0] * 20 + [0.7] * 20}}
    rows = [
        {"method": method, "seed": seed, "step": step, "reward": reward}
        | ({"own_reward": 0.5} if step % 10 == 0 else {})
        for method, seeds in rewards.items()
        for seed, curve in seeds.items()
        for step, reward in enumerate(curve)
    ]
    condition = Condition.of_rows("c", rows)
    assert condition.base == "none"
    assert condition.difference("better", "none", "reward").mean == pytest.approx((0.1 - 0.05) / 2)
    assert condition.difference("better", "none", "reward", slice(0, 10)).mean == pytest.approx(0.1)
    assert (condition.fell("none"), condition.fell("better")) == (0, 0.5)
    # The policy itself can fall while its rollouts, of older weights, do not.
    next(row for row in rows if row["seed"] == 1 and row["step"] == 10)["own_reward"] = 0.71
    assert Condition.of_rows("c", rows).fell("none") == 0.5


def test_settings_are_compared_with_the_uncorrected_runs_of_another_by_seed() -> None:
    def condition(name: str, rewards: dict[str, dict[int, list[float]]]) -> Condition:
        return Condition.of_rows(
            name,
            [
                {"method": method, "seed": seed, "step": step, "reward": reward}
                for method, seeds in rewards.items()
                for seed, curve in seeds.items()
                for step, reward in enumerate(curve)
            ],
        )

    reference = condition("whole", {"none": {1: [0.5] * 40, 2: [0.9] * 40}, "other": {1: [0.0] * 40, 2: [0.0] * 40}})
    part = condition("part", {"tis": {1: [0.4] * 30 + [0.7] * 10, 2: [0.8] * 40, 3: [0.0] * 40}})
    assert part.difference_to("tis", reference, "reward", slice(0, 30)).mean == pytest.approx(-0.1)
    last = part.difference_to("tis", reference, "reward", None)
    assert (last.mean, last.num_pairs) == (pytest.approx(0.05), 2)


@pytest.mark.parametrize("shape", [0.1, 0.5, 0.9])
def test_the_tail_index_is_found(shape: float) -> None:
    uniform = (np.arange(200_000) + 0.5) / 200_000
    assert pareto_k(uniform**-shape) == pytest.approx(shape, abs=0.12)
    assert math.isnan(pareto_k(np.ones(1000)))


def test_tokens_with_flipped_experts_are_told_from_the_others() -> None:
    d = np.array([[[0.01, -0.75, 0.02, 5.0]]], dtype=np.float16)
    flips, mask = np.array([[[0, 1, 0, 1]]], dtype=bool), np.array([[[1, 1, 1, 0]]], dtype=bool)
    streams = mismatch.Streams(behavior=np.zeros_like(d), log_ratio=d, mask=mask, flips=flips)
    row = mismatch._flips({"engine": {"step7": [streams]}})[-2]
    # One of three tokens; k3 = e^-0.75 - 1 + 0.75 there, and the ratio e^0.75.
    assert row == "| engine | 7 | 3.3e-01 | 1.00 | 2.2e-01 | 1.0e+00 | 2.117 | 1.3e-04 | 0.0e+00 | 1.020 |"
    assert not mismatch._flips({"dense": {"step7": [dataclasses.replace(streams, flips=None)]}})


def test_the_gaussian_law_is_that_of_simulated_ratios() -> None:
    rng = np.random.default_rng(0)
    k3, length = 3e-3, 100
    d = rng.normal(-k3, math.sqrt(2 * k3), (4000, length))
    sums = d.cumsum(1)
    for band in mismatch.BANDS:
        assert mismatch._share(sums, length, band) == pytest.approx(mismatch._law(k3, length, band), abs=0.03)


def test_the_law_keeps_all_where_log_probs_are_equal() -> None:
    assert {mismatch._law(0.0, 5, band) for band in mismatch.BANDS} == {1.0}


def streams_of(rows: list[list[float]]) -> mismatch.Streams:
    width = max(map(len, rows))
    d = np.array([[row + [9.0] * (width - len(row)) for row in rows]], dtype=np.float16)
    mask = np.array([[[True] * len(row) + [False] * (width - len(row)) for row in rows]])
    return mismatch.Streams(behavior=np.full_like(d, -3.0), log_ratio=d, mask=mask)


def test_a_length_has_the_responses_that_are_as_long(tmp_path) -> None:
    # Of one token, two, two, four; behind its end a response has 9.0, which is nobody's log-ratio.
    pieces = [streams_of([[0.25], [0.5, 0.5], [-0.75, 0.25], [0.0, 0.0, 2.0, -2.0]])]
    header, _, *lines = mismatch._plot_length({"engine": {"step0": pieces}}, tmp_path / "length.png")
    assert header.startswith("| engine | step | tokens | their k3 | product in [1/2, 2]: kept (law)")
    kept = {int(line.split("|")[3]): float(line.split("|")[5].split()[0]) for line in lines}
    # Sums of one token: only 0.75 is above log 2. Of two: 1, -0.5, 0. A quarter of all is longer than two.
    assert kept == {1: 0.75, 2: pytest.approx(2 / 3, abs=0.01)}
    numbers = mismatch._numbers(pieces).split(" | ")
    assert (numbers[0], float(numbers[2])) == (
        "9",
        pytest.approx(np.mean([0.25, 0.5, 0.5, 0.75, 0.25, 0, 0, 2, 2]), rel=0.06),
    )


def test_of_open_tokens_the_share_above_one_has_an_interval_over_responses() -> None:
    # 40 responses of ten tokens, of which 7, 6, ... rise; neither the rare nor the certain nor the equal ones count.
    d = np.full((1, 40, 13), -0.5, dtype=np.float16)
    rising = [7, 6, 8, 5] * 10
    for response, number in enumerate(rising):
        d[0, response, :number] = 0.5
    behavior = np.full_like(d, np.log(0.5))
    behavior[..., 10], behavior[..., 11], d[..., 10:12], d[..., 12] = np.log(0.04), np.log(0.95), 0.5, 0.0
    streams = mismatch.Streams(behavior=behavior, log_ratio=d, mask=np.ones(d.shape, dtype=bool))
    share, count = mismatch._above_one([streams])
    # The standard deviation of 7, 6, 8, 5 tenths over the root of 40.
    assert (share, count) == (f"0.650 ± {1.96 * np.sqrt(1.25) / 10 / np.sqrt(40):.3f}", "400")
    masked = dataclasses.replace(streams, mask=streams.mask & (np.arange(13) < 4))
    assert mismatch._above_one([masked]) == ("", "160")


def test_responses_of_about_one_length_are_compared_as_far_as_all_reach() -> None:
    def reach(*lengths: int) -> int:
        return mismatch._reach(mismatch._rows([streams_of([[0.1] * length for length in lengths])]))

    assert [reach(5, 5, 5, 5), reach(5, 6, 7, 10), reach(4, 9, 9, 9), reach(1, 2, 2, 4)] == [5, 5, 9, 2]


def test_exact_weights_have_no_bias_and_the_spread_is_that_of_draws() -> None:
    exact = Method(name="exact", keys={"use_tis": True, "tis_level": "sequence", "tis_mode": "unbounded"})
    problem = Enumerated(0.3, seed=1)
    assert problem.bias_and_spread(exact)[0] < 1e-5
    assert Enumerated(0.0, seed=1).bias_and_spread(NONE)[0] < 1e-9
    bias, spread = problem.bias_and_spread(NONE)
    assert bias > 0.1

    probability = problem._behavior.sum(1).exp()
    drawn = probability.multinomial(4000, replacement=True, generator=torch.Generator().manual_seed(0))
    softmax = problem._logits.detach().softmax(-1)
    gradients = torch.zeros(len(drawn), *softmax.shape, dtype=torch.float64)
    per_token = torch.nn.functional.one_hot(problem._responses, 2) - softmax[problem._nodes]
    rows = torch.arange(len(drawn))[:, None]
    gradients[rows, problem._nodes[drawn]] = per_token[drawn] * problem._reward[drawn, None, None]
    length = problem._true_gradient.norm()
    assert float(gradients.var(0).sum().sqrt() / length) == pytest.approx(spread, rel=0.05)
    assert float((gradients.mean(0) - problem._true_gradient).norm() / length) == pytest.approx(
        math.hypot(bias, spread / math.sqrt(len(drawn))), rel=0.15
    )


def test_a_call_of_one_response_normalises_sequence_weights_away() -> None:
    problem = Enumerated(0.4, seed=1)
    sequence = Method(name="sequence", keys={"use_tis": True, "tis_level": "sequence", "tis_mode": "unbounded"})
    uncorrected = problem.rollout_error(NONE, None)
    assert problem.rollout_error(sequence, 1) == pytest.approx(uncorrected)
    assert problem.rollout_error(sequence, 256) != pytest.approx(uncorrected, rel=0.01)
    bias, spread = problem.bias_and_spread(NONE)
    assert uncorrected == pytest.approx(math.hypot(bias, spread / 16), rel=0.05)


def test_every_study_has_unique_groups_and_controls_with_models() -> None:
    groups = [group for study in STUDIES.values() for group in study.groups]
    assert len({group.name for group in groups}) == len(groups)
    for group in groups:
        names = {method.name for method in group.methods}
        assert all(method.like is None or method.like in names for method in group.methods)
        assert not group.methods[0].keys


def test_a_claim_survives_the_other_comparisons_and_the_noise() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.9, 0.5]) == pytest.approx([1.0, 1.0])
    assert benjamini_hochberg([0.01, 0.04, 0.03, 0.5]) == pytest.approx([0.04, 0.16 / 3, 0.16 / 3, 0.5])
    difference = Difference.of_pairs([0.1, 0.2, 0.3, 0.2])
    assert difference.p_value == pytest.approx(0.0163, abs=1e-4)
    assert difference.verdict(0.02, holm([difference.p_value] * 4)[0]) == "not resolved"
    # Sure, but not beyond what equal runs differ by.
    assert Difference.of_pairs([0.021, 0.022, 0.0215]).verdict(0.03) == "no difference"
    assert Difference.of_pairs([0.018, 0.024, 0.03, 0.028]).verdict(0.027) == "not resolved"


def test_the_floor_is_what_repeated_runs_differ_by(tmp_path: Path) -> None:
    def group(name: str, seeds: tuple[int, ...], methods: tuple[Method, ...], **settings: Any) -> Group:
        return Group(name=name, engine=EngineSpec(), methods=methods, seeds=seeds, num_steps=2, **settings)

    tis = Method(name="token_tis", keys={"use_tis": True})
    renamed = Method(name="another name", keys={"use_tis": True})
    groups = (
        (group("a", (1, 2), (NONE, tis)), 0.5),
        (group("b", (2,), (NONE, renamed), dump_steps=(0,)), 0.53),
        (group("stale", (1, 2), (NONE, tis), staleness=1), 0.9),
    )
    results = Results(tmp_path)
    for each, reward in groups:
        rows = [
            {"method": method.name, "seed": seed, "step": step, "reward": reward}
            for method, seed in each.runs
            for step in range(2)
        ]
        Archives(tmp_path).write(each.name, {"settings": settings(each), "seconds": {}}, rows, {})
    floor = Floor.of_results([Study(name="s", question="?", groups=tuple(each for each, _ in groups))], results)
    assert floor.differences == pytest.approx([-0.03, -0.03])
    # Student's t with 2 degrees of freedom, one for each pair.
    assert floor.half_width(4) == pytest.approx(4.3027 * 0.03 / 2, rel=1e-4)
    assert (floor.margin(4, 0.02), floor.margin(100, 0.02)) == pytest.approx((0.06454, 0.02), rel=1e-3)
    assert "pooled, as no run of this setting was repeated" in floor.of("stale").sentence(4)
    assert "2 pairs" in floor.sentence(4)
    larger = Floor((0.03, 0.03, 0.01), {"a": (0.01,)})
    assert larger.of("a").spread == pytest.approx(0.01)
    assert larger.of("b").spread > 0.02
    assert "of this setting" in floor.of("a").sentence(4)
    assert floor.of("b").differences == floor.of("a").differences == floor.differences
    nothing = Floor(())
    assert nothing.margin(4, 0.02) == 0.02
    assert "not measured" in nothing.sentence(4)
