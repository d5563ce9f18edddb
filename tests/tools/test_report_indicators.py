# SPDX-License-Identifier: Apache-2.0
"""Which logged numbers move with the mismatch."""

import json

import pytest
import torch

from mis_ext.tools.report.whole_report import indicators, read_series


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
