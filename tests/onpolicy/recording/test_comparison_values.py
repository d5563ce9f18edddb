# SPDX-License-Identifier: Apache-2.0
"""The comparator: values, dtypes and rows; nothing that was not compared counts as equal."""

import math
from itertools import permutations

import pytest
import torch
from comparison_recordings import THREE, VALUES, X, made
from torch import Tensor

from mis_ext.onpolicy.audit.log_probs import audit_logprobs
from mis_ext.onpolicy.recording import differences
from mis_ext.onpolicy.recording.compare import compare
from mis_ext.onpolicy.recording.differences import Row
from mis_ext.onpolicy.recording.recordings import Recording


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (made(), made()),
        (X, made()),
        (made(), X),
        (made(x=(VALUES[:0], [])), made(x=(VALUES[:0], []))),
        (X, made(x=(VALUES[:0], []))),
        (X, made(x=(VALUES, [(5, 0), (5, 1), (5, 2)]))),
    ],
    ids=["both empty", "b empty", "a empty", "no rows", "no rows in b", "no row in common"],
)
@pytest.mark.parametrize("allow", [(), ("*",)])
def test_nothing_compared_is_never_a_pass(a: Recording, b: Recording, allow: tuple[str, ...]) -> None:
    result = compare(a, b, allow=allow)
    assert (result.verdict, result.passed, result.num_rows) == ("INVALID", False, 0)
    assert result.summary().startswith("INVALID: 0 rows")


def test_a_missing_module_fails_unless_allowed_by_name() -> None:
    both = made(x=(VALUES, THREE), y=(VALUES, THREE))
    for a, b, side in ((both, X, "b"), (X, both, "a")):
        assert compare(a, b).problems == (f"y: missing in {side}",)
        assert compare(a, b).verdict == "INVALID"
        assert not compare(a, b, allow=("x",)).passed
        assert compare(a, b, allow=("y*",)).passed


def test_a_module_that_was_skipped_on_one_side_says_why() -> None:
    b = Recording(outputs=X.outputs, skipped={"y outputs": "no token dimensions in [7]", "y[0] inputs": "other"})
    result = compare(made(x=(VALUES, THREE), y=(VALUES, THREE)), b)
    assert result.problems == ("y: missing in b (no token dimensions in [7])",)
    both = compare(b, b)
    assert both.passed
    assert both.skipped == ("y outputs",)
    assert "not compared: y outputs" in both.summary()


def test_rows_on_one_side_are_counted_and_fail_unless_allowed() -> None:
    more = made(x=(torch.cat([VALUES, VALUES]), [*THREE, (2, 1), (3, 0), (3, 7)]))
    for a, b, counts in ((X, more, (0, 3)), (more, X, (3, 0))):
        result = compare(a, b)
        assert result.modules[0].num_rows == 3
        assert result.problems == (f"x: {counts[0]} rows only in a, {counts[1]} only in b",)
        assert result.verdict == "INVALID"
        assert compare(a, b, allow=("x",)).passed
        assert not compare(a, b, allow=("y",)).passed


@pytest.mark.parametrize("rows", [(THREE, [(5, 0), (5, 1), (5, 2)]), ([], []), (THREE, [])])
def test_one_module_without_common_rows_fails_although_others_have_some(rows) -> None:
    a, b = (made(x=(VALUES, THREE), y=(VALUES[: len(tokens)], tokens)) for tokens in rows)
    result = compare(a, b, allow=("x",))
    assert result.problems == ("y: no row in common",)
    assert (result.verdict, result.num_rows) == ("INVALID", 3)
    assert compare(a, b, allow=("y",)).passed


def test_rows_are_matched_by_token_and_not_by_place() -> None:
    b = made(x=(VALUES[[2, 0, 1]], [THREE[2], THREE[0], THREE[1]]))
    assert compare(X, b).passed
    swapped = made(x=(VALUES, [(0, 1), (0, 0), (2, 0)]))
    assert compare(X, swapped).modules[0].num_differing == 2
    # (0, 2) and (1, 0) must not be one key, whatever the longest position.
    assert compare(X, made(x=(VALUES, [(0, 0), (0, 1), (1, 0)]))).modules[0].num_rows == 2
    far, near = made(x=(VALUES[:2], [(0, 0), (0, 2)])), made(x=(VALUES[:2], [(0, 0), (1, 0)]))
    assert compare(far, near).modules[0].num_rows == 1


def test_rows_that_differ_in_shape_only_are_compared_flat_and_other_sizes_fail() -> None:
    heads = torch.arange(24.0).view(3, 2, 4)
    assert compare(made(x=(heads, THREE)), made(x=(heads.flatten(1), THREE))).passed
    result = compare(made(x=(heads, THREE), y=(VALUES, THREE)), made(x=(heads[:, 0], THREE), y=(VALUES, THREE)))
    assert result.problems == ("x: rows of shape [2, 4] and [4]",)
    assert not result.passed
    allowed = compare(
        made(x=(heads, THREE), y=(VALUES, THREE)), made(x=(heads[:, 0], THREE), y=(VALUES, THREE)), allow=("x",)
    )
    assert allowed.passed
    assert [module.name for module in allowed.modules] == ["y"]


def test_a_dtype_that_differs_fails_unless_allowed_and_then_values_must_be_equal() -> None:
    b = made(x=(VALUES.bfloat16(), THREE))
    assert compare(X, b).problems == ("x: torch.float32 and torch.bfloat16",)
    assert compare(X, b).verdict == "INVALID"
    assert compare(X, b, allow=("x",)).passed
    third = made(x=(VALUES / 3, THREE))
    result = compare(third, made(x=((VALUES / 3).bfloat16(), THREE)), allow=("x",))
    assert result.verdict == "DIFFERENT"
    assert result.modules[0].max_abs == float((VALUES / 3 - (VALUES / 3).bfloat16().float()).abs().max())


def test_numbers_of_a_difference_are_those_of_the_elements_that_differ() -> None:
    changed = VALUES.clone()
    changed[2, 1] = torch.nextafter(torch.nextafter(VALUES[2, 1], torch.tensor(9.0)), torch.tensor(9.0))
    changed[1, 0] = torch.nextafter(VALUES[1, 0], torch.tensor(0.0))
    found = compare(X, made(x=(changed, THREE))).modules[0]
    assert (found.num_rows, found.num_differing, found.max_ulp, found.num_nan) == (3, 2, 2, 0)
    assert found.max_abs == float(changed[2, 1]) - 6.0 == 2 * 2.0**-21
    assert found.first == Row(0, 1)


def test_signed_zero_is_a_difference_of_no_ulp() -> None:
    found = compare(made(x=(torch.zeros(3, 1), THREE)), made(x=(-torch.zeros(3, 1), THREE))).modules[0]
    assert (found.num_differing, found.max_ulp, found.max_abs) == (3, 0, 0.0)


def test_the_same_nan_is_no_difference_and_no_pass_as_in_the_audit() -> None:
    values = VALUES.clone()
    values[0, 0] = math.nan
    a = made(x=(values, THREE))
    same = compare(a, made(x=(values.clone(), THREE)))
    assert (same.verdict, same.passed) == ("INVALID", False)
    assert (same.num_nan, same.modules[0].num_differing) == (1, 0)
    assert "1 elements are NaN, first in x" in same.summary()
    assert audit_logprobs([values[0]], [values[0].clone()]).verdict.value == same.verdict
    found = compare(a, X).modules[0]
    assert (found.num_differing, found.num_nan, found.max_ulp) == (1, 1, 0)
    assert math.isnan(found.max_abs)


def test_integer_outputs_are_compared_too() -> None:
    ids = torch.tensor([[1], [2], [3]])
    assert compare(made(x=(ids, THREE)), made(x=(ids, THREE))).passed
    result = compare(made(x=(ids, THREE)), made(x=(ids + torch.tensor([[0], [0], [4]]), THREE)))
    found = result.modules[0]
    assert (found.num_differing, found.max_abs, found.max_ulp) == (1, 4.0, 0)
    assert "output differs, max abs 4\n" in result.summary()


@pytest.mark.parametrize(
    ("integer", "number"), [(257, torch.tensor(256.0).bfloat16()), (2**24 + 1, torch.tensor(2.0**24))]
)
def test_an_integer_equals_a_float_of_the_same_value_only(integer: int, number: Tensor) -> None:
    def found(value: int):
        a, b = (made(x=(values.expand(3, 1).clone(), THREE)) for values in (torch.tensor(value), number))
        return compare(a, b, allow=("x",))

    assert found(integer - 1).passed
    assert (found(integer).verdict, found(integer).modules[0].max_abs) == ("DIFFERENT", 1.0)


def test_complex_numbers_are_compared_in_both_parts() -> None:
    a = torch.tensor([[1 + 1j], [0j], [complex(math.nan, 2)]])
    assert compare(made(x=(a, THREE)), made(x=(a.clone(), THREE))).first_divergent is None
    b = torch.tensor([[1 + 5j], [complex(0.0, -0.0)], [complex(math.nan, 2)]])
    found = compare(made(x=(a, THREE)), made(x=(b, THREE))).modules[0]
    assert (found.num_differing, found.max_abs, found.num_nan) == (2, 4.0, 1)
    assert found.max_ulp == 2**24 + 2**21
    for x, y in permutations([a[:1].expand(3, 1), torch.ones(3, 1)]):
        assert compare(made(x=(x, THREE)), made(x=(y, THREE)), allow=("x",)).modules[0].max_abs == 1.0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_floats_of_8_bits_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    a = torch.tensor([[0.0], [math.nan], [2.0]])
    assert compare(made(x=(a.to(dtype), THREE)), made(x=(a.to(dtype), THREE))).first_divergent is None
    b = torch.tensor([[-0.0], [math.nan], [1.5]])
    found = compare(made(x=(a.to(dtype), THREE)), made(x=(b.to(dtype), THREE))).modules[0]
    assert (found.num_differing, found.max_abs, found.num_nan) == (2, 0.5, 1)
    finite = a.nan_to_num()
    assert compare(made(x=(finite.to(dtype), THREE)), made(x=(finite, THREE)), allow=("x",)).passed


def test_large_tensors_are_compared_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(10, 3)
    values[4, 1] = math.nan
    changed, tokens = values.clone(), [(0, position) for position in range(10)]
    changed[2, 0] = torch.nextafter(values[2, 0], torch.tensor(9.0))
    changed[7, 2] = torch.nextafter(torch.nextafter(values[7, 2], torch.tensor(9.0)), torch.tensor(9.0))
    a, b = made(x=(values, tokens)), made(x=(changed, tokens))
    whole = compare(a, b).modules
    for chunk in (1, 6, 7, 29):
        monkeypatch.setattr(differences, "_CHUNK", chunk)
        assert compare(a, b).modules == whole
        more = made(x=(torch.cat([values[:1], changed]), [(0, 99), *tokens]))
        assert compare(a, more).modules[0].num_differing == compare(more, a).modules[0].num_differing == 2
        early = made(x=(changed[3:], tokens[3:]))
        assert compare(a, early).modules[0].num_differing == compare(early, a).modules[0].num_differing == 1
    assert (whole[0].num_differing, whole[0].max_ulp, whole[0].num_nan, whole[0].first) == (2, 2, 1, Row(0, 2))
    changed[9] = math.nan
    assert math.isnan(compare(a, made(x=(changed, tokens))).modules[0].max_abs)
