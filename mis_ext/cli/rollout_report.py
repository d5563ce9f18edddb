"""The report of ``mis-ext check-rollouts`` on a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mis_ext.files import printable


def show(report: Mapping[str, Any]) -> None:
    """Print a report of :class:`~mis_ext.rollout.logs.log_report.LogReport`: verdict, counts and tables."""
    from rich.console import Console
    from rich.text import Text

    console = Console()
    passed = report["passed"]
    console.print(Text("PASSED" if passed else "FAILED", style="bold green" if passed else "bold red"))
    console.print(_grid(_rows(report)))
    for key, title in (("refused", "refused"), ("boundaries", "turn boundaries"), ("texts", "texts")):
        if report[key]:
            console.print(_table(title, report[key]))
    if report["policy"] and report["policy"]["errors"]:
        console.print(_table("refused by the policy", report["policy"]["errors"]))


def _rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = [("because", reason) for reason in report["reasons"]]
    rows += [(name.replace("_", " "), str(report[name])) for name in ("conversations", "calls", "sampled_tokens")]
    for kind, found in report["weight_versions"].items():
        versions = ", ".join(found["first"]["versions"])
        example = f", the first {found['first']['conversation']!r}{versions and ': '}{versions}"
        rows.append((f"weight versions: {kind}", f"{found['count']} conversations{example}"))
    policy = report["policy"]
    if policy:
        rows += [
            (f"policy {policy['name']}", f"{policy['samples']} samples"),
            ("trained tokens", str(policy["trained_tokens"])),
            ("dropped tokens", str(policy["dropped_tokens"])),
            ("actions", ", ".join(f"{action} {count}" for action, count in policy["actions"].items() if count) or "-"),
        ]
    return rows


def _grid(rows: list[tuple[str, str]]) -> Any:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        grid.add_row(Text(name, style="dim"), Text(printable(value)))
    return grid


def _table(title: str, classes: Mapping[str, Mapping[str, Any]]) -> Any:
    from rich.table import Column, Table
    from rich.text import Text

    first = Column("first", overflow="fold")
    table = Table("class", "count", "share", "failing", first, title=title, show_lines=True)
    for kind, found in classes.items():
        cells = [kind, str(found["count"]), f"{found['share']:.1%}", str(found["failing"])]
        example = "\n".join(map(printable, _example_lines(found["first"])))
        table.add_row(*map(Text, cells), Text(example), style="red" if found["failing"] else "")
    return table


def _example_lines(example: Mapping[str, Any]) -> Iterator[str]:
    place = f"{example['file']}, line {example['line']}" if "file" in example else ""
    conversation = f"conversation {example['conversation']!r}" if example["conversation"] is not None else ""
    yield ", ".join(filter(None, (place, conversation)))
    if example.get("position") is not None:
        found = "the prompt ends" if example["found_id"] is None else f"the prompt has {example['found_id']}"
        known = "nothing more" if example["expected_id"] is None else f"id {example['expected_id']}"
        yield f"position {example['position']}: {known} is known, {found}"
    for key, name in (("expected_text", "known: "), ("found_text", "prompt: ")):
        if example.get(key) is not None:
            yield f"{name}{example[key]!r}"
    yield from (example[key] for key in ("message", "detail") if example.get(key))
    if example.get("cure"):
        yield f"cure: {example['cure']}"
