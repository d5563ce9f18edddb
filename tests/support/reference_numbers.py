# SPDX-License-Identifier: Apache-2.0
"""The arithmetic of the float64 reference: bounded exponentials, means, effective sample sizes."""

import math
from collections.abc import Iterable

LOG_RATIO_LIMIT = 20.0


def bounded_exp(x: float) -> float:
    """The ratio of a log ratio."""
    return math.exp(min(max(x, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT))


def finite(x: float) -> float:
    """Nats of a metric; sums of so large numbers are finite."""
    return min(max(x, -1e6), 1e6)


def clamped(x: float) -> float:
    """The log ratio that `bounded_exp` uses."""
    return min(max(x, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT)


def log(x: float) -> float:
    """Logarithm with log 0 = -inf, so that a bound of 0 never rejects."""
    return -math.inf if x == 0 else math.log(x)


def mean(values: Iterable[float]) -> float:
    """Mean; 0 if empty."""
    values = list(values)
    return math.fsum(values) / len(values) if values else 0.0


def effective_share(ratios: list[float]) -> float:
    """Effective sample size over sample size."""
    if not ratios:
        return math.nan
    return math.fsum(ratios) ** 2 / (len(ratios) * math.fsum(r * r for r in ratios))
