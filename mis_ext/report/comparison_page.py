"""The section of a page that shows two runs side by side."""

from __future__ import annotations

from collections.abc import Iterable

from mis_ext.report.comparison import Compared, ComparedCause, Comparison, Found
from mis_ext.report.comparison_plot import comparison_pictures
from mis_ext.report.markup import escape, figure, number, percent, table
from mis_ext.report.noise import MIN_PROMPTS, digits
from mis_ext.report.run import Run
from mis_ext.report.whole_report import Report

NUMBERS = ("number", "A", "B", "change", "95 % interval")
CAUSES = ("cause", "A", "B", "found in")
"""Titles of the two tables."""

_VERDICTS = {
    "equal": "equal",
    "noise": "not more than noise",
    "higher": "yes, A is higher",
    "lower": "yes, A is lower",
    "unknown": "-",
}
_REMARKS = (
    "Change: x is A / B. Shares, and what may be 0 or less, have A - B with its sign.",
    "95 % interval: over prompts, because responses to one prompt are alike. A response of unknown prompt counts as a "
    "prompt. It is Welch's, of the standard error of a ratio of two sums (Cochran, Sampling Techniques, 1977, chapter "
    "6; over clusters: Miller, Adding Error Bars to Evals, arXiv:2411.00640).",
    f"A dash: the number has no interval, or a run has fewer than {MIN_PROMPTS} prompts.",
    "The interval knows nothing of other seeds: two runs of one configuration may differ by more.",
)


def comparison_section(report: Report) -> list[tuple[str, str, str]]:
    """The section as its name, title and content, in a list; none without another run."""
    if report.against is None:
        return []
    found = report.against
    content = (
        f'<p class="headline">{escape(found.headline)}</p>'
        f"<dl>{_run('A', report)}{_run('B', found.other)}</dl>"
        f"{_list(found.notes)}"
        f'<div class="pictures">{"".join(map(figure, comparison_pictures(report)))}</div>'
        f"{_numbers(found)}{_list(_REMARKS)}<h3>Causes</h3>{_causes(found)}"
        "<p>All other sections, the ranking of configurations too, are of A alone.</p>"
    )
    return [("against", "Two runs side by side", content)]


def _list(texts: Iterable[str]) -> str:
    rows = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f"<ul>{rows}</ul>" if rows else ""


def _run(letter: str, run: Run) -> str:
    overall = run.summary.overall
    size = (
        f"{overall.num_tokens:,} tokens of {overall.num_sequences:,} responses to {overall.num_prompts:,} prompts, "
        f"{len(run.summary.steps)} steps"
    )
    return f"<dt>{letter}: {escape(run.name)}</dt><dd>{size}</dd>"


def number_cells(found: Compared) -> tuple[str, ...]:
    """A row of the table of numbers, without the verdict: its name, A, B, how they differ, and the interval of that."""
    sign = "x " if found.kind == "ratio" else "+" if found.change > 0.0 else ""
    change = f"{sign}{digits(found.change)}"
    return (found.name, number(found.first), number(found.second), change, str(found.interval))


def _numbers(found: Comparison) -> str:
    rows = ((*number_cells(each), _VERDICTS[each.verdict]) for each in found.numbers)
    return table("Numbers of A and of B", (*NUMBERS, "more than noise?"), rows)


def cause_cells(found: ComparedCause) -> tuple[str, ...]:
    """A row of the table of causes: what it is, how each run shows it, and which of them does."""
    where = "both" if found.first and found.second else "A alone" if found.first else "B alone"
    return (found.title, _found(found.first), _found(found.second), where)


def _causes(found: Comparison) -> str:
    if not found.causes:
        return "<p>Neither run has enough tokens to name one.</p>"
    return table("Causes in A and in B", CAUSES, map(cause_cells, found.causes))


def _found(found: Found | None) -> str:
    if found is None:
        return "-"
    return f"{found.confidence}, {'up to ' if found.is_up_to else ''}{percent(found.k3_share)} of k3"
