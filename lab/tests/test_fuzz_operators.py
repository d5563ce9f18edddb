# SPDX-License-Identifier: Apache-2.0
"""Runs of operators in the batch-invariant mode, drawn or torch's own: none differs, and planted mistakes are found."""

import random
import subprocess
import sys

import fuzz_operators
import pytest
import torch
from fuzz_operators import OUTCOMES, Sample, _ways, check, draw, run

from mis_ext.onpolicy.batch_invariant import cpu_rows, overrides

aten = torch.ops.aten
# Of torch: sparse and complex results, outputs of another shape.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.slow
def test_no_operator_that_is_drawn_differs_silently():
    for _ in range(3):
        options = ["--runs", "250", "--seed", str(random.randrange(10**6))]
        command = [sys.executable, fuzz_operators.__file__, *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
        # Some of torch's operators write outside of their memory, where arguments do not fit: that process dies later.
        if done.returncode >= 0:
            break
    assert done.returncode == 0, (command, done.stdout, done.stderr[-2000:])
    assert "silent" not in done.stdout
    assert "'same': 250" in done.stdout


def test_a_silent_row_is_printed_and_fails(monkeypatch, capsys):
    one = draw(aten.mul.Tensor, random.Random(0))
    monkeypatch.setattr(fuzz_operators, "fuzz", lambda runs, seed, seconds: [(one, "same"), (one, "3 of 5 numbers")])
    monkeypatch.setattr(fuzz_operators.resource, "setrlimit", lambda *limit: None)
    monkeypatch.setattr(sys, "argv", ["fuzz_operators.py"])
    with pytest.raises(SystemExit, match="True"):
        fuzz_operators.main()
    assert "3 of 5 numbers: aten.mul.Tensor" in capsys.readouterr().out


PLANTS = {
    "sums over experts": (aten.sum.dim_IntList, cpu_rows, "is_over_rows", lambda x, dim: dim == [x.dim() - 1]),
    "a factor of integers": (
        aten.add.Scalar,
        overrides,
        "_of_integers",
        lambda f, args, kwargs: f(*args, **kwargs),
    ),
    "one number": (aten.var.correction, cpu_rows, "_ANOTHER_WAY_ALONE", frozenset()),
    "elementwise": (aten.cosh.default, cpu_rows, "elementwise", lambda func, *args, **kwargs: func(*args)),
}


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_mistake_is_found(name, monkeypatch):
    func, place, attribute, planted = PLANTS[name]
    rng, threads = random.Random(0), torch.get_num_threads()
    monkeypatch.setattr(place, attribute, planted)
    with torch.no_grad():
        is_found = any(run(draw(func, rng), rng) not in OUTCOMES for _ in range(4000))
    torch.set_num_threads(threads)
    assert is_found


COSH = Sample(torch.cosh, [torch.linspace(-2.0, 2.0, 6).view(2, 3)], {}, "as it is")


def test_a_sample_is_called_as_it_is_without_dimensions_and_by_keyword():
    as_it_is, without_dimensions, by_keyword = _ways(COSH)
    assert as_it_is is COSH
    assert without_dimensions.args == [COSH.args[0][0, 0]]
    assert (by_keyword.args, [*by_keyword.kwargs]) == ([], ["input"])
    assert [check(each) for each in _ways(COSH)] == ["same"] * 3
    assert check(Sample(torch.conv1d, [torch.ones(1, 1, 4), torch.ones(1, 1, 2)], {}, "as it is")) == "refused"
    assert check(COSH._replace(kwargs={"nobody": 1})) == "no call"


@pytest.mark.parametrize(
    ("planted", "outcome"),
    [
        (lambda func, *args, **kwargs: func(*args, nobody=1), "RuntimeError: "),
        (lambda func, *args, **kwargs: func(*args) + 1.0, "another result, by 1"),
        (lambda func, *args, **kwargs: func(*args).double(), "torch.float32 [2, 3], in the mode torch.float64 [2, 3]"),
    ],
)
def test_a_sample_that_raises_or_differs_in_the_mode_only_is_found(planted, outcome, monkeypatch):
    monkeypatch.setattr(cpu_rows, "elementwise", planted)
    assert check(COSH).startswith(outcome)


@pytest.mark.whole_run
def test_no_sample_of_torch_differs_in_the_mode(capsys):
    pytest.importorskip("expecttest")
    assert not fuzz_operators.search("", seconds=300.0)
    assert "'same'" in capsys.readouterr().out
