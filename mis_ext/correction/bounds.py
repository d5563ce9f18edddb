"""Bounds: how the ratio becomes a weight, one row each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from mis_ext.correction.formula import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class Bound:
    """What ``mode`` of a weight means.

    Attributes:
        name: The mode.
        weight: Weight from a log-ratio and the edges of the band in log space; it never falls where the ratio grows.
        has_low: Whether the low edge acts.
        has_high: Whether the high edge acts.
        rejects: Whether what lies outside the band leaves the mask.
        text: What it does, for the documentation.
    """

    name: str
    weight: Callable[[Tensor, float, float], Tensor]
    has_low: bool
    has_high: bool
    rejects: bool
    text: str


def _clipped(log_ratio: Tensor, log_low: float, log_high: float) -> Tensor:
    return log_ratio.clamp(max(log_low, -MAX_LOG_RATIO), min(log_high, MAX_LOG_RATIO)).exp()


def _truncated(log_ratio: Tensor, _log_low: float, log_high: float) -> Tensor:
    return _clipped(log_ratio, -math.inf, log_high)


def _unbounded(log_ratio: Tensor, _log_low: float, _log_high: float) -> Tensor:
    return _clipped(log_ratio, -math.inf, math.inf)


_ROWS = (
    Bound("truncate", _truncated, False, True, False, "the ratio, at most `high`"),
    Bound("clip", _clipped, True, True, False, "the ratio, clamped into `[low, high]`"),
    Bound("mask", _unbounded, True, True, True, "the ratio; outside `[low, high]` the token or sequence is rejected"),
    Bound("unbounded", _unbounded, False, False, False, "the ratio"),
)

BOUNDS: dict[str, Bound] = {row.name: row for row in _ROWS}
"""The bounds of a weight by name. Truncation: Ionides, Truncated Importance Sampling, 2008; masking: IcePop,
arXiv:2510.18855."""
