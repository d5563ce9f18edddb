# SPDX-License-Identifier: Apache-2.0
"""Shared parts of commands: a result, required packages, printed text, and progress."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mis_ext.files import printable

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text


class Result(NamedTuple):
    """Result of a command.

    ``content`` is the input of :func:`~mis_ext.files.to_jsonable`. ``show`` prints it as text. ``code`` is the exit
    code.
    """

    content: Any
    show: Callable[[], object]
    code: int = 0


def require(*modules: str, to_show: bool = False) -> None:
    """Raise an error that names all missing packages, before any work is done.

    Args:
        *modules: Names of modules, which are also the names of their packages.
        to_show: Whether the command needs them only for text output, not for JSON.
    """
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        instead = ", or use --json" if to_show and {*missing} <= {"rich", "jinja2"} else ""
        raise OSError(f"needs {' and '.join(missing)}: pip install {' '.join(missing)}{instead}")


# These functions print texts literally: a file name may contain rich markup or terminal control characters.


def show(text: str, style: str = "") -> None:
    """Print a text."""
    _print(_text(text, style))


def show_grid(rows: Iterable[tuple[str, str]], *, gap: int = 2, style: str = "dim", text_style: str = "") -> None:
    """Print names and texts in two columns. Long texts wrap within their column."""
    from rich.table import Column, Table

    grid = Table.grid("", Column(overflow="fold"), padding=(0, gap))
    for name, text in rows:
        grid.add_row(_text(name, style), _text(text, text_style))
    _print(grid)


def show_table(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    styles: Iterable[str] | None = None,
    numbers_right: bool = False,
    name: str = "",
    **options: Any,
) -> None:
    """Print a table of names and numbers. On a narrow terminal, cells wrap."""
    from rich.table import Column, Table

    first, *others = titles
    justify: Any = "right" if numbers_right else "left"
    columns = (Column(title, overflow="fold", justify=justify) for title in others)
    table = Table(Column(first, overflow="fold"), *columns, title=name or None, **options)
    rows = [*rows]
    for row, style in zip(rows, [""] * len(rows) if styles is None else styles, strict=True):
        table.add_row(*map(_text, row), style=style)
    _print(table)


def _text(text: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(printable(text), style=style)


def _print(what: Text | Table) -> None:
    from rich.console import Console

    Console().print(what)


def watch(paths: Sequence[Path]) -> Iterable[Path]:
    """The paths one by one, on a terminal with a view of how many are read."""
    if not sys.stderr.isatty() or find_spec("rich") is None:
        return paths
    from rich.console import Console
    from rich.progress import track

    return track(paths, "reading", console=Console(stderr=True), transient=True)
