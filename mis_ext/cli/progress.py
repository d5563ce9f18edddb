"""How far a command has come, on standard error: on a terminal, and where rich is installed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

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
