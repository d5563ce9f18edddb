"""What a micro-batch shows about the log-probs of this rank's tokens, in a few numbers that add up over calls."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from mis_ext.correction.formula import MAX_LOG_RATIO, Values
from mis_ext.correction.statistics import TOKEN_FORMULAS
from mis_ext.correction.suspicions import MAX_MEAN_ABS_DIFF, MIN_CONSTANT_TOKENS
from mis_ext.hosts.packing import PackedStreams

MAX_CONSTANT_SPREAD = 0.1
"""Nats. Equal behavior log-probs are legitimate where the proximal ones hardly vary: one-token answers, uniform
policies. They are not where the proximal ones vary as those of different tokens do."""

IMPROBABLE = -1.0
"""Nats. What the trainer finds less probable cannot have had the probability 1, not even with a small top-p."""

PLACEHOLDER = -1000.0
"""Nats. No model gives a token that it sampled a log-prob like this; -9999, -1e9 and the lowest floats are below it in
every dtype."""

MAX_LOG_PROB = 0.1
"""Nats. Where the log-sum-exp is rounded to bfloat16, the log-prob of a certain token may be above 0, but by less."""

_Number = TypeVar("_Number", float, Tensor)


class Evidence(NamedTuple):
    """What the calls so far have shown about this rank's tokens; sums, but for the last two, which are minima.

    Differences are proximal minus behavior, bounded: one absurd log-prob must not outweigh all others. ``first`` and
    ``second`` are those of the two tokens of a pair, ``earlier`` and ``later`` the same with a shifted stream,
    ``negated`` of all tokens with one sign flipped.
    """

    num_sequences: float
    num_response: float
    num_valid: float
    num_placeholders: float
    num_positive: float
    num_zeros: float
    num_constant: float
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
    lowest: float
    negated_highest: float


NUM_SUMS = len(Evidence._fields) - 2


def evidence_of(streams: PackedStreams) -> Tensor:
    """``[19]``, the numbers of :class:`Evidence`."""
    index, tokens, mask_R = streams.layout.index, streams.tokens, streams.response_mask_R
    behavior_T, proximal_T, valid_T = tokens.behavior_T, tokens.proximal_T, tokens.valid_mask_T
    difference_T = _bounded(tokens.log_ratio_T)
    rows = [valid_T.float(), difference_T, difference_T.abs(), difference_T.square()]
    length_S, *sums_S = index.reduce(rows, "sum")
    never_T = torch.where(valid_T, 0.0, torch.inf)
    lowest_S, negated_highest_S = index.reduce([never_T + behavior_T, never_T - behavior_T], "min")
    constant_S = (lowest_S == -negated_highest_S) & (length_S >= MIN_CONSTANT_TOKENS) & vary(length_S, *sums_S)
    sums = [
        torch.full((), streams.layout.num_sequences, device=mask_R.device),
        (mask_R != 0).sum(),
        valid_T.sum(),
        (valid_T & (behavior_T < PLACEHOLDER) & (proximal_T > PLACEHOLDER)).sum(),
        (valid_T & (behavior_T > MAX_LOG_PROB)).sum(),
        (valid_T & (behavior_T == 0.0) & (proximal_T < IMPROBABLE)).sum(),
        torch.where(constant_S, length_S, 0.0).sum(),
        *(row_S.sum() for row_S in sums_S),
        _bounded(proximal_T + behavior_T).abs().sum(),
        Values({"log_ratio": difference_T}, TOKEN_FORMULAS)["k3"].clamp_max(MAX_LOG_RATIO).sum(),
        *_pairs(streams, proximal_T, behavior_T, valid_T),
    ]
    # Padded, so that a call without sequences has extremes too.
    minima = [torch.nn.functional.pad(row, (0, 1), value=torch.inf).amin() for row in (lowest_S, negated_highest_S)]
    return torch.stack([value.float() for value in (*sums, *minima)])


def _pairs(streams: PackedStreams, proximal_T: Tensor, behavior_T: Tensor, valid_T: Tensor) -> list[Tensor]:
    index = streams.layout.index
    paired_T = valid_T[1:] & valid_T[:-1] & (index.sequence_T[1:] == index.sequence_T[:-1])
    if index.position_T is not None:
        paired_T = paired_T & (index.position_T[1:] == index.position_T[:-1] + 1)
    differences = (
        proximal_T[:-1] - behavior_T[:-1],
        proximal_T[1:] - behavior_T[1:],
        proximal_T[1:] - behavior_T[:-1],
        proximal_T[:-1] - behavior_T[1:],
    )
    return [paired_T.sum(), *(torch.where(paired_T, _bounded(each).abs(), 0.0).sum() for each in differences)]


def _bounded(difference: Tensor) -> Tensor:
    return difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def added(before: Tensor, now: Tensor) -> Tensor:
    """The evidence of all calls until now, from that before and that of this call: sums are added, minima compared."""
    return torch.cat([before[:NUM_SUMS] + now[:NUM_SUMS], torch.minimum(before[NUM_SUMS:], now[NUM_SUMS:])])


def vary(count: _Number, difference: _Number, gap: _Number, squared: _Number) -> _Number:
    """Whether proximal log-probs are no constant, or another one: from sums of their differences from a constant."""
    is_far = gap > MAX_MEAN_ABS_DIFF * count
    spread: _Number = squared * count - difference * difference
    return is_far | (spread > (MAX_CONSTANT_SPREAD * count) ** 2)
