# SPDX-License-Identifier: Apache-2.0
"""The exactness audit gives the report of one process on any number of ranks."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from audit_lists import GOOD, NAN, SHOWN, audit_logprobs, copies, log_probs, next_number, tensors, tied_to
from process_ranks import joined, run_processes

from mis_ext.onpolicy.audit.audit_report import Evidence

SPREADS = {1: [6], 2: [4, 2], 4: [1, 0, 3, 2]}


def cases() -> dict[str, tuple[list, list, dict]]:
    train = log_probs(30, 20, 1, 40, 8, 25)
    noisy = tied_to(train, noise=1e-2)
    masks = [(torch.arange(len(x)) % 4 != 0).int() for x in train]
    masks[2][:] = 0
    broken = copies(noisy)
    broken[4][3] = NAN
    late = copies(train)
    late[5][7] = next_number(late[5])[7]
    return {
        "exact": (train, copies(train), {}),
        "one ulp": (train, late, {"train_token_ids": [torch.arange(len(x)) for x in train]}),
        "noisy": (train, noisy, {"masks": masks}),
        "broken": (train, broken, {"masks": masks}),
        "missing": (train, [*noisy[:5], None], {}),
        "no token": (train, noisy, {"masks": [torch.zeros(len(x)) for x in train]}),
        "stale": (train, noisy, {"train_weight_version": [2] * 6, "rollout_weight_versions": [1, 2, 1, 1, 2, 1]}),
        "two dtypes": ([*train[:3], *(x.double() for x in train[3:])], noisy, {}),
    }


def of_rank(column: list | None, spread: list[int], rank: int) -> list | None:
    start = sum(spread[:rank])
    return None if column is None else column[start : start + spread[rank]]


def work(rank: int, folder: str) -> None:
    with joined(rank, 4, folder, seconds=40):
        Path(folder, f"{rank}.json").write_text(json.dumps(reports_of(rank)))
        dist.barrier()


def reports_of(rank: int) -> dict[str, dict | str]:
    groups = {size: dist.new_group(list(range(size)), timeout=timedelta(seconds=40)) for size in SPREADS}
    out = {}
    for size, spread in SPREADS.items():
        if rank >= size:
            continue
        for name, (train, rollout, columns) in cases().items():
            report = audit_logprobs(
                of_rank(train, spread, rank),
                of_rank(rollout, spread, rank),
                **{key: of_rank(column, spread, rank) for key, column in columns.items()},
                group=groups[size],
            )
            out[f"{size} {name}"] = report.to_dict()
    # A rank without its lists does not leave the others waiting.
    broken = None if rank == 2 else log_probs(3)
    out["4 no list"] = audit_logprobs(broken, log_probs(3), group=groups[4]).to_dict()
    broken_ids = {"train_token_ids": [[1, 2, None if rank == 1 else 3]], "rollout_token_ids": [[1, 2, 3]]}
    out["4 broken ids"] = audit_logprobs(log_probs(3), log_probs(3), **broken_ids, group=groups[4]).to_dict()
    for name, column in {
        "4 versions": {"rollout_weight_versions": 5 if rank == 1 else [5]},
        "4 names": {"names": [lambda: None] if rank == 1 else ["a"]},
        "4 evidence": {"evidence": SHOWN if rank else Evidence(rollout="a record")},
    }.items():
        rollout = [x - 1.0 if name == "4 names" else x for x in log_probs(3)]
        out[name] = audit_logprobs(log_probs(3), rollout, **column, group=groups[4]).to_dict()
    try:
        audit_logprobs(log_probs(3), log_probs(3), provenance="wrong" if rank == 3 else "decode", group=groups[4])
    except ValueError as error:
        out["4 wrong provenance"] = str(error)
    said = "decode" if rank == 0 else "prefill"
    out["4 provenances"] = audit_logprobs(log_probs(3), log_probs(3), provenance=said, group=groups[4]).to_dict()
    return out


@pytest.mark.whole_run
@pytest.mark.distributed
def test_every_rank_gets_the_report_of_one_process_for_any_number_of_ranks(tmp_path) -> None:
    run_processes(work, str(tmp_path), world_size=4)
    found = [json.loads(Path(tmp_path, f"{rank}.json").read_text()) for rank in range(4)]
    for name, (train, rollout, columns) in cases().items():
        expected = json.loads(json.dumps(audit_logprobs(train, rollout, **columns).to_dict()))
        for size in SPREADS:
            for rank in range(size):
                assert found[rank][f"{size} {name}"] == expected, (size, rank, name)
    assert [report["4 no list"]["verdict"] for report in found] == ["INVALID"] * 4
    assert found[0]["4 no list"] == found[3]["4 no list"]
    for name, problem in (("4 broken ids", "not comparable"), ("4 provenances", "provenance of their log-probs")):
        assert [report[name] for report in found] == [found[0][name]] * 4
        assert problem in found[0][name]["problems"][0]["reason"]
    for report in found:
        assert "rollout_weight_versions must be a list" in report["4 versions"]["problems"][0]["reason"]
        assert (report["4 names"]["verdict"], report["4 names"]["num_nonzero"]) == ("DIFFERENT", 12)
        assert report["4 evidence"]["evidence"] == {"rollout": "a record", "train": None}
        assert "provenance on rank 3 must be one of decode | prefill | unknown" in report["4 wrong provenance"]
    verdicts = [audit_logprobs(train, rollout, **columns).verdict.value for train, rollout, columns in cases().values()]
    assert set(verdicts) == {"EXACT", "DIFFERENT", "INVALID"}


def test_a_group_that_cannot_carry_a_report_is_refused() -> None:
    class FaultTolerant:
        _replica_id = 0

    with pytest.raises(TypeError, match="got a FaultTolerant"):
        audit_logprobs(tensors(GOOD), tensors(GOOD), group=FaultTolerant())
