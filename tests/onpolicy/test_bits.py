# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch

from mis_ext.onpolicy.bits import FLOAT_DTYPES, same_bits, ulp_distance


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_neighbors_are_one_ulp_apart_on_both_sides_of_zero(dtype):
    values = torch.tensor([1.0, -1.0, 0.0, 3.5, -2e-5], dtype=dtype)
    up = torch.nextafter(values, torch.full_like(values, math.inf)) if dtype != torch.float16 else None
    if up is None:
        # torch has no nextafter in float16: one more in the bit pattern is one away from zero.
        up = (values.view(torch.int16) + 1).view(dtype)
    assert ulp_distance(values, up).tolist() == [1] * 5
    assert ulp_distance(up, values).tolist() == [1] * 5
    assert not same_bits(values, up).any()


@pytest.mark.parametrize("dtype", FLOAT_DTYPES)
def test_signed_zeros_are_the_same_number_with_different_bits(dtype):
    plus, minus = torch.zeros(1, dtype=dtype), -torch.zeros(1, dtype=dtype)
    assert ulp_distance(plus, minus).item() == 0
    assert not same_bits(plus, minus).item()
    smallest = (torch.zeros(1, dtype=torch.float64) + 1).to(dtype)
    assert ulp_distance(smallest, -smallest).item() == 2 * ulp_distance(smallest, plus).item()


def test_a_nan_has_the_bits_of_itself_and_no_others():
    x = torch.tensor([math.nan, math.inf, -math.inf])
    assert same_bits(x, x).all()
    assert not same_bits(x, x.flip(0))[0]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz])
def test_floats_of_8_bits_have_bits_too(dtype):
    x = torch.tensor([0.0, 1.0, math.nan]).to(dtype)
    assert same_bits(x, x.clone()).all()
    assert same_bits(x, torch.tensor([0.0, 1.5, 1.0]).to(dtype)).tolist() == [True, False, False]


def test_complex_numbers_have_the_bits_of_both_parts():
    x = torch.tensor([1 + 2j, complex(0.0, math.nan), 0j])
    assert same_bits(x, x.clone()).all()
    y = torch.tensor([1 - 2j, complex(0.0, math.nan), complex(0.0, -0.0)])
    assert same_bits(x, y).tolist() == [False, True, False]
    assert same_bits(y.conj(), y.conj().clone()).all()
    assert not same_bits(y.conj(), y)[0]


def test_distances_beyond_an_int64_stop_there():
    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert ulp_distance(-largest, largest).item() == torch.iinfo(torch.int64).max


def test_known_distance_between_powers_of_two():
    assert ulp_distance(torch.tensor([1.0]), torch.tensor([2.0])).item() == 2**23
    assert ulp_distance(torch.tensor([1.0]).bfloat16(), torch.tensor([2.0]).bfloat16()).item() == 2**7


def test_non_contiguous_input_compares_element_by_element():
    x = torch.arange(6.0).reshape(2, 3)
    assert same_bits(x.t(), x.t().clone()).all()
    assert ulp_distance(x.t(), x.t().contiguous()).sum().item() == 0


def test_pairs_that_cannot_be_compared_are_errors():
    with pytest.raises(TypeError, match=r"torch.float32 and torch.bfloat16"):
        same_bits(torch.zeros(2), torch.zeros(2).bfloat16())
    with pytest.raises(ValueError, match=r"shapes \[2\] and \[3\]"):
        ulp_distance(torch.zeros(2), torch.zeros(3))
    with pytest.raises(TypeError, match=r"floating-point dtype, got torch.int32"):
        ulp_distance(torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    assert same_bits(torch.tensor([1, 2]), torch.tensor([1, 3])).tolist() == [True, False]
