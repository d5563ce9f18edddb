# SPDX-License-Identifier: Apache-2.0
"""Importance weights: the ratio of a token or of its sequence, bounded.

How the ratio becomes a weight is a row of :data:`BOUNDS`. A weight without gradient is what all of them are: a bound
truncates, it does not stop a token's gradient. What a method can have and the hook cannot says
:attr:`Weight.hook_obstacle`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from mis_ext.correction.gates import Gate, check_pair, warn_far_from_one
from mis_ext.correction.statistics import MISMATCH, Pair, Reduce, When
from mis_ext.correction.tokens import MAX_LOG_RATIO, Tokens, bounded_exp
from mis_ext.validation import check_choice, check_number

HookLevel = Literal["token", "sequence", "geometric"]
Level = HookLevel | Literal["prefix", "segment"]

HookWhen = Literal["always", "stale"]

DEFAULT_UPPER_BOUND = 2.0
"""The cap of a weight where no upper bound is given, as where the only key is `use_tis: true`."""

REDUCTIONS: dict[str, Reduce] = {
    "token": "token",
    "sequence": "sum",
    "geometric": "mean",
    "prefix": "prefix",
    "segment": "segment_sum",
}
"""How a level reduces log-ratios: their sum is the product of ratios, their mean the geometric mean."""


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


def _truncated(log_ratio: Tensor, _log_low: float, log_high: float) -> Tensor:
    # min(rho, high)
    return log_ratio.clamp(-MAX_LOG_RATIO, min(log_high, MAX_LOG_RATIO)).exp()


def _clipped(log_ratio: Tensor, log_low: float, log_high: float) -> Tensor:
    # max(low, min(rho, high))
    return log_ratio.clamp(max(log_low, -MAX_LOG_RATIO), min(log_high, MAX_LOG_RATIO)).exp()


def _unbounded(log_ratio: Tensor, _log_low: float, _log_high: float) -> Tensor:
    return bounded_exp(log_ratio)


_ROWS = (
    Bound("truncate", _truncated, False, True, False, "the ratio, at most `high`"),
    Bound("clip", _clipped, True, True, False, "the ratio, clamped into `[low, high]`"),
    Bound("mask", _unbounded, True, True, True, "the ratio; outside `[low, high]` the token or sequence is rejected"),
    Bound("unbounded", _unbounded, False, False, False, "the ratio"),
)

BOUNDS: dict[str, Bound] = {row.name: row for row in _ROWS}
"""The bounds of a weight by name. Truncation: Ionides, Truncated Importance Sampling, 2008; masking: IcePop,
arXiv:2510.18855."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Weight:
    """Importance weight: the ratio at ``level``, bounded as ``mode`` says.

    The token ratio corrects the next token only; the prefix stays off-policy. The product over the sequence is
    unbiased, and its variance grows exponentially with the length. The geometric mean is biased, but its size does not
    depend on the length.

    Args:
        level: ``token``, ``sequence`` (product of ratios) or ``geometric`` (their geometric mean). In a method also
            ``prefix``, the product up to the token, and ``segment``, that over a run of generated tokens.
        mode: A name of :data:`BOUNDS`.
        low: Lower bound of the ratio, for modes that have one; 1 / ``high`` by default.
        high: Upper bound of the ratio, for modes that have one; :data:`DEFAULT_UPPER_BOUND` by default.
        pair: Numerator and denominator of the ratio.
        power: The ratio is raised to it before it is bounded; in a method alone.
        when: Tokens that are weighed, the others have weight 1. ``stale``: those whose lag is above 0 or unknown, at
            ``level: token``. Signs of the advantage in a method alone.

    Attributes:
        gate: The gate that the mode implies.
        action: None: a weight drops nothing, its gate does.

    References:
        Token: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025. Sequence: Liu,
        Li et al., When Speed Kills Stability, 2025. Geometric: Zheng et al., Group Sequence Policy Optimization,
        arXiv:2507.18071.
    """

    level: Level = "token"
    mode: str = "truncate"
    low: float | None = None
    high: float | None = None
    pair: Pair = MISMATCH
    power: float = 1.0
    when: When | HookWhen = "always"
    action: ClassVar[None] = None
    gate: Gate | None = field(init=False, repr=False, compare=False, default=None)

    def __post_init__(self) -> None:
        check_choice("level", self.level, REDUCTIONS)
        check_choice("mode", self.mode, BOUNDS)
        check_pair(self.pair)
        check_choice("when", self.when, dict.fromkeys((*get_args(When), *get_args(HookWhen))))
        check_number("power", self.power, low=-math.inf, high=math.inf, open_low=True, open_high=True)
        bound = self.bound
        self._open_unused_bounds(bound)
        if not bound.has_high and (self.low, self.high) != (None, None):
            raise ValueError(f"mode: {self.mode} takes no bounds, got low={self.low} and high={self.high}")
        if not bound.has_low and self.low is not None:
            raise ValueError(f"mode: {self.mode} has no low bound, got low={self.low}; write mode: clip")
        if bound.has_high:
            self._fill_bounds(bound)
        if self.when == "stale":
            self._check_stale(bound)
        if bound.rejects:
            object.__setattr__(self, "gate", Gate(reduce=self.reduce, low=self.low, high=self.high, pair=self.pair))
        elif self.hook_obstacle is None:
            self._warn_unusual_bounds(bound)

    def _open_unused_bounds(self, bound: Bound) -> None:
        # The open ends of a band say the same as no bound.
        if not bound.has_low and self.low == 0.0:
            object.__setattr__(self, "low", None)
        if not bound.has_high and self.high == math.inf:
            object.__setattr__(self, "high", None)

    def _fill_bounds(self, bound: Bound) -> None:
        high = DEFAULT_UPPER_BOUND if self.high is None else self.high
        check_number("high", high, low=0.0, high=math.inf, open_low=True)
        object.__setattr__(self, "high", float(high))
        if bound.has_low:
            default, low = ("", self.low) if self.low is not None else (" (1 / high by default)", 1.0 / high)
            object.__setattr__(self, "low", check_number("low", low, low=0.0, high=math.inf))
            if not low <= high:
                raise ValueError(f"low must be below high, got low={low}{default} and high={high}")

    def _check_stale(self, bound: Bound) -> None:
        if self.level != "token":
            raise ValueError(
                f"when: stale is a choice between tokens, and level: {self.level} weighs all of them alike"
            )
        if bound.rejects:
            raise ValueError(f"when: stale leaves fresh tokens as they are, and mode: {self.mode} rejects some of them")
        if not (self.low or 0.0) <= 1.0 <= (math.inf if self.high is None else self.high):
            raise ValueError(f"when: stale gives fresh tokens weight 1, got low={self.low} and high={self.high}")

    def _warn_unusual_bounds(self, bound: Bound) -> None:
        low, high = self.low or 0.0, math.inf if self.high is None else self.high
        if not low <= 1.0 <= high:
            warnings.warn(
                f"the bounds {low:g} to {high:g} of the weight change what is on-policy (ratio 1)", stacklevel=4
            )
        if self.level == "geometric" and bound.has_low:
            warn_far_from_one(f"a geometric weight with mode: {self.mode}", self.low, self.high)

    @property
    def reduce(self) -> Reduce:
        """How ``level`` reduces log-ratios over a sequence."""
        return REDUCTIONS[self.level]

    @property
    def hook_obstacle(self) -> str | None:
        """Why the correction cannot have this weight, which a method can; None if it can."""
        if self.pair != MISMATCH:
            return f"it compares {' with '.join(self.pair)}: the hook sees proximal and behavior only"
        if self.level not in get_args(HookLevel):
            return f"the hook has no weight of level: {self.level}; it has {', '.join(get_args(HookLevel))}"
        if self.when not in get_args(HookWhen):
            return f"when must be always or stale, got {self.when}: the hook does not see the advantage"
        if self.power != 1.0:
            return f"power must be 1, got {self.power:g}: the hook's weight is the ratio itself"
        if self.bound.has_high and self.high == math.inf:
            return f"mode: {self.mode} needs a finite high; write mode: unbounded for none"
        if self.bound.has_low and self.low == self.high:
            return f"low must be below high, got low={self.low} and high={self.high}"
        return None

    @property
    def bound(self) -> Bound:
        """What ``mode`` does with a ratio outside of the edges."""
        return BOUNDS[self.mode]

    @property
    def log_low(self) -> float:
        """Log of the low edge, ``-inf`` without one."""
        return math.log(self.low) if self.low else -math.inf

    @property
    def log_high(self) -> float:
        """Log of the high edge, ``inf`` without one."""
        return math.log(self.high) if self.high is not None else math.inf

    def log_ratio_of(self, tokens: Tokens) -> Tensor:
        """The log-ratio that a weight of tokens bounds, nats: 0, and so weight 1, of a token that is not weighed."""
        return torch.where(tokens.lag > 0.0, tokens.d, 0.0) if self.when == "stale" else tokens.d

    def bounded(self, log_ratio: Tensor) -> Tensor:
        """The weight of log-ratios (nats, any shape): their ``exp``, bounded as ``mode`` says."""
        return self.bound.weight(log_ratio, self.log_low, self.log_high)


# --- what the weights are scaled by: self-normalisation and denominators, over one call or a group

Scope = Literal["micro_batch", "data_parallel"]
NormalizeOver = Literal["kept", "valid"]
Denominator = Literal["fixed", "kept"]
