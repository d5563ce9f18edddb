# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the whole loss: it runs, and a wrong number ends it."""

import json

import bench_policy_loss
import host_policy_loss
import pytest

QUICK = ["--device", "cpu", "--shape", "3x40", "--repeats", "1", "--budget", "0"]


@pytest.mark.whole_run
def test_every_line_is_measured(tmp_path, capsys) -> None:
    bench_policy_loss.main([*QUICK, "--json", str(tmp_path / "rows.json")])
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    contenders = bench_policy_loss.contenders(bench_policy_loss.GATED_MIS)
    assert {row["contender"] for row in rows} == {*contenders}
    assert len(rows) == 2 * len(contenders) - 2
    assert all(row["median_s"] > 0.0 for row in rows)
    assert capsys.readouterr().out.count("\n| ") == len(rows) + 2


def test_a_wrong_loss_is_not_timed(monkeypatch) -> None:
    right = host_policy_loss.policy_loss

    def wrong(*arguments) -> tuple:
        loss, metrics = right(*arguments)
        return loss * 1.001, metrics

    monkeypatch.setattr(host_policy_loss, "policy_loss", wrong)
    with pytest.raises(AssertionError, match="not timed: loss"):
        bench_policy_loss.main(QUICK)
