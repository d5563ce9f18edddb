# SPDX-License-Identifier: Apache-2.0
"""Each cell of the tables of the page is the number that the title of its column names."""

import dataclasses
import html
import math
import re

import pytest
from test_report_oracle import CONFIG, collected, draw

import mis_ext
from mis_ext.tools.report.findings import Unexplained
from mis_ext.tools.report.page import MEANING
from mis_ext.tools.report.recommendation import Candidate, no_correction, recommend
from mis_ext.tools.report.summary import WorstToken
from mis_ext.tools.report.whole_report import Report

pytest.importorskip("jinja2")
from mis_ext.tools.report.page import render_page

AROUND = {"ids_before": (1, 2, 3, 4, 5), "ids_behind": (6, 7, 8, 9, 10)}
TOKENS = [
    WorstToken("0", "a", None, 3, None, -1.0, -3.0, 2.0, (), ()),
    WorstToken("0", "b", None, 5, 77, -4.0, -3.0, -1.0, **AROUND),
    WorstToken("1", "c", None, 5, 78, -4.5, -4.0, -0.5, **AROUND, text=("before", "<own> & more", "behind")),
]
GROUP = {
    "group": "name",
    "tokens": "num_tokens",
    "mean |d|": "mean_abs_difference",
    "mean d": "mean_log_ratio",
    "k3": "k3",
    "share of k3": "k3_share",
}
STEP = {"tokens": "num_tokens"} | {
    name: name for name in ("k3", "abs_mean", "abs_p99", "abs_max", "ess_token", "ess_sequence", "k_hat", "reward")
}
SAMPLE = {name: name for name in ("step", "sample", "k3", "reward")} | {
    "tokens": "num_tokens",
    "mean |d|": "mean_abs_difference",
    "mean d": "mean_log_ratio",
}
OUTCOME = {
    "tokens kept": "kept_tokens",
    "with gradient": "live_tokens",
    "sequences kept": "kept_sequences",
    "A > 0, no grad": "removed_positive",
    "A < 0, no grad": "removed_negative",
    "mean factor": "learning_rate",
    "ESS": "ess",
    "variance": "variance",
    "left uncorrected": "residual",
    "largest weight, unfiltered": "weight_max",
}
SHARES = {"kept_tokens", "live_tokens", "kept_sequences", "removed_positive", "removed_negative", "k3_share"}


@pytest.fixture(scope="module")
def report() -> Report:
    candidates = [
        no_correction(),
        Candidate("tried", CONFIG, "tried: here"),
        Candidate("mis", mis_ext.preset("mis"), ""),
    ]
    collector = collected(draw(0), **{each.name: each.config for each in candidates})
    summary = dataclasses.replace(collector.summary(), worst_tokens=TOKENS)
    recommendation = recommend(candidates, collector.outcomes(), summary, [])
    run = {"sources": ("a.pt",), "summary": summary, "diagnoses": (), "unexplained": Unexplained(1.0, 0.0)}
    return Report(**run, skipped=("b.pt: why",), recommendation=recommendation, against=None)


@pytest.fixture(scope="module")
def page(report) -> str:
    return render_page(report)


@pytest.fixture(scope="module")
def tables(page) -> dict[str, list[dict[str, str]]]:
    """By their names: for each row its cells by the titles of their columns."""
    found = re.findall(r'aria-label="([^"]*)"><table><thead>(.*?)</thead><tbody>(.*?)</tbody>', page)

    def cells(row: str) -> list[str]:
        return [html.unescape(each.replace("<wbr>", "")) for each in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)]

    return {
        html.unescape(name): [dict(zip(cells(head), cells(row), strict=True)) for row in body.split("</tr>")[:-1]]
        for name, head, body in found
    }


def shown(row: object, fields: dict[str, str]) -> dict[str, str]:
    """The cells that a row should have: three digits, percent of shares, a dash for what was not measured."""

    def text(name: str) -> str:
        value = getattr(row, name)
        if not isinstance(value, float):
            return f"{value:,}" if isinstance(value, int) else str(value)
        return "-" if math.isnan(value) else f"{value:.1%}" if name in SHARES else f"{value:.3g}"

    return {title: text(name) for title, name in fields.items()}


def test_the_numbers_of_all_steps(report, tables) -> None:
    found = {row["number"]: row["value"] for row in tables["The numbers of all steps"]}
    assert found == shown(report.summary.overall, {name: name for name in MEANING})


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("By probability of the engine", "by_probability"),
        ("By position in the response", "by_position"),
        ("By turn", "by_turn"),
        ("By weight versions", "by_version"),
    ],
)
def test_groups(report, tables, name, field) -> None:
    rows = getattr(report.summary, field)
    assert len(rows) >= 2
    assert tables[name] == [shown(row, GROUP) for row in rows]


def test_steps(report, tables) -> None:
    steps = report.summary.steps
    assert tables["Steps"] == [{"step": name} | shown(step, STEP) for name, step in steps.items()]
    assert [*steps] == ["0", "1"]


def test_worst_samples(report, tables) -> None:
    rows = report.summary.worst_samples
    assert len(rows) >= 5
    assert tables["Samples with the largest mean |d|"] == [shown(row, SAMPLE) for row in rows]


def test_worst_tokens_have_their_ids_around_them_or_their_text(tables, page) -> None:
    assert "<own>" not in page
    titles = ("step", "sample", "position", "token id", "trainer", "engine", "d", "in context")
    assert tables["Tokens with the largest |d|"] == [
        dict(zip(titles, cells, strict=True))
        for cells in (
            ("0", "a", "3", "-", "-1", "-3", "2", "-"),
            ("0", "b", "5", "77", "-4", "-3", "-1", "2 3 4 5 [[77]] 6 7 8 9"),
            ("1", "c", "5", "78", "-4.5", "-4", "-0.5", "...before [[<own> & more]] behind..."),
        )
    ]


def test_configurations(report, tables) -> None:
    ranking, rows = report.recommendation.ranking, tables["Configurations, the best first"]
    assert [row["configuration"] for row in rows] == [each.name for each in ranking]
    for each, row in zip(ranking, rows, strict=True):
        outcome = each.outcome
        assert row.items() >= shown(outcome, OUTCOME).items()
        removed = [f"{name}: {100 * share:.2f}%" for name, share in outcome.removed_by.items()]
        assert row["removed by"] == ("; ".join(removed) or "-")
    assert [row["removed by"] for row in rows if row["configuration"] == "none"] == ["-"]


def test_what_was_read_and_what_was_not(report, page) -> None:
    overall = report.summary.overall
    assert (
        f"{overall.num_tokens:,} tokens were used. {overall.num_masked:,} were masked, {overall.num_without_ratio:,} "
        "trained tokens had no finite log-prob of both sides." in page
    )
    assert "<h3>Read</h3><ul><li>a.pt</li></ul><h3>Skipped</h3><ul><li>b.pt: why</li></ul>" in page
