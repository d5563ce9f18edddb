"""What commands share: a result, packages that one needs, and how far it has come."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from mis_ext.files import printable


class Result(NamedTuple):
    """What a command found.

    ``content`` is all of it, as :func:`~mis_ext.jsonable.to_jsonable` takes it. ``show`` prints it for people. ``code``
    is the exit code.
    """

    content: Any
    show: Callable[[], object]
    code: int = 0


def grid(rows: Iterable[tuple[str, str]]) -> Any:
    """Names and values in two columns of a terminal."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, value in rows:
        # Text, because names of files may hold what rich would read as markup.
        grid.add_row(Text(name, style="dim"), Text(printable(value)))
    return grid


def require(*modules: str, install: str) -> None:
    """Say what to install, before any work is done.

    Raises:
        OSError: A module is not there; the message says how to get it.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise OSError(f"needs {module}: pip install {install}") from error


Advance = Callable[[int], None]
"""Says how many bytes more were read."""

_LARGE = 1 << 24
"""Bytes that take seconds to read: worth a view of the progress."""


def watch(paths: Sequence[Path], *, min_files: int = 1) -> Iterable[Path]:
    """The paths one by one; from ``min_files`` on, with a view of how many are read."""
    if find_spec("rich") is None:
        return paths
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    is_quick = len(paths) < min_files
    return track(paths, "reading", console=console, transient=True, disable=is_quick or not console.is_terminal)


@contextmanager
def bytes_bars(*, size: int) -> Iterator[Callable[[str, int], Advance]]:
    """Bars for work on a log of ``size`` bytes: what is yielded makes one, of its title and of how many there are."""
    if find_spec("rich") is None:
        yield lambda title, total: lambda num_bytes: None
        return
    from rich import progress as columns
    from rich.console import Console

    with columns.Progress(
        columns.TextColumn("{task.description}"),
        columns.BarColumn(),
        columns.DownloadColumn(),
        columns.TransferSpeedColumn(),
        columns.TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=size < _LARGE,
    ) as progress:

        def bar(title: str, total: int) -> Advance:
            task = progress.add_task(title, total=total)
            return lambda num_bytes: progress.advance(task, num_bytes)

        yield bar
