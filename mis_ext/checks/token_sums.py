# SPDX-License-Identifier: Apache-2.0
"""What a micro-batch shows about its log-probs in a few numbers that add up over calls, and need no look at the host.

Tokens that have no log-prob are taken out, so that they do not hide what the others show: placeholders, numbers above
0, responses whose log-probs are all one number, and responses that are shifted by a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout, TokenRatios
from mis_ext.correction.tokens import MAX_LOG_RATIO, k3

# From where on log-probs are suspicious: limits that several rules share.

MIN_TOKENS = 64
"""Fewer tokens, or pairs of neighbours, say too little about sizes, lines and shifts."""

MIN_CONSTANT_TOKENS = 8
"""So many equal log-probs are no coincidence."""

SHIFT_FACTOR = 0.5
"""Streams that fit so much better when one is shifted by a token are misaligned."""

MIN_SHIFTED_TOKENS, MIN_SHIFTED_DIFF = 8, 0.1
"""So many tokens of a shifted response, half of them in either half of it, differ by so many nats: kernels in bfloat16
give at most as much."""

MAX_MEAN_ABS_DIFF = 0.3
"""Nats per token; more is no mismatch of kernels."""

MAX_CONSTANT_SPREAD = 0.1
"""Nats. Equal behavior log-probs are legitimate where the proximal ones hardly vary: one-token answers, uniform
policies. They are not where the proximal ones vary as those of different tokens do."""

IMPROBABLE = -1.0
"""Nats. What the other side finds less probable had no probability of 1, unless a cut left it alone."""

ZEROS_OF_A_CUT = 0.5
"""Log-probs of 0 in place of others do not depend on the token: the other side finds them less probable than is typical
of the response's tokens as often as the rest, 1 times. A token to which a cut left no alternative was the most probable
one: with top-p it has at least that probability, and no other token has as much, so that none of them is less probable
than the rest, 0 times. This is halfway, for logits of any kind and vocabulary."""

MANY_POSITIVE = 0.5
"""Share of a response's tokens above 0 from which on all of them are wrong: something was added to each."""

PLACEHOLDER = -1000.0
"""Nats. No model gives a token that it sampled a log-prob like this; -9999, -1e9 and the lowest floats are below it in
every dtype."""

MAX_LOG_PROB = 0.1
"""Nats. Where the log-sum-exp is rounded to bfloat16, the log-prob of a certain token may be above 0, but by less."""

CERTAIN = 0.98
"""Where the engine's probability is above, a token says little about the engines: both give 1."""

KERNEL_K3, PRETRAINED_K3, QUANTISED_K3 = 1e-3, 3e-3, 7e-2
"""Up to where a k3 per token is explained by kernels in bfloat16 of our small models, by those of SmolLM2-135M (1.7e-3
to 2.2e-3), and by low precision there (1.4e-2 to 7e-2 while a policy learns). They are no limits of other models:
Qwen2.5-Coder-1.5B has 2e-4 and 0.3. So they choose which of several words for a size comes first, and the others are
among its alternatives. Where differences are normal, a k3 of 7e-2 has a mean difference of ``MAX_MEAN_ABS_DIFF``."""

SAMPLED_ERRORS = 3.0
"""The mean of p / q over tokens that q sampled is 1, or less where few ratios have much of it, and never more: above by
so many standard errors, they were sampled from something else."""

BASES = tuple((side, base) for side in ("engine", "trainer") for base in (2.0, 10.0))
"""Of logarithms, and whose they may be."""

MAX_CHANCE = 1e-3
"""What has a smaller chance is no coincidence."""

FEW_SEQUENCES_ESS = 0.2
"""Effective share of products of ratios below which a few responses decide.

By the Gaussian law it is exp(-s^2), with s the standard deviation of the log of a product, and the heaviest Phi(-s) of
the responses have half of all weight: a tenth of them at 0.19, a fifth at 0.5, one in fifteen at 0.1.
"""


class Fit(NamedTuple):
    """A straight line: its slope, and the share of the variance that it explains."""

    slope: float
    explained: float


class Line(NamedTuple):
    """Sums over tokens for the regression of the difference d on either log-prob, b or p."""

    num_tokens: float
    d: float
    b: float
    p: float
    dd: float
    bb: float
    pp: float
    bd: float
    pd: float

    def on(self, side: str) -> Fit:
        """The difference as a line in the log-prob of a side."""
        x, xx, xd = (self.b, self.bb, self.bd) if side == "behavior" else (self.p, self.pp, self.pd)
        count = max(self.num_tokens, 1.0)
        spread, spread_d, together = xx - x**2 / count, self.dd - self.d**2 / count, xd - x * self.d / count
        if spread <= 0.0 or spread_d <= 0.0:
            return Fit(0.0, 0.0)
        return Fit(together / spread, together**2 / (spread * spread_d))

    def through_zero(self, slope: float) -> float:
        """The share of the variance that a line through 0 in b with this slope explains: what all share is none."""
        left = self.dd - 2.0 * slope * self.bd + slope**2 * self.bb
        spread = self.dd - self.d**2 / max(self.num_tokens, 1.0)
        return 1.0 - left / spread if spread > 0.0 else 0.0


class Moments(NamedTuple):
    """Sums over tokens of a weight times 1, s, o, s^2, s o and o^2, where s and o are log-probs of the two sides."""

    one: float
    s: float
    o: float
    ss: float
    so: float
    oo: float

    def swapped(self) -> Moments:
        """The same with the sides exchanged."""
        return Moments(self.one, self.o, self.s, self.oo, self.so, self.ss)

    def squares(self, slope: float, intercept: float) -> float:
        """The weighted sum of ``(o - slope s - intercept)^2``."""
        along = self.oo - 2.0 * slope * self.so + slope**2 * self.ss
        return along - 2.0 * intercept * (self.o - slope * self.s) + intercept**2 * self.one


class Power(NamedTuple):
    """The power of a distribution that another is, from the log-probs s and o of tokens that the first one sampled.

    Logits that are divided by a temperature make ``o_t = slope s_t - log sum_v p_t(v)^slope``, and only the position
    decides the sum. At every position, ``w = exp(o - s) - 1`` has mean 0 over what is sampled, whatever the two
    distributions are. So w does not go with anything that the position decides, ``Cov(w, o) = slope Cov(w, s)``: exact
    for any logits and any temperature. Noise of o alone adds its own square to the left, and moves the slope from 1.

    Attributes:
        excess: The mean of w: 0, unless the tokens were sampled from something else.
        excess_error: Its standard error.
        slope: The power.
        error: Its standard error.
        fit: The mean of w, weighted by the square of ``o - slope s``, between -1 and 1. It is 0 for a power.
    """

    excess: float
    excess_error: float
    slope: float
    error: float
    fit: float

    @classmethod
    def of(cls, plain: Moments, once: Moments, squared: Moments, absolute: Moments) -> Power:
        """From sums with the weights 1, w, w^2 and abs(w)."""
        count = max(plain.one, 1.0)
        excess, excess_error = once.one / count, math.sqrt(squared.one) / count
        along = once.s - plain.s * excess
        if not along or not squared.one:
            return cls(excess, excess_error, math.nan, math.inf, math.nan)
        slope = (once.o - plain.o * excess) / along
        intercept = (plain.o - slope * plain.s) / count
        left, signed, size = (each.squares(slope, intercept) for each in (squared, once, absolute))
        fit = signed / size if size > 0.0 else math.nan
        return cls(excess, excess_error, slope, math.sqrt(max(left, 0.0)) / abs(along), fit)


class TokenSums(NamedTuple):
    """What the calls so far have shown about this rank's tokens: sums, and behind them minima.

    Differences are proximal minus behavior. They are bounded, and so are the sums of the log-probs of either side: one
    absurd log-prob must not outweigh all others. ``first`` and ``second`` are those of the two tokens of a pair,
    ``earlier`` and ``later`` the same with a shifted stream, ``negated`` of all tokens with one sign flipped. What ends
    in ``_rest`` is of the tokens that are not taken out; ``moments`` and ``in_base`` are those of ``_moments`` and
    ``_in_base`` over them, and ``line`` is over those of them that are uncertain.
    """

    num_sequences: float
    num_response: float
    num_valid: float
    num_different: float
    num_placeholders: float
    num_proximal_placeholders: float
    num_zeros: float
    num_proximal_zeros: float
    num_constant: float
    num_shifted: float
    num_positive: float
    num_proximal_positive: float
    difference: float
    gap: float
    squared: float
    negated: float
    k3: float
    num_pairs: float
    first: float
    second: float
    earlier: float
    later: float
    k3_placeholders: float
    k3_shifted: float
    k3_positive: float
    num_rest: float
    gap_rest: float
    k3_rest: float
    proximal_rest: float
    behavior_rest: float
    line: Line
    moments: Sequence[float]
    in_base: Sequence[float]
    minima: Sequence[float]

    @classmethod
    def of(cls, numbers: Sequence[float]) -> TokenSums:
        """From the numbers of :func:`token_sums`."""
        ends = [0, *accumulate((NUM_PLAIN, len(Line._fields), NUM_MOMENTS, 2 * len(BASES), NUM_MINIMA))]
        plain, line, *more = (numbers[begin:end] for begin, end in pairwise(ends))
        return cls._make([*plain, Line(*line), *more])

    @property
    def pair_gaps(self) -> tuple[float, float]:
        """The differences of pairs as they are, and with a shifted stream.

        Each is the better of two: at the end of a response one absurd log-prob is in all sums but one.
        """
        return min(self.first, self.second), min(self.earlier, self.later)

    @property
    def is_shifted(self) -> bool:
        """Whether the streams fit much better when one is shifted by a token."""
        aligned, moved = self.pair_gaps
        return self.num_pairs >= MIN_TOKENS and moved < SHIFT_FACTOR * aligned

    def one_number(self, side: str, *, of_different: bool = False) -> float | None:
        """What all log-probs of a side are, or all of tokens whose two differ; None if these are several numbers."""
        at = 2 * (side == "proximal") + 4 * of_different
        low, negated_high = self.minima[at : at + 2]
        return low if low == -negated_high else None

    @property
    def powers(self) -> tuple[Power, Power]:
        """Of the engine's distribution the trainer's, and the reverse: each as if the former had sampled."""
        size = len(Moments._fields)
        plain, *rest = (Moments(*self.moments[at : at + size]) for at in range(0, NUM_MOMENTS, size))
        return Power.of(plain, *rest[:3]), Power.of(plain.swapped(), *(each.swapped() for each in rest[3:]))

    @property
    def excess_in_base(self) -> dict[tuple[str, float], tuple[float, float]]:
        """The mean of ``exp(proximal - behavior) - 1`` if one side's are to a base, and its standard error."""
        count = max(self.num_rest, 1.0)
        pairs = zip(self.in_base[: len(BASES)], self.in_base[len(BASES) :], strict=True)
        return {base: (w / count, math.sqrt(squared) / count) for base, (w, squared) in zip(BASES, pairs, strict=True)}


NUM_PLAIN, NUM_MOMENTS, NUM_MINIMA = len(TokenSums._fields) - 4, 7 * len(Moments._fields), 8
NUM_SUMS = NUM_PLAIN + len(Line._fields) + NUM_MOMENTS + 2 * len(BASES)

NOTHING = TokenSums.of([0.0] * NUM_SUMS + [math.inf] * NUM_MINIMA)
"""Of no token."""


class Sorted(NamedTuple):
    """Which valid tokens have no log-prob, each for one reason; ``rest_T`` are the others.

    ``pairs_S`` ``[5, S]`` are sums over pairs of neighbours.
    """

    placeholder_T: Tensor
    zero_T: Tensor
    constant_T: Tensor
    shifted_T: Tensor
    positive_T: Tensor
    rest_T: Tensor
    pairs_S: Tensor


def token_sums(tokens: TokenRatios, *, response_mask_R: Tensor, layout: PackedLayout) -> Tensor:
    """The numbers of :class:`TokenSums` in float64, on the device of the tokens."""
    return sums_of_sorted(tokens, sort_out(tokens, layout), response_mask_R=response_mask_R, layout=layout)


def sort_out(tokens: TokenRatios, layout: PackedLayout) -> Sorted:
    """Tokens by whether they have a log-prob of the engine at all."""
    difference_T, proximal_T, behavior_T, _, valid_T = tokens
    # Where both sides have one it is padding.
    placeholder_T = valid_T & ((behavior_T < PLACEHOLDER) != (proximal_T < PLACEHOLDER))
    is_positive_T = valid_T & ((behavior_T > MAX_LOG_PROB) | (proximal_T > MAX_LOG_PROB))
    usable_T = valid_T & ~placeholder_T
    zero_T = _zeros(behavior_T, proximal_T, usable_T, layout) | _zeros(proximal_T, behavior_T, usable_T, layout)
    bounded_T = _bounded(difference_T)
    counted = [each.to(bounded_T.dtype) for each in (valid_T, is_positive_T)]
    sums_S = layout.sums([*counted, torch.where(is_positive_T, bounded_T, 0.0), bounded_T])
    length_S, positive_S, of_positive_S, of_all_S = sums_S
    lowest_S, lowest_proximal_S = layout.minima([torch.where(valid_T, x, torch.inf) for x in (behavior_T, proximal_T)])
    # A constant, or what log-probs are clamped to.
    at_lowest = [valid_T & (behavior_T == layout.spread(lowest_S))]
    at_lowest.append(valid_T & (proximal_T == layout.spread(lowest_proximal_S)))
    is_constant_T = torch.zeros_like(valid_T)
    for at_lowest_T in at_lowest:
        rows = (torch.ones_like(bounded_T), bounded_T, bounded_T.abs(), bounded_T.square())
        count_S, *moments_S = layout.sums([torch.where(at_lowest_T, row, 0.0) for row in rows])
        is_clamped_S = moments_S[1] > MAX_MEAN_ABS_DIFF * count_S
        differ_S = torch.where(count_S == length_S, vary(count_S, *moments_S), is_clamped_S)
        constant_S = (count_S >= MIN_CONSTANT_TOKENS) & differ_S
        is_constant_T = is_constant_T | (at_lowest_T & layout.spread(constant_S))
    pairs_S = layout.sums(_pairs(tokens, valid_T & ~placeholder_T & ~zero_T, layout))
    num_pairs_S, first_S, second_S, earlier_S, later_S = pairs_S
    is_shifted_S = earlier_S.minimum(later_S) < SHIFT_FACTOR * first_S.minimum(second_S)
    # A response that repeats itself is a line that falls, and apart at its beginning only.
    apart_T = valid_T & ~placeholder_T & (difference_T.abs() > MIN_SHIFTED_DIFF)
    number_T = valid_T.cumsum(0).double()
    (number_S,) = layout.minima([torch.where(valid_T, number_T, torch.inf)])
    is_late_T = number_T >= layout.spread(number_S + length_S / 2.0)
    halves_2S = layout.sums([apart_T & ~is_late_T, apart_T & is_late_T])
    is_shifted_S = is_shifted_S & (halves_2S.amin(0) >= MIN_SHIFTED_TOKENS / 2)
    rest_T = valid_T & ~placeholder_T
    shifted_T = rest_T & layout.spread(is_shifted_S & (num_pairs_S >= MIN_TOKENS))
    # A shift puts certain tokens beside improbable ones, too.
    zero_T, rest_T = zero_T & ~shifted_T, rest_T & ~shifted_T & ~zero_T
    constant_T = rest_T & is_constant_T
    # What is added to a response moves its improbable tokens, too: on average by at least half as much. Probabilities
    # are nowhere below 0.
    of_others_S, num_others_S = of_all_S - of_positive_S, length_S - positive_S
    is_moved_S = of_others_S * of_positive_S * positive_S > 0.5 * of_positive_S.square() * num_others_S
    are_probabilities_S = (positive_S > 0.0) & (lowest_S.maximum(lowest_proximal_S) >= 0.0)
    are_positive_S = (positive_S > MANY_POSITIVE * length_S) | is_moved_S | are_probabilities_S
    positive_T = rest_T & ~constant_T & (is_positive_T | layout.spread(are_positive_S))
    rest_T = rest_T & ~constant_T & ~positive_T
    return Sorted(placeholder_T, zero_T, constant_T, shifted_T, positive_T, rest_T, pairs_S)


def _zeros(side_T: Tensor, other_T: Tensor, usable_T: Tensor, layout: PackedLayout) -> Tensor:
    """Log-probs of 0 that the other side finds improbable, where no cut explains it: see ``ZEROS_OF_A_CUT``."""
    one_T = torch.ones_like(other_T)
    # Where the other side is certain, too, a 0 is right.
    open_T = usable_T & (other_T.exp() < CERTAIN)
    is_zero_T = open_T & (side_T == 0.0)
    rest_T = open_T & ~is_zero_T
    rest_S, of_rest_S = layout.sums([torch.where(rest_T, each, 0.0) for each in (one_T, other_T)])
    is_low_T = other_T < layout.spread(of_rest_S / rest_S.clamp_min(1.0)).clamp_max(IMPROBABLE)
    counted = (is_zero_T, is_zero_T & is_low_T, rest_T & is_low_T)
    zero_S, low_zero_S, low_rest_S = layout.sums([torch.where(each, one_T, 0.0) for each in counted])
    is_of_no_cut_S = (low_zero_S * rest_S > ZEROS_OF_A_CUT * low_rest_S * zero_S) | (rest_S == 0.0)
    return is_zero_T & (other_T < IMPROBABLE) & layout.spread(is_of_no_cut_S)


def sums_of_sorted(
    tokens: TokenRatios, found: Sorted, *, response_mask_R: Tensor, layout: PackedLayout, line: Tensor | None = None
) -> Tensor:
    """:func:`token_sums` of tokens that are sorted out; ``line`` are the sums of lines, if they are known."""
    difference_T, proximal_T, behavior_T, _, valid_T = tokens
    bounded_T, different_T, rest_T = _bounded(difference_T), difference_T != 0.0, found.rest_T
    k3_T = k3(difference_T)
    if line is None:
        line = line_sums(rest_T & (behavior_T.exp() < CERTAIN), bounded_T, behavior_T, proximal_T)
    sums = [
        torch.full((), layout.num_sequences, device=valid_T.device),
        (response_mask_R != 0).sum(),
        *(each.sum() for each in (valid_T, different_T)),
        *(each.sum() for each in (found.placeholder_T, found.placeholder_T & (proximal_T < PLACEHOLDER))),
        *(each.sum() for each in (found.zero_T, found.zero_T & (proximal_T == 0.0))),
        *(each.sum() for each in (found.constant_T, found.shifted_T)),
        *((valid_T & (side > MAX_LOG_PROB)).sum() for side in (behavior_T, proximal_T)),
        # All of them are 0 where a token is not valid.
        *(each.sum(dtype=torch.float64) for each in (bounded_T, bounded_T.abs(), bounded_T.square())),
        _bounded(proximal_T + behavior_T).abs().sum(dtype=torch.float64),
        k3_T.clamp_max(MAX_LOG_RATIO).sum(dtype=torch.float64),
        *found.pairs_S.sum(1),
        _total(found.placeholder_T | found.zero_T | found.constant_T, k3_T),
        *(_total(each, k3_T) for each in (found.shifted_T, found.positive_T)),
        rest_T.sum(),
        *(_total(rest_T, each) for each in (bounded_T.abs(), k3_T, _bounded(proximal_T), _bounded(behavior_T))),
        *line,
    ]
    minima = [
        # Padded, so that a call without tokens has extremes too.
        torch.nn.functional.pad(torch.where(chosen_T, 0.0, torch.inf) + each_T, (0, 1), value=torch.inf).amin()
        for chosen_T in (valid_T, different_T)
        for side_T in (behavior_T, proximal_T)
        for each_T in (side_T, -side_T)
    ]
    of_rest = _moments(rest_T, bounded_T, behavior_T, proximal_T), _in_base(rest_T, behavior_T, proximal_T)
    plain, least = (torch.stack([each.double() for each in numbers]) for numbers in (sums, minima))
    return torch.cat([plain, *of_rest, least])


def _moments(chosen_T: Tensor, difference_T: Tensor, behavior_T: Tensor, proximal_T: Tensor) -> Tensor:
    """The sums of :class:`Moments`, for the weights 1, and w, w^2 and abs(w) of either side."""
    d, b, p = (torch.where(chosen_T, each, 0.0).double() for each in (difference_T, behavior_T, proximal_T))
    products = torch.stack([chosen_T.double(), b, p, b * b, b * p, p * p])
    of_engine, of_trainer = torch.expm1(d), torch.expm1(-d)
    weights = [torch.ones_like(d), *(each for w in (of_engine, of_trainer) for each in (w, w.square(), w.abs()))]
    return (torch.stack(weights) @ products.T).flatten()


def _in_base(chosen_T: Tensor, behavior_T: Tensor, proximal_T: Tensor) -> Tensor:
    """The sums of w and of w^2 for each of ``BASES``, where w is of natural logarithms if that base was right."""
    b, p = (torch.where(chosen_T, each, 0.0).double() for each in (behavior_T, proximal_T))
    natural = [p - b * math.log(base) if side == "engine" else p * math.log(base) - b for side, base in BASES]
    w = _bounded(torch.stack(natural)).expm1()
    return torch.cat([w.sum(1), w.square().sum(1)])


def _pairs(tokens: TokenRatios, usable_T: Tensor, layout: PackedLayout) -> list[Tensor]:
    """Neighbours in a response: whether there is one before, and the differences as they are and shifted; ``[T]``."""
    proximal_T, behavior_T = tokens.proximal_T, tokens.behavior_T
    paired_T = usable_T[1:] & usable_T[:-1] & (layout.sequence_T[1:] == layout.sequence_T[:-1])
    if not layout.is_whole:
        paired_T = paired_T & (layout.position_T[1:] == layout.position_T[:-1] + 1)
    differences = (
        proximal_T[:-1] - behavior_T[:-1],
        proximal_T[1:] - behavior_T[1:],
        proximal_T[1:] - behavior_T[:-1],
        proximal_T[:-1] - behavior_T[1:],
    )
    rows = [paired_T.to(proximal_T.dtype)]
    rows += [torch.where(paired_T, _bounded(each).abs(), 0.0) for each in differences]
    first = min(1, len(proximal_T))
    return [torch.nn.functional.pad(row, (first, 0)) for row in rows]


def line_sums(chosen_T: Tensor, difference_T: Tensor, behavior_T: Tensor, proximal_T: Tensor) -> Tensor:
    """The sums of :class:`Line` over chosen tokens."""
    d, b, p = (torch.where(chosen_T, each, 0.0).double() for each in (_bounded(difference_T), behavior_T, proximal_T))
    return torch.stack([chosen_T.sum(), d.sum(), b.sum(), p.sum(), d @ d, b @ b, p @ p, b @ d, p @ d])


def _total(chosen_T: Tensor, values_T: Tensor) -> Tensor:
    return torch.where(chosen_T, values_T, 0.0).sum(dtype=torch.float64)


def _bounded(difference: Tensor) -> Tensor:
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def added(before: Tensor, now: Tensor) -> Tensor:
    """The sums of all calls until now, from those before and those of this call: sums are added, minima compared."""
    return torch.cat([before[:NUM_SUMS] + now[:NUM_SUMS], torch.minimum(before[NUM_SUMS:], now[NUM_SUMS:])])


_Number = TypeVar("_Number", float, Tensor)


def vary(count: _Number, difference: _Number, gap: _Number, squared: _Number) -> _Number:
    """Whether proximal log-probs are no constant, or another one: from sums of their differences from a constant."""
    is_far = gap > MAX_MEAN_ABS_DIFF * count
    spread: _Number = squared * count - difference * difference
    return is_far | (spread > (MAX_CONSTANT_SPREAD * count) ** 2)
