# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the report measures the command itself."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.whole_run
def test_the_benchmark_measures_the_command() -> None:
    shown = subprocess.run(
        [sys.executable, str(ROOT / "lab" / "benchmarks" / "bench_report.py"), "--smoke", "--config", "yaml/mis.yaml"],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    ).stdout
    titles, _, row = (line for line in shown.splitlines() if line.startswith("|"))
    tokens, length, files, *measured = (cell.strip().replace(",", "") for cell in row.strip("|").split("|"))
    assert int(tokens) >= 100_000
    assert (length, files) == ("1000", "2")
    assert len(measured) + 3 == titles.count("|") - 1
    assert all(float(each) > 0.0 for each in measured[1:3])
