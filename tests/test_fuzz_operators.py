"""Random runs of operators in the batch-invariant mode: none differs silently, and a planted mistake is found."""

import random
import sys
from pathlib import Path

import pytest
import torch

from mis_ext.onpolicy.batch_invariant import overrides, row_reductions

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from fuzz_operators import OUTCOMES, described, draw, fuzz, run

aten = torch.ops.aten
# Of torch: sparse and complex results, outputs of another shape.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("seconds", [8, pytest.param(60, marks=pytest.mark.whole_run)])
def test_no_operator_that_is_drawn_differs_silently(seconds):
    seed = random.randrange(10**6)
    found = [*fuzz(10_000, seed, seconds=seconds)]
    silent = [f"{outcome}: {described(one)}" for one, outcome in found if outcome not in OUTCOMES]
    assert silent == [], seed
    assert sum(outcome == "same" for _, outcome in found) > 20 * seconds


PLANTS = {
    "integers as they are": (aten.mul.Tensor, overrides, "_rounded", lambda factor, x: factor),
    "sums over experts": (aten.sum.dim_IntList, row_reductions, "is_over_rows", lambda x, dim: dim == [x.dim() - 1]),
    "one number": (aten.var.correction, row_reductions, "_ANOTHER_WAY_ALONE", frozenset()),
    "elementwise": (aten.cosh.default, overrides.elementwise, "compute", lambda func, *args, **kwargs: func(*args)),
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
