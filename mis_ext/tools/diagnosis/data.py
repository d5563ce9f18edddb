# SPDX-License-Identifier: Apache-2.0
"""Faults of the data: missing log-probs, numbers that are not log-probs, and log-probs of other tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.tools.diagnosis import thresholds as limit
from mis_ext.tools.diagnosis.cause import Found, Left, cause
from mis_ext.tools.diagnosis.evidence import Evidence, may_be_zero, mean_and_error

# --- no log-prob at all


@cause(
    name="placeholder_log_probs",
    title="placeholders instead of log-probs, or missing log-probs",
    looks_like="Log-probs are null, NaN, infinite, below -1000, or 0 where the other side is below -1. Or they are "
    "equal in a whole response, or at one place of every response",
    advice="Request log-probs from the side with placeholders (engine: return_logprob in SGLang, logprobs in vLLM), or "
    "set the loss_masks of these tokens to 0. Engines return 0 for tokens that they sampled greedily.",
    is_fault=True,
)
def placeholders(left: Left) -> Found | None:
    tokens = left.tokens
    num_missing, missing = _missing(tokens)
    count = len(tokens)
    if count + num_missing < limit.MIN_CONSTANT_TOKENS:
        return None
    if evidence := _constants(tokens):
        return placeholders.found(confidence="certain", evidence=evidence, k3_share=1.0)
    shifted = Shift.of(tokens)
    sentinel_T, constant_T = _sentinels(tokens), _constant_samples(tokens)
    zero_T = torch.zeros_like(sentinel_T)
    num_placed, placed = 0.0, list[str]()
    # A shift pairs certain tokens with improbable ones. A different text in some samples does the same.
    if not shifted.is_all:
        zero_T = _zeros(tokens) & ~tokens.spread(shifted.some_S)
        far_T = tokens.spread(tokens.gap_S > limit.MAX_MEAN_ABS_DIFF)
        if float(far_T.double().mean()) < limit.MAX_FAR:
            zero_T &= ~far_T
        num_placed, placed = _zeros_of_a_place(tokens, sentinel_T | tokens.spread(shifted.some_S))
    constant_T &= ~sentinel_T & ~zero_T & ~tokens.spread(shifted.some_S)
    found = [*missing, *_in_words(tokens, sentinel_T, zero_T, constant_T), *placed]
    if not found:
        return None
    taken_T = sentinel_T | zero_T | constant_T
    if bool(zero_T.any()) or num_placed:
        # Truncated sampling can give a log-prob of 0, but if other zeros are placeholders, these may be placeholders
        # too.
        for side_T, other_T in permutations(tokens.sides.values()):
            taken_T = taken_T | ((side_T == 0.0) & (other_T < math.log(limit.CERTAIN)))
    most = max(int(sentinel_T.sum()), int(constant_T.sum()), num_missing, num_placed)
    num_zeros = int(zero_T.sum())
    return placeholders.found(
        confidence="certain",
        evidence="; ".join(found),
        k3_share=share_of(tokens, taken_T),
        is_pattern=most > max(1.0, limit.SUSPICIOUS_SHARE * count) or num_zeros > max(1.0, limit.ZERO_SHARE * count),
        taken_T=taken_T,
    )


def share_of(tokens: Evidence, chosen_T: Tensor) -> float:
    """Return the share of k3 of chosen tokens."""
    total = float(tokens.k3_T.sum())
    return float(tokens.k3_T[chosen_T].sum()) / total if total else 0.0


def _missing(tokens: Evidence) -> tuple[float, list[str]]:
    """Count the trained tokens of a side without a finite log-prob, and describe them."""
    totals = {side: float(tokens[f"missing_{side}"].sum()) for side in ("trainer", "engine")}
    return max(totals.values()), [
        f"{total:.0f} {_BEHIND[side]} log-probs on trainable tokens are missing (null, NaN or infinite), in "
        f"{int((tokens[f'missing_{side}'] > 0.0).sum())} of {len(tokens.steps)} responses"
        for side, total in totals.items()
        if total >= limit.MIN_PLACEHOLDERS
    ]


_BEHIND = {"trainer": "proximal", "engine": "behavior"}


def _sentinels(tokens: Evidence) -> Tensor:
    # If both sides have one, it is padding.
    return (tokens.engine_T < limit.PLACEHOLDER) != (tokens.trainer_T < limit.PLACEHOLDER)


def _zeros(tokens: Evidence) -> Tensor:
    """Log-probs of 0 which the other side finds improbable and truncation does not explain: see ``ZEROS_OF_A_CUT``."""
    found_T = torch.zeros(len(tokens), dtype=torch.bool)
    usable_T = ~_sentinels(tokens)
    for side_T, other_T in permutations(tokens.sides.values()):
        # If the other side is also certain, a 0 is correct.
        open_T = usable_T & (other_T < math.log(limit.CERTAIN))
        zero_T = open_T & (side_T == 0.0)
        rest_T = open_T & ~zero_T
        rest_S = tokens.per_sample(rest_T)
        mean_S = tokens.per_sample(torch.where(rest_T, other_T, 0.0)) / rest_S.clamp_min(1.0)
        low_T = other_T < tokens.spread(mean_S).clamp_max(limit.IMPROBABLE)
        zero_S, low_zero_S, low_rest_S = (tokens.per_sample(each) for each in (zero_T, zero_T & low_T, rest_T & low_T))
        of_no_cut_S = (low_zero_S * rest_S > limit.ZEROS_OF_A_CUT * low_rest_S * zero_S) | (rest_S == 0.0)
        found_T |= zero_T & (other_T < limit.IMPROBABLE) & tokens.spread(of_no_cut_S)
    return found_T


def _places(tokens: Evidence) -> Iterator[tuple[str, Tensor]]:
    """Places at which a framework adds a token that was not sampled, each with its tokens."""
    begins_T = tokens.place_T == 0
    yield "the last tokens of responses", tokens.later_T == 0
    yield "the first tokens of responses", begins_T & (tokens.turn_T == 0)
    yield "the last of turns", tokens.later_T >= 0
    yield "the first of turns", begins_T


def _zeros_of_a_place(tokens: Evidence, unusable_T: Tensor) -> tuple[int, list[str]]:
    """Count the zeros of one side at one place of many responses which truncation does not explain; describe them."""
    most, words = 0, list[str]()
    for place, at_T in _places(tokens):
        for (side, side_T), (_, other_T) in permutations(tokens.sides.items()):
            open_T = ~unusable_T & (other_T < math.log(limit.CERTAIN))
            zero_T = open_T & at_T & (side_T == 0.0)
            zero_S = tokens.per_sample(zero_T)
            least_S = tokens.per_sample(torch.where(zero_T, other_T, 0.0)) / zero_S
            # False for NaN.
            alike_T = open_T & ~at_T & (other_T >= tokens.spread(least_S))
            at, zeros, alike = int((open_T & at_T).sum()), int(zero_T.sum()), int(alike_T.sum())
            elsewhere = int((alike_T & (side_T == 0.0)).sum())
            is_usual = zeros >= max(limit.ZEROS_OF_A_PLACE * at, limit.MIN_CONSTANT_TOKENS)
            if zeros > most and is_usual and alike and elsewhere * at < limit.ZEROS_ELSEWHERE * zeros * alike:
                most = zeros
                words = [f"{zeros} of {at} {side} log-probs are exactly 0 at {place}, and not elsewhere"]
    return most, words


def _vary(count: Tensor, total: Tensor, gap: Tensor, squared: Tensor) -> Tensor:
    """Return True if log-probs differ from a constant, given sums of their differences from it."""
    spread = squared * count - total * total
    return (gap > limit.MAX_MEAN_ABS_DIFF * count) | (spread > (limit.MAX_CONSTANT_SPREAD * count) ** 2)


def _constants(tokens: Evidence) -> str:
    """Describe a side whose log-probs are all equal, or equal wherever they differ from the other side; else empty."""
    d_T, count = tokens.d_T, len(tokens)
    if not count:
        return ""
    gap = float(d_T.abs().sum())
    varies = bool(_vary(torch.tensor(float(count)), d_T.sum(), d_T.abs().sum(), d_T.square().sum()))
    for (side, side_T), (other, _) in permutations(tokens.sides.items()):
        number = float(side_T[0])
        is_zero = number == 0.0 and side == "behavior" and gap > limit.MAX_ZERO_GAP * count
        if bool((side_T == number).all()) and (varies or (is_zero and count >= limit.MIN_TOKENS)):
            return f"all {count} {side} log-probs on trainable tokens are {number:g}, and the {other} ones are not"
    different_T = d_T != 0.0
    different = int(different_T.sum())
    if different >= limit.MIN_CONSTANT_TOKENS and gap > limit.MAX_MEAN_ABS_DIFF * different:
        for side, side_T in tokens.sides.items():
            chosen = side_T[different_T]
            if bool((chosen == chosen[0]).all()):
                return f"the {different} {side} log-probs that differ from the other side's are all {chosen[0]:g}"
    return ""


def _constant_samples(tokens: Evidence) -> Tensor:
    """Tokens of responses whose log-probs are all equal, or whose lowest ones are equal, as from a clamp."""
    found_T = torch.zeros(len(tokens), dtype=torch.bool)
    for side_T in tokens.sides.values():
        lowest_T = side_T == tokens.spread(tokens.least(side_T))
        rows = (torch.ones_like(side_T), tokens.d_T, tokens.d_T.abs(), tokens.d_T.square())
        count_S, *moments_S = (tokens.per_sample(torch.where(lowest_T, row, 0.0)) for row in rows)
        clamped_S = moments_S[1] > limit.MAX_MEAN_ABS_DIFF * count_S
        differ_S = torch.where(count_S == tokens.num_S, _vary(count_S, *moments_S), clamped_S)
        found_T |= lowest_T & tokens.spread((count_S >= limit.MIN_CONSTANT_TOKENS) & differ_S)
    return found_T


def _in_words(tokens: Evidence, sentinel_T: Tensor, zero_T: Tensor, constant_T: Tensor) -> Iterator[str]:
    count = len(tokens)
    if int((sentinel_T | zero_T).sum()) >= limit.MIN_PLACEHOLDERS:
        for side, side_T in tokens.sides.items():
            if number := int((sentinel_T & (side_T < limit.PLACEHOLDER)).sum()):
                yield (
                    f"{number} of {count} {side} log-probs on trainable tokens are placeholders below "
                    f"{limit.PLACEHOLDER:g}"
                )
        for (side, side_T), (other, _) in permutations(tokens.sides.items()):
            if number := int((zero_T & (side_T == 0.0)).sum()):
                yield (
                    f"{number} of {count} {side} log-probs on trainable tokens are 0, where the {other} ones are below "
                    f"{limit.IMPROBABLE:g}"
                )
    if bool(constant_T.any()):
        yield (
            f"{int(constant_T.sum())} of {count} log-probs on trainable tokens are in responses where all values, "
            "or all of the lowest, are equal, as after a clamp, but not on the other side"
        )


# --- numbers that are no log-probs


@cause(
    name="not_log_probs",
    title="numbers that are not log-probs: negated, probabilities, to another base, or with an added value",
    looks_like="Both sides fit at least twice as well if the sign of one is flipped. Or values are above 0.1. Or one "
    "log-prob is 0.69, 1.44, 0.43, or 2.30 times the other",
    advice="Store natural logarithms of probabilities, which are below 0, without an added reward or bonus. Multiply "
    "log-probs to base 2 by 0.693, and to base 10 by 2.303.",
    is_fault=True,
)
def not_log_probs(left: Left) -> Found | None:
    return _negated(left.tokens) or _of_another_base(left) or _positive(left.tokens)


def _negated(tokens: Evidence) -> Found | None:
    count = max(len(tokens), 1)
    gap, flipped = float(tokens.d_T.abs().sum()), float((tokens.trainer_T + tokens.engine_T).clamp(-20, 20).abs().sum())
    if count < limit.MIN_CONSTANT_TOKENS or gap <= limit.MAX_ZERO_GAP * count or flipped >= limit.SHIFT_FACTOR * gap:
        return None
    return not_log_probs.found(
        title="log-probs with the wrong sign: negative log-likelihoods instead of log-probs",
        confidence="certain",
        evidence=f"behavior and proximal log-probs differ by {gap / count:.3g} on average, but by only "
        f"{flipped / count:.3g} when the sign of one is flipped",
        k3_share=1.0,
    )


def _positive(tokens: Evidence) -> Found | None:
    count, d_T = len(tokens), tokens.d_T
    numbers = {side: int((side_T > limit.MAX_LOG_PROB).sum()) for side, side_T in tokens.sides.items()}
    most = max(numbers.values())
    if most < limit.MIN_PLACEHOLDERS or count < limit.MIN_CONSTANT_TOKENS:
        return None
    positive_T = tokens.engine_T.maximum(tokens.trainer_T) > limit.MAX_LOG_PROB
    positive_S, of_positive_S = (tokens.per_sample(torch.where(positive_T, each, 0.0)) for each in (1.0 + 0 * d_T, d_T))
    others_S, of_others_S = tokens.num_S - positive_S, tokens.per_sample(d_T) - of_positive_S
    # An offset added to a response also moves its improbable tokens, on average by at least half as much. Probabilities
    # are never below 0.
    moved_S = of_others_S * of_positive_S * positive_S > 0.5 * of_positive_S.square() * others_S
    nowhere_below_S = tokens.least(tokens.engine_T).maximum(tokens.least(tokens.trainer_T)) >= 0.0
    all_S = (positive_S > limit.MANY_POSITIVE * tokens.num_S) | moved_S | ((positive_S > 0.0) & nowhere_below_S)
    taken_T = (positive_T | tokens.spread(all_S)) & ~_sentinels(tokens)
    told = " and ".join(f"{number} of {count} {side} log-probs" for side, number in numbers.items() if number)
    return not_log_probs.found(
        title="numbers above 0, which are not log-probs",
        confidence="certain",
        evidence=f"{told} on trainable tokens are above 0, and no probability is above 1",
        k3_share=share_of(tokens, taken_T),
        is_pattern=most > limit.SUSPICIOUS_SHARE * count,
        taken_T=taken_T,
    )


def _of_another_base(left: Left) -> Found | None:
    """Find logarithms to base 2 or 10 on one side.

    If one of two policies sampled the tokens, the mean ratio to it is 1. Here neither side fits as the sampling policy,
    with the other as a power of it. Truncated sampling moves both mean ratios; then converting the base must leave
    almost no difference.
    """
    tokens = left.tokens.uncertain
    is_of_policies = any(may_be_zero(each.excess, each.excess_error) and each.slope > 0.0 for each in left.powers)
    if len(tokens) < limit.MIN_TOKENS or is_of_policies:
        return None
    # Measured from the median: tokens that are all similar allow any ratio.
    gap = float((tokens.d_T - tokens.d_T.median()).abs().sum())
    natural = {
        (side, base): (left.tokens.trainer_T * scales[0] - left.tokens.engine_T * scales[1]).clamp(-20.0, 20.0)
        for base in (2.0, 10.0)
        for side, scales in (("engine", (1.0, math.log(base))), ("trainer", (math.log(base), 1.0)))
    }
    apart = {key: float(d_T[left.tokens.uncertain_T].abs().sum()) for key, d_T in natural.items()}
    side, base = min(apart, key=lambda key: apart[key])
    has_sampled = may_be_zero(*mean_and_error(natural[side, base].expm1()))
    if apart[side, base] >= (limit.BASE_FACTOR if has_sampled else limit.EXACT) * gap:
        return None
    is_sure = has_sampled and apart[side, base] < limit.EXACT * gap
    return not_log_probs.found(
        title="logarithms to base 2 or 10 on one side",
        confidence="certain" if is_sure else "possible",
        evidence=f"the {side}'s log-probs are logarithms to the base {base:g}: as natural logarithms they differ "
        f"by {apart[side, base] / len(tokens):.3g} nats on average, instead of by {float(tokens.d_T.abs().mean()):.3g}"
        + (", and the mean ratio is 1 then" if has_sampled else ""),
        k3_share=1.0,
        alternatives=() if is_sure else ("a temperature together with another cause, such as top-p",),
    )


# --- log-probs of other tokens


class Shift(NamedTuple):
    """Log-probs that fit at least twice as well when one side is shifted: all, or those of some responses."""

    lag: int
    is_all: bool
    some_S: Tensor
    aligned: float
    moved: float

    @classmethod
    def of(cls, tokens: Evidence) -> Shift:
        """Return the lag at which all log-probs fit best, else the first lag.

        If only some responses fit at another lag, log-probs of a dropped attempt precede their own.
        """
        usable_T = ~_sentinels(tokens) & ~_zeros(tokens)
        shifts = [cls.by(lag, tokens, usable_T) for lag in limit.LAGS]
        return min((each for each in shifts if each.is_all), key=lambda each: each.moved, default=shifts[0])

    @classmethod
    def by(cls, lag: int, tokens: Evidence, usable_T: Tensor) -> Shift:
        """Compare pairs of tokens of one response, ``lag`` positions apart, which both have a log-prob."""
        one, two = slice(None, -lag), slice(lag, None)
        sample_T, position_T = tokens.sample_T, tokens.position_T
        is_pair = usable_T[one] & usable_T[two] & (sample_T[one] == sample_T[two])
        pair = (is_pair & (position_T[two] == position_T[one] + lag)).nonzero().flatten()
        trainer, engine = tokens.trainer_T, tokens.engine_T
        differences = (
            trainer[pair] - engine[pair],
            trainer[pair + lag] - engine[pair + lag],
            trainer[pair + lag] - engine[pair],
            trainer[pair] - engine[pair + lag],
        )
        sums_S = [
            torch.bincount(sample_T[pair], each.abs().clamp_max(20.0), minlength=len(tokens.steps)).double()
            for each in differences
        ]
        num_S = torch.bincount(sample_T[pair], minlength=len(tokens.steps))
        first, second, earlier, later = (float(each.sum()) for each in sums_S)
        # Take the smaller of two sums: one extreme log-prob at the end of a response is in all sums except one.
        aligned, moved = min(first, second), min(earlier, later)
        some_S = sums_S[2].minimum(sums_S[3]) < limit.SHIFT_FACTOR * sums_S[0].minimum(sums_S[1])
        # Log-probs of a repetitive response change steadily, so a shift fits, but the sides differ only at its
        # beginning.
        apart_T = ~_sentinels(tokens) & (tokens.d_T.abs() > limit.MIN_SHIFTED_DIFF)
        place_T = torch.arange(len(tokens), dtype=torch.float64)
        late_T = place_T - tokens.spread(tokens.least(place_T)) >= tokens.spread(tokens.num_S / 2.0)
        halves_2S = torch.stack([tokens.per_sample(apart_T & half_T) for half_T in (late_T, ~late_T)])
        some_S = some_S & (halves_2S.amin(0) >= limit.MIN_SHIFTED_TOKENS / 2) & (num_S >= limit.MIN_TOKENS)
        is_all = len(pair) >= limit.MIN_TOKENS and moved < limit.SHIFT_FACTOR * aligned
        count = max(len(pair), 1)
        return cls(lag, is_all, some_S, aligned / count, moved / count)


@cause(
    name="shifted_log_probs",
    title="log-probs shifted by one token, or by two or three",
    looks_like="Log-probs fit at least twice as well if one side is shifted by one to three tokens, or in some "
    "responses by one",
    advice="Score position p with the logits of position p - 1, on both sides.",
    is_fault=True,
)
def shifted(left: Left) -> Found | None:
    tokens, shift = left.tokens, Shift.of(left.tokens)
    if shift.is_all:
        lag = "a token" if shift.lag == 1 else f"{shift.lag} tokens"
        return shifted.found(
            confidence="certain",
            evidence=f"behavior and proximal log-probs differ by {shift.aligned:.3g} on average, but by only "
            f"{shift.moved:.3g} when one of them is shifted by {lag}: they are misaligned",
            k3_share=1.0,
        )
    taken_T = tokens.spread(shift.some_S)
    if not bool(taken_T.any()):
        return None
    return shifted.found(
        confidence="certain",
        evidence=f"{int(taken_T.sum())} of {len(tokens)} tokens are in responses whose log-probs fit at least twice as "
        "well when one side is shifted by a token: they are misaligned",
        k3_share=share_of(tokens, taken_T),
        is_pattern=int(taken_T.sum()) > limit.SUSPICIOUS_SHARE * len(tokens),
        taken_T=taken_T,
    )
