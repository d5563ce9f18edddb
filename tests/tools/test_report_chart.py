# SPDX-License-Identifier: Apache-2.0
"""The chart of the page shows k3 of each step, of one run or of two."""

import dataclasses
import math

import pytest
import torch

from mis_ext.tools.report import Collector, Part
from mis_ext.tools.report.findings import Findings, Unexplained
from mis_ext.tools.report.recommendation import no_correction, recommend
from mis_ext.tools.report.whole_report import Report, side_by_side

pytest.importorskip("jinja2")

from mis_ext.tools.report.page import Chart, chart, render_page, tiles


def findings(gaps: dict[str, float]) -> tuple[Findings, Collector]:
    """A run of one response per step, whose log-probs differ by this."""
    candidate = no_correction()
    collector = Collector({candidate.name: candidate.config})
    for step, gap in gaps.items():
        values = [torch.tensor([-1.0, -2.0], dtype=torch.float64)]
        collector.add(Part.of_lists(proximal=[values[0] + gap], behavior=values, step=step))
    return Findings(("a",), collector.summary(), (), Unexplained(1.0, 0.0), ()), collector


def report_of(gaps: dict[str, float], other: dict[str, float] | None = None) -> Report:
    run, collector = findings(gaps)
    recommendation = recommend([no_correction()], collector.outcomes(), run.summary, [])
    against = None if other is None else side_by_side(run, findings(other)[0])
    return Report(**vars(run), recommendation=recommendation, against=against)


def k3(gap: float) -> float:
    return math.expm1(gap) - gap


def test_it_has_k3_of_each_step_on_whole_decades() -> None:
    # k3 is half of the square: 5e-5 and 5e-3.
    found = chart(report_of({"9": 0.01, "10": 0.1}))
    assert isinstance(found, Chart)
    assert found.steps == [(0.0, "9"), (100.0, "10")]
    assert found.decades == [(40.0, "1e-5"), (80 / 3, "1e-4"), (40 / 3, "1e-3"), (0.0, "1e-2")]
    (line,) = found.lines
    heights = [40 * (-2 - math.log10(k3(gap))) / 3 for gap in (0.01, 0.1)]
    assert [(x, y) for x, y, _ in line] == [(0.0, pytest.approx(heights[0], abs=0.06)), (100.0, round(heights[1], 1))]
    assert [text for _, _, text in line] == [f"step 9: {k3(0.01):.3g}", f"step 10: {k3(0.1):.3g}"]


def test_steps_without_a_mismatch_are_not_drawn_and_a_decade_is_the_least() -> None:
    found = chart(report_of({"b": 0.1, "c": 0.1, "10": 0.0}))
    assert [x for x, _, _ in found.lines[0]] == [50.0, 100.0]
    assert len(found.decades) == 2


def test_long_titles_of_steps_do_not_touch() -> None:
    found = chart(report_of({str(step): 0.1 for step in range(10_000, 10_019)}))
    assert [title for _, title in found.steps] == [str(step) for step in range(10_000, 10_019, 3)]


@pytest.mark.parametrize("gaps", [{"0": 0.1}, {"0": 0.0, "1": 0.0}], ids=["one step", "equal engines"])
def test_without_a_change_to_show_there_is_none(gaps) -> None:
    report = report_of(gaps)
    assert chart(report) is None
    assert "<polyline" not in render_page(report)


@pytest.mark.parametrize(
    ("gaps", "size", "trend"),
    [
        ([0.01], "good", "good"),
        ([0.01, 0.012, 0.01], "good", "good"),
        ([0.01, 0.013, 0.01], "good", "watch"),
        ([0.01, 0.018, 0.01], "good", "bad"),
        ([0.06, 0.06], "watch", "good"),
        ([0.4, 0.4], "bad", "good"),
    ],
)
def test_tiles_warn_of_a_large_k3_and_of_a_step_above_the_first(gaps, size, trend) -> None:
    found = tiles(report_of({str(step): gap for step, gap in enumerate(gaps)}))
    assert [tile.severity for tile in found] == [size, trend, "watch"]
    if len(gaps) > 1:
        assert found[1].text == f"k3 over {len(gaps)} steps, at most {k3(max(gaps)):.3g}"


def test_another_run_is_a_second_line_over_the_steps_of_both() -> None:
    report = report_of({"4": 0.1, "3": 0.1}, {str(step): 0.1 for step in range(4, 24)})
    found = chart(report)
    assert [len(line) for line in found.lines] == [2, 20]
    assert [x for x, _, _ in found.lines[0]] == [0.0, 5.0]
    assert [x for x, _, _ in found.lines[1]] == [5.0 * place for place in range(1, 21)]
    # Every second one, so that titles do not touch.
    assert [title for _, title in found.steps] == [str(step) for step in range(3, 24, 2)]
    page = render_page(report)
    # The sparkline, then a line for each run.
    assert page.count("<polyline") == 3
    assert page.count("<circle") == 22
    assert "of A (solid) and of B (dashed)" in page
    assert "dashed" not in render_page(dataclasses.replace(report, against=None))
