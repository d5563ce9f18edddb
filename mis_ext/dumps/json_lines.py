"""JSON lines, a sample each, as columns."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

from mis_ext.dumps.keys import columns_of, rollout_of
from mis_ext.dumps.torch_files import TorchFile

_MAX_LINE = 1 << 28
"""Bytes; no sample has as many."""


def read_json_lines(path: Path) -> TorchFile:
    """The columns of a file of JSON lines, one object a line: lists of equal length, by key, and each line's rollout.

    Raises:
        OSError: The file cannot be opened.
        ValueError: A line is no object, or there is none.
    """
    rows: list[dict[str, Any]] = []
    # As bytes, where only a line feed ends a line: JSON leaves other such characters as they are.
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, _MAX_LINE + 1), b""), start=1):
            if len(line) > _MAX_LINE:
                raise ValueError(f"line {number}: longer than {_MAX_LINE:,} bytes")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                row = json.loads(text) if text.strip() else None
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
            if not text.strip():
                continue
            if not isinstance(row, dict):
                raise ValueError(f"line {number}: a {type(row).__name__}, not an object")
            rows.append(row)
    return TorchFile(columns_of(rows), [rollout_of(row) for row in rows])
