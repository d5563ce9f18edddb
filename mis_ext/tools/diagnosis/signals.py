# SPDX-License-Identifier: Apache-2.0
"""What the log-probs show about the cause of a mismatch: sums that add up over parts.

Noise of the logits moves a log-prob by about ``1 - p`` times the noise: a token that is nearly certain hardly moves. So
``|d| / (1 - p)`` is compared between tokens, the size of the noise behind ``d``. Without it the uncertain tokens of any
model look like a mixture of tokens that agree and tokens that do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.checks.token_sums import CERTAIN, MIN_TOKENS, Sorted, TokenSums, added, line_sums, sums_of_sorted
from mis_ext.correction.layout import PackedLayout, TokenRatios
from mis_ext.correction.tokens import bounded_expm1
from mis_ext.correction.tokens import k3 as k3_of

PLACES = {"first": 0, "early": 8, "between": 32, "late": 64, "far": 256}
"""Of a turn, and where each begins: a prefix shows in the first two. Tokens far behind them are no measure: in one of
our engines noise halves from 64 tokens to 256, where responses are long."""

PER_OCTAVE = 4
NUM_POSITIONS = PER_OCTAVE * 22
"""Bins of positions, each a quarter of an octave: a place where something begins lies near the edge of one."""

PER_DECADE, SMALLEST, DECADES = 20, -9, 12
NUM_SHIFTS = PER_DECADE * DECADES
"""Bins of ``|d| / (1 - p)`` of equal width in log space, each 12 % wide."""

NEARLY_CERTAIN = math.log(0.999)
"""Where the probability is closer to 1, the log-probs of two engines can agree by saturation alone."""

PLACE_FACTOR, PLACE_K3_FACTOR, PLACE_ERRORS = 2.0, 5.0, 6.0
"""Noise of engines fades in long responses: in one of ours the first 8 tokens differ 1.6 times as much as those from
the 65th to the 256th, and have 3 times their k3. How much it fades depends on the model: an alternative says so."""
FIRST_LATE = 5 * PER_OCTAVE
"""The first bin of positions, from 31 on, that may begin to differ."""

_FLOAT32_STEP = 2.0**-23
_BF16_DIGITS = 8
_UNIFORM_VARIANCE = 1.0 / 12.0


@dataclass(eq=False)
class Signals:
    """Evidence of causes, of the tokens that have a log-prob of the engine.

    Attributes:
        sums: Of :class:`~mis_ext.checks.token_sums.TokenSums`.
        shifts: ``[2, 2, NUM_SHIFTS]`` of uncertain tokens by ``|d| / (1 - p)``, for ``d`` below and above 0: how many,
            and their k3.
        places: ``[2, len(PLACES), 6]`` of uncertain tokens of the first turn and of later ones, by their place in the
            turn: count, k3, and sums of ``min(|d| / (1 - p), 1)``, of its square, of ``min(k3, 1)`` and of its square.
        positions: ``[NUM_POSITIONS, 6]`` of uncertain tokens by their position in the response: likewise.
        ratios: Count, sum of ``ratio - 1`` and of its square, of all tokens.
        rounded: ``[2, 3]`` of the proximal and of the behavior side: numbers that are not 0, those of bfloat16, and the
            k3 that rounding them to bfloat16 is expected to give.
        firsts: First tokens of responses that are not nearly certain, and those of them that differ; later ones alike.
        largest: The largest ``|d|`` in float32 steps of ``max(1, |log-prob|)``, the largest ``-d`` and ``|d|``.
    """

    sums: Tensor
    shifts: Tensor
    places: Tensor
    positions: Tensor
    ratios: Tensor
    rounded: Tensor
    firsts: Tensor
    largest: Tensor

    @classmethod
    def of(
        cls,
        tokens: TokenRatios,
        found: Sorted,
        response_mask_R: Tensor,
        *,
        layout: PackedLayout,
        position_T: Tensor,
        turns: Turns,
    ) -> Signals:
        """The sums that the rules need; ``position_T`` is that of a token in its response."""
        columns = [*tokens[:3], position_T, *turns]
        if not bool(found.rest_T.all()):
            # An index in brackets takes four times as long.
            rest = found.rest_T.nonzero().flatten()
            columns = [each.index_select(0, rest) for each in columns]
        difference, proximal, behavior, position, turn, place = columns
        excess, k3 = bounded_expm1(difference), k3_of(difference)
        steps = difference.abs() / (_FLOAT32_STEP * behavior.abs().clamp_min(1.0))
        largest = torch.stack([steps, -difference, difference.abs()]).double()
        is_open, is_first = behavior < NEARLY_CERTAIN, position == 0
        firsts = [
            (is_open & chosen & different).sum()
            for chosen in (is_first, ~is_first)
            for different in (torch.ones_like(is_open), difference != 0.0)
        ]
        uncertain = (behavior.exp() < CERTAIN).nonzero().flatten()
        d, b, p, k3_open = (each.index_select(0, uncertain) for each in (difference, behavior, proximal, k3))
        turn, place, position = (each.index_select(0, uncertain) for each in (turn, place, position))
        line = line_sums(torch.ones_like(d, dtype=torch.bool), d, b, p)
        shift = d.abs() / -b.expm1()
        begins = torch.tensor([*PLACES.values()][1:], device=place.device)
        place = torch.bucketize(place, begins, right=True) + len(PLACES) * (turn > 0)
        octave = ((position.double() + 1.0).log2() * PER_OCTAVE).floor().long().clamp_max(NUM_POSITIONS - 1)
        return cls(
            sums=sums_of_sorted(tokens, found, response_mask_R=response_mask_R, layout=layout, line=line),
            shifts=_by_shift(shift, k3_open, d),
            places=_moments(place, 2 * len(PLACES), shift, k3_open).view(2, len(PLACES), -1),
            positions=_moments(octave, NUM_POSITIONS, shift, k3_open),
            ratios=torch.stack([torch.tensor(len(excess)), excess.double().sum(), excess.double().square().sum()]),
            rounded=torch.stack([_bf16_numbers(side) for side in (proximal, behavior)]),
            firsts=torch.stack(firsts).double(),
            largest=torch.nn.functional.pad(largest, (0, 1), value=-torch.inf).amax(1),
        )

    def __add__(self, other: Signals) -> Signals:
        """The signals of the tokens of both."""
        both = {each.name: getattr(self, each.name) + getattr(other, each.name) for each in fields(self)}
        both |= {"sums": added(self.sums, other.sums), "largest": torch.maximum(self.largest, other.largest)}
        return Signals(**both)

    @cached_property
    def tokens(self) -> TokenSums:
        """The sums that guards judge by."""
        return TokenSums.of(self.sums.tolist())

    def typical_shift(self) -> float:
        """The median of ``|d| / (1 - p)`` of uncertain tokens whose log-probs differ."""
        counts = self.shifts[:, 0].sum(0)
        half = torch.tensor(float(counts.sum()) / 2.0, dtype=torch.float64)
        index = min(int(torch.searchsorted(counts.cumsum(0), half)), NUM_SHIFTS - 1)
        return float(10.0 ** (SMALLEST + (index + 0.5) / PER_DECADE))

    def beyond(self, shift: float) -> Tensor:
        """``[2, 2]`` of uncertain tokens with ``|d| / (1 - p)`` above ``shift``, ``d`` below and above 0: count, k3."""
        return self.shifts[:, :, int(_bin(torch.tensor(shift, dtype=torch.float64))) + 1 :].sum(-1)


def _bin(shift: Tensor) -> Tensor:
    return ((shift.log10() - SMALLEST) * PER_DECADE).clamp(0, NUM_SHIFTS - 1).long()


def _by_shift(shift: Tensor, k3: Tensor, difference: Tensor) -> Tensor:
    different = (difference != 0.0).nonzero().flatten()
    shift, k3, difference = (each.index_select(0, different) for each in (shift, k3, difference))
    index = _bin(shift) + NUM_SHIFTS * (difference > 0.0)
    moments = [torch.bincount(index, weights, minlength=2 * NUM_SHIFTS).double() for weights in (None, k3.double())]
    return torch.stack(moments).view(2, 2, -1).transpose(0, 1)


def _moments(index: Tensor, size: int, shift: Tensor, k3: Tensor) -> Tensor:
    bounded = [each.clamp_max(1.0).double() for each in (shift, k3)]
    weights = (None, k3.double(), *(power for each in bounded for power in (each, each.square())))
    return torch.stack([torch.bincount(index, each, minlength=size).double() for each in weights], dim=1)


def _bf16_numbers(values: Tensor) -> Tensor:
    is_number = values != 0.0
    is_rounded = is_number & (values.bfloat16().to(values.dtype) == values)
    step = torch.exp2(values.abs().log2().floor() - (_BF16_DIGITS - 1.0))
    # k3 of a small difference is half its square.
    expected = torch.where(is_number, step, 0.0).square().sum(dtype=torch.float64) * (0.5 * _UNIFORM_VARIANCE)
    return torch.stack([is_number.sum(), is_rounded.sum(), expected]).double()


def first_position(index: int) -> int:
    """Of a bin of positions."""
    return math.ceil(math.pow(2.0, index / PER_OCTAVE)) - 1


class Turns(NamedTuple):
    """Of each trained token ``[T]`` the number of its turn, from 0 in each response, and its place in the turn."""

    turn_T: Tensor
    place_T: Tensor


def turns_of(trained_T: Tensor, position_T: Tensor) -> Turns:
    """Turns of whole responses, one after the other: a turn begins behind a masked token, or with the response."""
    begins_T = trained_T & (position_T == 0)
    begins_T[1:] |= trained_T[1:] & ~trained_T[:-1]
    index_T = torch.arange(len(begins_T), device=begins_T.device)
    count_T = begins_T.long().cumsum(0)
    before_T = torch.cat([count_T.new_zeros(1), count_T])[index_T - position_T]
    last_begin_T = torch.where(begins_T, index_T, 0)
    place_T = index_T - (last_begin_T.cummax(0).values if len(index_T) else index_T)
    return Turns((count_T - before_T - 1).clamp_min(0), place_T)


class Mean(NamedTuple):
    """A mean, and the variance of its error."""

    value: float
    variance: float

    @classmethod
    def of(cls, count: float, total: float, squared: float) -> Mean:
        """From sums of so many numbers, and of their squares."""
        mean = total / count if count else math.nan
        return cls(mean, max(squared / count - mean**2, 0.0) / count if count else math.nan)

    def is_above(self, other: Mean, factor: float) -> bool:
        """Whether it is more than so many times another, beyond chance."""
        error = math.sqrt(self.variance + other.variance)
        return self.value > factor * other.value and self.value - other.value > PLACE_ERRORS * error


class Place(NamedTuple):
    """Uncertain tokens of a place: how many, their k3, and the means of ``|d| / (1 - p)`` and of k3, both at most 1."""

    num_tokens: float
    k3: float
    shift: Mean
    size: Mean

    @classmethod
    def of(cls, moments: Tensor) -> Place:
        """From a row of :attr:`Signals.positions`, or a sum of rows."""
        count, k3, *sums = moments.tolist()
        return cls(count, k3, Mean.of(count, *sums[:2]), Mean.of(count, *sums[2:]))

    def stands_out_of(self, other: Place) -> bool:
        """Whether its tokens are far apart where those of another are not."""
        enough = min(self.num_tokens, other.num_tokens) >= MIN_TOKENS
        return enough and self.shift.is_above(other.shift, PLACE_FACTOR)

    def has_more_k3_than(self, other: Place) -> bool:
        """Whether a few of its tokens are, which a mean of all may not show beside another cause."""
        enough = min(self.num_tokens, other.num_tokens) >= MIN_TOKENS
        return enough and self.size.is_above(other.size, PLACE_K3_FACTOR)

    def excess_over(self, other: Place) -> float:
        """The k3 that it has beyond that of as many tokens of another."""
        return max(self.k3 - other.k3 / other.num_tokens * self.num_tokens, 0.0)
