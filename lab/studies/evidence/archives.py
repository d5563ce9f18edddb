# SPDX-License-Identifier: Apache-2.0
"""Files of results: zip archives, each with the groups of a study, or with one that is not yet among them.

A group is ``GROUP.json``, what is known of the whole and a column per number, and ``GROUP/STEP/STREAM.npy``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any
from zipfile import ZIP_LZMA, ZipFile

import numpy as np

Row = dict[str, Any]


class Archives:
    """The archives of a folder at the first access; a group's own archive may come later."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._of_group: dict[str, Path] | None = None

    def names(self) -> list[str]:
        """Of all groups."""
        return sorted(self._index())

    def has(self, group: str) -> bool:
        """Whether there are results of a group."""
        return self._path(group) is not None

    def head(self, group: str) -> dict[str, Any]:
        """Data of a whole group."""
        found: dict[str, Any] = self._table(group)["head"]
        return found

    def rows(self, group: str) -> list[Row]:
        """One per run and step."""
        columns = self._table(group)["columns"]
        lines = zip(*columns.values(), strict=True)
        return [{name: x for name, x in zip(columns, line, strict=True) if x is not None} for line in lines]

    def has_arrays(self, group: str) -> bool:
        """Whether a group kept any."""
        return any(name.startswith(f"{group}/") for name in self._archive(group).namelist())

    def arrays(self, group: str) -> dict[str, dict[str, Any]]:
        """By step and stream."""
        steps: dict[str, dict[str, Any]] = {}
        archive = self._archive(group)
        for name in archive.namelist():
            if name.startswith(f"{group}/"):
                step, stream = name.removeprefix(f"{group}/").removesuffix(".npy").split("/")
                steps.setdefault(step, {})[stream] = np.load(io.BytesIO(archive.read(name)))
        return steps

    def write(
        self, group: str, head: Mapping[str, Any], rows: Sequence[Row], arrays: Mapping[str, np.ndarray[Any, Any]]
    ) -> None:
        """A group's own archive; arrays by ``STEP/STREAM``."""
        names = dict.fromkeys(name for row in rows for name in row)
        table = {"head": head, "columns": {name: [row.get(name) for row in rows] for name in names}}
        members = {f"{group}.json": json.dumps(table).encode()}
        for name, array in arrays.items():
            buffer = io.BytesIO()
            np.save(buffer, array)
            members[f"{group}/{name}.npy"] = buffer.getvalue()
        _write(self._folder / f"{group}.zip", members)

    def remove(self, group: str) -> None:
        """A group's own archive, if there is one."""
        (self._folder / f"{group}.zip").unlink(missing_ok=True)

    def compact(self, study: str, groups: Iterable[str]) -> None:
        """Put what there is of a study's groups into one archive."""
        members, old = {}, set()
        for group in groups:
            if (path := self._path(group)) is None:
                continue
            old.add(path)
            archive = _opened(path)
            own = [name for name in archive.namelist() if name == f"{group}.json" or name.startswith(f"{group}/")]
            members |= {name: archive.read(name) for name in own}
        target = self._folder / f"{study}.zip"
        if old <= {target}:
            return
        _write(target, members)
        for path in old - {target}:
            path.unlink()
        self._of_group = None

    def _table(self, group: str) -> dict[str, Any]:
        return _table_of(self._archive(group), group)

    def _archive(self, group: str) -> ZipFile:
        path = self._path(group)
        if path is None:
            raise FileNotFoundError(f"{self._folder}: no results of {group}")
        return _opened(path)

    def _path(self, group: str) -> Path | None:
        own = self._folder / f"{group}.zip"
        return own if own.exists() else self._index().get(group)

    def _index(self) -> dict[str, Path]:
        if self._of_group is None:
            self._of_group = {}
            for path in sorted(self._folder.glob("*.zip")):
                names = [name for name in _opened(path).namelist() if name.endswith(".json")]
                self._of_group |= {name.removesuffix(".json"): path for name in names}
        return self._of_group


def _opened(path: Path) -> ZipFile:
    found = path.stat()
    return _opened_as(path, found.st_ino, found.st_mtime_ns)


@lru_cache(maxsize=64)
def _opened_as(path: Path, inode: int, changed: int) -> ZipFile:
    # To read the list of its members takes longer than a member does, and some archives have a hundred groups.
    return ZipFile(path)


@lru_cache(maxsize=32)
def _table_of(archive: ZipFile, group: str) -> dict[str, Any]:
    # A page asks several times: whether a group is done, for its settings, for its rows.
    found: dict[str, Any] = json.loads(archive.read(f"{group}.json"))
    return found


def _write(path: Path, members: Mapping[str, bytes]) -> None:
    scratch = path.with_suffix(".part")
    with ZipFile(scratch, "w", ZIP_LZMA) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    scratch.replace(path)
