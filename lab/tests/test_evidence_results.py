# SPDX-License-Identifier: Apache-2.0
"""Results of runs that are interrupted, killed, or fail, and the processes that share a study."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from evidence import results as results_module
from evidence.results import Results
from evidence.study import Study
from stand_in import TINY, Counting


def test_an_interrupted_group_goes_on_where_it_was(tmp_path: Path) -> None:
    results, expected = Results(tmp_path), Results(tmp_path / "whole")
    for where, stops in ((results, (1, 2, 3)), (expected, (3,))):
        for stop in stops:
            training = Counting(TINY)
            rows = where.resume(TINY, training)
            with where.saving(TINY, training, rows) as keep:
                while training.num_steps_done < stop:
                    rows += training.step(keep)
            assert where.is_done(TINY) == (stop == 3)
    assert results.rows(TINY) == expected.rows(TINY)
    assert [row["step"] for row in results.rows(TINY)] == [0, 1, 2]
    assert results.sampling_seconds(TINY) == 0.5
    assert not list(tmp_path.glob("*.state.pt"))
    with pytest.raises(ValueError, match="results of other settings than tiny"):
        results.is_done(dataclasses.replace(TINY, learning_rate=0.5))
    assert list(results.log_probs(TINY)) == list(expected.log_probs(TINY)) == ["step1"]


def test_a_group_that_is_killed_leaves_what_it_had_and_a_shorter_attempt_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps_of(results: Results) -> list[int]:
        found, groups = results.unfinished([TINY])
        return [found.num_steps(group) for group in groups]

    # No state is written by what is killed.
    monkeypatch.setattr(Results, "_write_state", lambda *_: None)
    for seconds, num_steps, written in ((60.0, 1, []), (0.0, 2, [2]), (0.0, 1, [2])):
        monkeypatch.setattr(results_module, "SECONDS_BETWEEN_WRITES", seconds)
        training, rows = Counting(TINY), []
        with Results(tmp_path).saving(TINY, training, rows) as keep:
            for _ in range(num_steps):
                rows += training.step(keep)
                keep.write_now_and_then()
            assert steps_of(Results(tmp_path)) == written
    assert steps_of(Results(tmp_path)) == [2]
    found, _ = Results(tmp_path).unfinished([TINY])
    assert list(found.log_probs(TINY)) == ["step1"]
    other = dataclasses.replace(TINY, learning_rate=0.5)
    assert Results(tmp_path).unfinished([other])[1] == []
    with Results(tmp_path).saving(TINY, training, rows) as keep:
        while training.num_steps_done < TINY.num_steps:
            rows += training.step(keep)
    assert steps_of(Results(tmp_path)) == []
    assert not list((tmp_path / "unfinished").iterdir())


def test_a_group_that_is_over_is_finished_before_its_last_step(tmp_path: Path) -> None:
    training, rows, results = Counting(TINY), [], Results(tmp_path)
    with results.saving(TINY, training, rows) as keep:
        rows += training.step(keep)
        keep.is_over = True
    assert results.is_done(TINY)
    assert results.num_steps(TINY) == 1
    assert not list(tmp_path.glob("*.state.pt"))


@pytest.fixture
def command() -> Any:
    """The program, whose trainings count."""
    path = Path(__file__).parents[1] / "studies" / "evidence.py"
    specification = importlib.util.spec_from_file_location("evidence_command", path)
    found = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(found)
    found.places = SimpleNamespace(prepare=lambda _: None, start=Counting, close=lambda: None)
    return found


def test_every_slice_gets_further_however_short_it_is(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REVISION", "abc")
    whole, sliced = Results(tmp_path / "whole"), Results(tmp_path / "sliced")
    command.run(TINY, whole, command.places, False)
    for is_done in (False, False, True):
        command.run(TINY, sliced, command.places, True)
        assert sliced.is_done(TINY) == is_done
    assert sliced.rows(TINY) == whole.rows(TINY)
    assert sliced.machine(TINY)["revision"] == "abc"
    assert not list(tmp_path.rglob("*.state.pt"))


def test_a_group_that_fails_does_not_stop_the_others(
    command: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(group: Any) -> Counting:
        if group.name == "fails":
            raise ValueError("fails is not to be had")
        return Counting(group)

    command.places.start = start
    groups = [dataclasses.replace(TINY, name=name) for name in ("fails", "short")]
    results = Results(tmp_path)
    assert command.run_all(groups, results, command.places, False) == ["fails"]
    assert [results.is_done(group) for group in groups] == [False, True]
    assert "fails is not to be had" in capsys.readouterr().err


def test_a_process_without_memory_leaves_the_other_groups_to_others(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def run(group: Any, *_: object) -> None:
        tried.append(group.name)
        raise torch.OutOfMemoryError("no memory for this")

    monkeypatch.setattr(command, "run", run)
    groups = [dataclasses.replace(TINY, name=name) for name in ("first", "second")]
    assert command.run_all(groups, Results(tmp_path), command.places, False) == ["first"]
    assert tried == ["first"]
    assert "first: no memory for this" in capsys.readouterr().err


def test_a_group_that_another_process_has_claimed_is_left_to_it(command: Any, tmp_path: Path) -> None:
    results = Results(tmp_path)
    with Results(tmp_path).claimed(TINY) as is_ours:
        assert is_ours
        assert command.run_all([TINY], results, command.places, False) == []
        assert not results.is_done(TINY)
    command.run_all([TINY], results, command.places, False)
    assert results.is_done(TINY)


def test_processes_side_by_side_share_the_memory_of_a_gpu(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "STUDIES", {"s": Study(name="s", question="?", groups=(TINY,))})
    monkeypatch.setattr(command, "run_all", lambda *_: [])
    started: list[list[str]] = []
    taken: list[float] = []

    def start(arguments: list[str]) -> Any:
        started.append(arguments[1:])
        return SimpleNamespace(wait=lambda: 0, send_signal=lambda _: None)

    monkeypatch.setattr(command.subprocess, "Popen", start)
    monkeypatch.setattr(command.signal, "signal", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", taken.append)

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["evidence.py", "run", "s", "--results", str(tmp_path), *arguments])
        command.main()

    for given in ([], ["--memory-share", "0.25"]):
        with pytest.raises(SystemExit, match="0"):
            call("--workers", "2", *given)
    shares = [each[each.index("--workers") + 2 :][-1] for each in started]
    assert shares == ["0.4750", "0.4750", "0.2500", "0.2500"]
    with pytest.raises(SystemExit, match="2"):
        call("--memory-share", "1.5")
    # Such a process limits itself, on a GPU only; one alone takes all.
    call("--memory-share", "0.4750", "--device", "cuda")
    call("--memory-share", "0.4750", "--device", "cpu")
    call("--device", "cuda")
    assert taken == [0.475]
