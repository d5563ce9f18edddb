# SPDX-License-Identifier: Apache-2.0
"""What the pages of a pretrained model's studies say: verdicts above a floor, who learns sooner, what was compared."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from evidence.archives import Archives
from evidence.engines import EngineSpec
from evidence.outcomes import Condition, Difference
from evidence.pretrained import alert, collapse, collapse_correction, collapse_page, collapse_runs, report, studies
from evidence.pretrained.group import PretrainedGroup, runs_of
from evidence.results import Results, settings
from evidence.study import NONE, TOKEN_TIS, Study

GROUP = PretrainedGroup(name="tiny", engine=EngineSpec(), methods=(NONE,), seeds=(1,), learning_rate=1e-3)


def curves(own: list[float], rewards: list[float] | None = None) -> dict[str, np.ndarray]:
    return {"own_reward": np.array(own), "reward": np.array(rewards or own)}


def arms_of(**finals: list[float]) -> report.Arms:
    """Each with a flat curve per seed."""
    return report.Arms(
        Condition("c", {name: {seed: curves([x] * 12) for seed, x in enumerate(of)} for name, of in finals.items()})
    )


def test_nothing_is_claimed_within_the_floor_and_holm_counts_the_arms() -> None:
    none = [0.5, 0.5, 0.5, 0.5]
    better = [0.61, 0.62, 0.61, 0.62]
    small = [0.513, 0.514, 0.515, 0.512]
    arms = arms_of(**{"none": none, "none, again": [0.53, 0.47, 0.52, 0.48], "tis": better, "mask": small})
    assert arms.floor().mean == pytest.approx(0)
    assert arms.margin() == pytest.approx(0.0468, abs=1e-4)
    assert (arms.verdict("tis"), arms.verdict("mask")) == ("better", "no difference")
    assert arms.tokens() is None
    both = arms_of(**{"none": [0.5, 0.6], "none, again": [0.3, 0.4], "token_tis": [0.7, 0.6], "token_mask": [0.7, 0.8]})
    assert both.tokens().mean == pytest.approx(0.25)
    alone = arms_of(**{"none": none, "none, again": none, "tis": better})
    assert alone.margin() == 0.02
    assert arms.holm()["tis"] == pytest.approx(2 * alone.holm()["tis"])
    # Far from 0 for the test, and yet within what chance does here.
    noisy = arms_of(**{"none": none, "none, again": [0.6, 0.4, 0.6, 0.4], "mask": [0.55, 0.55, 0.551, 0.55]})
    assert noisy.holm()["mask"] < 0.001
    assert noisy.verdict("mask") == "no difference"
    assert arms_of(none=none, tis=better).verdict("tis") == "no floor"
    # Their standard deviation is 0.0263: 2.306 x 0.0263 / sqrt(9) is 0.0202, 2.262 x 0.0263 / sqrt(10) is 0.0188.
    assert report.needed_seeds([0.03, -0.02, 0.02, -0.02]) == 10
    assert report.needed_seeds([0.1]) is None


def test_a_run_that_never_rises_has_failed_and_so_has_one_that_falls() -> None:
    assert report.has_failed(curves([0.1] * 20))
    assert report.has_failed(curves([0.1, *[0.9] * 19], [0.9] * 20 + [0.1] * 20))
    assert not report.has_failed(curves([0.1, *[0.9] * 19]))
    # What is sampled still earns all: the engine's weights stayed behind.
    assert report.has_failed(curves([0.1, *[0.9] * 18, 0.79], [0.9] * 20))
    assert not report.has_failed(curves([0.1, *[0.9] * 18, 0.81], [0.9] * 20))
    assert report.final(np.array([0.0, np.nan, 1.0, 2.0, np.nan, 3.0, 4.0])) == 2.5


def test_who_learns_sooner_is_seen_where_all_end_alike() -> None:
    slow = {seed: curves([0.1, 0.2, 0.6, 1.0, 1.0, 1.0, 1.0]) for seed in (1, 2)}
    fast = {seed: curves([0.1, 0.7, 0.8, 1.0, 1.0, 1.0, 1.0]) for seed in (1, 2)}
    arms = report.Arms(Condition("c", {"none": slow, "tis": fast}))
    assert arms.against_none("tis").mean == 0
    assert arms.against_none("tis", report.of_all).mean == pytest.approx(0.1)
    # Most steps have no evaluation.
    assert report.of_all(np.array([0.0, np.nan, 3.0])) == 1.5


def test_a_page_says_when_each_method_had_learned_and_how_far_steps_went() -> None:
    def run(reward: list[float], k3: float) -> dict[str, np.ndarray]:
        ratio = [2.0] * (len(reward) - 1) + [300.0]
        return {
            name: np.array(values) for name, values in {"reward": reward, "k3": [k3] * 20, "ratio_max": ratio}.items()
        }

    rising, flat = [0.1] * 8 + [1.0] * 12, [0.1] * 20
    arms = {"none": {1: run(rising, 0.01), 2: run(rising[3:] + [1.0] * 3, 0.08)}, "tis": {1: run(flat, 0.01)}}
    condition = Condition("c", arms | {"half": {1: run(flat, 0.01), 2: run(rising, 0.01)}})
    assert report.steps_to_learn(np.array(rising)) == 8
    (speed,) = report._speed(condition)
    assert "by seed: none 5 to 8; tis never; half 8 (1 of 2 seeds)." in speed
    # Against both uncorrected arms: 10 and 6 for 8 and 5, 6 and 5. What never learns on a seed has no such number.
    late = {"none, again": {1: run([0.1] * 6 + [1.0] * 14, 0.01), 2: arms["none"][2]}}
    late |= {"mask": {1: run([0.1] * 10 + [1.0] * 10, 0.01), 2: run([0.1] * 6 + [1.0] * 14, 0.01)}}
    _, later = report._speed(Condition("c", condition.curves | late))
    assert later == f"Steps later than the mean of a seed's uncorrected runs: mask {Difference.of_pairs([3, 1])}."
    assert report._speed(Condition("c", {"none": arms["tis"]})) == []
    (extremes,) = report._extremes(Condition("c", {"none": arms["none"]}))
    # Of 13 steps with less than the full reward, five are of the second run.
    assert "All 40 steps: k3 1.0e-02 to 8.0e-02. It is above 0.07 in 50.0%; while" in extremes
    assert "earn less than 0.99, in 38.5%." in extremes
    assert "largest ratio is 2.0 (median), above 100 in 5.0%, 300.0 at most." in extremes


def test_a_page_says_how_far_each_method_fell_on_its_way() -> None:
    def run(own: list[float], k3: float) -> dict[str, np.ndarray]:
        # Evaluated at every other step.
        evaluated = np.full(2 * len(own), np.nan)
        evaluated[::2] = own
        return {"own_reward": evaluated, "k3": np.r_[np.full(2 * len(own) - 5, 0.5), np.full(5, k3)]}

    none = {1: run([0.1, 0.8, 0.5, 0.7], 0.2), 2: run([0.3, 0.6, 0.7, 0.9], 0.1)}
    page = report._courses(Condition("c", {"none": none, "tis": {1: run([0.2, 0.3, 0.4, 0.5], 0.01)}}))
    assert "at steps 0, 2, 4, 6." in page[1]
    assert page[-2] == "| none | 0.20, 0.70, 0.60, 0.80 | 0.30, 0.00 | 5.0e-01 to 5.0e-01 | 1.0e-01 to 2.0e-01 |"
    assert page[-1].startswith("| tis | 0.20, 0.30, 0.40, 0.50 | 0.00 |")
    assert report._courses(Condition("c", {"none": none})) == []


def test_uncorrected_runs_of_settings_that_differ_in_precision_alone_are_compared_by_seed() -> None:
    def setting(offset: float) -> report.Arms:
        # Seed 3 is run in one setting only, and no setting's correction is looked at.
        numbers = {"k3": np.full(12, 1e-3), "training_seconds": np.full(12, 1.5), "sampling_seconds": np.full(12, 0.5)}
        runs = {seed: curves([0.5 + offset + 0.002 * seed] * 12) | numbers for seed in (1, 2, 3)[: 3 if offset else 2]}
        return report.Arms(Condition("c", {"none": runs, "tis": {1: curves([9.0] * 12)}}))

    fp16 = dataclasses.replace(GROUP, engine=dataclasses.replace(studies.BF16, dtype="float16"), dtype="float16")
    groups = {
        "bf16": dataclasses.replace(GROUP, engine=studies.BF16),
        "fp16": fp16,
        "aligned": dataclasses.replace(GROUP, engine=studies.BF16, is_aligned=True),
        "longer": dataclasses.replace(fp16, num_steps=99),
    }
    arms = {"bf16": setting(0.0), "fp16": setting(0.25), "aligned": setting(0.1), "longer": setting(0.4)}
    page = report._between_settings(groups, arms)
    rows = [line for line in page if line.startswith(tuple(f"| {name}" for name in groups))]
    assert [row.split(" | ")[0] for row in rows] == ["| bf16", "| fp16", "| aligned"]
    assert (
        rows[0]
        == f"| bf16 | 2 | 0.503 |  |  |  |  | {', '.join(['0.50'] * 5)} | 0, 0, -, - | 1.0e-03 | never | 1.50, 0.50 |"
    )
    assert report._reached(np.array([0, 20, 40]), np.array([0.1, 0.3, 0.7]), 0.5) == "30"
    assert "| 3 | 0.754 | +0.250 [+0.250, +0.250] |" in rows[1]
    # Of fp16 itself there is none; aligned has 0.15 less, by seed.
    against_fp16 = [row.split(" | ")[6] for row in rows]
    assert against_fp16 == ["", "", "-0.150 [-0.150, -0.150]"]
    alone = report._between_settings({name: groups[name] for name in ("bf16", "aligned")}, arms)
    assert "against fp16" not in "".join(alone)
    assert report._engine(groups["aligned"]) == "sglang, bfloat16, aligned with the trainer"
    # Other settings have nothing to be compared with.
    assert report._between_settings({"longer": groups["longer"]}, arms) == []
    assert report._between_settings({name: groups[name] for name in ("fp16", "longer")}, arms) == []
    assert report._between_settings({name: groups[name] for name in ("fp16", "aligned")}, arms) == []


def test_every_setting_is_compared_at_its_own_best_learning_rate() -> None:
    def setting(late: float, early: float) -> report.Arms:
        runs = {seed: curves([early + 0.01 * seed] * 4 + [late + 0.01 * seed] * 4) for seed in (1, 2)}
        return report.Arms(Condition("c", {"none": runs}))

    plain = dataclasses.replace(GROUP, engine=studies.BF16, dtype="bfloat16")
    groups = {f"bf16 {rate}": dataclasses.replace(plain, learning_rate=rate) for rate in (1e-6, 3e-6)}
    groups |= {
        name.replace("16", "16 dithered"): dataclasses.replace(g, is_dithered=True) for name, g in groups.items()
    }
    groups["fp16"] = dataclasses.replace(plain, dtype="float16")
    values = [(0.9, 0.1), (0.8, 0.4), (0.95, 0.3), (0.7, 0.35), (1.0, 1.0)]
    arms = {name: setting(*each) for name, each in zip(groups, values, strict=True)}
    rows = report._best_rates(groups, arms)[-4:]
    assert rows[:2] == [
        "| last 4 evaluations | bf16 1e-06 | 1e-06 | 0.915 |  |",
        "| last 4 evaluations | bf16 dithered 1e-06 | 1e-06 | 0.965 | +0.050 [+0.050, +0.050] |",
    ]
    assert rows[2].startswith("| all evaluations | bf16 3e-06 | 3e-06 | 0.615 |")
    assert rows[3] == "| all evaluations | bf16 dithered 1e-06 | 1e-06 | 0.640 | +0.025 [+0.025, +0.025] |"
    # At one rate there is nothing to choose.
    for few in (("bf16 1e-06", "fp16"), ("bf16 1e-06", "bf16 3e-06"), ("bf16 1e-06", "bf16 dithered 1e-06")):
        assert report._best_rates({name: groups[name] for name in few}, arms) == []


def test_a_number_that_rises_before_runs_get_worse_is_named_with_its_rank_correlation() -> None:
    nan = float("nan")

    def run(lost: float, k3: float) -> dict[str, np.ndarray]:
        """Evaluated at steps 0, 20 and 29; k3 after the last evaluation but one says nothing."""
        own = [0.1] + [nan] * 19 + [0.8] + [nan] * 8 + [0.8 - lost]
        numbers = {"k3": [0.5] * 5 + [k3] * 15 + [1 - k3] * 10, "grad_norm": [1.0 + k3 % 0.02] * 30}
        return {name: np.array(values) for name, values in (numbers | {"own_reward": own, "reward": own}).items()}

    losses = {1: 0.0, 2: 0.04, 3: 0.06, 4: 0.1, 5: 0.2}
    seeds = {seed: run(lost, 0.01 + lost) for seed, lost in losses.items()}
    again = {seed: run(lost + 0.01, 0.02 + lost) for seed, lost in losses.items()}
    arms = report.Arms(Condition("c", {"none": seeds, "none, again": again, "tis": {1: run(0.0, 0.9)}}))
    assert arms.declines("none") == pytest.approx(list(losses.values()))
    assert arms.warnings()["k3"][0] == pytest.approx(1)
    assert abs(arms.warnings()["grad_norm"][0]) < 0.9
    assert "length" not in arms.warnings()
    page = "\n".join(report._warnings(arms))
    assert "Of the 10 uncorrected runs" in page
    assert "| k3 | +1.00 | 0.00 |" in page
    # Two that get worse are too few to ask.
    few = {seed: seeds[seed] for seed in (1, 2, 4, 5)}
    assert report._warnings(report.Arms(Condition("c", {"none": few}))) == []


def test_a_page_says_how_far_a_learning_rate_fell() -> None:
    slowed = {1: {"learning_rate": np.array([1e-3, 1e-3])}, 2: {"learning_rate": np.array([5e-4, 2e-4])}}
    condition = Condition("c", {"none": {1: curves([0.1])}, "none, slower as k3 grows": slowed})
    (line,) = report._rates(GROUP, condition)
    assert line == "Lowest share of the learning rate, by seed: none, slower as k3 grows 0.20 to 1.00."
    assert report._rates(GROUP, Condition("c", {"none": {1: curves([0.1])}})) == []


def test_runs_are_ordered_so_that_what_ran_can_be_compared() -> None:
    groups = runs_of([dataclasses.replace(GROUP, name=name, seeds=(1, 2), methods=(NONE, TOKEN_TIS)) for name in "ab"])
    assert [group.name for group in groups][:5] == [
        "a-seed1-none",
        "a-seed1-token_tis",
        "b-seed1-none",
        "b-seed1-token_tis",
        "a-seed2-none",
    ]
    assert all(len(group.runs) == 1 for group in groups)


def test_a_seed_that_a_study_has_not_is_a_run_for_each_method() -> None:
    groups = runs_of([dataclasses.replace(GROUP, name="a", seeds=(1, 2), methods=(NONE, TOKEN_TIS))])
    more = Study(name="s", question="?", groups=groups).with_seeds((2, 9)).groups
    assert [group.name for group in more] == ["a-seed2-none", "a-seed2-token_tis", "a-seed9-none", "a-seed9-token_tis"]
    assert more[-1].run == (TOKEN_TIS, 9)
    assert isinstance(more[-1], PretrainedGroup)


def test_of_the_recorded_runs_those_with_a_coarse_cache_collapsed_with_and_without_a_correction() -> None:
    runs = collapse_page.first_look()
    found = {
        run: collapse.collapsed_at([row["step"] for row in rows], [row["reward"] for row in rows])
        for run, rows in runs.items()
    }
    # With bf16 the reward falls too, at step 44 of 63: nobody saw it stay down. The engine with an e5m2 cache was never
    # worth anything.
    assert found == {
        ("bf16", "none"): None,
        ("e4m3", "none"): 17,
        ("e4m3", "token_tis"): 11,
        ("e4m3", "token_mask"): 11,
        ("e5m2", "none"): None,
    }


@pytest.mark.parametrize(
    ("rewards", "untrained", "expected"),
    [
        # Of steps 17 to 26 four have 0.4: a mean of 0.16.
        ([0.4] * 21 + [0.0] * 40, None, 26),
        # It rises again too soon.
        ([0.4] * 21 + [0.0] * 20 + [0.4] * 20, None, None),
        # Not seen for long enough.
        ([0.4] * 21 + [0.0] * 25, None, None),
        # From the best mean since, not from the untrained policy.
        ([0.2] * 20 + [0.8] * 20 + [0.3] * 40, None, 48),
        ([0.3] * 60, 0.7, 9),
        ([0.0] * 60, None, None),
    ],
)
def test_a_run_collapses_where_ten_steps_fall_below_half_and_stay_there(rewards, untrained, expected) -> None:
    assert collapse.collapsed_at(range(len(rewards)), rewards, untrained=untrained) == expected


def test_an_evaluation_every_ten_steps_stands_for_itself() -> None:
    assert collapse.collapsed_at([0, 10, 20, 30, 40, 50], [0.4, 0.5, 0.2, 0.2, 0.1, 0.1], window=10) == 20
    assert collapse.collapsed_at([0, 10, 20, 30, 40, 50], [0.4, 0.5, 0.2, 0.3, 0.1, 0.1], window=10) is None
    assert collapse.collapsed_at([0, 10, 20, 30], [0.4, 0.1, 0.1, 0.1], window=10) == 10


def test_a_run_is_over_once_rollouts_and_own_policy_have_both_collapsed() -> None:
    def rows(rollouts: float, own: float, steps: int = 71) -> list[dict[str, float]]:
        """From 0.4 to these values at step 31."""
        found = [{"step": step, "reward": 0.4 if step < 31 else rollouts} for step in range(steps)]
        for row in found[::10]:
            row["own_reward"] = 0.4 if row["step"] < 31 else own
        return found

    assert collapse.has_collapsed(rows(0.0, 0.0))
    assert not collapse.has_collapsed(rows(0.0, 0.4))
    assert not collapse.has_collapsed(rows(0.4, 0.0))
    assert not collapse.has_collapsed(rows(0.0, 0.0, steps=51))
    assert not collapse.has_collapsed([{"step": 0, "reward": 0.4}])


@pytest.mark.parametrize(
    ("falls_at", "steps", "expected"),
    [
        # A run that stands ends at the last step at which a fall counts.
        (None, 40, False),
        (None, 41, True),
        # Means of ten are below half from step 36 on, evaluations from step 40 on: seen for 20 steps after that.
        (31, 41, False),
        (31, 60, False),
        (31, 61, True),
        # It has collapsed long before.
        (11, 40, False),
        (11, 41, True),
        # Rollouts fall too late to count, and no evaluation says so by then.
        (38, 41, True),
    ],
)
def test_a_run_goes_on_as_long_as_a_fall_that_counts_may_be_one(falls_at, steps, expected) -> None:
    group = dataclasses.replace(GROUP, num_steps=61, stops_collapsed=True, last_fall=40)
    rows = [{"step": step, "reward": 0.0 if falls_at and step >= falls_at else 0.4} for step in range(steps)]
    for row in rows[::10]:
        row["own_reward"] = 0.4 if falls_at == 38 else row["reward"]
    assert collapse.is_over(group, rows) == expected


def correction_rows(seed: int, *, falls_at: int | None, own: float = 0.6, steps: int = 151) -> list[dict[str, float]]:
    """From 0.4 up to ``own``, and to nothing at a step; k3 had doubled twice seven steps before."""
    rows = []
    for step in range(steps):
        fell = falls_at is not None and step >= falls_at
        reward = 0.0 if fell else 0.4 + (own - 0.4) * step / 150
        k3 = 0.04 if falls_at is not None and step >= falls_at - 7 else 0.01
        row = {"step": step, "seed": seed, "reward": reward, "k3": k3, "ess_sequence": 0.5, "grad_norm": 1.0}
        row |= {"entropy": 0.3, "length": 300.0, "raised": 0.5, "seconds": 7.0}
        rows.append(row | ({"own_reward": reward + 0.001 * seed} if step % 10 == 0 else {}))
    return rows


def write_correction(folder: Path, runs: dict[str, list[dict[str, float]]]) -> None:
    folder.mkdir()
    (study,) = (study for study in collapse.COLLAPSE_STUDIES if study.name == collapse.CORRECTION)
    for group in study.groups:
        if (rows := runs.get(group.name.removeprefix(f"{study.name}_"))) is not None:
            head = {"device": "a GPU", "sglang": "1", "torch": "2", "revision": "r", "settings": settings(group)}
            Archives(folder).write(group.name, head, rows, {})


def correction_page(study: Study, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Of the drawn runs alone: of those that were recorded and had to stop, only the ones at another rate."""
    lines = collapse_runs.STOPPED.read_text().splitlines(keepends=True)
    stopped = folder / "stopped.jsonl"
    stopped.write_text("".join(line for line in lines if f"{collapse.CORRECTION}_lr" in line))
    monkeypatch.setattr(collapse_runs, "STOPPED", stopped)
    results = Results(folder / "results")
    parts = collapse_correction.front(study, results, folder), collapse_correction.details(study, results)
    return "\n".join(line for lines in parts for line in lines)


@pytest.mark.usefixtures("blank_pictures")
def test_a_correction_that_saves_all_runs_is_told_from_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = {}
    for seed in range(1, 7):
        runs[f"int4-seed{seed}-none"] = correction_rows(seed, falls_at=31, steps=66)
        runs[f"int4-seed{seed}-token_tis_2"] = correction_rows(seed, falls_at=None)
        runs[f"bf16-seed{seed}-none"] = correction_rows(seed, falls_at=None, own=0.8)
    # Stopped before it says anything.
    runs["bf16-seed6-none"] = runs["bf16-seed6-none"][:130]
    write_correction(tmp_path / "results", runs)
    (study,) = (study for study in collapse.COLLAPSE_STUDIES if study.name == collapse.CORRECTION)
    page = correction_page(study, tmp_path, monkeypatch)
    assert (tmp_path / "collapse_correction.png").exists()
    # C(11, 5) and C(12, 6) ways to put the runs into two arms; both of two contrasts take the larger p at least.
    assert "| int4 against bf16 | 6 of 6 against 0 of 5 | 0.004 | 0.11 against 0.76 | 0.004 | 4.0 against 1.0 |" in page
    assert "| int4 against int4, token_tis 2 | 6 of 6 against 0 of 6 | 0.004 |" in page
    assert "| int4 | 6 | 6 of 6 | 6 of 6 | 0.11: 0.11, 0.11, 0.11" in page
    # The mean of ten steps is below half at step 36, that of five k3 above 0.03 at step 27.
    assert (
        "| k3 above 3 times its start | 6 of 6 | 9: 9, 9, 9, 9, 9, 9 | int4, token_tis 2: 0 of 6; bf16: 0 of 5 |"
        in page
    )
    assert "| sequence ESS below 0.2 | 0 of 6 |  | int4, token_tis 2: 0 of 6; bf16: 0 of 5 |" in page
    # The stopped run of the control, and six of the published configuration, which did not begin.
    falls = "step 40, 40, 40, 40, 40, 40"
    assert f"without a correction 6 of 6 ({falls}); with token TIS 0 of 6; without mismatch (bf16) 0 of 5.**" in page
    assert "Against int4, token_tis 2: p 0.004. Against bf16: p 0.004." in page
    assert "**Not run**: 6 of 24 runs, and what was left of 1 that had to stop after 130 steps. All of these" in page
    assert "four GPUs 18 minutes" in page
    assert "| bf16, 6 | 130 of 171, stopped |" in page
    assert "| bf16, 5 | 151 |" in page


@pytest.mark.usefixtures("blank_pictures")
def test_a_run_that_was_stopped_in_its_fall_has_not_collapsed_and_the_page_says_since_when(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_correction(tmp_path / "results", {"int4-seed1-none": correction_rows(1, falls_at=121, steps=141)})
    (study,) = (study for study in collapse.COLLAPSE_STUDIES if study.name == collapse.CORRECTION)
    page = correction_page(study, tmp_path, monkeypatch)
    assert "| int4 | 1 | 0 of 1 | 0 of 1 |" in page
    assert "| below half since 130, below half since 126 |" in page
    assert "Below half, but not seen for 20 steps: one without a correction had been since step 130" in page
    assert "when it was stopped at 140." in page


@pytest.mark.usefixtures("blank_pictures")
def test_arms_that_differ_without_a_collapse_are_told_apart_by_the_secondary_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = {}
    for seed in range(1, 7):
        for arm, own in {"int4-seed%d-none": 0.5, "int4-seed%d-token_tis_2": 0.7, "bf16-seed%d-none": 0.5}.items():
            runs[arm % seed] = correction_rows(seed, falls_at=None, own=own)
    write_correction(tmp_path / "results", runs)
    (study,) = (study for study in collapse.COLLAPSE_STUDIES if study.name == collapse.CORRECTION)
    page = correction_page(study, tmp_path, monkeypatch)
    assert "from collapse, the primary outcome, is not resolved. What own policies are worth" in page
    assert "the secondary one, differs: against int4, token_tis 2 p 0.004." in page
    assert "Below half" not in page


@pytest.mark.usefixtures("blank_pictures")
def test_of_runs_that_all_stopped_too_soon_the_page_says_that_nothing_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_correction(tmp_path / "results", {"int4-seed1-none": correction_rows(1, falls_at=None, steps=80)})
    (study,) = (study for study in collapse.COLLAPSE_STUDIES if study.name == collapse.CORRECTION)
    page = correction_page(study, tmp_path, monkeypatch)
    assert "**No run was seen to step 130, so nothing is resolved**" in page
    assert "own policies that collapsed" not in page
    assert "| int4, 1 | 80 of 171, stopped |" in page


def test_a_correction_that_saves_nobody_gives_no_small_p() -> None:
    arms = {
        arm: [correction_rows(seed, falls_at=31, steps=66) for seed in (1, 2, 3)]
        for arm in ("int4", "int4, token_tis 2")
    }
    ((worse, better, fell, p_values),) = collapse_correction.contrasts(arms)
    assert (worse, better, fell) == ("int4", "int4, token_tis 2", [3, 3])
    assert p_values[0] == 1.0
    # C(6, 3) ways: 0.1, and one of two contrasts even where the other has not run.
    arms["int4, token_tis 2"] = [correction_rows(seed, falls_at=None) for seed in (1, 2, 3)]
    ((*_, p_values),) = collapse_correction.contrasts(arms)
    assert p_values == pytest.approx([0.2, 0.2, 0.2])


def test_a_number_that_crosses_after_the_fall_did_not_warn_of_it() -> None:
    late = correction_rows(1, falls_at=31, steps=66)
    for row in late:
        row["k3"] = 0.04 if row["step"] > 40 else 0.01
    found = collapse_correction.leads({"int4": [late]}, *collapse_runs.WARNINGS[0][::2])
    assert found == ([None], {})


def test_the_page_of_the_collapse_is_that_of_its_results(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "evidence"
    collapse_page.report(Results(folder / "results"), tmp_path)
    for page in ("collapse.md", "collapse_runs.md"):
        assert (tmp_path / page).read_text() == (folder / page).read_text()
    assert (tmp_path / "collapse.png").exists()


@pytest.mark.usefixtures("blank_pictures")
def test_an_atlas_of_your_own_model_names_its_folder_and_has_its_tails_once(tmp_path: Path) -> None:
    recorded, own = Archives(Path(__file__).parents[1] / "evidence" / "results"), Archives(tmp_path / "results")
    (tmp_path / "results").mkdir()
    name = "collapse_atlas_fp8_products-seed1-none"
    kept = {f"{step}/{key}": values for step, of in recorded.arrays(name).items() for key, values in of.items()}
    own.write(name, recorded.head(name) | {"model": "Mine-7B"}, recorded.rows(name), kept)
    results = Results(tmp_path / "results")
    report.report([collapse.COLLAPSE_STUDIES[0]], results, tmp_path)
    for _ in range(2):
        collapse_page.report(results, tmp_path)
    page = (tmp_path / "collapse_atlas.md").read_text()
    assert page.startswith("# Which mismatch does each engine have before any training: Mine-7B?\n")
    assert "\nMine-7B, questions" in page
    assert "model Mine-7B" not in page
    assert page.count("## Reward, and where the mismatch is") == 1


def test_a_number_warns_once_its_mean_is_beyond_its_limit() -> None:
    limits = {name: limit for name, _, limit in collapse_runs.WARNINGS}
    quiet = [1.0] * 12
    assert collapse_runs.first_crossing([*quiet, *[4.0] * 5], limits["k3"]) == 15
    assert collapse_runs.first_crossing([*quiet, 9.0, *quiet], limits["k3"]) is None
    assert collapse_runs.first_crossing([*quiet, *[0.1] * 5], limits["ess_sequence"]) == 16
    # From the median of the first steps: the first gradient is often the largest.
    assert collapse_runs.first_crossing([9.0, *quiet, *[4.0] * 5], limits["grad_norm"]) == 16


def test_an_alert_is_a_mean_of_five_steps_beyond_that_of_the_first_ten() -> None:
    quiet, loud, spike = [0.01] * 20, [0.01] * 10 + [0.06] * 10, [0.01] * 15 + [0.2] + [0.01] * 4
    assert alert.row_of("c", "none", [quiet, loud, spike], [0.5, 0.9, 0.7]) == (
        "| `c` | none | 3 | 1.0e-02 | 1.0 to 6.0 | 1 of 3 | 0 of 3 | 0.50 to 0.90 |"
    )
    assert "| 1 of 1 | 1 of 1 |" in alert.row_of("c", "none", [[0.03] * 10 + [0.16] * 5], [0.5])
