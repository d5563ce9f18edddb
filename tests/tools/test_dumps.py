# SPDX-License-Identifier: Apache-2.0
"""The samples in the hosts' dump files: one file of all ranks, a file per rank, JSON lines."""

import json
import shutil
import weakref
from pathlib import Path

import numpy
import pytest
import torch

from mis_ext.tools.dumps import DumpedSample, Dumps, Skipped, stream
from mis_ext.tools.dumps.formats import read_file as read_whole


def read(*paths: Path | str) -> list[DumpedSample]:
    return list(Dumps(paths, need_tokens=False))


def one_file_of_all_ranks(path: Path, *, order: tuple[int, ...] = (0, 1, 2), **more: object) -> Path:
    """As slime writes it with two data-parallel ranks: the samples, and who trained them when."""
    generator = torch.Generator().manual_seed(0)
    log_probs = [-3.0 * torch.rand(length, generator=generator) for length in (3, 1, 6)]
    samples = [
        {
            "data_parallel_rank": index % 2,
            "sample_index": index,
            "rollout_position": index,
            "tokens": torch.arange(len(x) + 4) + 100 * index,
            "total_lengths": len(x) + 4,
            "response_lengths": len(x),
            "loss_masks": torch.tensor([0] + [1] * (len(x) - 1)),
            "log_probs": x,
            "rollout_log_probs": x - 0.5,
            "advantages": torch.zeros(len(x)),
            "rewards": 1.0,
            "weight_versions": [str(index)],
        }
        for index, x in enumerate(log_probs)
    ]
    shards = [
        {"rank": rank, "data_parallel_rank": rank, "partition": [rank], "num_microbatches": [1]} for rank in (0, 1)
    ]
    content = {"format_version": 2, "rollout_id": 7, "rank": 0, "samples": [samples[i] for i in order]}
    torch.save(content | {"dp_shards": shards, "raw_reward": [1.0, 1.0, 1.0]} | more, path)
    return path


def test_one_file_of_all_ranks_gives_whole_samples_in_its_order(tmp_path) -> None:
    path = one_file_of_all_ranks(tmp_path / "train_7.pt")
    samples = read(path)
    assert [sample.response_length for sample in samples] == [3, 1, 6]
    assert [sample.token_ids[0] for sample in samples] == [0, 100, 200]
    assert [sample.response_ids.tolist() for sample in samples][:2] == [[4, 5, 6], [104]]
    assert [sample.response_mask.tolist() for sample in samples][:2] == [[0, 1, 1], [0]]
    assert [sample.behavior_weight_versions for sample in samples] == [["0"], ["1"], ["2"]]
    assert {(sample.rollout_id, sample.proximal_weight_version, sample.sampled_ids) for sample in samples} == {
        (7, None, None)
    }
    assert samples[2].name == f"{path}, its sample 2"
    for sample in samples:
        assert torch.equal(sample.behavior_log_probs, sample.proximal_log_probs - 0.5)
        assert len(sample.proximal_log_probs) == sample.response_length


def test_a_sample_that_lacks_what_others_have_lacks_it_alone(tmp_path) -> None:
    path = one_file_of_all_ranks(tmp_path / "7.pt")
    content = torch.load(path)
    del content["samples"][1]["rollout_log_probs"], content["samples"][2]["loss_masks"]
    torch.save(content, path)
    samples = read(path)
    assert [sample.behavior_log_probs is None for sample in samples] == [False, True, False]
    assert samples[2].response_mask.tolist() == [1] * 6


def test_the_same_samples_are_read_from_every_format(tmp_path) -> None:
    whole = one_file_of_all_ranks(tmp_path / "whole.pt")
    rows = torch.load(whole)["samples"]
    columns = {key: [row[key] for row in rows] for key in rows[0]}
    torch.save({"rollout_id": 7, "rank": 3, "rollout_data": columns}, tmp_path / "7_3.pt")
    # What Miles adds.
    layout = {"cp_rank": 0, "cp_size": 1, "qkv_format": "thd"}
    torch.save({"rollout_id": 7, "rank": 3, "rollout_data": columns} | layout, tmp_path / "miles.pt")
    torch.save(columns, tmp_path / "bare.pt")
    plain = [{key: x.tolist() if isinstance(x, torch.Tensor) else x for key, x in row.items()} for row in rows]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, plain)))
    expected = read(whole)
    for name in ("7_3.pt", "miles.pt", "bare.pt", "lines.jsonl"):
        samples = read(tmp_path / name)
        assert [sample.rollout_id for sample in samples] == [7 if name in ("7_3.pt", "miles.pt") else None] * 3
        for sample, other in zip(samples, expected, strict=True):
            assert torch.equal(sample.proximal_log_probs, other.proximal_log_probs)
            assert torch.equal(sample.behavior_log_probs, other.behavior_log_probs)
            for field in ("response_mask", "token_ids", "response_ids"):
                assert torch.equal(torch.as_tensor(getattr(sample, field)), getattr(other, field))
            assert sample.behavior_weight_versions == other.behavior_weight_versions


@pytest.mark.parametrize(("said", "rollout_id"), [({"step": 3}, 3), ({"step": 3, "rollout_id": 7}, 7)])
def test_a_step_is_a_rollout(tmp_path, said, rollout_id) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text(json.dumps({"log_prob": [-1.0], "rollout_log_prob": [-1.0]} | said))
    assert [sample.rollout_id for sample in Dumps([path])] == [rollout_id]


def test_tensors_of_one_memory_still_are(tmp_path) -> None:
    values = torch.rand(5)
    torch.save({"log_probs": [values], "rollout_log_probs": [values]}, tmp_path / "7.pt")
    assert read(tmp_path / "7.pt")[0].is_one_memory


def test_files_are_read_one_after_the_other(tmp_path) -> None:
    first = one_file_of_all_ranks(tmp_path / "7.pt")
    second = one_file_of_all_ranks(tmp_path / "8.pt", order=(2, 0), rollout_id=8)
    found = [(sample.rollout_id, sample.response_length) for sample in read(second, str(first))]
    assert found == [(8, 6), (8, 3), (7, 3), (7, 1), (7, 6)]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"format_version": 3}, "format_version must be 2 or absent, got 3"),
        ({"samples": {"log_probs": []}}, "its samples are not a list of dicts"),
        ({"samples": [[1.0]]}, "its samples are not a list of dicts"),
        (
            {"format_version": None, "rollout_data": {"log_probs": 5}},
            "log_probs must be a list with a value per sample",
        ),
        *(
            (
                {"format_version": None, "rollout_data": {"log_probs": [torch.ones(2)], key: value}},
                f"{key} must be a list with a value per sample, got ",
            )
            for key, value in (
                ("rewards", torch.tensor(1.0)),
                ("rewards", numpy.array(1.0)),
                ("metadata", {"a": 1}),
                ("log_probs", {0: torch.ones(2)}),
            )
        ),
        ({"samples": [{"tokens": torch.tensor(5)}]}, r"tokens must be a list, got tensor\(5\)"),
        *(
            (
                {"format_version": None, "rollout_data": {"response_lengths": values}},
                "response_lengths must be an integer of at least 0, got .*2.5",
            )
            for values in (torch.tensor([2.5, 2.0]), [torch.tensor(2.5)], [numpy.float32(2.5)], numpy.array([2.5]))
        ),
        (
            {"format_version": None, "rollout_data": {"log_probs": [torch.ones(2) * 1j]}},
            "log_probs must be numbers, got",
        ),
        ({"format_version": None, "rollout_data": []}, "contains a list, not a dict of lists"),
        (
            {"format_version": None, "rollout_data": {"log_probs": [torch.ones(2)]}, "cp_size": 2},
            r"has parts of responses \(cp_size 2\) and needs response_lengths, total_lengths to join them",
        ),
        ({"format_version": None, "rollout_data": {}, "cp_size": 0}, "cp_size must be an integer of at least 1, got 0"),
        ({"format_version": None, "rollout_data": {}, "cp_rank": "a"}, "cp_rank must be an integer of at least 0, got"),
    ],
)
def test_a_file_of_another_format_is_an_error_that_names_it(tmp_path, content, reason) -> None:
    path = one_file_of_all_ranks(tmp_path / "7.pt", **content)
    with pytest.raises(ValueError, match=rf"7\.pt: {reason}"):
        read(path)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"log_probs": ["-1", "-2"]}, r"log_probs must be numbers, got \['-1', '-2'\]"),
        ({"rollout_log_probs": [[-1.0], [-2.0]]}, r"rollout_log_probs must be numbers, got \[\[-1.0\], \[-2.0\]\]"),
        ({"advantage": "high"}, "advantages must be numbers, got 'high'"),
        ({"sample_index": "a"}, "sample_indices must be an integer, got 'a'"),
        ({"rollout_id": [1]}, r"rollout_id must be an integer, got \[1\]"),
        ({"rollout_id": 1.5}, r"rollout_id must be an integer, got 1\.5"),
        ({"response_length": "abc"}, "response_lengths must be an integer of at least 0, got 'abc'"),
        ({"response_length": -1}, "response_lengths must be an integer of at least 0, got -1"),
        ({"response_length": 2.5}, r"response_lengths must be an integer of at least 0, got 2\.5"),
        ({"log_probs": -1.0}, r"log_probs must be numbers, got -1\.0"),
        ({"tokens": 5}, "tokens must be a list, got 5"),
        ({"train_weight_version": [1]}, r"train_weight_version must be a number or a name, got \[1\]"),
        ({"loss_mask": 1, "response_length": 2}, "loss_masks must be a list, got 1"),
    ],
)
def test_what_is_no_number_is_named_by_its_key(tmp_path, values, reason) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text(json.dumps({"log_probs": [-1.0, -2.0], "rollout_log_probs": [-1.0, -2.0]} | values))
    with pytest.raises(ValueError, match=rf"words\.jsonl: {reason}"):
        read(path)


def test_an_integer_may_be_a_string(tmp_path) -> None:
    path = tmp_path / "words.jsonl"
    path.write_text(json.dumps({"log_probs": [-1.0], "rollout_log_probs": [-1.0], "sample_index": "3"}))
    assert read(path)[0].sample_index == 3


def test_log_probs_that_are_no_list_are_an_obstacle(tmp_path) -> None:
    values = torch.ones(2, 2)
    torch.save({"log_probs": [values], "rollout_log_probs": [values - 1.0]}, tmp_path / "7.pt")
    assert read(tmp_path / "7.pt")[0].obstacle == "lists of different lengths: log_probs 2 x 2, rollout_log_probs 2 x 2"


def test_an_advantage_may_be_null(tmp_path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text('{"log_probs": [-1.0, -2.0], "rollout_log_probs": [-1.0, -2.0], "advantages": [0.5, null]}')
    (sample,) = read(path)
    assert sample.advantages.isnan().tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16])
def test_advantages_of_parts_may_have_any_type(tmp_path, dtype) -> None:
    # A token belongs to the rank that has the one before it: rank 0 has the last token of the response.
    for rank, size in enumerate((1, 3)):
        values = [torch.full((size,), -1.0)]
        lengths = {"response_lengths": [4], "total_lengths": [8], "sample_indices": [0]}
        columns = {"log_probs": values, "rollout_log_probs": values, "advantages": [torch.ones(size, dtype=dtype)]}
        part = {"rollout_id": 7, "cp_rank": rank, "cp_size": 2, "rollout_data": columns | lengths}
        torch.save(part, tmp_path / f"7_{rank}.pt")
    (sample,) = read(*(tmp_path / f"7_{rank}.pt" for rank in range(2)))
    assert torch.equal(sample.advantages, torch.ones(4))


def test_a_file_given_twice_counts_once(tmp_path) -> None:
    path = one_file_of_all_ranks(tmp_path / "7.pt")
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"log_probs": [-1.0], "rollout_log_probs": [-1.0]}\n')
    dumps = Dumps([path, lines, str(path), lines])
    assert [sample.path for sample in dumps] == [str(path)] * 3 + [str(lines)]
    assert dumps.skipped == []


def test_equal_samples_of_a_group_are_different_samples(tmp_path) -> None:
    row = {"tokens": [1, 2], "log_probs": [-1.0], "rollout_log_probs": [-1.0], "response_lengths": 1}
    for name, indices in {"7_0.pt": [4, 5], "7_1.pt": [6, 6], "7_2.pt": [None, None]}.items():
        columns = {key: [value, value] for key, value in row.items()} | {"sample_indices": indices}
        torch.save({"rollout_id": 7, "rollout_data": columns}, tmp_path / name)
    dumps = Dumps(sorted(tmp_path.iterdir()))
    assert len(list(dumps)) == 6
    assert dumps.skipped == []


def test_a_file_without_samples_is_stated(tmp_path) -> None:
    empty = tmp_path / "7_1.pt"
    torch.save({"rollout_id": 7, "rollout_data": {"log_probs": [], "rollout_log_probs": []}}, empty)
    dumps = Dumps([one_file_of_all_ranks(tmp_path / "7.pt"), empty])
    assert len(list(dumps)) == 3
    assert dumps.skipped == [Skipped(str(empty), None, "contains no sample")]


def test_lines_without_a_sample_are_an_error_beside_other_files_too(tmp_path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    with pytest.raises(ValueError, match=r"empty\.jsonl: contains no sample"):
        list(Dumps([one_file_of_all_ranks(tmp_path / "7.pt"), empty]))


def test_one_file_is_in_memory_at_a_time(tmp_path, monkeypatch) -> None:
    paths = [one_file_of_all_ranks(tmp_path / f"{number}.pt", rollout_id=number) for number in range(3)]
    opened: list[Path] = []

    def watch(paths):
        for path in paths:
            opened.append(path)
            yield path

    samples = iter(Dumps(paths, watch=watch))
    alive = [weakref.ref(next(samples).proximal_log_probs) for _ in range(3)]
    assert opened == paths[:1]
    while_reading: list[list[object]] = []

    def read_file(*arguments, **keywords):
        while_reading.append([reference() for reference in alive[:2]])
        return read_whole(*arguments, **keywords)

    monkeypatch.setattr(stream, "read_file", read_file)
    next(samples)
    assert opened == paths[:2]
    assert while_reading == [[None, None]]
    assert [reference() for reference in alive] == [None] * 3


def test_a_file_that_cannot_be_parsed_is_named_when_its_turn_comes(tmp_path) -> None:
    good = one_file_of_all_ranks(tmp_path / "7.pt")
    content = good.read_bytes()
    (tmp_path / "8.pt").write_bytes(content[: len(content) // 2])
    samples = iter(Dumps([good, tmp_path / "8.pt"]))
    assert [next(samples).rollout_id for _ in range(3)] == [7] * 3
    with pytest.raises(ValueError, match=r"8\.pt: cannot be read"):
        next(samples)


def test_runs_in_folders_of_their_own_are_not_each_other_s_ranks(tmp_path) -> None:
    for run in ("a", "b"):
        (tmp_path / run).mkdir()
        one_file_of_all_ranks(tmp_path / run / "7.pt", run=run)
    assert len(read(tmp_path / "a/7.pt", tmp_path / "b/7.pt")) == 6
    shutil.copy(tmp_path / "b/7.pt", tmp_path / "a/8.pt")
    assert len(read(tmp_path / "a/7.pt", tmp_path / "a/8.pt")) == 3
