# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the presets: it runs, and every preset can be asked for."""

import json

import bench_methods

from mis_ext.methods.catalogue import METHODS


def test_what_is_asked_for_is_measured_and_nothing_reads_a_value(tmp_path, capsys) -> None:
    path = tmp_path / "rows.json"
    quick = ["--device", "cpu", "--shape", "9x40", "--repeats", "1", "--budget", "0", "--json", str(path)]
    bench_methods.main([*quick, "--presets", "ppo", "gspo", "drift_control"])
    rows = json.loads(path.read_text())["rows"]
    assert [*rows] == ["ppo", "gspo", "drift_control"]
    assert all(row["median_s"] > 0.0 and row["launches"] > 0 and row["waits"] == 0 for row in rows.values())
    assert capsys.readouterr().out.count("\n| ") == 2 + len(rows)


def test_every_preset_runs_with_the_inputs_of_the_benchmark() -> None:
    inputs = bench_methods.Inputs(bench_methods.Shape(40, 40), device=bench_methods.torch.device("cpu"), seed=0)
    for preset in METHODS.values():
        result = preset.method(**inputs.next())
        assert result.coefficient_T.abs().sum() > 0.0, preset.name
