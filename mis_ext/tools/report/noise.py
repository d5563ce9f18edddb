# SPDX-License-Identifier: Apache-2.0
"""Statistical errors: standard errors over prompts, and confidence intervals of the differences of two runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.tools.diagnosis.evidence import t_quantile

MIN_PROMPTS = 4
"""The least number of prompts for a standard error."""

NORMAL = 1.959963984540054
"""The quantile 0.975 of the normal distribution."""


class Estimate(NamedTuple):
    """A value with its standard error and number of prompts; NaN if unknown."""

    value: float
    error: float
    num_prompts: int


@dataclass(frozen=True)
class Interval:
    """The 95 % confidence interval of a value; NaN if unknown."""

    low: float
    high: float

    @property
    def is_known(self) -> bool:
        """True if the interval is known."""
        return not (math.isnan(self.low) or math.isnan(self.high))

    def __str__(self) -> str:
        return f"{digits(self.low)} to {digits(self.high)}" if self.is_known else "-"


UNKNOWN = Interval(math.nan, math.nan)


def standard_error(total_S: Tensor, count_S: Tensor, prompt_S: Tensor) -> float:
    """Return the standard error of ``sum(total_S) / sum(count_S)`` over prompts; NaN for fewer than 4.

    Responses to one prompt are correlated; only prompts are sampled independently. With the residual of a prompt,
    ``e = total - ratio * count``, and ``n`` prompts, it is ``sqrt(n / (n - 1) * sum(e^2)) / sum(count)``: Cochran,
    Sampling Techniques, 1977, chapter 6 (ratio of two sums); over clusters as in Miller, Adding Error Bars to Evals,
    arXiv:2411.00640.

    Args:
        total_S: ``[S]`` sums of each response.
        count_S: ``[S]`` number of summed elements: tokens, or 1.
        prompt_S: ``[S]`` int64, a number for each prompt.
    """
    _, index = torch.unique(prompt_S, return_inverse=True)
    num_prompts = int(index.max()) + 1 if len(index) else 0
    if num_prompts < MIN_PROMPTS:
        return math.nan
    total, count = (torch.bincount(index, each.double(), minlength=num_prompts) for each in (total_S, count_S))
    residual = total - total.sum() / count.sum() * count
    return math.sqrt(num_prompts / (num_prompts - 1) * float(residual.square().sum())) / float(count.sum())


def interval_of_difference(first: Estimate, second: Estimate) -> Interval:
    """Interval of ``first - second`` for independent numbers, by Welch's t."""
    variances = first.error**2, second.error**2
    variance = sum(variances)
    if math.isnan(variance):
        return UNKNOWN
    # Degrees of freedom by Welch and Satterthwaite.
    parts = zip(variances, (first, second), strict=True)
    spread = sum(each**2 / max(part.num_prompts - 1, 1) for each, part in parts)
    reach = (t_quantile(NORMAL, variance**2 / spread) if spread > 0.0 else NORMAL) * math.sqrt(variance)
    middle = first.value - second.value
    return Interval(middle - reach, middle + reach)


def interval_of_ratio(first: Estimate, second: Estimate) -> Interval:
    """Interval of ``first / second`` for independent numbers above 0, by Welch's t of their logs."""
    logs = (Estimate(math.log(each.value), each.error / each.value, each.num_prompts) for each in (first, second))
    interval = interval_of_difference(*logs)
    return Interval(*(math.exp(min(each, 700.0)) for each in (interval.low, interval.high)))


def digits(value: float) -> str:
    """Format with three digits, or as a whole number from 1000 to 1e6; a dash if unknown."""
    if math.isnan(value):
        return "-"
    return f"{value:,.0f}" if 1e3 <= abs(value) < 1e6 else f"{value:.3g}"
