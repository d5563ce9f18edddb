# SPDX-License-Identifier: Apache-2.0
"""`lab/peers/host_losses/record.py --check` without the hosts: what it compares, prints and leaves alone."""

import copy
import importlib.util
import lzma
import subprocess
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "host_losses"
RECORDER = ROOT / "lab" / "peers" / "host_losses" / "record.py"
CLONES = ["--slime", "slime", "--miles", "miles"]
NAMES = ("ppo", "k1", "tokens")
"""Of the losses in the file: a program that compares all of them takes ten times as long."""


@pytest.fixture(scope="module")
def recorded() -> dict:
    record = read(DATA / "losses.pt.xz")
    return {"revisions": record.pop("revisions")} | {
        topology: {rank: {name: loss for name, loss in of.items() if name in NAMES} for rank, of in ranks.items()}
        for topology, ranks in record.items()
    }


@pytest.fixture
def recorder(monkeypatch, tmp_path, recorded):
    """The program over some losses of its file, and with the hosts' numbers of that file in place of a run of them."""
    spec = importlib.util.spec_from_file_location("record_host_losses", RECORDER)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    monkeypatch.setattr(program, "FILE", tmp_path / "losses.pt.xz")
    with lzma.open(program.FILE, "wb") as file:
        torch.save(recorded, file)
    losses = {topology: ranks for topology, ranks in recorded.items() if topology != "revisions"}
    program.found = {whose: copy.deepcopy(losses) for whose in ("host", "mis_ext", "fused")}
    exact(program.found["fused"])
    program.run_in_hosts = program.run_hosts
    monkeypatch.setattr(program, "run_hosts", lambda *_, **__: program.found)
    return program


def read(path: Path) -> dict:
    with lzma.open(path, "rb") as file:
        return torch.load(file)


def exact(losses: dict) -> None:
    """With slime's gradients in Miles, whose own are rounded."""
    for topology in [name for name in losses if name.startswith("miles") and name.endswith("thd")]:
        for rank, of in losses[topology].items():
            for name, loss in of.items():
                loss["gradient"] = losses[topology.replace("miles", "slime")][rank][name]["gradient"].clone()


def test_a_check_says_what_it_compared_and_writes_nothing(recorder, capsys) -> None:
    before = recorder.FILE.read_bytes()
    assert recorder.main([*CLONES, "--check"]) == 0
    printed = capsys.readouterr().out
    for topology, ranks in recorder.found["host"].items():
        for rank, losses in ranks.items():
            assert printed.count(f"  {topology}, rank {rank}: {len(losses)} losses, 0 differ\n") == 3
    assert "  miles-cp2-thd as slime, rank 1: 1 losses, 0 differ\n" in printed
    assert recorder.FILE.read_bytes() == before


@pytest.mark.parametrize("whose", ["host", "mis_ext"])
@pytest.mark.parametrize("quantity", ["loss", "metrics", "gradient"])
def test_one_number_that_differs_is_named_and_fails_the_check(recorder, capsys, whose, quantity) -> None:
    loss = recorder.found[whose]["slime-cp2-thd"][1]["tokens"]
    number = loss[quantity]["pg_loss"] if quantity == "metrics" else loss[quantity].reshape(-1)[:1]
    # Twice what is allowed.
    number += 2.0 * (recorder.RTOL * number.abs() + recorder.ATOL)
    before = recorder.FILE.read_bytes()
    assert recorder.main([*CLONES, "--check"]) == 1
    printed = capsys.readouterr().out
    assert (
        f"slime-cp2-thd, rank 1: {len(recorder.found[whose]['slime-cp2-thd'][1])} losses, 1 differ\n    tokens: "
        in printed
    )
    assert recorder.FILE.read_bytes() == before


@pytest.mark.parametrize("quantity", ["loss", "metrics", "gradient"])
def test_fused_scoring_may_differ_by_a_share_of_the_largest_entry(recorder, capsys, quantity) -> None:
    loss = recorder.found["fused"]["slime-cp2-thd"][1]["tokens"]
    numbers = [*loss["metrics"].values()] if quantity == "metrics" else [*loss[quantity].reshape(-1).split(1)]
    largest = max(float(number.abs()) for number in numbers)
    for share, code in ((0.4, 0), (1.6, 1)):
        numbers[0] += share * recorder.FUSED * largest
        assert recorder.main([*CLONES, "--check"]) == code
    printed = capsys.readouterr().out
    assert f"    tokens: {quantity} by " in printed
    assert "of its largest entry, 2.0e-06 is allowed\n" in printed


def test_the_gradient_of_fused_scoring_in_miles_is_compared_with_one_that_is_not_rounded(recorder, capsys) -> None:
    gradient = recorder.found["fused"]["miles-cp1-thd"][0]["ppo"]["gradient"]
    gradient += 1e-5 * gradient.abs().max()
    assert recorder.main([*CLONES, "--check"]) == 1
    printed = capsys.readouterr().out
    assert "  miles-cp1-thd, rank 0: 3 losses, 0 differ\n    largest share: " in printed
    assert "  miles-cp1-thd as slime, rank 0: 3 losses, 1 differ\n    largest share: " in printed


def test_what_is_missing_or_of_another_name_fails_the_check(recorder, capsys) -> None:
    del recorder.found["host"]["miles-cp1-thd"][0]["ppo"]
    del recorder.found["mis_ext"]["slime-cp1-thd"][0]["k1"]["metrics"]["kl_loss"]
    assert recorder.main([*CLONES, "--check"]) == 1
    printed = capsys.readouterr().out
    assert "    ppo: it is not in both\n" in printed
    assert "    k1: other names of metrics, or another order\n" in printed


def test_without_a_check_the_hosts_numbers_are_written(recorder) -> None:
    loss = recorder.found["host"]["slime-cp1-thd"][0]["ppo"]
    loss["loss"] = torch.tensor(7.0)
    assert recorder.main(CLONES) == 0
    assert read(recorder.FILE)["slime-cp1-thd"][0]["ppo"]["loss"] == 7.0


def test_the_hosts_run_without_torchs_caches_of_graphs(monkeypatch, recorder, tmp_path) -> None:
    """Compiled or not: their clip bounds may be those of another option else."""
    environments = []

    def run(command, *, env=None, **_):
        environments.append(env)
        return subprocess.CompletedProcess(command, 0, stdout=b"")

    monkeypatch.setattr(recorder.subprocess, "run", run)
    monkeypatch.setenv("TORCHINDUCTOR_AUTOGRAD_CACHE", "1")
    for compiled in (False, True):
        recorder.run_in_hosts({"slime": tmp_path, "miles": tmp_path}, check=True, compiled=compiled)
    found = [env for env in environments if env is not None]
    caches = {(env["TORCHINDUCTOR_AUTOGRAD_CACHE"], env["TORCHINDUCTOR_FX_GRAPH_CACHE"]) for env in found}
    assert caches == {("0", "0")}
    assert ["TORCHDYNAMO_DISABLE" in env for env in found] == [True, True, False, False]
