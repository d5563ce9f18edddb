# SPDX-License-Identifier: Apache-2.0
"""Two runs side by side: numbers against their definitions, what is noise, what appeared and what went."""

import json
import math
import random
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from engines import engines

from mis_ext.files import to_jsonable
from mis_ext.tools.diagnosis.evidence import t_quantile
from mis_ext.tools.dumps import Dumps
from mis_ext.tools.report.findings import Findings, read_findings
from mis_ext.tools.report.noise import NORMAL, Estimate, interval_of_difference, interval_of_ratio
from mis_ext.tools.report.page import cause_cells
from mis_ext.tools.report.recommendation import preset_candidates
from mis_ext.tools.report.whole_report import Report, SideBySide, make_report, side_by_side

RATIOS = ("k3", "abs_mean", "mean_length", "abs_p99", "abs_max")
DIFFERENCES = ("reward", "ratio_mean", "ess_token", "ess_sequence", "k_hat")
WITH_ERROR = ("k3", "abs_mean", "reward", "mean_length")


def rows_of(seed: int, *, spread: float, prompts: int = 10, steps: int = 3, first_step: int = 0) -> list[dict]:
    """Samples, four of a prompt, whose log-probs differ by a normal number of this deviation."""
    rng = random.Random(seed)
    rows = []
    for step in range(first_step, first_step + steps):
        for prompt in range(prompts):
            for _ in range(4):
                behavior = [-2.0 * rng.random() - 2.0 for _ in range(rng.randint(20, 60))]
                row = {"log_probs": [each + rng.gauss(0.0, spread) for each in behavior], "rollout_log_probs": behavior}
                rows.append(row | {"rollout_id": step, "group_id": prompt, "reward": float(rng.random() < 0.3)})
    return rows


def written(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run_in(path: Path, rows: list[dict]) -> Findings:
    return read_findings(Dumps([written(path, rows)]), sources=[str(path)])


@pytest.fixture(scope="module")
def drawn() -> tuple[list[dict], list[dict]]:
    return rows_of(0, spread=0.2), rows_of(1, spread=0.1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, drawn) -> tuple[Findings, Findings]:
    folder = tmp_path_factory.mktemp("runs")
    return run_in(folder / "a.jsonl", drawn[0]), run_in(folder / "b.jsonl", drawn[1])


def numbers(found: SideBySide) -> dict:
    return {each.name: each for each in found.numbers}


def k3_of(rows: list[dict]) -> tuple[float, float, int]:
    """k3 per token, its standard error over prompts relative to it, and the number of prompts."""
    sums, counts = defaultdict(float), defaultdict(int)
    for row in rows:
        prompt = row["rollout_id"], row["group_id"]
        for ours, theirs in zip(row["log_probs"], row["rollout_log_probs"], strict=True):
            sums[prompt] += math.exp(ours - theirs) - 1 - (ours - theirs)
            counts[prompt] += 1
    k3 = math.fsum(sums.values()) / sum(counts.values())
    residuals = [sums[prompt] - k3 * counts[prompt] for prompt in sums]
    return k3, statistics.stdev(residuals) * math.sqrt(len(residuals)) / sum(counts.values()) / k3, len(residuals)


def test_the_ratio_of_k3_and_its_interval_are_those_of_the_tokens(runs, drawn) -> None:
    (first, error, count), (second, other, number) = map(k3_of, drawn)
    variance = error**2 + other**2
    degrees = variance**2 / (error**4 / (count - 1) + other**4 / (number - 1))
    factor = math.exp(t_quantile(NORMAL, degrees) * math.sqrt(variance))
    found = numbers(side_by_side(*runs))["k3"]
    # Log-probs are subtracted in float32.
    assert (found.first, found.second, found.change) == pytest.approx((first, second, first / second), rel=1e-4)
    assert (found.interval.low, found.interval.high) == pytest.approx(
        (first / second / factor, first / second * factor), rel=1e-4
    )
    assert found.kind == "ratio"
    # Variances of 0.04 and 0.01: k3 is half of them.
    assert 3.5 < found.change < 4.5


def test_every_number_is_that_of_each_run_and_their_ratio_or_difference(runs, drawn) -> None:
    found = numbers(side_by_side(*runs))
    assert {*found} == {*RATIOS, *DIFFERENCES}
    for name, each in found.items():
        first, second = (getattr(run.summary.overall, name) for run in runs)
        assert (each.first, each.second) == (first, second)
        assert each.kind == ("ratio" if name in RATIOS else "difference")
        assert each.change == (first / second if name in RATIOS else first - second)
        assert each.interval.is_known is (name in WITH_ERROR)
        if name in WITH_ERROR:
            errors = (getattr(run.summary.overall, f"{name}_error") for run in runs)
            ours, theirs = (Estimate(*pair, 30) for pair in zip((first, second), errors, strict=True))
            of = interval_of_ratio if name in RATIOS else interval_of_difference
            assert each.interval == of(ours, theirs)
    means = [statistics.mean(row["reward"] for row in rows) for rows in drawn]
    assert found["reward"].change == pytest.approx(means[0] - means[1])


def test_two_draws_of_one_law_are_not_more_than_noise(tmp_path) -> None:
    found = side_by_side(
        *(run_in(tmp_path / f"{seed}.jsonl", rows_of(seed, spread=0.2)) for seed in (2, 3)),
    )
    k3 = numbers(found)["k3"]
    assert k3.interval.low < 1.0 < k3.interval.high
    assert "times that of B (95 % interval of the ratio: " in found.headline
    assert f"{k3.interval.low:.3g} to {k3.interval.high:.3g}" in found.headline
    shifted = run_in(tmp_path / "4.jsonl", rows_of(4, spread=0.4))
    assert numbers(side_by_side(found.other, shifted))["k3"].interval.high < 1.0


def test_of_three_prompts_nothing_is_said(tmp_path, runs) -> None:
    few = run_in(tmp_path / "few.jsonl", rows_of(5, spread=0.2, prompts=3, steps=1))
    found = side_by_side(runs[1], few)
    assert not any(each.interval.is_known for each in found.numbers)
    assert "An interval takes 4 prompts of either run." in found.headline


def test_without_a_mismatch_in_a_run_its_k3_is_compared_by_its_difference(tmp_path, runs) -> None:
    exact = run_in(tmp_path / "exact.jsonl", rows_of(6, spread=0.0))
    found = numbers(side_by_side(runs[0], exact))["k3"]
    assert (found.second, found.kind, found.change) == (0.0, "difference", found.first)
    assert side_by_side(runs[0], exact).headline.startswith(
        f"k3 of A is {found.first:.3g} per token, that of B 0 (95 %"
    )
    assert numbers(side_by_side(exact, runs[0]))["k3"].change == -found.change
    assert side_by_side(exact, exact).headline == "k3 is equal in A and B: 0 per token."
    # One token of 2,400 samples' tokens may be chance.
    rows = rows_of(6, spread=0.0)
    rows[0]["log_probs"][0] -= 3.0
    single = numbers(side_by_side(run_in(tmp_path / "single.jsonl", rows), exact))["k3"]
    assert single.interval.low < 0.0 < single.first < single.interval.high


def test_what_makes_a_comparison_unfair_is_said(tmp_path, runs) -> None:
    later = run_in(tmp_path / "later.jsonl", rows_of(7, spread=0.1, first_step=1))
    (note,) = side_by_side(runs[0], later).notes
    assert note.startswith("A has 1 step that B has not, B 1 step that A has not.")
    alone = [{**row, "group_id": None} for row in rows_of(8, spread=0.1)]
    (note,) = side_by_side(runs[0], run_in(tmp_path / "alone.jsonl", alone)).notes
    assert note.startswith("No two responses of B are known to share a prompt.")
    tiny = [
        {**row, "log_probs": row["log_probs"][:1], "rollout_log_probs": row["rollout_log_probs"][:1]} for row in alone
    ]
    notes = side_by_side(run_in(tmp_path / "tiny.jsonl", tiny[::40]), runs[1]).notes
    assert [note.split(".")[0] for note in notes] == [
        "No two responses of A are known to share a prompt",
        "A has too few tokens to name a cause",
    ]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Report:
    """Low precision, against kernels alone."""
    folder = tmp_path_factory.mktemp("report")
    paths = {
        name: [written(folder / f"{name}{step}.jsonl", engine_rows(step, kernels)) for step in range(2)]
        for name, kernels in (("a", 0.12), ("b", 0.01))
    }
    other = read_findings(Dumps(paths["b"]), sources=map(str, paths["b"]))
    return make_report(Dumps(paths["a"]), preset_candidates(["mis"]), sources=map(str, paths["a"]), against=other)


def engine_rows(step: int, kernels: float) -> list[dict]:
    sampled = zip(*engines(step, kernels=kernels).sampled(), strict=True)
    return [
        {"log_probs": ours.tolist(), "rollout_log_probs": theirs.tolist(), "rollout_id": step, "group_id": place // 8}
        for place, (ours, theirs) in enumerate(sampled)
    ]


def test_causes_that_appeared_and_went_are_named(report) -> None:
    causes = {each.cause: each for each in report.against.causes}
    assert [*causes] == ["low_precision", "bf16_kernels"]
    appeared, went = causes.values()
    assert (appeared.second, went.first) == (None, None)
    assert (appeared.first.confidence, appeared.first.k3_share) == ("possible", 1.0)
    assert cause_cells(appeared) == (report.diagnoses[0].title, "possible, explains up to 100 % of k3", "-", "A alone")
    assert cause_cells(went)[1::2] == ("-", "B alone")
    (same,) = side_by_side(report, report).causes
    assert cause_cells(same)[1:] == (
        "possible, explains up to 100 % of k3",
        "possible, explains up to 100 % of k3",
        "both",
    )
    assert went.second.confidence == report.against.other.diagnoses[0].confidence


def test_the_json_has_the_second_run_in_full(report) -> None:
    found = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    other = report.against.other
    assert found["against"]["summary"] == json.loads(json.dumps(to_jsonable(other.summary)))
    assert found["against"]["summary"] != found["summary"]
    assert found["against"]["sources"] == [*other.sources]
    assert [each["cause"] for each in found["against"]["diagnoses"]] == ["bf16_kernels"]
    k3 = found["against"]["numbers"][0]
    assert k3["change"] == found["summary"]["overall"]["k3"] / found["against"]["summary"]["overall"]["k3"]
    assert k3["interval"]["low"] < k3["change"] < k3["interval"]["high"]
    assert [each["name"] for each in found["recommendation"]["ranking"]] == ["mis", "none"]
