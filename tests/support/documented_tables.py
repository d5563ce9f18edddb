# SPDX-License-Identifier: Apache-2.0
"""The rows of statistics, bounds, metrics, methods and causes as the tables of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from mis_ext.correction.config import BOUNDS, CorrectionConfig, Gate, Weight
from mis_ext.correction.metrics import MetricRow, rows_of
from mis_ext.correction.tokens import STATISTICS
from mis_ext.keys.rows import described
from mis_ext.methods.catalogue import METHODS
from mis_ext.tools.diagnosis.table import CAUSES


class Table(NamedTuple):
    """Column titles, and rows of as many cells."""

    titles: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """The table in Markdown, a line per row, with a line break at its end."""
        lines = [self.titles, ("---",) * len(self.titles), *self.rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def keys_table(*names: str) -> Table:
    """Keys of a file: default, legal range, and effect."""

    def row(name: str) -> tuple[str, ...]:
        found = described(name)
        default = "" if found["default"] is None else f"`{found['default']}`"
        unit = f" ({found['unit']})" if found["unit"] else ""
        return f"`{name}`", default, found["legal"].replace(" | ", ", ") + unit, found["what"]

    return Table(("key", "default", "legal", "what it does"), tuple(map(row, names)))


def statistics_table() -> Table:
    """The statistics of gates: bounds, unit and meaning."""
    return Table(
        ("statistic", "bounds", "unit", "meaning"),
        tuple(
            (
                f"`{row.name}`",
                f"[{row.low:g}, {row.high:g}]",
                row.unit,
                row.text,
            )
            for row in STATISTICS.values()
        ),
    )


def bounds_table() -> Table:
    """The modes of a weight, and the effect of each on a ratio."""
    return Table(
        ("mode", "weight"),
        tuple((f"`{mode}`", row.text) for mode, row in BOUNDS.items()),
    )


METRIC_GROUPS = {
    "staleness": re.compile(r"lag_|unknown_lag|stale_|.*_(fresh|stale)$"),
    "weights": re.compile(r"tis_|is_ratio_|batch_norm_factor"),
    "filters": re.compile(r"rs_|kept_|denominator_factor"),
    "perplexity and equality": re.compile(r"(training|rollout)_(log_)?ppl|log_ppl|ppl_|train_rollout"),
    "mismatch": re.compile(""),
}
"""The tables of metrics with their names. A name belongs to the first table whose prefix it has."""


def metrics_table(group: str) -> Table:
    """The metrics of a group that configurations of every kind can emit; core ones carry a star."""
    rows: dict[str, MetricRow] = {}
    for config in _one_of_every_kind():
        for row in rows_of(config):
            rows.setdefault(row.name, row)
    # Vetoes have the same metrics under other names: they share a row.
    names: dict[tuple[str, str, str], list[str]] = {}
    for row in rows.values():
        if group == next(name for name, pattern in METRIC_GROUPS.items() if pattern.match(row.name)):
            alone = "" if row.name.startswith("rs_") else row.name
            names.setdefault((alone, row.over, row.text), []).append(f"`{row.name}`{' *' * row.is_core}")
    return Table(
        ("name (`mis_` +)", "over", "meaning"),
        tuple((", ".join(found), over, text) for (_, over, text), found in names.items()),
    )


def _one_of_every_kind() -> Iterable[CorrectionConfig]:
    vetoes = (
        Gate(reduce="min", low=1e-4),
        Gate(reduce="max", high=100.0),
        Gate(statistic="proximal_probability", reduce="min", low=1e-6),
    )
    yield CorrectionConfig(metrics_only=True, weight=None)
    yield CorrectionConfig(metrics_only=True, weight=None, staleness=True)
    for mode in BOUNDS:
        yield CorrectionConfig(
            weight=Weight(mode=mode), gates=(Gate(high=2.0), *vetoes), normalize_over="kept", denominator="kept"
        )


_PPO = "min(r A, clip(r, 0.8, 1.2) A)"
"""The page of methods defines PPO as this formula, which many methods share."""


def methods_table() -> Table:
    """Every method with its objective and the first source, whose title `mis-ext methods NAME` prints."""
    rows = ((f"`{row.name}`", f"`{row.formula.replace(_PPO, 'PPO')}`", _source(row.paper)) for row in METHODS.values())
    return Table(("method", "objective of a token", "source"), tuple(rows))


def _source(paper: str) -> str:
    """The number of the first source on arXiv, or its authors and year, or the whole text."""
    if found := re.search(r"arXiv:[\d.]+", paper):
        return found[0]
    first = paper.split(";")[0]
    authors, year = re.match(r".*? et al\.|[^,:]+", first), re.search(r"\b\d{4}\b", first)
    return f"{authors[0]}, {year[0]}" if authors and year else paper


def causes_table() -> Table:
    """The causes in the order of the search: title, symptoms, and advice."""
    rows = ((f"`{cause.name}`: {cause.title}", cause.looks_like, cause.advice) for cause in CAUSES.values())
    return Table(("cause", "what you see", "fix"), tuple(rows))
