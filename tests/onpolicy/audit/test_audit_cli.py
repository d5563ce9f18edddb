# SPDX-License-Identifier: Apache-2.0
"""`mis-ext audit` on files as slime and Miles write them, and on JSON lines."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import json_of

from mis_ext.tools.cli import main as mis_ext_command
from mis_ext.tools.dumps import DumpedSample, Dumps

pytest.importorskip("rich", reason="the command shows its report with rich: pip install rich")


def main(*arguments: object) -> int:
    return mis_ext_command(["audit", *map(str, arguments)])


def read(*paths: Path) -> list[DumpedSample]:
    return list(Dumps(paths, need_tokens=False))


def error_of(capsys, *arguments: object) -> str:
    with pytest.raises(SystemExit) as caught:
        main(*arguments)
    assert caught.value.code == 2
    return capsys.readouterr().err


def rollout_data(*lengths: int, seed: int = 0) -> dict:
    """The part of what both hosts dump that the audit reads, among what it does not."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = [-0.01 - 3.0 * torch.rand(length, generator=generator) for length in lengths]
    return {
        "tokens": [torch.arange(length + 5) + 1000 for length in lengths],
        "response_lengths": [*lengths],
        "total_lengths": [length + 5 for length in lengths],
        "loss_masks": [torch.ones(length, dtype=torch.int) for length in lengths],
        "log_probs": log_probs,
        "rollout_log_probs": [x.clone() for x in log_probs],
        "advantages": [torch.zeros(length) for length in lengths],
        "rewards": [1.0 for _ in lengths],
        "partition": range(len(lengths)),
    }


def dump(folder: Path, rank: int, data: dict) -> Path:
    path = folder / f"7_{rank}.pt"
    torch.save({"rollout_id": 7, "rank": rank, "rollout_data": data}, path)
    return path


def lines(folder: Path, *rows: dict) -> Path:
    path = folder / "samples.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def report_of(*arguments: object) -> dict:
    return json_of("audit", *arguments)[1]


def test_dumps_of_all_ranks_that_agree_pass_with_records_of_the_engine(tmp_path, capsys) -> None:
    data = [rollout_data(4, 9, seed=rank) for rank in range(5)]
    paths = [dump(tmp_path, rank, of_rank) for rank, of_rank in enumerate(data)]
    records = tmp_path / "records.jsonl"
    with records.open("w") as file:
        for of_rank in data:
            for tokens, log_probs in zip(of_rank["tokens"], of_rank["rollout_log_probs"], strict=True):
                row = {"tokens": tokens.tolist(), "rollout_log_probs": log_probs.tolist()}
                file.write(json.dumps(row | {"response_length": len(log_probs)}) + "\n")
    assert main(*paths) == 1
    assert "UNPROVED" in capsys.readouterr().out
    assert main(*paths, "--engine-records", records) == 0
    assert "EXACT" in capsys.readouterr().out
    report = report_of(*paths, "--engine-records", records)
    assert (report["num_samples"], report["num_recorded"], report["num_active_tokens"]) == (10, 10, 65)
    assert report["files"] == [str(path) for path in paths]


def test_one_ulp_in_the_dump_of_one_rank_is_found_there(tmp_path) -> None:
    data = rollout_data(4, 9)
    data["rollout_log_probs"][1][6] = torch.nextafter(data["rollout_log_probs"][1][6], torch.tensor(0.0))
    data["loss_masks"][0][1] = 0
    data["rollout_log_probs"][0][1] = math.nan
    paths = [dump(tmp_path, 0, rollout_data(3)), dump(tmp_path, 1, data)]
    assert main(*paths) == 1
    report = report_of(*paths)
    first = report["first_divergence"]
    # Sample 1 of the second file; of its 14 ids the last 9 are the response.
    assert (first["sample"], first["position"], first["token_id"], first["ulps"]) == (2, 6, 1011, 1)
    assert first["name"] == f"{paths[1]}, its sample 1"
    assert (report["verdict"], report["max_ulp"], report["num_active_tokens"]) == ("DIFFERENT", 1, 15)


@pytest.mark.parametrize("key", ["log_probs", "rollout_log_probs"])
def test_a_file_without_log_probs_is_invalid_and_named(tmp_path, capsys, key) -> None:
    data = rollout_data(4, 2)
    del data[key]
    paths = [dump(tmp_path, 0, rollout_data(4)), dump(tmp_path, 1, data)]
    assert main(*paths) == 1
    assert "INVALID" in capsys.readouterr().out
    side = "train" if key == "log_probs" else "rollout"
    report = report_of(*paths)
    assert report["verdict"] == "INVALID"
    assert [(p["sample"], p["name"], p["reason"]) for p in report["problems"]] == [
        (1 + index, f"{paths[1]}, its sample {index}", f"{side} log-probs are missing") for index in range(2)
    ]


def test_a_file_with_neither_side_is_one_missing_sample(tmp_path) -> None:
    report = report_of(dump(tmp_path, 0, {}), dump(tmp_path, 1, rollout_data(4)))
    assert (report["verdict"], report["num_samples"]) == ("INVALID", 2)


@pytest.mark.parametrize(
    "versions",
    [
        [["3", "4"], ["4"]],
        [[[{"version": "3", "abs_start": 0, "abs_end": 2}], [{"version": 4}]], []],
        [3, None],
    ],
)
def test_weight_versions_of_all_shapes_are_compared_with_the_trainers(tmp_path, versions) -> None:
    data = rollout_data(4, 16) | {"weight_versions": versions}
    data["rollout_log_probs"][0] -= 1.0
    report = report_of(dump(tmp_path, 0, data | {"train_weight_version": [4, 4]}))
    assert "stale weights, or a tensor that was not sent" in report["hint"]
    assert report_of(dump(tmp_path, 0, data))["hint"] is None


def test_a_bare_rollout_data_with_lists_of_floats_is_read_as_float32(tmp_path) -> None:
    data = rollout_data(6)
    data["rollout_log_probs"] = [x.tolist() for x in data["rollout_log_probs"]]
    path = tmp_path / "bare.pt"
    torch.save(data, path)
    report = report_of(path)
    assert (report["verdict"], report["rollout_dtype"]) == ("UNPROVED", "float32")


def test_json_lines_keep_float32_exactly_and_hosts_own_names_are_known(tmp_path) -> None:
    x = -3.0 * torch.rand(6)
    row = {"log_probs": x.tolist(), "rollout_log_probs": x.tolist(), "tokens": [9, 1, 2, 3, 4, 5, 6]}
    path = lines(tmp_path, row | {"loss_mask": [0, 1, 1, 1, 1, 1], "response_length": 6})
    report = report_of(path)
    assert (report["verdict"], report["num_active_tokens"], report["train_dtype"]) == ("UNPROVED", 5, "float32")
    moved = torch.nextafter(x, torch.zeros(6)).tolist()
    late = row | {"rollout_log_probs": [*x.tolist()[:5], moved[5]], "response_length": 6}
    first = report_of(lines(tmp_path, row, late))["first_divergence"]
    assert (first["sample"], first["position"], first["token_id"], first["ulps"]) == (1, 5, 6, 1)


def test_json_lines_with_rounded_decimals_are_float64_and_different(tmp_path) -> None:
    x = -3.0 * torch.rand(6)
    path = lines(tmp_path, {"log_probs": x.tolist(), "rollout_log_probs": [float(f"{v:.6f}") for v in x.tolist()]})
    report = report_of(path)
    assert (report["verdict"], report["train_dtype"], report["rollout_dtype"]) == ("DIFFERENT", "float64", "float64")


IDS = {"log_probs": [-1.0, -2.0], "rollout_log_probs": [-1.0, -2.0], "rollout_token_ids": [7, 8]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tokens": [5, 6, 7]}, "the token id is 6 in training and 7 in the rollout"),
        ({"tokens": [6], "response_length": 2}, "train token ids of shape [1]"),
        ({"response_length": 300}, "mask values of shape [300]"),
        ({"rollout_token_ids": [7, None]} | {"tokens": [5, 7, 8]}, "not comparable"),
        ({"loss_mask": [1, None]}, "not comparable"),
        ({"tokens": ["a", "b"]}, "not comparable"),
    ],
)
def test_ids_and_lengths_that_do_not_fit_the_log_probs_are_invalid(tmp_path, change, reason) -> None:
    report = report_of(lines(tmp_path, IDS | change))
    assert report["verdict"] == "INVALID"
    assert reason in report["problems"][0]["reason"]
    assert report["problems"][0]["name"].endswith("samples.jsonl, its sample 0")


def test_text_in_a_line_may_hold_characters_that_end_a_line_elsewhere(tmp_path) -> None:
    path = tmp_path / "samples.jsonl"
    row = json.dumps(IDS | {"text": "a\u2028b\x85c"}, ensure_ascii=False)
    path.write_bytes(b"\xef\xbb\xbf" + f"{row}\r\n{row}\r\n".encode())
    assert len(read(path)) == 2


def test_numbers_and_arrays_of_numpy_need_no_trust(tmp_path) -> None:
    data = rollout_data(4, 9)
    data |= {"rewards": [np.float64(1.0), np.float32(2.0)], "response_lengths": np.array([4, 9])}
    data["log_probs"] = [x.numpy().copy() for x in data["log_probs"]]
    data["rollout_log_probs"] = [tuple(x.tolist()) for x in data["rollout_log_probs"]]
    assert report_of(dump(tmp_path, 0, data))["verdict"] == "UNPROVED"
    data["rollout_log_probs"][0] = (-0.1, -0.2, -0.3, -0.4)
    assert read(dump(tmp_path, 0, data))[0].behavior_log_probs.dtype == torch.float64


def test_an_empty_response_has_no_token_ids(tmp_path) -> None:
    empty = {"log_probs": [], "rollout_log_probs": [], "tokens": [5], "response_length": 0, "rollout_token_ids": []}
    whole = IDS | {"tokens": [5, 7, 8], "response_length": 2}
    assert report_of(lines(tmp_path, empty, whole))["verdict"] == "UNPROVED"


def test_columns_of_different_lengths_are_an_error(tmp_path, capsys) -> None:
    data = rollout_data(4, 4)
    data["loss_masks"].pop()
    assert "'loss_masks': 1" in error_of(capsys, dump(tmp_path, 0, data))
    data = rollout_data(4, 4) | {"train_weight_version": [4]}
    assert "'train_weight_version': 1" in error_of(capsys, dump(tmp_path, 0, data))


class Dangerous:
    """Reading it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return Path.write_text, (self.path, "ran")


def test_code_in_a_file_runs_only_if_the_user_trusts_it(tmp_path, capsys) -> None:
    mark = tmp_path / "mark"
    path = dump(tmp_path, 0, rollout_data(4) | {"object": Dangerous(mark)})
    error = error_of(capsys, path)
    assert "--trust-pickle" in error
    assert "Unsupported global: GLOBAL getattr was not an allowed global by default (if it" in error
    assert not mark.exists()
    assert report_of(path, "--trust-pickle")["verdict"] == "UNPROVED"
    assert mark.exists()


def test_tensors_keep_the_dtype_they_were_dumped_in(tmp_path) -> None:
    data = rollout_data(4)
    data["rollout_log_probs"] = [x.bfloat16() for x in data["rollout_log_probs"]]
    sample = read(dump(tmp_path, 0, data))[0]
    assert (sample.proximal_log_probs.dtype, sample.behavior_log_probs.dtype) == (torch.float32, torch.bfloat16)
