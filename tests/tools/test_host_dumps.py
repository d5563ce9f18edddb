# SPDX-License-Identifier: Apache-2.0
"""The reader and the audit on files that the hosts' own saving code wrote (`tests/data/host_dumps/record.py`)."""

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType

import pytest
import torch
from archived import unpacked
from commands import json_of

from mis_ext.tools.cli import main
from mis_ext.tools.dumps import DumpedSample, Dumps, num_usable_tokens

DATA = Path(__file__).parents[1] / "data" / "host_dumps"


def recorder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_host_dumps", DATA / "record.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


record = recorder()
SAMPLES = record.samples()
NUM_ACTIVE = sum(sum(sample["mask"]) for sample in SAMPLES)
HOSTS = ("slime", "slime_before", "miles", "miles_bshd")


@pytest.fixture(scope="module")
def dumps(tmp_path_factory) -> Path:
    return unpacked(DATA / "dumps.tar.xz", tmp_path_factory.mktemp("dumps"))


def train_files(dumps: Path, host: str) -> list[Path]:
    return sorted((dumps / host / "train_data").iterdir(), key=lambda path: (len(path.name), path.name))


def rollout_file(dumps: Path, host: str = "slime") -> Path:
    return dumps / host / "rollout_data" / "7.pt"


def by_index(samples: list[DumpedSample]) -> list[DumpedSample]:
    return sorted(samples, key=lambda sample: sample.sample_index)


def audit(*arguments: object) -> dict:
    code, report = json_of("audit", *arguments)
    assert code == (0 if report["passed"] else 1)
    return report


@pytest.mark.parametrize("host", HOSTS)
def test_every_sample_of_every_rank_is_read_once_and_whole(dumps, host) -> None:
    for paths in (train_files(dumps, host), train_files(dumps, host)[::-1]):
        samples = by_index(list(Dumps(paths)))
        assert [sample.sample_index for sample in samples] == [0, 1, 2, 3]
        for sample, made in zip(samples, SAMPLES, strict=True):
            assert torch.equal(sample.proximal_log_probs, torch.tensor(made["log_probs"]))
            assert torch.equal(sample.behavior_log_probs, torch.tensor(made["rollout_log_probs"]))
            assert sample.response_mask.tolist() == made["mask"]
            assert sample.token_ids.tolist() == made["tokens"]
            assert sample.response_ids.tolist() == made["tokens"][-len(made["mask"]) :]
            assert (sample.rollout_id, sample.part, sample.problem) == (7, None, None)
            assert sample.behavior_weight_versions == (made["weight_versions"] if "miles" in host else None)


@pytest.mark.parametrize("host", HOSTS)
def test_the_audit_finds_the_one_different_token_of_all_ranks(dumps, host, tmp_path) -> None:
    report = audit(*train_files(dumps, host))
    assert (report["verdict"], report["problems"]) == ("DIFFERENT", [])
    assert (report["num_samples"], report["num_active_tokens"], report["num_nonzero"]) == (4, NUM_ACTIVE, 1)
    first = report["first_divergence"]
    sample, position = record.DIFFERENT
    ids = SAMPLES[sample]["tokens"][-len(SAMPLES[sample]["mask"]) :]
    assert (first["position"], first["token_id"], first["ulps"]) == (position, ids[position], 1)
    assert first["train"] == SAMPLES[sample]["log_probs"][position]


def test_what_was_skipped_is_stated_for_every_file_and_reason(dumps) -> None:
    paths = train_files(dumps, "miles")
    reader = Dumps(paths)
    assert len(list(reader)) == 4
    reasons = {Path(path).name: (count, reason) for path, count, reason in reader.skipped}
    # Of 16 ranks 4 hold what counts: two of context times two of data parallelism, on the last of two stages.
    assert len(reasons) == 12
    assert sum("no trainer log-probs" in reason for _, reason in reasons.values()) == 4
    assert sum("the same numbers as in" in reason for _, reason in reasons.values()) == 8
    assert {count for count, _ in reasons.values()} == {2}
    # Iterated anew, nothing adds up.
    assert len(list(reader)) == 4
    assert len(reader.skipped) == 12


@pytest.mark.parametrize("host", ["miles", "miles_bshd"])
def test_a_context_parallel_rank_without_its_file_is_named(dumps, host, tmp_path) -> None:
    paths = [path for path in train_files(dumps, host) if torch.load(path)["cp_rank"] == 0]
    report = audit(*paths)
    assert report["verdict"] == "INVALID"
    assert len(report["problems"]) == 4
    assert "the files of context-parallel ranks 1 are not given" in report["problems"][0]["reason"]
    with pytest.raises(ValueError, match="no usable tokens"):
        list(Dumps(paths))


def test_an_earlier_pipeline_stage_alone_has_no_trainer_log_probs(dumps, tmp_path) -> None:
    paths = [path for path in train_files(dumps, "miles") if "log_probs" not in torch.load(path)["rollout_data"]]
    assert len(paths) == 8
    report = audit(*paths)
    assert (report["verdict"], report["num_samples"]) == ("INVALID", 4)
    assert {problem["reason"] for problem in report["problems"]} == {"train log-probs are missing"}


def test_context_parallel_ranks_of_two_runs_are_refused(dumps, tmp_path) -> None:
    paths = [Path(shutil.copy(path, tmp_path)) for path in train_files(dumps, "miles_bshd")]
    content = torch.load(paths[0])
    content["rollout_data"]["log_probs"][3] -= 1.0
    torch.save(content, tmp_path / "7_9.pt")
    with pytest.raises(ValueError, match=r"7_9.pt, its sample 3: context-parallel rank 0 has other .*7_0.pt"):
        list(Dumps([*paths, tmp_path / "7_9.pt"]))


def test_tensor_parallel_ranks_that_disagree_both_count(dumps, tmp_path) -> None:
    paths = [Path(shutil.copy(path, tmp_path)) for path in train_files(dumps, "slime_before")]
    content = torch.load(paths[0])
    content["rollout_data"]["log_probs"][0] -= 1.0
    torch.save(content, tmp_path / "7_2.pt")
    samples = list(Dumps([*paths, tmp_path / "7_2.pt"]))
    assert sorted(sample.sample_index for sample in samples) == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("host", ["slime_before", "miles_bshd"])
def test_one_tensor_for_both_sides_is_seen_in_the_files_of_ranks_too(dumps, host, tmp_path) -> None:
    paths = []
    for path in train_files(dumps, host):
        content = torch.load(path)
        data = content["rollout_data"]
        data["log_probs"] = data["rollout_log_probs"]
        paths.append(tmp_path / path.name)
        torch.save(content, paths[-1])
    # A float32 and a float64 sample more make all of the audit float64.
    others = [tmp_path / "halves.jsonl", tmp_path / "tenths.jsonl"]
    for other, values in zip(others, ([-0.5], [-0.1]), strict=True):
        other.write_text(json.dumps({"log_probs": values, "rollout_log_probs": values}))
    for added in ([], others):
        report = audit(*paths, *added)
        assert (report["verdict"], len(report["problems"])) == ("INVALID", 4)
        assert all("the same memory" in problem["reason"] for problem in report["problems"])


# --- evidence


def equal_files(dumps: Path, folder: Path, host: str = "slime") -> list[Path]:
    """The host's files, in which the trainer has the engine's number at the one place."""
    folder.mkdir(exist_ok=True)
    paths = []
    for path in train_files(dumps, host):
        content = torch.load(path)
        for sample in content["samples"]:
            sample["log_probs"] = sample["rollout_log_probs"].clone()
        paths.append(folder / path.name)
        torch.save(content, paths[-1])
    return paths


def test_a_copy_is_no_pass_until_the_records_of_the_engine_have_it(dumps, tmp_path) -> None:
    (path,) = equal_files(dumps, tmp_path / "copy")
    report = audit(path)
    assert (report["verdict"], report["passed"], report["num_nonzero"]) == ("UNPROVED", False, 0)
    shown = audit(path, "--engine-records", rollout_file(dumps))
    assert (shown["verdict"], shown["num_recorded"]) == ("EXACT", 4)
    assert shown["engine_records"] == [str(rollout_file(dumps))]


def test_versions_that_only_the_records_of_the_engine_have_are_compared(dumps, tmp_path) -> None:
    (path,) = equal_files(dumps, tmp_path / "versions")
    content = torch.load(path)
    for sample in content["samples"]:
        sample["train_weight_version"] = "another"
        sample["log_probs"] -= 1.0
    torch.save(content, path)
    found = "sampled with other weights"
    assert found not in audit(path)["hint"]
    assert found in audit(path, "--engine-records", rollout_file(dumps))["hint"]


def test_rollout_log_probs_that_are_not_those_of_the_engine_are_invalid(dumps, tmp_path) -> None:
    (path,) = equal_files(dumps, tmp_path / "filled")
    content = torch.load(path)
    # The engine's were lost, and filled in from the trainer.
    for sample in content["samples"]:
        sample["rollout_log_probs"] = sample["log_probs"] = sample["log_probs"] - 0.5
        sample["log_probs"] = sample["log_probs"].clone()
    torch.save(content, path)
    assert audit(path)["verdict"] == "UNPROVED"
    report = audit(path, "--engine-records", rollout_file(dumps))
    assert (report["verdict"], len(report["problems"])) == ("INVALID", 4)
    first = report["problems"][0]
    assert (first["sample"], first["position"]) == (0, 0)
    assert "in the engine's record" in first["reason"]
    assert "between the engine and the trainer" in first["reason"]
    # Under the mask nothing is compared.
    masked = SAMPLES[0]["mask"].index(0)
    for sample, made in zip(content["samples"], SAMPLES, strict=True):
        sample["log_probs"] = torch.tensor(made["rollout_log_probs"])
        sample["rollout_log_probs"] = sample["log_probs"].clone()
    content["samples"][0]["rollout_log_probs"][masked] = 0.0
    torch.save(content, path)
    assert audit(path, "--engine-records", rollout_file(dumps))["verdict"] == "EXACT"


def test_records_of_other_samples_show_nothing(dumps, tmp_path) -> None:
    (path,) = equal_files(dumps, tmp_path / "copy")
    record_file = tmp_path / "7.pt"
    content = torch.load(rollout_file(dumps))
    del content["samples"][2]
    torch.save(content, record_file)
    report = audit(path, "--engine-records", record_file)
    assert (report["verdict"], report["num_recorded"]) == ("UNPROVED", 3)
    content["samples"][0]["tokens"][0] += 1
    torch.save(content, record_file)
    report = audit(path, "--engine-records", record_file)
    assert "the token ids differ from those" in report["problems"][0]["reason"]


def test_without_numbers_records_are_found_by_ids_of_which_several_may_be_the_same(tmp_path) -> None:
    # Two answers of a group can have the same ids, and log-probs of two batches.
    rows = [{"tokens": [4, 5, 6], "rollout_log_probs": [-1.5, value], "response_length": 2} for value in (-0.1, -0.3)]
    records, audited = tmp_path / "records.jsonl", tmp_path / "audited.jsonl"
    records.write_text("\n".join(map(json.dumps, rows)))
    both = [row | {"log_probs": row["rollout_log_probs"]} for row in rows[::-1]]
    audited.write_text("\n".join(map(json.dumps, both)))
    report = audit(audited, "--engine-records", records)
    assert (report["verdict"], report["num_active_tokens"]) == ("EXACT", 4)
    both[0]["rollout_log_probs"] = both[0]["log_probs"] = [-1.5, -0.2]
    audited.write_text("\n".join(map(json.dumps, both)))
    assert [(p["sample"], p["position"]) for p in audit(audited, "--engine-records", records)["problems"]] == [(0, 1)]


def test_a_mask_that_cannot_be_read_is_a_problem_of_its_sample_with_records_too(tmp_path) -> None:
    row = {"tokens": [4, [5], None], "rollout_log_probs": [-1.5, -0.1], "response_length": 2}
    records, audited = tmp_path / "records.jsonl", tmp_path / "audited.jsonl"
    records.write_text(json.dumps(row))
    audited.write_text(json.dumps(row | {"log_probs": [-1.5, -0.1], "loss_mask": [1, None]}))
    report = audit(audited, "--engine-records", records)
    assert "not comparable" in report["problems"][0]["reason"]


def test_a_file_with_trainer_log_probs_is_no_record_of_the_engine(dumps, tmp_path, capsys) -> None:
    pytest.importorskip("rich")
    (path,) = equal_files(dumps, tmp_path / "copy")
    with pytest.raises(SystemExit) as caught:
        main(["audit", str(path), "--engine-records", str(path)])
    assert caught.value.code == 2
    assert "is not a record of the engine, because it has trainer log-probs" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_what_a_host_dumps_before_training_is_read_and_alone_says_what_it_lacks(dumps, host, tmp_path) -> None:
    samples = list(Dumps([rollout_file(dumps, host)], need_tokens=False))
    assert [sample.sample_index for sample in samples] == [0, 1, 2, 3]
    assert [sample.behavior_log_probs.tolist() for sample in samples] == [x["rollout_log_probs"] for x in SAMPLES]
    assert [num_usable_tokens(sample) for sample in samples] == [0] * 4
    report = audit(rollout_file(dumps, host))
    assert "written before training" in report["problems"][0]["reason"]
