# SPDX-License-Identifier: Apache-2.0
"""The evidence harness: its training of many runs at once."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from evidence import ensemble
from evidence import results as results_module
from evidence.engines import EngineSpec
from evidence.group import Method
from evidence.results import Results
from evidence.study import Study
from evidence_runs import CPU, EXPERTS, GATE, NONE, TINY, rows_of, training_of

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_trainer_scores_and_learns_with_the_experts_of_the_engine() -> None:
    group = dataclasses.replace(TINY, methods=(NONE,), engine=EngineSpec(), shape=EXPERTS, dump_steps=(0,))
    k3, entropy = {}, {}
    for replays in (False, True):
        kept: dict[str, Any] = {}
        training = training_of(dataclasses.replace(group, replays_routing=replays))
        rows = training.step(lambda name, arrays, kept=kept: kept.update(arrays))
        counted = (kept["flips"] & kept["mask"]).sum((1, 2)) / kept["mask"].sum((1, 2))
        assert [row["routing_flips"] for row in rows] == pytest.approx(counted.tolist(), rel=1e-3)
        assert 0 < counted.mean() < 0.5
        k3[replays] = [row["k3"] for row in rows]
        entropy[replays] = [row["entropy"] for row in training.step(lambda name, arrays: None)]
    assert k3[True] != k3[False]
    assert k3[True] == pytest.approx(k3[False], rel=0.5)
    assert entropy[True] == pytest.approx(entropy[False], rel=0.1)


def test_runs_of_a_group_do_not_see_each_other() -> None:
    narrow = Method(name="gate", keys=GATE.keys | {"rs_lower_bound": 0.9999, "rs_upper_bound": 1.0001})
    group = dataclasses.replace(TINY, num_steps=2)
    others = dataclasses.replace(group, seeds=(3, 2), methods=(NONE, narrow, *TINY.methods[2:]))
    beside, beside_others = (
        [row for row in rows_of(training_of(group)) if row["seed"] == 2] for group in (group, others)
    )
    # The same shapes, so the same kernels: what differs is what the other runs do.
    none, none_beside_others = ([row for row in rows if row["method"] == "none"] for rows in (beside, beside_others))
    assert none == none_beside_others
    assert beside != beside_others


def test_a_run_alone_is_the_run_of_its_group() -> None:
    group = dataclasses.replace(TINY, engine=EngineSpec(dtype="float32"), num_steps=1)
    together = rows_of(training_of(group))
    (alone,) = rows_of(training_of(dataclasses.replace(group, methods=(NONE,), seeds=(2,))))
    (found,) = [row for row in together if row["method"] == "none" and row["seed"] == 2]
    # A product of one matrix has another kernel than of several: 2^-24 of each rounding, of which a number has some
    # thousand. Rows are rounded to 4 digits.
    for name in ("entropy", "reward", "solved", "grad_norm", "kept_tokens", "own_reward"):
        assert found[name] == pytest.approx(alone[name], rel=1e-3), name


def test_a_correction_reaches_the_weights_and_none_does_not() -> None:
    rows = rows_of(training_of(dataclasses.replace(TINY, methods=(NONE, Method(name="also none"), GATE))))
    last = {row["method"]: row for row in rows if row["step"] == 2 and row["seed"] == 1}
    assert last["none"]["kept_tokens"] == 1
    assert 0 < last["gate"]["kept_sequences"] < 1
    assert last["none"]["own_reward"] == last["also none"]["own_reward"]
    assert last["none"]["entropy"] != last["gate"]["entropy"]


def test_the_control_rejects_as_much_as_its_model_but_others() -> None:
    training = training_of(TINY)
    kept: dict[str, Any] = {}
    rows = training.step(lambda name, arrays: kept.update({name: arrays}))
    by_method = {(row["method"], row["seed"]): row for row in rows}
    for seed in TINY.seeds:
        model, control = by_method["gate", seed], by_method["gate, random", seed]
        assert control["kept_sequences"] == model["kept_sequences"] < 1
        assert control["grad_norm"] != model["grad_norm"]


def test_stale_weights_are_those_of_earlier_steps() -> None:
    group = dataclasses.replace(TINY, methods=(NONE,), engine=EngineSpec(dtype="float32"), learning_rate=0.02)
    fresh, stale = (rows_of(training_of(dataclasses.replace(group, staleness=k))) for k in (0, 2))
    assert [row["k3"] for row in fresh if row["seed"] == 1] == pytest.approx([0, 0, 0], abs=1e-6)
    first, second, third = [row["k3"] for row in stale if row["seed"] == 1]
    assert first == pytest.approx(0, abs=1e-6)
    assert 1e-5 < second < third


def test_an_interrupted_group_goes_on_where_it_was(tmp_path: Path) -> None:
    results, expected = Results(tmp_path), Results(tmp_path / "whole")
    for where, stops in ((results, (1, 2, 3)), (expected, (3,))):
        for stop in stops:
            training = training_of(TINY)
            rows = where.resume(TINY, training)
            with where.saving(TINY, training, rows) as keep:
                while training.num_steps_done < stop:
                    rows += training.step(keep)
            assert where.is_done(TINY) == (stop == 3)
    assert results.rows(TINY) == expected.rows(TINY)
    assert not list(tmp_path.glob("*.state.pt"))
    with pytest.raises(ValueError, match="results of other settings than tiny"):
        results.is_done(dataclasses.replace(TINY, learning_rate=0.5))
    found, whole = results.log_probs(TINY), expected.log_probs(TINY)
    assert list(found) == list(whole) == ["step1"]
    assert all(np.array_equal(found["step1"][name], whole["step1"][name]) for name in ("behavior", "log_ratio", "mask"))
    assert found["step1"]["mask"].shape == (2, 32, 10)


def test_a_group_that_is_killed_leaves_what_it_had_and_a_shorter_attempt_leaves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps_of(results: Results) -> list[int]:
        found, groups = results.unfinished([TINY])
        return [found.num_steps(group) for group in groups]

    # No state is written by what is killed.
    monkeypatch.setattr(torch, "save", lambda *_: None)
    for seconds, num_steps, written in ((60.0, 1, []), (0.0, 2, [2]), (0.0, 1, [2])):
        monkeypatch.setattr(results_module, "SECONDS_BETWEEN_WRITES", seconds)
        training, rows = training_of(TINY), []
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
    training, rows, results = training_of(TINY), [], Results(tmp_path)
    with results.saving(TINY, training, rows) as keep:
        rows += training.step(keep)
        keep.is_over = True
    assert results.is_done(TINY)
    assert results.num_steps(TINY) == 1
    assert not list(tmp_path.glob("*.state.pt"))


def test_only_the_scoring_with_the_mask_has_no_mismatch_and_the_right_log_probs() -> None:
    group = dataclasses.replace(TINY, methods=(NONE,), engine=EngineSpec(dtype="float32"), top_p=0.8)
    rows = {
        scoring: training_of(dataclasses.replace(group, scoring=scoring)).step(lambda name, arrays: None)
        for scoring in ("reported", "sampled", "kept")
    }
    k3, entropy, norm = (
        {name: [row[number] for row in of] for name, of in rows.items()} for number in ("k3", "entropy", "grad_norm")
    )
    assert max(k3["reported"] + k3["kept"]) < 1e-8
    # The ratio is the mass of the kept tokens, 0.8 or a little more.
    assert k3["sampled"] == pytest.approx([math.log(1 / 0.83) - 1 + 0.83] * 2, rel=0.5)
    assert entropy["reported"] == entropy["sampled"]
    assert entropy["kept"] == pytest.approx([value + math.log(0.83) for value in entropy["reported"]], abs=0.05)
    assert norm["reported"] == norm["sampled"] != norm["kept"]


def test_the_loss_has_the_ratio_1_at_first_whatever_the_engine_chose() -> None:
    group = dataclasses.replace(TINY, methods=(NONE,), engine=EngineSpec(), top_p=0.7, scoring="kept", shape=EXPERTS)
    training = training_of(dataclasses.replace(group, replays_routing=True))
    trainer = training._trainer
    rollout, _ = ensemble._sample(training.group, training._engine, trainer.weights, training._problems, 0, CPU)
    assert rollout.choices.kept is not None
    assert rollout.choices.experts is not None
    proximal, _ = ensemble._score(trainer, rollout)
    inputs = rollout.ids, proximal, rollout.advantage, torch.ones_like(proximal), rollout.mask, rollout.mask
    loss_R = ensemble._loss(trainer, *inputs, rollout.choices)
    # The ratio 1 leaves the advantages. That of other choices does not.
    torch.testing.assert_close(loss_R, -rollout.advantage.sum(1), rtol=0, atol=1e-3)
    for choices in (
        ensemble.Choices(rollout.choices.experts, None),
        ensemble.Choices(rollout.choices.experts.flip(0).roll(1, 1), rollout.choices.kept),
    ):
        assert ((ensemble._loss(trainer, *inputs, choices) - loss_R).abs() > 1e-3).all()


def test_runs_are_equal_until_they_branch() -> None:
    group = dataclasses.replace(TINY, engine=EngineSpec(dtype="float32"), learning_rate=0.02, staleness=1)
    rows = rows_of(training_of(dataclasses.replace(group, methods=(NONE, GATE), branch_step=2)))
    of = {(row["method"], row["seed"], row["step"]): row for row in rows}
    for seed in TINY.seeds:
        for step, kept in ((0, 1.0), (1, 1.0), (2, of["gate", seed, 2]["kept_sequences"])):
            none, gate = of["none", seed, step], of["gate", seed, step]
            assert gate["kept_sequences"] == kept
            assert (none["entropy"], none["reward"]) == (gate["entropy"], gate["reward"])
            assert (none["k3"] > 1e-5) == (step == 2)
        assert of["gate", seed, 2]["kept_sequences"] < 1
        assert of["gate", seed, 2]["grad_norm"] != of["none", seed, 2]["grad_norm"]


def evidence_command() -> Any:
    path = Path(__file__).parents[1] / "studies" / "evidence.py"
    specification = importlib.util.spec_from_file_location("evidence_command", path)
    command = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(command)
    return command


def test_every_slice_gets_further_however_short_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REVISION", "abc")
    group = dataclasses.replace(TINY, methods=(NONE,), num_steps=2, warmup_steps=3)
    command, whole, sliced = evidence_command(), Results(tmp_path / "whole"), Results(tmp_path / "sliced")
    with command.Places(CPU, None, tmp_path) as places:
        command.run(group, whole, places, False)
        for is_done in (False, False, False, False, True):
            # As in a new process: what is not on disk is lost.
            ensemble._warm_up_of.cache_clear()
            command.run(group, sliced, places, True)
            assert sliced.is_done(group) == is_done
    assert sliced.rows(group) == whole.rows(group)
    assert sliced.machine(group)["revision"] == "abc"
    assert not list(tmp_path.rglob("*.state.pt"))


def test_a_run_that_goes_on_is_not_warmed_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, training = Results(tmp_path), training_of(TINY)
    rows: list[dict[str, Any]] = []
    with results.saving(TINY, training, rows) as keep:
        rows += training.step(keep)
    ensemble._warm_up_of.cache_clear()
    monkeypatch.delattr(ensemble.WarmUp, "step")
    resumed = training_of(TINY)
    assert results.resume(TINY, resumed) == rows
    assert resumed.is_warm
    assert len(resumed.step(keep)) == len(rows)


@pytest.mark.whole_run
@pytest.mark.usefixtures("blank_pictures")
def test_more_seeds_of_a_study_run_and_are_in_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command, results = evidence_command(), Results(tmp_path / "results")
    tiny = dataclasses.replace(TINY, methods=(NONE, GATE), num_steps=2)
    monkeypatch.setattr(command, "STUDIES", {"s": Study(name="s", question="?", groups=(tiny,))})
    monkeypatch.setattr(command, "TOY_STUDIES", command.STUDIES)

    def call(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["evidence.py", *arguments, "--results", str(tmp_path / "results")])
        command.main()

    call("run", "s", "--device", "cpu", "--seeds", "5")
    assert results.names() == ["tiny-seed5"]
    call("run", "s", "--device", "cpu", "--seeds", "2", "5")
    call("compact")
    assert Results(tmp_path / "results").names() == ["tiny", "tiny-seed5"]
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["s.zip"]
    call("report", "s", "--output", str(tmp_path))
    assert "3 seeds" in (tmp_path / "s.md").read_text()


def test_a_group_that_fails_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = evidence_command()
    broken = dataclasses.replace(TINY, name="broken", replays_routing=True)
    short = dataclasses.replace(TINY, methods=(NONE,), num_steps=1)
    results = Results(tmp_path)
    with command.Places(CPU, None, tmp_path) as places:
        assert command.run_all((broken, short), results, places, False) == ["broken"]
    assert (results.is_done(broken), results.is_done(short)) == (False, True)
    assert "replays_routing: this engine does not tell" in capsys.readouterr().err
    assert 0 < results.sampling_seconds(short) < 60


def test_a_process_without_memory_leaves_the_other_groups_to_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = evidence_command()
    groups = [dataclasses.replace(TINY, name=name) for name in ("first", "second")]
    tried = []

    def run(group: Any, *_: object) -> None:
        tried.append(group.name)
        raise torch.OutOfMemoryError("no memory for this")

    monkeypatch.setattr(command, "run", run)
    with command.Places(CPU, None, tmp_path) as places:
        assert command.run_all(groups, Results(tmp_path), places, False) == ["first"]
    assert tried == ["first"]
    assert "first: no memory for this" in capsys.readouterr().err


def test_processes_side_by_side_share_the_memory_of_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = evidence_command()
    monkeypatch.setattr(command, "STUDIES", {"s": Study(name="s", question="?", groups=(TINY,))})
    monkeypatch.setattr(command, "TOY_STUDIES", command.STUDIES)
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
