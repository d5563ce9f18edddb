"""Logs of calls of inference servers: JSON lines, plain or compressed with gzip."""

from __future__ import annotations

import gzip
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple

from mis_ext.rollout.logs.lines import LoggedCall, LogLineError, parse_line

_BLOCK = 1 << 20


class Place(NamedTuple):
    """Where a line is: its file among those of the log, its number, its first byte and how many it has."""

    file: int
    number: int
    offset: int
    size: int


class RolloutLog:
    """Log files, read one conversation at a time, wherever its calls are.

    Two passes: :meth:`scan` finds the lines of each conversation, :meth:`calls` reads them again. In memory are only
    the places of the lines and what is being read. A file that cannot be read twice, because it is compressed or a
    pipe, is copied to a temporary file.

    Args:
        paths: The files; they stay open until the log is closed.

    Attributes:
        size: Bytes of all files, those of compressed ones after decompression.
        places: The lines of each conversation, in the order of their first calls; none before :meth:`scan`.
        problems: The lines that hold no call; none before :meth:`scan`.

    Raises:
        OSError: A file cannot be opened.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.problems: list[LogLineError] = []
        self.places: dict[str, list[Place]] = {}
        with ExitStack() as stack:
            self._files = [_open(path, stack) for path in paths]
            self._stack = stack.pop_all()
        self.size = sum(os.fstat(each.content.fileno()).st_size for each in self._files)

    def __enter__(self) -> RolloutLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def scan(self) -> Iterator[int]:
        """Find the conversations; yields the bytes of each line that was looked at."""
        for index, file in enumerate(self._files):
            offset = number = num_lines = 0
            for number, content in enumerate(file.content, start=1):
                if not content.isspace():
                    num_lines += 1
                    try:
                        call = parse_line(content, file=file.name, line=number)
                        place = Place(index, number, offset, len(content))
                        self.places.setdefault(call.conversation, []).append(place)
                    except LogLineError as problem:
                        self.problems.append(problem)
                offset += len(content)
                yield len(content)
            if file.damage:
                self.problems.append(LogLineError(file.name, number + 1, file.damage))
            elif not num_lines:
                self.problems.append(LogLineError(file.name, 1, "the file holds no call"))

    def calls(self, places: Iterable[Place]) -> Iterator[LoggedCall]:
        """The calls of a conversation, in order."""
        for place in places:
            file = self._files[place.file]
            content = os.pread(file.content.fileno(), place.size, place.offset)
            yield parse_line(content, file=file.name, line=place.number)


class _LogFile(NamedTuple):
    name: str
    content: IO[bytes]
    damage: str


def _open(path: Path, stack: ExitStack) -> _LogFile:
    # Pipes are read; of a device nobody knows where it ends.
    if path.is_char_device() or path.is_block_device():
        raise ValueError(f"{path}: is a device, not a file or a pipe")
    raw = stack.enter_context(path.open("rb"))
    compressed = raw.peek(2)[:2] == b"\x1f\x8b"
    if not compressed and raw.seekable():
        return _LogFile(str(path), raw, "")
    source = gzip.GzipFile(fileobj=raw) if compressed else raw
    copy = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    damage = ""
    try:
        while block := source.read1(_BLOCK):
            copy.write(block)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        # What came before is worth a report; a log that is being written ends like this.
        damage = f"the rest cannot be decompressed: {error}"
    copy.seek(0)
    return _LogFile(str(path), copy, damage)
