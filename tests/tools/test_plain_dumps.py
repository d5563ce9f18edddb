# SPDX-License-Identifier: Apache-2.0
"""Parquet and safetensors hold the same samples as JSON lines do."""

import json
import math
from pathlib import Path

import pytest
import torch

from mis_ext.tools.dumps import DumpedSample, Dumps

ROWS = [
    {
        "log_prob": [-1.0, -0.25, -3.5],
        "rollout_log_prob": [-1.5, -0.25, None],
        "loss_mask": [1, 0, 1],
        "token": [7, 8, 9],
        "response_length": 3,
        "sample_index": 4,
        "advantage": [0.5, 0.5, -0.5],
        "reward": 1.0,
        "weight_version": ["3", "4"],
        "train_weight_version": "4",
    },
    {
        "log_prob": [-0.5],
        "rollout_log_prob": [-0.5],
        "loss_mask": [1],
        "token": [5],
        "response_length": 1,
        "sample_index": 2,
        "advantage": [1.0],
        "reward": 0.0,
        "weight_version": ["4"],
        "train_weight_version": "4",
    },
]


def content(sample: DumpedSample) -> dict:
    """Everything but where it comes from; NaN as a word, because it equals nothing."""
    found = dict(vars(sample))
    for key, value in found.items():
        if isinstance(value, torch.Tensor):
            found[key] = ["nan" if math.isnan(each) else each for each in value.tolist()]
    return {key: value for key, value in found.items() if key not in ("path", "rollout_id")}


def json_lines(folder: Path) -> list[dict]:
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return [content(sample) for sample in Dumps([path])]


def test_a_step_is_a_rollout(tmp_path) -> None:
    rows, path = [row | {"step": number + 3} for number, row in enumerate(ROWS)], tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [sample.rollout_id for sample in Dumps([path])] == [3, 4]
    path.write_text("".join(json.dumps(row | {"rollout_id": 7}) + "\n" for row in rows))
    assert [sample.rollout_id for sample in Dumps([path])] == [7, 7]


def test_parquet_holds_what_json_lines_do(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "run.parquet"
    types = {"log_prob": pyarrow.list_(pyarrow.float32()), "rollout_log_prob": pyarrow.list_(pyarrow.float32())}
    table = pyarrow.table(
        {key: pyarrow.array([row[key] for row in ROWS], types.get(key)) for key in ROWS[0]}
        | {"rollout_id": [11, 11], "text": ["a", "b"]}
    )
    parquet.write_table(table, path, row_group_size=1)
    samples = [*Dumps([path])]
    assert [content(sample) for sample in samples] == json_lines(tmp_path)
    assert [sample.rollout_id for sample in samples] == [11, 11]
    parquet.write_table(table.set_column(table.schema.get_field_index("rollout_id"), "rollout_id", [[1, 2]]), path)
    assert [sample.rollout_id for sample in Dumps([path])] == [1, 2]
    parquet.write_table(table.drop_columns("rollout_id").append_column("step", [[5, 6]]), path)
    assert [sample.rollout_id for sample in Dumps([path])] == [5, 6]
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(ValueError, match=r"run.parquet"):
        [*Dumps([path])]


def test_safetensors_hold_what_json_lines_do(tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "run.safetensors"
    names = {
        "log_probs": "log_prob",
        "rollout_log_probs": "rollout_log_prob",
        "loss_masks": "loss_mask",
        "tokens": "token",
        "advantages": "advantage",
    }
    flat = {
        name: torch.tensor([math.nan if each is None else each for row in ROWS for each in row[key]])
        for name, key in names.items()
    }
    whole = {
        name: torch.tensor([row[key] for row in ROWS])
        for name, key in (
            ("response_lengths", "response_length"),
            ("sample_indices", "sample_index"),
            ("rewards", "reward"),
        )
    }
    safetensors.save_file(flat | whole, path, metadata={"rollout_id": "11"})
    samples = [*Dumps([path])]
    without = ("behavior_weight_versions", "proximal_weight_version")
    for sample, expected in zip(samples, json_lines(tmp_path), strict=True):
        found = content(sample)
        assert {key: found[key] for key in found if key not in without} == {
            key: value for key, value in expected.items() if key not in without
        }
        assert not sample.is_one_memory
    assert samples[0].rollout_id == 11
    safetensors.save_file(flat, path)
    with pytest.raises(ValueError, match=r"run.safetensors: has no response_lengths"):
        [*Dumps([path])]
    safetensors.save_file(flat | whole | {"tokens": torch.zeros(9)}, path)
    with pytest.raises(ValueError, match=r"tokens has 9 entries, response_lengths add up to 4"):
        [*Dumps([path])]
    path.write_bytes(b"no such file")
    with pytest.raises(ValueError, match=r"run.safetensors: cannot be read"):
        [*Dumps([path])]
