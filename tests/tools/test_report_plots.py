# SPDX-License-Identifier: Apache-2.0
"""The pictures of the report show the numbers of the tokens: what is drawn is read back from the axes."""

import dataclasses
import math
import random
from collections import Counter

import pytest
import torch

from mis_ext.tools.report import Collector, Part
from mis_ext.tools.report.findings import Unexplained
from mis_ext.tools.report.recommendation import Recommendation, no_correction, preset_candidates, recommend
from mis_ext.tools.report.summary import Summary
from mis_ext.tools.report.whole_report import Report, side_by_side

pytest.importorskip("matplotlib")
from matplotlib.figure import Figure

from mis_ext.tools.report.plots import Picture, drawn, pictures


def made(*, spread: float = 0.3) -> tuple[Report, dict[str, list[tuple[float, float]]]]:
    """A report of 40 responses in two steps, with the log-probs of trainer and engine; first tokens are equal."""
    rng, tokens = random.Random(5), {}
    candidates = [no_correction(), *preset_candidates(["mis", "icepop"])]
    collector = Collector({each.name: each.config for each in candidates})
    for step, size in (("3", spread), ("4", 2 * spread)):
        behavior = [
            torch.tensor([-6.0 * rng.random() ** 2 - 0.01 for _ in range(rng.choice((2, 9, 20)))]) for _ in range(20)
        ]
        proximal = [
            each + torch.tensor([0.0, *(rng.gauss(0.0, size) for _ in range(len(each) - 1))]) for each in behavior
        ]
        collector.add(Part.of_lists(proximal=proximal, behavior=behavior, step=step))
        pairs = zip(proximal, behavior, strict=True)
        tokens[step] = [[*zip(ours.tolist(), theirs.tolist(), strict=True)] for ours, theirs in pairs]
    summary = collector.summary()
    recommendation = recommend(candidates, collector.outcomes(), summary, [])
    return report_with(summary, recommendation), tokens


def report_with(summary: Summary, recommendation: Recommendation) -> Report:
    run = {"sources": (), "summary": summary, "diagnoses": (), "unexplained": Unexplained(1.0, 0.0), "skipped": ()}
    return Report(**run, recommendation=recommendation, against=None)


@pytest.fixture(scope="module")
def report():
    return made()


def axes_of(report: Report, name: str) -> list:
    """What a picture draws on, the main axes first."""
    (picture,) = [each for each in pictures(report) if each.name == name]
    figure = Figure()
    picture.draw(figure.add_subplot())
    return figure.axes


def lines_of(axes) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): ([*line.get_xdata()], [*line.get_ydata()]) for line in axes.lines}


def all_tokens(tokens) -> list[tuple[float, float]]:
    return [pair for step in tokens.values() for response in step for pair in response]


def k3(d: float) -> float:
    return math.expm1(d) - d


def mean_k3(pairs) -> float:
    """NaN for 0, which a logarithmic axis cannot show."""
    return sum(k3(ours - theirs) for ours, theirs in pairs) / len(pairs) or math.nan


def test_the_density_has_the_engine_to_the_right_and_the_trainer_upwards(report) -> None:
    axes, _ = axes_of(report[0], "density")
    (mesh,) = [each for each in axes.collections if each.get_array() is not None]
    # Bins of a quarter of a nat, from e^-14 on, those of the trainer upwards; empty ones are not shown.
    cells = Counter(
        # What is above probability 1 by rounding is in the last one.
        tuple(min(55, math.floor(4 * log_prob) + 56) for log_prob in pair)
        for pair in all_tokens(report[1])
    )
    first = min(min(cell) for cell in cells)
    array = mesh.get_array()
    shown = {
        (row + first, column + first): float(array[row][column])
        for row in range(array.shape[0])
        for column in range(array.shape[1])
        if not array.mask[row][column]
    }
    assert shown == cells
    edges = mesh.get_coordinates()
    assert edges[0, 0].tolist() == [first / 4 - 14.0] * 2
    assert edges[-1, -1].tolist() == [0.0, 0.0]
    (diagonal,) = axes.lines
    assert [*diagonal.get_xdata()] == [*diagonal.get_ydata()]
    for axis in (axes.xaxis, axes.yaxis):
        # Every second power of e.
        assert [*axis.get_ticklocs()] == [*range(-12, 1, 2)][-len(axis.get_ticklocs()) :]
        assert -2.0 <= first / 4 - 14.0 - axis.get_ticklocs()[0] <= 0.0
        for tick, label in zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True):
            assert float(label.get_text()) == pytest.approx(math.exp(tick), rel=0.3)


def test_steps_shows_k3_of_each_step(report) -> None:
    (axes,) = axes_of(report[0], "steps")
    expected = [mean_k3([pair for response in step for pair in response]) for step in report[1].values()]
    assert lines_of(axes) == {"A": ([0, 1], pytest.approx(expected, rel=1e-3))}
    assert [text.get_text() for text in axes.get_xticklabels()] == ["3", "4"]
    assert axes.get_yscale() == "log"


def test_equal_engines_have_a_linear_axis() -> None:
    report, _ = made(spread=0.0)
    assert axes_of(report, "steps")[0].get_yscale() == "linear"


def test_a_run_of_one_step_has_no_picture_over_steps() -> None:
    collector = Collector()
    collector.add(Part.of_lists(proximal=[torch.tensor([-1.0, -2.0])], behavior=[torch.tensor([-1.1, -2.0])], step="0"))
    report = report_with(collector.summary(), made()[0].recommendation)
    assert [picture.name for picture in pictures(report)] == ["density"]
    assert [picture.name for picture in pictures(made()[0])] == ["density", "steps"]


def test_with_another_run_steps_shows_k3_of_both_in_the_order_of_their_numbers(report) -> None:
    first, recommendation = report[0], report[0].recommendation
    collector = Collector()
    for step in range(4, 24):
        values = [torch.tensor([-1.0, -2.0 - step])]
        collector.add(Part.of_lists(proximal=values, behavior=[values[0] - 0.1], step=str(step)))
    other = report_with(collector.summary(), recommendation)
    (axes,) = axes_of(dataclasses.replace(first, against=side_by_side(first, other)), "steps")
    k3s = [[step.k3 for step in run.summary.steps.values()] for run in (first, other)]
    assert lines_of(axes) == {"A": ([0, 1], k3s[0]), "B": ([*range(1, 21)], k3s[1])}
    assert [label.get_text() for label in axes.get_xticklabels()] == [str(step) for step in range(3, 24, 2)]


def test_a_picture_of_the_same_numbers_is_the_same_file(report) -> None:
    picture = next(each for each in pictures(report[0]) if each.name == "steps")
    assert isinstance(picture, Picture)
    drawing = drawn(picture)
    assert drawing == drawn(picture)
    assert b"Over steps" in drawing.svg
