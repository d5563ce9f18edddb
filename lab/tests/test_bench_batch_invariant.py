# SPDX-License-Identifier: Apache-2.0
"""The benchmark of the batch-invariant kernels: its checks pass in Triton's interpreter, and a wrong kernel ends it."""

import pytest
from triton_support import OBSTACLE

pytestmark = [pytest.mark.whole_run, pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))]


@pytest.fixture
def bench(monkeypatch):
    import bench_batch_invariant
    from triton.runtime.interpreter import InterpreterBuilder

    # The program changes it, for its whole process.
    monkeypatch.setattr(InterpreterBuilder, "create_dot", InterpreterBuilder.create_dot)
    return bench_batch_invariant


def test_every_kernel_is_right(bench, capsys) -> None:
    bench.main(["--smoke"])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 20
    assert all("| right |" in row for row in rows)


def test_a_wrong_kernel_ends_it(bench, monkeypatch) -> None:
    right, cases = bench.reductions.mean, bench._cases
    monkeypatch.setattr(bench.reductions, "mean", lambda *args: right(*args) * 1.05)
    monkeypatch.setattr(bench, "_cases", lambda **options: (x for x in cases(**options) if x.name == "mean"))
    with pytest.raises(SystemExit, match=r"mean 3 x 70 torch.float16: relative error"):
        bench.main(["--smoke"])
