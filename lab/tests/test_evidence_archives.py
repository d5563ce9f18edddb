# SPDX-License-Identifier: Apache-2.0
"""Results of the evidence in archives: what was written is read, in a group's own archive and in that of its study."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from evidence.archives import Archives
from evidence.results import Results, settings
from stand_in import TINY

ROWS: list[dict[str, Any]] = [
    {"method": "none", "step": 0, "reward": 0.1, "own_reward": 0.25},
    {"method": "none", "step": 1, "reward": -1e-9},
]
ARRAYS = {"step1/behavior": np.arange(6, dtype=np.float16).reshape(2, 3), "step1/mask": np.eye(3, dtype=bool)}


def write(folder: Path, group: str, reward: float) -> None:
    rows = [row | {"reward": row["reward"] + reward} for row in ROWS]
    Archives(folder).write(group, {"device": group, "settings": {"a": [1, None]}}, rows, ARRAYS if reward else {})


def found(folder: Path) -> dict[str, str]:
    """All there is, as text; arrays with their types."""
    archives = Archives(folder)
    content = {}
    for name in archives.names():
        arrays = {
            step: {stream: (str(array.dtype), array.tolist()) for stream, array in streams.items()}
            for step, streams in archives.arrays(name).items()
        }
        content[name] = json.dumps([archives.head(name), archives.rows(name), arrays], sort_keys=True)
    return content


def test_what_was_written_is_read(tmp_path: Path) -> None:
    Archives(tmp_path).write("one", {"device": "cpu"}, ROWS, ARRAYS)
    archives = Archives(tmp_path)
    assert archives.rows("one") == ROWS
    assert archives.head("one") == {"device": "cpu"}
    read = archives.arrays("one")["step1"]
    for name in ("behavior", "mask"):
        assert read[name].dtype == ARRAYS[f"step1/{name}"].dtype
        assert np.array_equal(read[name], ARRAYS[f"step1/{name}"])
    with pytest.raises(FileNotFoundError, match="no results of two"):
        archives.rows("two")


def test_a_study_in_one_archive_holds_what_its_groups_held_and_takes_later_ones(tmp_path: Path) -> None:
    for number, group in enumerate(("a_1", "a_10", "b")):
        write(tmp_path, group, float(number))
    (tmp_path / "a_2.state.pt").touch()
    apart = found(tmp_path)
    Archives(tmp_path).compact("a", ["a_1", "a_2", "a_10"])
    assert {path.name for path in tmp_path.iterdir()} == {"a.zip", "b.zip", "a_2.state.pt"}
    assert found(tmp_path) == apart
    # A study of one group with its name, and a group that ran later.
    Archives(tmp_path).compact("b", ["b"])
    archives = Archives(tmp_path)
    assert not archives.has("a_2")
    write(tmp_path, "a_2", 3.0)
    assert archives.has("a_2")
    later = found(tmp_path)
    archives.compact("a", ["a_1", "a_2", "a_10"])
    assert {path.name for path in tmp_path.glob("*.zip")} == {"a.zip", "b.zip"}
    assert found(tmp_path) == later == apart | {"a_2": later["a_2"]}
    assert archives.has("a_2")


def test_a_compacted_group_is_done_and_its_settings_are_still_compared(tmp_path: Path) -> None:
    Archives(tmp_path).write(TINY.name, {"settings": settings(TINY)}, ROWS, {})
    results = Results(tmp_path)
    results.compact("study", [TINY])
    assert results.is_done(TINY)
    Archives(tmp_path).write(TINY.name, {"settings": {}}, ROWS, {})
    with pytest.raises(ValueError, match="other settings than tiny"):
        results.is_done(TINY)


def test_the_results_of_the_repository_are_one_archive_per_study() -> None:
    folder = Path(__file__).parents[1] / "evidence" / "results"
    # Questions that somebody prepared lie there too.
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".json"]
    assert {path.suffix for path in files} == {".zip"}
    finished, stopped = Archives(folder), Archives(folder / "unfinished")
    assert len(finished.names()) > 500
    assert not {*finished.names()} & {*stopped.names()}
    # The rows of every run are there, also where its log-probs are those of 16a265ec.
    assert all(archives.rows(name) for archives in (finished, stopped) for name in archives.names())
