"""The hook gives the golden results: what it gave before the core was rewritten, up to the bits of another `exp`.

A part of what ``golden/record.py --check`` compares; that one also asks for the same bits.
"""

import sys
from pathlib import Path

import pytest
import torch
from triton_support import HAS_GPU, OBSTACLE

sys.path.insert(0, str(Path(__file__).parent / "golden"))

from golden_grid import LAYOUTS, Case, cases
from golden_store import Record, Result, compute, differences, is_wrong

# Chosen so that every value of every axis has its turn.
EAGER_STRIDE, TRITON_STRIDE = 11, 15
CASE = Case("mis", "whole", "clean", "sample means")


@pytest.fixture(scope="module")
def records() -> dict[str, Record]:
    return {backend: Record.load(backend) for backend in ("eager", "triton")}


def assert_golden(case: Case, record: Record) -> None:
    actual, pg_loss = compute(case)
    found = differences(case, actual, record.get(case, pg_loss))
    assert not [difference for difference in found if is_wrong(difference, needs_bits=False)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_eager_backend_gives_the_golden_results(layout, records, monkeypatch) -> None:
    monkeypatch.setenv("MIS_EXT_BACKEND", "eager")
    of_layout = [case for case in cases("eager") if case.layout == layout]
    for case in of_layout[[*LAYOUTS].index(layout) :: EAGER_STRIDE]:
        assert_golden(case, records["eager"])


@pytest.mark.skipif(HAS_GPU or OBSTACLE is not None, reason="Triton's interpreter is off")
@pytest.mark.parametrize("case", cases("triton")[::TRITON_STRIDE], ids=lambda case: case.name)
def test_the_interpreted_triton_backend_gives_the_golden_results(case, records, monkeypatch) -> None:
    monkeypatch.setenv("MIS_EXT_BACKEND", "triton")
    assert_golden(case, records["triton"])


def test_the_record_holds_the_cases_of_the_grid(records) -> None:
    assert {name: record.cases for name, record in records.items()} == {
        name: [case.name for case in cases(name)] for name in records
    }


def wrong_quantities(actual: Result, expected: Result, *, needs_bits: bool = False) -> list[str]:
    found = differences(CASE, actual, expected)
    return [difference.quantity for difference in found if is_wrong(difference, needs_bits=needs_bits)]


def test_a_difference_is_noticed_and_one_within_the_tolerance_only_where_bits_are_asked_for() -> None:
    loss, masks = torch.tensor([1.0, torch.nan, torch.inf]), torch.tensor([1.0, 0.0])
    golden = Result(loss, loss, masks, {"mis_kl": [0.5], "mis_tv": [torch.nan]})
    assert wrong_quantities(golden, golden, needs_bits=True) == []
    near = golden._replace(
        loss=loss * (1 + 5e-7), metrics={"mis_kl": [0.5 + 5e-7], "mis_tv": [torch.nan], "new": [1.0]}
    )
    assert wrong_quantities(near, golden) == []
    assert wrong_quantities(near, golden, needs_bits=True) == ["loss"]
    other = Result(loss * 1.001, loss.nan_to_num(), masks.flip(0), {"mis_kl": [0.50001], "mis_tv": [0.0]})
    assert wrong_quantities(other, golden) == ["loss", "gradient", "masks", "mis_kl", "mis_tv"]
    assert wrong_quantities(golden._replace(metrics={"mis_kl": [torch.nan]}), golden) == ["mis_kl", "mis_tv"]
    lost = differences(CASE, golden._replace(loss=torch.full((3,), torch.nan)), golden)[0]
    assert (lost.is_lost, lost.error, lost.example) == (True, 0.0, "nan, was 1")


def test_other_inputs_than_the_recorded_ones_are_an_error(records, monkeypatch) -> None:
    monkeypatch.setattr("golden_store.fingerprint", lambda case: "another")
    with pytest.raises(ValueError, match="its inputs are not those of the record"):
        records["eager"].get(CASE, torch.zeros(1))
