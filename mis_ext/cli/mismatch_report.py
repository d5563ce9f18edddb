"""The report of ``mis-ext report`` on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mis_ext.files import printable

if TYPE_CHECKING:
    from rich.console import Console

    from mis_ext.report.comparison import Comparison
    from mis_ext.report.recommendation import Recommendation
    from mis_ext.report.whole_report import Report

_NUMBERS = ("k3", "reverse_k3", "abs_mean", "abs_p99", "abs_max", "ess_token", "ess_sequence", "k_hat", "ratio_mean")


def show(report: Report, folder: Path) -> None:
    """Print the recommendation, the causes and the numbers; another run beside this one; the ranking."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    _show_causes(console, report)
    _show_numbers(console, report)
    if report.against is not None:
        _show_comparison(console, report, report.against)
    _show_ranking(console, report.recommendation)
    for skipped in report.skipped[:10]:
        console.print(Text(f"skipped: {printable(str(skipped))}", style="yellow"))
    if len(report.skipped) > 10:
        console.print(Text(f"skipped: {len(report.skipped) - 10} more, see {folder / 'summary.json'}", style="yellow"))
    console.print(Text(f"written: {folder / 'report.html'}, summary.json, pictures"))


def _show_causes(console: Console, report: Report) -> None:
    from rich.text import Text

    found = report.recommendation
    console.print(Text(found.headline, style="bold"))
    for reason in found.reasons:
        console.print(Text(f"  {reason}"))
    for diagnosis in report.diagnoses:
        console.print(Text(f"{diagnosis.confidence}: {diagnosis.title}", style="bold yellow"))
        for said in filter(None, (diagnosis.evidence, diagnosis.share_in_words, diagnosis.doubt_in_words)):
            console.print(Text(f"  {printable(said)}"))
    if report.diagnoses:
        console.print(Text(report.unexplained.in_words, style="dim"))


def _show_numbers(console: Console, report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from mis_ext.report.page import number

    overall = report.summary.overall
    grid = Table.grid(padding=(0, 2))
    grid.add_row(Text("tokens", style="dim"), f"{overall.num_tokens:,} of {overall.num_sequences:,} responses")
    for name in _NUMBERS:
        grid.add_row(Text(name, style="dim"), number(getattr(overall, name)))
    console.print(grid)
    console.print(Text("  What each number means, and when to worry: report.html", style="dim"))


def _show_comparison(console: Console, report: Report, found: Comparison) -> None:
    from rich.text import Text

    from mis_ext.report.page import CAUSES, NUMBERS, cause_cells, number_cells

    console.print(Text(found.headline, style="bold"))
    for letter, run in (("A", report), ("B", found.other)):
        console.print(Text(f"  {letter}: {printable(run.name)}"))
    for note in found.notes:
        console.print(Text(f"  {note}"))
    rows = ((*number_cells(each), "-" if each.verdict == "unknown" else each.verdict) for each in found.numbers)
    console.print(_table((*NUMBERS, "A is"), rows))
    console.print(Text("  change: x is A / B, + and - A - B. noise: not more than noise", style="dim"))
    console.print(_table(CAUSES, map(cause_cells, found.causes)))
    console.print(Text("  What the intervals are: report.html. What follows is of A alone.", style="dim"))


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    table = Table(*titles)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def _show_ranking(console: Console, found: Recommendation) -> None:
    from rich.table import Table
    from rich.text import Text

    from mis_ext.report.page import number, percent

    table = Table(title="what each configuration would do, the best first")
    table.add_column("configuration", overflow="fold")
    for column in ("kept", "ESS", "lr", "left"):
        table.add_column(column, no_wrap=True)
    # As wide as their longest name.
    table.add_column("traps", no_wrap=True)
    for ranked in found.ranking:
        outcome = ranked.outcome
        cells = [Path(ranked.name).name, percent(outcome.kept_tokens)]
        cells += map(number, (outcome.ess, outcome.learning_rate, outcome.residual))
        cells.append("\n".join(ranked.traps))
        table.add_row(*(Text(printable(cell)) for cell in cells), style="yellow" if ranked.warnings else "")
    console.print(table)
    console.print(
        Text(
            "  kept: share of tokens. ESS, lr (effective learning rate): of the factor on the loss, which is 1 without "
            "a correction. left: the mean distance of this factor from the ratio",
            style="dim",
        )
    )
    if any(ranked.traps for ranked in found.ranking):
        console.print(Text("  What a trap is: report.html, or mis-ext explain CONFIGURATION", style="dim"))
