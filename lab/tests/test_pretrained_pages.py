# SPDX-License-Identifier: Apache-2.0
"""What the pages of the collapse studies say: who collapsed, what a correction saved, which number warned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from zipfile import ZipFile

import pytest
from evidence.archives import Archives
from evidence.engines import EngineSpec
from evidence.outcomes import Difference, holm
from evidence.pretrained import alert, collapse, collapse_correction, collapse_page, collapse_runs
from evidence.pretrained.group import PretrainedGroup, runs_of
from evidence.results import Results, settings
from evidence.study import NONE, TOKEN_TIS, Study

GROUP = PretrainedGroup(name="tiny", engine=EngineSpec(), methods=(NONE,), seeds=(1,), learning_rate=1e-3)


def test_differences_have_an_interval_and_p_values_count_the_other_comparisons() -> None:
    difference = Difference.of_pairs([0.1, 0.2, 0.3, 0.2])
    assert difference[:4] == pytest.approx((0.2, 0.2 - 0.1299, 0.2 + 0.1299, 4), abs=1e-3)
    assert difference.p_value == pytest.approx(0.0163, abs=1e-4)
    assert difference.verdict(0.02) == "better"
    assert difference.verdict(0.02, holm([difference.p_value] * 4)[0]) == "not resolved"
    assert Difference.of_pairs([0.001, -0.001, 0.002]).verdict(0.02) == "no difference"
    assert Difference.of_pairs([0.3]).verdict(0.02) == "not resolved"
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])


def test_every_recorded_run_is_found_by_the_name_of_its_group() -> None:
    recorded = Path(__file__).parents[1] / "evidence" / "results"
    studies = [study for study in collapse.COLLAPSE_STUDIES if (recorded / f"{study.name}.zip").exists()]
    assert {study.name for study in studies} >= {collapse.LADDER, collapse.CORRECTION}
    for study in studies:
        names = {
            name.split("/")[0].removesuffix(".json") for name in ZipFile(recorded / f"{study.name}.zip").namelist()
        }
        assert names <= {group.name for group in study.with_more(names).groups}


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
    assert "**Not run**: 6 of 24 runs, and the rest of 1 that stopped after 130 steps. They take" in page
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
    assert "Below half of R0, but for less than 20 steps: one without a correction, since step 130" in page
    assert ", stopped at 140." in page


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
    # 2 C(6, 5) / C(12, 5) is 0.015, with four falls 2 C(6, 4) / C(12, 4) is 0.061; twice that for two contrasts.
    assert "prevents a collapse, is not resolved. A contrast needs 5 falls of 6, against none. The secondary" in page
    assert "the final reward, differs: against int4, token_tis 2 p 0.004." in page
    assert "Below half" not in page


def test_arms_are_compared_by_seed_also_to_the_step_that_all_saw() -> None:
    def runs(own: float, steps: int = 151) -> list[list[dict[str, float]]]:
        return [correction_rows(seed, falls_at=None, own=own + 0.01 * seed, steps=steps) for seed in (1, 2, 3)]

    (study,) = (study for study in collapse.COLLAPSE_STUDIES if study.name == collapse.CORRECTION)
    arms = {"int4-seed%d-none": runs(0.5, 171), "int4-seed%d-token_tis_2": runs(0.7), "bf16-seed%d-none": runs(0.8)}
    named = {group.name.removeprefix(f"{study.name}_"): group for group in study.groups}
    seen = [(named[name % seed], rows) for name, of in arms.items() for seed, rows in enumerate(of, start=1)]
    (text, _) = collapse_correction._pairs(study, seen)
    # Lines from 0.4 at step 0: the mean of steps 120 to 150 is 0.9 of the way, of steps 140 to 170 it is 155 / 150.
    # 0.9 (0.3 + 0.01 s) - 155 / 150 (0.1 + 0.01 s): 0.1653, 0.1640 and 0.1627.
    assert "minus none: +0.164 [+0.161, +0.167], higher on 3 of 3 seeds. Minus bf16: -0.090" in text
    assert "At step 150, which every run reached, minus none: +0.180" in text
    assert "without a correction is 0.51 to 0.54. The last one with token TIS is 0.68 to 0.70. So" in text


@pytest.mark.usefixtures("blank_pictures")
def test_of_runs_that_all_stopped_too_soon_the_page_says_that_nothing_is_resolved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_correction(tmp_path / "results", {"int4-seed1-none": correction_rows(1, falls_at=None, steps=80)})
    (study,) = (study for study in collapse.COLLAPSE_STUDIES if study.name == collapse.CORRECTION)
    page = correction_page(study, tmp_path, monkeypatch)
    assert "**No run was seen to step 130, so nothing is resolved**" in page
    assert "olicies that collapsed" not in page
    assert "| int4, 1 | 80 of 171, stopped |" in page


def test_four_runs_of_an_arm_cannot_say_who_is_saved_and_five_can() -> None:
    # 2 / C(8, 4) is 0.029, 2 / C(10, 5) is 0.008: twice that for two contrasts.
    assert [collapse_correction._falls_needed(number, number) for number in (3, 4, 5, 6)] == [0, 0, 5, 5]


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


def test_a_number_warns_once_its_mean_is_beyond_its_limit() -> None:
    limits = {name: limit for name, _, limit in collapse_runs.WARNINGS}
    quiet = [1.0] * 12
    assert collapse_runs.first_crossing([*quiet, *[4.0] * 5], limits["k3"]) == 15
    assert collapse_runs.first_crossing([*quiet, 9.0, *quiet], limits["k3"]) is None
    assert collapse_runs.first_crossing([*quiet, *[0.1] * 5], limits["ess_sequence"]) == 16
    # From the median of the first steps: the first gradient is often the largest.
    assert collapse_runs.first_crossing([9.0, *quiet, *[4.0] * 5], limits["grad_norm"]) == 16


@pytest.mark.usefixtures("blank_pictures")
def test_an_atlas_of_your_own_model_is_in_the_table(tmp_path: Path) -> None:
    recorded, own = Archives(Path(__file__).parents[1] / "evidence" / "results"), Archives(tmp_path / "results")
    (tmp_path / "results").mkdir()
    name = "collapse_atlas_fp8_products-seed1-none"
    own.write(name, recorded.head(name), [recorded.rows(name)[0] | {"k3": 0.125, "reward": 0.5}], {})
    collapse_page.report(Results(tmp_path / "results"), tmp_path)
    assert "| fp8_products | 1.2e-01 | 0.500 |  |  |" in (tmp_path / "collapse_runs.md").read_text()


def test_an_alert_is_a_mean_of_five_steps_beyond_that_of_the_first_ten() -> None:
    quiet, loud, spike = [0.01] * 20, [0.01] * 10 + [0.06] * 10, [0.01] * 15 + [0.2] + [0.01] * 4
    assert alert.row_of("c", "none", [quiet, loud, spike], [0.5, 0.9, 0.7]) == (
        "| `c` | none | 3 | 1.0e-02 | 1.0 to 6.0 | 1 of 3 | 0 of 3 | 0.50 to 0.90 |"
    )
    assert "| 1 of 1 | 1 of 1 |" in alert.row_of("c", "none", [[0.03] * 10 + [0.16] * 5], [0.5])


def test_the_page_of_the_alert_is_that_of_its_results(tmp_path: Path) -> None:
    folder = Path(__file__).parents[1] / "evidence"
    alert.report(*collapse.COLLAPSE_STUDIES[-2:], Results(folder / "results"), tmp_path)
    assert (tmp_path / "alert.md").read_text() == (folder / "alert.md").read_text()


def test_of_healthy_runs_those_that_repeat_another_one_count_once() -> None:
    def run(condition: str, start: float, k3: float = 0.01) -> tuple[str, str, list[dict[str, float]]]:
        return condition, "none", [{"k3": start if step < 10 else k3} for step in range(20)]

    runs = [run("pretrained_a", 0.01), run("pretrained_b", 0.01), run("pretrained_b", 0.02)]
    runs += [run("collapse_ladder_bf16", 0.03), run("collapse_ladder_int4", 0.04), run("pretrained_stale_4", 0.05)]
    counts = {"healthy": 4, "small": 3, "large": 1, "fired": 0, "repeats": 1, "different": 3}
    assert alert._healthy(runs) == counts
    assert alert._healthy([*runs[:3], run("collapse_ladder_bf16", 0.03, k3=0.2)]) == counts | {"fired": 1}


def test_a_limit_finds_failed_runs_and_fires_in_others() -> None:
    def run(k3: float, last: float) -> list[dict[str, float]]:
        """Its first steps are no alarm, and its best evaluation is the second one."""
        rows = [{"step": step, "k3": 0.2 if step < 10 else k3} for step in range(25)]
        own = {0: 0.2, 10: 0.5, 24: last}
        return [row | ({"own_reward": own[row["step"]]} if row["step"] in own else {}) for row in rows]

    runs = [run(0.2, 0.3), run(0.09, 0.39), run(0.11, 0.41), run(0.2, 0.6), run(0.01, 0.6)]
    assert alert._failures(runs) == {"old": 5, "failed": 2, "found": 1, "false": 2}


def test_the_tiny_model_is_counted_by_method_and_seed() -> None:
    def run(seed: int, start: float, end: float, reward: float) -> list[dict[str, float]]:
        first = [{"method": "none", "seed": seed, "k3": start, "reward": 0.5} for _ in range(10)]
        return first + [row | {"k3": end, "reward": reward} for row in first]

    rows = [*run(1, 0.2, 0.01, 0.5), *run(2, 0.01, 0.2, 0.41), *run(3, 0.01, 0.2, 0.39)]
    assert alert._tiny(rows) == {"tiny": 3, "early": 1, "unharmed": 2, "alerts": 2, "alarms": 1}
