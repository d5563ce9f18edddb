"""Which logged numbers move with the mismatch; the same numbers from a running job."""

import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch

from mis_ext.report import Part, summarize
from mis_ext.report.indicators import indicators, read_series

EXAMPLE = Path(__file__).parents[1] / "examples" / "report_online.py"


def test_a_series_that_follows_k3_is_found_with_its_lag() -> None:
    values = torch.rand(40, generator=torch.Generator().manual_seed(0)).tolist()
    k3 = {str(step): value for step, value in enumerate(values)}
    later = {str(step + 3): -value for step, value in enumerate(values)}
    noise = torch.rand(40, generator=torch.Generator().manual_seed(1)).tolist()
    found = indicators(
        k3,
        {
            "noise": {str(step): value for step, value in enumerate(noise)},
            "reward": later,
            "constant": dict.fromkeys(k3, 1.0),
            "short": {"0": 1.0},
        },
    )
    assert [each.name for each in found] == ["reward", "noise"]
    assert (found[0].lag, found[0].num_steps) == (3, 37)
    assert found[0].correlation == pytest.approx(-1.0)
    assert abs(found[1].correlation) < 0.6


def test_logged_numbers_are_read_by_step(tmp_path) -> None:
    path = tmp_path / "log.jsonl"
    rows = [{"step": 0, "reward": 1, "name": "x", "done": True}, {"rollout_id": 1, "reward": 0.5}]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert read_series(path) == {"reward": {"0": 1.0, "1": 0.5}}
    path.write_text('{"reward": 1}\n')
    with pytest.raises(ValueError, match="line 1: not an object with one of step"):
        read_series(path)


def test_a_running_job_logs_the_numbers_of_the_report(monkeypatch) -> None:
    spec = importlib.util.spec_from_file_location("report_online", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    behavior = [-torch.rand(50), -torch.rand(9)]
    proximal = [each + 0.01 for each in behavior]
    masks = [torch.ones(50), torch.ones(9)]
    data = {"log_probs": proximal, "rollout_log_probs": behavior, "loss_masks": masks}
    expected = summarize([Part.of_lists(proximal=proximal, behavior=behavior, masks=masks)]).scalars()
    found = example.mismatch_of(data, step=3)
    assert {*found} == {f"mismatch/{name}" for name in expected}
    assert found["mismatch/k3"] == expected["k3"]
    assert not math.isnan(found["mismatch/k3"])
    assert example.mismatch_of({"rollout_log_probs": behavior}, step=3) == {}
    # Other ranks write nothing, and need no logger.
    monkeypatch.setenv("RANK", "1")
    example.log_mismatch(None, 3, data)
