# SPDX-License-Identifier: Apache-2.0
"""Runs that fork at the alert: when it fires, what is kept of that step, and what the pairs say."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from pretrained_runs import GROUP, MARKS

pytestmark = MARKS

from evidence.engines import EngineSpec  # noqa: E402
from evidence.pretrained import fork, training  # noqa: E402
from evidence.pretrained.collapse import alert_at, is_over  # noqa: E402
from evidence.pretrained.group import PretrainedGroup  # noqa: E402
from evidence.pretrained.training import PretrainedTraining  # noqa: E402
from evidence.pretrained.workplace import Workplace  # noqa: E402
from evidence.results import Results  # noqa: E402

_spec = importlib.util.spec_from_file_location("evidence_program", Path(__file__).parents[1] / "studies/evidence.py")
program: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(program)

START = [0.01] * 10


@pytest.mark.parametrize(
    ("k3", "expected"),
    [
        (START, None),
        (START + [0.0499] * 20, None),
        # Means of 5 steps of which two, three are high: 0.046, 0.064.
        (START + [0.01] * 5 + [0.1] * 9, 17),
        (START + [0.1] * 3, None),
        (START + [0.1] * 5, 14),
        # A start as high as that: 0.1 comes first.
        ([0.05] * 10 + [0.09] * 5 + [0.15] * 5, 15),
        ([0.05] * 10 + [0.0999] * 30, None),
    ],
)
def test_the_alert_fires_at_five_times_the_start_and_at_a_tenth(k3: list[float], expected: int | None) -> None:
    assert alert_at(k3) == expected
    # It is known at that step.
    if expected is not None:
        assert alert_at(k3[: expected + 1]) == expected
        assert alert_at(k3[:expected]) is None


@pytest.mark.usefixtures("graded")
def test_a_run_continues_and_forks_from_its_alert_as_if_it_had_not_stopped(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, whose optimizer has weights of its own; equal to the last bit."""
    own, trainings = training.numbers.mismatch, list[PretrainedTraining]()
    curve = [*START, *[0.2] * 7]
    taken: list[int] = []

    def mismatch(*given: Any) -> dict[str, float]:
        taken.append(trainings[-1].num_steps_done)
        return own(*given) | {"k3": curve[taken[-1]]}

    monkeypatch.setattr(training.numbers, "mismatch", mismatch)
    size = {"num_steps": 30, "response_length": 2, "num_prompts": 1, "samples_per_prompt": 2, "eval_interval": 16}
    whole = dataclasses.replace(GROUP, steps_after_alert=2, evaluates_greedily=True, **size)
    whole = dataclasses.replace(whole, engine=EngineSpec(dtype="float32"))
    places = program.Places(workplace.device, None, tmp_path)
    places.__dict__["_workplace"] = workplace
    monkeypatch.setattr(
        places, "start", lambda group: trainings.append(PretrainedTraining(group, workplace)) or trainings[-1]
    )
    expected = Results(tmp_path / "whole")
    program.run(whole, expected, places, stop=False)
    kept = torch.load(tmp_path / "whole" / f"{whole.name}.alert.state.pt", weights_only=False)
    assert kept["training"]["num_steps_done"] == 15 == len(kept["rows"])
    assert not (tmp_path / "whole" / f"{whole.name}.state.pt").exists()

    # Killed at a step, in a process of its own; then killed without a word after the alert.
    again = Results(tmp_path / "again")
    for stop in (After(trainings, 6), After(trainings, 16), False):
        program.run(whole, again, places, stop=stop)
        state = tmp_path / "again" / f"{whole.name}.state.pt"
        if stop and stop.step == 16:
            state.unlink()
    assert taken == [*range(17), *range(6), *range(6, 16), 15, 16]
    assert _rows(again, whole) == _rows(expected, whole)
    assert {"own_reward", "own_greedy"} <= _rows(again, whole)[-1].keys()

    # Another run begins from the state at the alert; with the same method it does what the first one did.
    twin = dataclasses.replace(whole, name="twin", forks_from=whole.name)
    program.run(twin, again, places, stop=False)
    assert taken[-2:] == [15, 16]
    assert [row | {"group": whole.name} for row in _rows(again, twin)] == _rows(expected, whole)[15:]
    for training_of in (trainings[-2], trainings[-1]):
        first, last = (_tensors(run.state()) for run in (trainings[0], training_of))
        assert first.keys() == last.keys()
        assert sum(name.endswith(("exp_avg", "exp_avg_sq")) for name in first) > 4
        assert all(torch.equal(tensor, last[name]) for name, tensor in first.items())
        assert trainings[0]._problems.getstate() == training_of._problems.getstate()

    # Where the first run ended without an alert, there is nothing to begin from.
    program.run(dataclasses.replace(twin, name="orphan", forks_from="other"), Ended(tmp_path, ["other"]), places, False)
    assert taken[-2:] == [15, 16]


class Ended(Results):
    """Results in which these runs have ended."""

    def __init__(self, folder: Path, ended: list[str]) -> None:
        super().__init__(folder)
        self._ended = ended

    def names(self) -> list[str]:
        return self._ended


class After:
    """True once the last training has done so many steps."""

    def __init__(self, trainings: list[PretrainedTraining], step: int) -> None:
        self._trainings, self.step = trainings, step

    def __bool__(self) -> bool:
        return self._trainings[-1].num_steps_done >= self.step


def _rows(results: Results, group: PretrainedGroup) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in results.rows(group)]


def _tensors(state: Any, name: str = "") -> dict[str, torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return {name: state.clone()}
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    return {path: tensor for key, value in items for path, tensor in _tensors(value, f"{name}.{key}").items()}


def _run(k3: list[float], own: list[float], start: int = 0) -> list[dict[str, Any]]:
    """Rows of a run that is evaluated every ten steps."""
    values = iter(own)
    rows = []
    for step, value in enumerate(k3, start=start):
        rows.append({"step": step, "k3": value, "seconds": 6.0})
        if step % 10 == 0:
            own_reward = next(values)
            rows[-1] |= {"own_reward": own_reward, "own_greedy": own_reward + 0.1}
    return rows


def test_a_run_ends_after_its_alert_and_without_one_at_the_latest_step() -> None:
    none, tis = fork.FORK_STUDIES[1].groups[:2]
    assert isinstance(none, PretrainedGroup)
    assert isinstance(tis, PretrainedGroup)
    calm, loud = [0.01] * 131, [*START, *[0.1] * 75]
    assert is_over(none, [{"step": step, "k3": k3} for step, k3 in enumerate(calm)])
    assert not is_over(none, [{"step": step, "k3": k3} for step, k3 in enumerate(calm[:-1])])
    # The alert fires at step 14.
    assert is_over(none, [{"step": step, "k3": k3} for step, k3 in enumerate(loud)])
    assert not is_over(none, [{"step": step, "k3": k3} for step, k3 in enumerate(loud[:-1])])
    assert is_over(tis, [{"step": step, "k3": 0.1} for step in range(15, 85)])
    assert not is_over(tis, [{"step": step, "k3": 0.1} for step in range(15, 84)])


def test_a_pair_is_compared_over_the_evaluations_that_both_runs_have() -> None:
    none = _run([*START, *[0.1] * 61], [0.4, 0.5, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1])
    tis = _run([0.02] * 70, [0.6, 0.6, 0.7, 0.8, 0.9, 1.0, 1.0], start=15)
    pair = fork.pair_of(21, none, tis)
    assert pair is not None
    assert (pair.alert, pair.steps, pair.fell) == (14, 56, (False, False))
    # Up to the alert: steps 0 and 10. Of both: steps 40 to 70, greedy 0.1 above sampled.
    assert (pair.before, pair.none, pair.tis) == pytest.approx((0.5, 0.3, 0.9))
    assert pair.k3 == pytest.approx((0.1, 0.02))
    assert pair.counts
    assert fork.pair_of(21, none[:14], tis) is None
    assert fork.pair_of(21, none, []) is None
    short = fork.pair_of(21, none[:61], tis)
    assert short is not None
    assert not short.counts


def test_the_test_is_exact_and_says_the_least_p_of_so_many_pairs() -> None:
    assert fork.sign_test([0.1, 0.2, 0.3]) == 2 / 8
    # 8 of 16 signs give a sum as large as 0.3 + 0.1 + 0.1 - 0.1 = 0.4: six of 0.4, two of 0.6.
    assert fork.sign_test([0.3, 0.1, 0.1, -0.1]) == 8 / 16
    pair = fork.Pair(21, 14, 0.5, 0.3, 0.6, 56, (False, False), (0.1, 0.02))
    assert fork.conclusion([]) == "No pair counts yet."
    said = fork.conclusion([pair] * 3)
    assert "3 of 12 pairs: token TIS minus none +0.300" in said
    assert "p = 0.25 (at least 0.25 with 3 pairs)" in said
    assert "p = 0.00049" in fork.conclusion([pair] * 12)


def test_the_table_has_a_line_for_each_pair_and_says_which_run_has_none(tmp_path: Path) -> None:
    results, groups = Results(tmp_path), fork.FORK_STUDIES[1].groups
    done = argparse.Namespace(device=torch.device("cpu"), record={}, sampling_seconds=1.0)
    (tmp_path / "unfinished").mkdir()
    results._write(groups[0], done, _run([*START, *[0.1] * 75], [0.5] * 9), {})
    Results(tmp_path / "unfinished")._write(groups[1], done, _run([0.02] * 56, [0.7] * 6, start=15), {})
    Results(tmp_path / "unfinished")._write(groups[2], done, _run([0.01] * 40, [0.5] * 4), {})
    *_, pair, _, waiting, _, said = fork.report(results).splitlines()
    assert pair == "| 21 | 14 | 56 | 0.550 | 0.550 | 0.750 | +0.200 | 1.0e-01, 2.0e-02 | no, no |"
    assert waiting == "seed 22: 40 steps, no pair"
    assert said.startswith("**1 of 12 pairs: token TIS minus none +0.200 on average, +0.200 to +0.200, p = 1 ")
