# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the scoring: what it draws, what it compares, that a wrong number ends it, and a run on a CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import bench_scoring
import pytest
import scoring_hosts
import scoring_measure
import scoring_whole
import torch
import torch.distributed as dist
from scoring_work import Batches, Logits, Rows
from workload import Shape, World

import mis_ext
from mis_ext.keys.rows import LOSS_ROWS

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
HOSTS = {name: os.environ.get(f"MIS_EXT_{name.upper()}") for name in ("miles", "slime")}
QUICK = ["--device", "cpu", "--repeats", "1", "--budget", "0"]


def batches(dtype=torch.float32) -> Batches:
    return Batches(Shape(3, 40), 11, dtype=dtype, world=World(CPU), seed=0)


def test_every_micro_batch_has_lengths_that_none_has_had() -> None:
    drawn = batches()
    found = [drawn.new() for _ in range(12)]
    assert len({tuple(item["response_lengths"]) for item in found}) == len(found)
    for item in found:
        assert item["logits"].shape == (1, sum(item["total_lengths"]), 11)
        assert all(t > r for t, r in zip(item["total_lengths"], item["response_lengths"], strict=True))
        assert [len(x) for x in item["log_probs"]] == item["response_lengths"]


def test_logits_are_a_part_of_one_buffer_and_no_leaf() -> None:
    drawn = batches()
    item = drawn.new()
    assert item["logits"].data_ptr() == drawn.logits.buffer.data_ptr()
    assert item["logits"].requires_grad
    assert not item["logits"].is_leaf


def test_a_refilled_buffer_has_the_same_bits() -> None:
    drawn = batches()
    before = drawn.logits.buffer.clone()
    drawn.logits.buffer.zero_()
    drawn.refilled()
    assert torch.equal(drawn.logits.buffer, before)


def test_old_log_probs_are_those_of_the_tokens_and_no_ratio_is_at_a_clip_bound() -> None:
    item = batches().new()
    log_p = item["logits"][0].detach().double().log_softmax(-1)
    start = 0
    for tokens, total, response, old in zip(
        item["unconcat_tokens"], item["total_lengths"], item["response_lengths"], item["log_probs"], strict=True
    ):
        rows = log_p[start + total - response - 1 : start + total - 1]
        ratio = rows.gather(-1, tokens[-response:, None])[:, 0] - old
        steps = ratio / 0.01
        # A quantum of the old log-probs and what float32 rounds are a hundredth of a step at most.
        assert float((steps - steps.round()).abs().max()) < 0.01
        start += total
    args = scoring_hosts.host_args({})
    for bound in (1.0 - args.eps_clip, 1.0 + args.eps_clip_high):
        steps = torch.tensor(bound).log() / 0.01
        assert float((steps - steps.round()).abs()) > 0.2


def test_a_row_predicts_the_token_after_it() -> None:
    assert Rows.of([5, 4], [2, 3]).at_T.tolist() == [2, 3, 5, 6, 7]


def test_a_context_parallel_rank_has_the_rows_of_its_two_chunks() -> None:
    # Positions 0 1 | 2 3 | 4 . | . .; positions 1, 2 and 3 predict the response.
    found = [Rows.of([5], [3], cp_rank=rank, cp_size=2) for rank in (0, 1)]
    assert [rows.count for rows in found] == [4, 4]
    assert [rows.at_T.tolist() for rows in found] == [[1], [0, 1]]


def plain_host(factor: float) -> scoring_hosts.Host:
    """A host whose own loss is ours, times a factor where it is called as the host's own."""

    def loss(args, batch, logits):
        is_own = args.custom_loss_function_path is None
        found, metrics = mis_ext.policy_loss(args, batch, logits)
        found = found * (factor if is_own else 1.0)
        return found, {"keys": [*metrics], "values": torch.tensor([0.0, *metrics.values()])}

    return scoring_hosts.Host("slime", loss, None, None)


def run_part_a(host: scoring_hosts.Host, *more: str) -> list[dict]:
    options = bench_scoring.parsed([*QUICK, "--problems", "3x24:13:float32", *more])
    world = bench_scoring.World.join("cpu", 1)
    return [*scoring_whole.part({"slime": host}, world, options)]


@pytest.mark.skipif("mis_loss_inplace" not in LOSS_ROWS, reason="policy_loss has no mis_loss_inplace")
def test_what_differs_is_named_and_ends_the_run() -> None:
    rows = {row["contender"]: row for row in run_part_a(plain_host(1.0))}
    assert rows["policy_loss, fused, in place"]["gradient_differs"] <= 2e-6
    assert not any(row["is_wrong"] for row in rows.values())
    with pytest.raises(SystemExit, match=r"policy_loss, fused differs.*gradient_differs"):
        run_part_a(plain_host(1.001))
    found = {row["contender"]: row["is_wrong"] for row in run_part_a(plain_host(1.001), "--keep-going")}
    assert found["policy_loss, fused"]


@pytest.mark.whole_run
def test_parts_without_a_host_are_measured_and_kept_beside_other_parts(tmp_path, capsys) -> None:
    file = tmp_path / "scoring.json"
    kept = {"problem": "8x16:7:float32", "host": "miles"}
    file.write_text(json.dumps({"A": [kept], "headers": {"A": {}}}))
    assert bench_scoring.main([*QUICK, "--parts", "B", "--json", str(file)]) == 0
    found = json.loads(file.read_text())
    assert found["A"] == [kept]
    own = [row for row in found["B"] if row["contender"].startswith("mis_ext")]
    assert len(own) == 8
    assert all(row["median_s"] > 0.0 and row["gradient_differs"] == 0.0 for row in own)
    printed = capsys.readouterr().out
    del found["A"], found["headers"]["A"]
    file.write_text(json.dumps(found))
    assert bench_scoring.main([*QUICK, "--show", str(file)]) == 0
    assert capsys.readouterr().out.count("\n| ") == printed.count("\n| ")


def test_a_problem_that_is_measured_anew_replaces_its_own_rows_alone(tmp_path) -> None:
    file = tmp_path / "scoring.json"
    record = bench_scoring.Record(file)
    record.begin("A", {}, ["1x2:3:float32"])
    for problem in ("1x2:3:float32", "4x5:6:float32"):
        record.add("A", {"problem": problem})
    again = bench_scoring.Record(file)
    again.begin("A", {}, ["1x2:3:float32"])
    again.add("A", {"problem": "1x2:3:float32", "new": True})
    assert json.loads(file.read_text())["A"] == [
        {"problem": "4x5:6:float32"},
        {"problem": "1x2:3:float32", "new": True},
    ]


@pytest.mark.parametrize(("tp_size", "cp_size"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 8)])
def test_ranks_are_in_the_order_of_megatron_core(tp_size, cp_size, monkeypatch) -> None:
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state as mpu
    from torch.testing._internal.distributed.fake_pg import FakeStore

    monkeypatch.setenv("WORLD_SIZE", "8")
    for rank in range(8):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
        try:
            mpu.initialize_model_parallel(
                tensor_model_parallel_size=tp_size, context_parallel_size=cp_size, create_gloo_process_groups=False
            )
            world = World.join("cpu", cp_size, tp_size=tp_size)
            assert (world.cp_rank, world.dp_rank) == (
                mpu.get_context_parallel_rank(),
                mpu.get_data_parallel_rank(),
            )
            for ours, theirs in (
                (world.cp_group, mpu.get_context_parallel_group()),
                (world.dp_group, mpu.get_data_parallel_group()),
            ):
                ranks = dist.get_process_group_ranks(theirs)
                assert ([rank] if ours is None else dist.get_process_group_ranks(ours)) == ranks
        finally:
            mpu.destroy_model_parallel()
            dist.destroy_process_group()


def test_a_product_that_does_not_divide_the_ranks_is_named(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(SystemExit, match="--tp 3 --cp 2: their product does not divide 8 processes"):
        World.join("cpu", 2, tp_size=3)


def test_a_rank_that_is_quick_calls_no_more_often_than_the_slowest() -> None:
    class Slow(World):
        def maximum(self, values):
            return [100.0 for _ in values]

    calls = []
    scoring_measure.cost(calls.append, dict, world=Slow(CPU), repeats=1, budget=0.0)
    # To warm up, for the peak, five that are timed, and one whose operations are counted.
    assert len(calls) == 1 + 1 + 5 + 1


def test_the_ranks_of_a_step_are_the_product_of_its_sizes(tmp_path: Path) -> None:
    python = tmp_path / "python3"
    python.write_text('#!/bin/bash\nshift\necho "$*"\n')
    python.chmod(0o755)
    command = ["bash", str(ROOT / "lab/benchmarks/gpu_scoring.sh"), str(tmp_path), str(tmp_path / "out")]
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(step: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, step], env=environment, capture_output=True, text=True)

    said = run("4x8:32:float32:tp2cp2dp2").stdout
    assert "torch.distributed.run --standalone --nproc-per-node 8 lab/benchmarks/bench_scoring.py" in said
    assert said.rstrip().endswith("--parts A --problems 4x8:32:float32 --tp 2 --cp 2")
    assert run("4x8:32:float32:cp4").stdout.rstrip().endswith("--problems 4x8:32:float32 --cp 4")
    wrong = run("4x8:32:float32:tp2ep2")
    assert wrong.returncode == 1
    assert "ranks are tp, cp and dp with a number" in wrong.stderr


def run_in_host(host: str, file: Path, *more: str, ranks: int = 1) -> dict:
    if HOSTS[host] is None:
        pytest.skip(f"MIS_EXT_{host.upper()} names no checkout of the host")
    pytest.importorskip("megatron.core")
    pytest.importorskip("httpx")
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, "lab/benchmarks/bench_scoring.py", *QUICK, f"--{host}", HOSTS[host]]
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    # A CPU has no use for compiled functions, and may have no compiler.
    environment = os.environ | {"PYTHONPATH": path, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [*command, "--json", str(file), *more], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(file.read_text())
    assert not [row for row in found["A"] if "missing" in row]
    assert all(row["median_s"] > 0.0 for row in found["A"])
    return found


@pytest.mark.whole_run
@pytest.mark.parametrize("host", ["miles", "slime"])
def test_in_the_code_of_a_host_every_loss_is_equal_and_measured(host, tmp_path) -> None:
    found = run_in_host(host, tmp_path / "scoring.json")
    assert len(found["A"]) == 20
    who = {row["contender"] for row in found["B"] if "missing" not in row}
    assert {f"{host}'s function", "Megatron-Core's fused cross entropy", "mis_ext"} <= who


@pytest.mark.whole_run
@pytest.mark.distributed
@pytest.mark.parametrize(("by", "ranks"), [("--tp 2", 2), ("--cp 2", 2), ("--tp 2 --cp 2", 4), ("--cp 2", 4)])
@pytest.mark.parametrize("host", ["miles", "slime"])
def test_over_several_ranks_every_loss_is_equal_and_measured(host, by, ranks, tmp_path) -> None:
    more = ["--parts", "A", *by.split(), "--problems", "8x96:32:float32"]
    found = run_in_host(host, tmp_path / "scoring.json", *more, ranks=ranks)
    assert len(found["A"]) == 10


def test_two_contenders_of_one_name_do_not_exist() -> None:
    names = [way.name for way in scoring_whole.contenders(plain_host(1.0), metrics="all")]
    assert len(names) == len({*names})
    assert {way.same_as for way in scoring_whole.contenders(plain_host(1.0), metrics="all")} - {None} <= {*names}


def test_a_logit_of_a_buffer_is_drawn_once_for_each_seed() -> None:
    first, same, other = (Logits(4, 5, dtype=torch.float32, device=CPU, seed=seed).buffer for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
