# SPDX-License-Identifier: Apache-2.0
"""Standard errors over prompts and the intervals of two runs."""

import math

import pytest
import torch

from mis_ext.tools.diagnosis.evidence import t_quantile
from mis_ext.tools.report.noise import (
    NORMAL,
    Estimate,
    Interval,
    digits,
    interval_of_difference,
    interval_of_ratio,
    standard_error,
)

T_QUANTILES = {3: 3.182446, 4: 2.776445, 5: 2.570582, 10: 2.228139, 30: 2.042272, 1000: 1.962339}
"""From a table of Student's t: 0.975."""


@pytest.mark.parametrize(("degrees", "expected"), T_QUANTILES.items())
def test_quantiles_are_those_of_the_tables(degrees, expected) -> None:
    assert t_quantile(NORMAL, degrees) == pytest.approx(expected, rel=2e-3)


def test_of_equal_counts_it_is_the_standard_error_of_the_mean_of_prompts() -> None:
    prompts = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    totals = torch.tensor([1.0, 3.0, 2.0, 2.0, 5.0, 5.0, 1.0, 1.0])
    # Means of the prompts are 2, 2, 5, 1: their standard deviation is sqrt(3), of a mean of four half of it.
    assert standard_error(totals, torch.ones(8), prompts) == pytest.approx(math.sqrt(3.0) / 2.0)
    # With prompts of their own the eight responses are taken as independent.
    alone = standard_error(totals, torch.ones(8), torch.arange(8))
    assert alone == pytest.approx(float(totals.std()) / math.sqrt(8.0))


def test_three_prompts_say_nothing() -> None:
    assert math.isnan(standard_error(torch.rand(30), torch.ones(30), torch.arange(30) % 3))
    assert math.isnan(standard_error(torch.empty(0), torch.empty(0), torch.empty(0).long()))
    assert not math.isnan(standard_error(torch.rand(30), torch.ones(30), torch.arange(30) % 4))


def test_intervals_are_those_of_the_formulas() -> None:
    first, second = Estimate(6.0, 0.3, 11), Estimate(2.0, 0.4, 21)
    degrees = (0.09 + 0.16) ** 2 / (0.09**2 / 10 + 0.16**2 / 20)
    reach = t_quantile(NORMAL, degrees) * 0.5
    found = interval_of_difference(first, second)
    assert (found.low, found.high) == pytest.approx((4.0 - reach, 4.0 + reach))
    # Relative errors: 0.05 and 0.2.
    degrees = (0.0025 + 0.04) ** 2 / (0.0025**2 / 10 + 0.04**2 / 20)
    factor = math.exp(t_quantile(NORMAL, degrees) * math.sqrt(0.0425))
    found = interval_of_ratio(first, second)
    assert (found.low, found.high) == pytest.approx((3.0 / factor, 3.0 * factor))


def test_an_interval_without_an_error_is_not_known() -> None:
    known, unknown = Estimate(1.0, 0.1, 9), Estimate(1.0, math.nan, 3)
    for found in (interval_of_difference(known, unknown), interval_of_ratio(unknown, known)):
        assert not found.is_known
        assert str(found) == "-"
    # Numbers that never scattered differ for certain, or not at all.
    assert interval_of_difference(Estimate(2.0, 0.0, 9), Estimate(1.0, 0.0, 9)) == Interval(1.0, 1.0)


def test_numbers_have_three_digits_or_all_before_the_point() -> None:
    assert [digits(value) for value in (0.012345, 3.1415, 3265.6, -1234.5, 2e7, math.nan)] == [
        *("0.0123", "3.14", "3,266", "-1,234", "2e+07", "-")
    ]
