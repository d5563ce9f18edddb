"""JSON lines, a sample each, as columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def read_json_lines(path: Path, *, keys: Sequence[str]) -> dict[str, list[Any]]:
    """The columns of a file; a line may also have a key without its plural.

    Raises:
        OSError: The file cannot be opened.
        ValueError: A line is no object, or there is none.
    """
    rows: list[dict[str, Any]] = []
    # Not splitlines, which also splits at characters that JSON leaves as they are.
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"line {number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"line {number}: a {type(row).__name__}, not an object")
        rows.append(row)
    if not rows:
        raise ValueError("holds no sample")
    return {key: [row.get(key, row.get(key.removesuffix("s"))) for row in rows] for key in keys}
