# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the batch-invariant kernels: its checks pass in Triton's interpreter, and a wrong kernel ends it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from triton_support import OBSTACLE

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bench_batch_invariant.py"
WRONG = """
import runpy, sys
from mis_ext.onpolicy.batch_invariant import triton_reductions
right = triton_reductions.mean
triton_reductions.mean = lambda *args, **kwargs: right(*args, **kwargs) * 1.05
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
pytestmark = [pytest.mark.whole_run, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]


def smoke(*command: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(BENCHMARK.parents[2]), str(BENCHMARK.parent)])
    environment = {**os.environ, "PYTHONPATH": path}
    whole = [sys.executable, *command, str(BENCHMARK), "--smoke"]
    return subprocess.run(whole, capture_output=True, text=True, env=environment)


def test_every_kernel_is_right() -> None:
    found = smoke()
    assert found.returncode == 0, found.stderr
    rows = [line for line in found.stdout.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    assert all("| right |" in row for row in rows)


def test_a_wrong_kernel_ends_it() -> None:
    found = smoke("-c", WRONG)
    assert found.returncode == 1
    assert "mean 3 x 70 torch.float16: relative error" in found.stderr
