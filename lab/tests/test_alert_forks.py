# SPDX-License-Identifier: Apache-2.0
"""Runs that fork at the alert: when it fires, what is kept of that step, and what the pilot decides."""

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
from evidence.pretrained.collapse import alert_at  # noqa: E402
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
def test_a_run_goes_on_from_its_alert_or_from_where_it_was_killed_as_if_it_had_not_been(
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
    size = {"num_steps": 17, "response_length": 2, "num_prompts": 1, "samples_per_prompt": 2, "eval_interval": 16}
    whole = dataclasses.replace(GROUP, keeps_alert=True, evaluates_greedily=True, **size)
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
    first, last = (_tensors(run.state()) for run in (trainings[0], trainings[-1]))
    assert first.keys() == last.keys()
    assert sum(name.endswith(("exp_avg", "exp_avg_sq")) for name in first) > 4
    assert all(torch.equal(tensor, last[name]) for name, tensor in first.items())
    assert trainings[0]._problems.getstate() == trainings[-1]._problems.getstate()
    assert {"own_reward", "own_greedy"} <= _rows(again, whole)[-1].keys()


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


def _run(k3: list[float], own: float) -> list[dict[str, Any]]:
    return [
        {"step": step, "k3": value, "seconds": 6.0} | ({} if step % 10 else {"own_reward": own, "own_greedy": own})
        for step, value in enumerate(k3)
    ]


@pytest.mark.parametrize(
    ("engine", "rows", "expected"),
    [
        ("int4", _run(START + [0.1] * 5, 0.5), True),
        ("int4", _run([0.01] * 99, 0.5), None),
        ("int4", _run([0.01] * 100, 0.5), False),
        ("int4", _run([0.01] * 97 + [0.1] * 5, 0.5), True),
        ("int4", _run([0.01] * 98 + [0.1] * 5, 0.5), False),
        ("bf16", _run([1e-4] * 100, 0.9), None),
        ("bf16", _run([1e-4] * 101, 0.9), True),
        ("bf16", _run([1e-4] * 101, 0.75), False),
        # It was above, and does not stay there.
        ("bf16", _run([1e-4] * 101, 0.8)[:81] + _run([1e-4] * 151, 0.6)[81:], False),
        ("bf16", [], None),
    ],
)
def test_each_arm_of_the_pilot_has_its_condition(
    engine: str, rows: list[dict[str, Any]], expected: bool | None
) -> None:
    (group, *_) = (group for group in fork.FORK_STUDIES[1].groups if engine in group.name)
    assert fork.verdict(group, rows) is expected


@pytest.mark.parametrize(
    ("verdicts", "word"),
    [([True] * 4, "passes"), ([True, None, False, True], "fails"), ([True, None, True, True], "has not decided")],
)
def test_all_runs_have_to_pass_and_one_fails(verdicts: list[bool | None], word: str) -> None:
    assert word in fork.decision(verdicts)


def test_the_table_has_a_line_for_each_run_that_began(tmp_path: Path) -> None:
    results, groups = Results(tmp_path), fork.FORK_STUDIES[1].groups
    so_far = Results(tmp_path / "unfinished")
    for group, rows in zip(groups[:2], (_run(START + [0.1] * 5, 0.5), _run([1e-4] * 101, 0.8)), strict=True):
        done = argparse.Namespace(device=torch.device("cpu"), record={}, sampling_seconds=1.0)
        where = results if group is groups[0] else so_far
        (tmp_path / "unfinished").mkdir(exist_ok=True)
        where._write(group, done, rows, {})
    *_, first, second, _, said = fork.report(results).splitlines()
    assert first == "| int4-seed11 | 15 | 6.0 | 1.0e-02, 1.0e-01 | 14 | 0.500, 0.500 |  |"
    assert second == "| bf16-seed11 | 101 | 6.0 | 1.0e-04, 1.0e-04 | None | 0.800, 0.800 | 0.800 |"
    assert said == "**The pilot has not decided.**"
