# SPDX-License-Identifier: Apache-2.0
"""Runs with an fp8 engine: what the rule that was fixed beforehand says of them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from evidence.pretrained import fp8, fp8_page
from evidence.pretrained.collapse import alert_at
from evidence.results import Results


def _run(last: int, k3: float, *, other: float = 0.01) -> list[dict[str, Any]]:
    """k3 starts at 0.01; the ten steps before the last have another one."""
    rows = [{"step": step, "k3": 0.01 if step < 10 else other} for step in range(last + 1)]
    for row in rows[-10:]:
        row["k3"] = k3
    return [row | {"reward": 0.5, "seconds": 8.0} | ({} if row["step"] % 40 else {"own_reward": 0.6}) for row in rows]


@pytest.mark.parametrize(
    ("k3", "said"),
    [
        ((0.0161, 0.05), "k3 grows: times 1.61 and 5.00 by step 130"),
        ((0.0134, 0.008), "k3 does not grow: times 1.34 and 0.80 by step 130"),
        ((0.0159, 0.05), "k3 is not resolved: times 1.59 and 5.00 by step 130"),
        ((0.0136, 0.008), "k3 is not resolved: times 1.36 and 0.80 by step 130"),
    ],
)
def test_two_runs_without_a_correction_decide(k3: tuple[float, float], said: str) -> None:
    assert fp8.verdict([_run(130, value) for value in k3]) == said
    # Steps after 130 do not count.
    longer = [[*_run(130, value), *_run(150, 9.0)[131:]] for value in k3]
    assert fp8.verdict(longer) == said


def test_runs_that_were_stopped_are_compared_at_the_last_step_of_both_or_not_at_all() -> None:
    assert fp8.verdict([_run(115, 0.02), [*_run(115, 0.02), *_run(150, 9.0)[116:]]]).endswith("by step 115")
    assert fp8.verdict([_run(99, 0.02), _run(130, 0.02)]).startswith("not judged")
    assert fp8.verdict([_run(130, 0.02)]).startswith("not judged")


def test_a_growth_has_the_error_of_two_means_of_ten_steps() -> None:
    rows = [{"step": step, "k3": 1.0} for step in range(121)]
    rows += [{"step": step, "k3": 2.0 + 0.3 * (-1) ** step} for step in range(121, 131)]
    # A mean of ten values that scatter by 0.3 around 2.
    assert fp8.growth(rows) == pytest.approx(2.0)
    assert fp8.growth_error(rows) == pytest.approx(0.1)
    rows[:10] = [{"step": step, "k3": 1.0 + 0.3 * (-1) ** step} for step in range(10)]
    assert fp8.growth_error(rows) == pytest.approx(2.0 * (0.05**2 + 0.1**2) ** 0.5)


def test_the_table_has_a_line_for_each_run_that_has_begun(tmp_path: Path) -> None:
    results, groups = Results(tmp_path), fp8.FP8_STUDIES[1].groups
    done = argparse.Namespace(device=torch.device("cpu"), record={}, sampling_seconds=1.0)
    (tmp_path / "unfinished").mkdir()
    results._write(groups[0], done, _run(150, 0.02, other=0.06), {})
    Results(tmp_path / "unfinished")._write(groups[4], done, _run(130, 0.02), {})
    _, _, first, second, _, said = fp8.report(results).splitlines()
    # k3 is 0.06 at steps 121 to 130, and 0.02 in the last ten.
    start = "| fp8 matmuls, none, 1 | 150 | 1.00e-02 | 6.00 ± 0.00 | 2.00 | step 14 | 0.500, 0.500 | "
    assert first == f"{start}0.600, 0.600, 0.600, 0.600 | 8.0 |"
    assert second.startswith("| fp8 matmuls, none, 2 | 130 | 1.00e-02 | 2.00 ± 0.00 | 2.00 | no |")
    assert said == "**fp8 matmuls: k3 grows: times 6.00 and 2.00 by step 130.**"


def test_the_page_compares_the_runs_with_int4_and_bf16_at_the_step_that_is_judged(tmp_path: Path) -> None:
    results = Results(Path(__file__).parents[1] / "evidence" / "results")
    lines = fp8_page.page(results, tmp_path)
    runs: dict[str, list[Any]] = {"fp8_products": [], "e4m3_weights": [], "with TIS": []}
    for group, rows in fp8.seen(results):
        is_none = group.run[0] == fp8.NONE
        runs[group.condition.removeprefix("fp8_training_") if is_none else "with TIS"].append(rows)
    for engine, name in fp8.ENGINE_NAMES.items():
        step = fp8.judged_at(runs[engine])
        assert step >= fp8.FEWEST_STEPS
        (row,) = (line for line in lines if line.startswith(f"| {name} | "))
        low, high = sorted(fp8.growth(rows, step) for rows in runs[engine])
        assert f"| {low:.2f} to {high:.2f} |" in row
    head = next(index for index, line in enumerate(lines) if line.startswith("| engine | runs |"))
    assert [line.split(" |")[0] for line in lines[head + 2 : head + 9]] == [
        "| int4 weights",
        "| int4 weights, token TIS",
        "| fp8 matmuls",
        "| fp8 matmuls, token TIS",
        "| e4m3 weights",
        "| e4m3 weights, token TIS",
        "| bf16",
    ]
    # The sentences about them.
    words = " ".join(lines)
    products, weights = ([fp8.growth(rows) for rows in runs[engine]] for engine in fp8.ENGINE_NAMES)
    assert f"{products[0]:.1f} and {products[1]:.1f} times its start by step 130" in words
    assert f"k3 was {weights[0]:.1f} and {weights[1]:.1f} times its start" in words
    at_the_end = [fp8.growth(rows, 150) for rows in runs["e4m3_weights"]]
    assert f"By step 150 it was {at_the_end[0]:.1f} and {at_the_end[1]:.1f} times" in words
    for column, said in (
        ("abs_diff", "|d| was {:.2f} and {:.2f} times"),
        ("above_2", "was {:.1f} and {:.1f} times its"),
    ):
        grown = [fp8.mean_of(rows[121:131], column) / fp8.mean_of(rows[:10], column) for rows in runs["fp8_products"]]
        assert said.format(*grown) in words
    pairs = zip([fp8.growth(rows) for rows in runs["with TIS"]], [*products, *weights], strict=True)
    less = [f"{tis:.2f} against {none:.2f}" for tis, none in pairs if tis < none]
    assert len(less) == 3
    assert f"three pairs of runs ({', '.join(less)})" in words
    assert all(alert_at([row["k3"] for row in rows]) is None for _, rows in fp8.seen(results))
    before, during, last = (
        f"{fp8.mean_of(runs['fp8_products'][0][first:end], 'reward'):.2f}"
        for first, end in ((113, 123), (123, 130), (134, 144))
    )
    assert f"from {before} (steps 113 to 122) to {during} (123 to 129)" in words
    assert f"fell to {last} in steps 134 to 143" in words
    assert (tmp_path / "fp8_training.png").exists()
    assert fp8_page.page(Results(tmp_path), tmp_path)[-1] == "Nothing has run yet."
