# SPDX-License-Identifier: Apache-2.0
"""Inputs of a method, one value per token: the tokens of one call, and reductions over sequences and the batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from mis_ext.correction import config
from mis_ext.correction.collectives import Group, gather_rows, group_size
from mis_ext.correction.config import OF_SEGMENTS
from mis_ext.correction.layout import PackedLayout, runs, segment_sums, to_device, whole_rows
from mis_ext.correction.tokens import STATISTICS, Tokens, bounded_exp

Policy = Literal["behavior", "proximal", "current", "reference"]
Pair = tuple[Policy, Policy]
"""Numerator and denominator of a ratio."""

MISMATCH: Pair = ("proximal", "behavior")
UPDATE: Pair = ("current", "proximal")
TOTAL: Pair = ("current", "behavior")
"""Log-ratios of the engine, of the updates of this step, and of both."""

Condition = Literal["positive", "negative", "outward"]
When = Literal["always", Condition]
"""All tokens, tokens with a positive or negative advantage, or tokens that the update moves away from ratio 1."""

Reduce = Literal[config.Reduce, "prefix", "batch_mean", "batch_rank_mean"]
"""The value at a token: as in the correction, the sum up to the token, the mean over the batch, or the mean over all
tokens of the batch whose value is not larger than its own.
"""

WHOLE_SEQUENCE: frozenset[str] = frozenset({"sum", "mean", "prefix", "segment_sum", "segment_mean"})
"""Reductions that are unknown for a sequence if one of its tokens has no value."""


class Reductions:
    """Reductions over the tokens of a mask, without a loop over sequences. Each gathers one small row from all ranks.

    Args:
        layout: Positions of the local tokens.
        cp_group: Ranks that hold other parts of the same sequences.
        dp_group: Ranks that hold other sequences, without context parallelism.
        num_joined: The number of gathers that this rank has already joined. For these it gets its own row back.
    """

    def __init__(
        self,
        layout: PackedLayout,
        *,
        cp_group: Group | None = None,
        dp_group: Group | None = None,
        num_joined: int = 0,
    ) -> None:
        if layout.is_whole != (group_size(cp_group) == 1):
            raise ValueError("a context-parallel layout needs its cp_group, and whole responses must have none")
        self._layout, self._cp_group, self._dp_group = layout, cp_group, dp_group
        self.has_other_sequences = group_size(dp_group) > 1
        """True if other ranks have sequences that this rank does not have."""
        self._num_joined, self._num_gathers = num_joined, 0

    def left_over(self) -> Reductions:
        """Return the reductions of a rank without tokens, which joins the gathers that this rank has not joined."""
        return Reductions(
            self._layout.emptied, cp_group=self._cp_group, dp_group=self._dp_group, num_joined=self._num_gathers
        )

    def reduce(self, values_T: Tensor, mask_T: Tensor, reduce: Reduce) -> Tensor:
        """``[T]``: the reduction over the tokens of ``mask_T``."""
        if reduce == "token":
            return values_T
        if reduce == "max":
            return -self.reduce(-values_T, mask_T, "min")
        if reduce == "min":
            (lowest_S,) = self._layout.minima([torch.where(mask_T, values_T, torch.inf)]).to(values_T.dtype)
            return self.to_tokens(
                lowest_S if self._cp_group is None else self._gather(lowest_S, self._cp_group).amin(0)
            )
        if reduce == "batch_rank_mean":
            return self._batch_rank_mean(values_T, mask_T)
        if reduce == "batch_mean":
            count = self.batch_total(torch.ones_like(values_T), mask_T).clamp_min(1)
            return (self.batch_total(values_T, mask_T) / count).expand_as(values_T)
        masked_T = torch.where(mask_T, values_T, 0.0)
        if reduce == "prefix":
            return self._prefix_sum(masked_T)
        if reduce in OF_SEGMENTS:
            masked_R, mask_R = self._whole(masked_T, mask_T)
            total_R, count_R = segment_sums([masked_R, mask_R], mask_R, self._layout.sequence_R)
            if reduce == "segment_mean":
                total_R = total_R / count_R.clamp_min(1.0)
            return self._layout.local_part(total_R.to(values_T.dtype))
        if reduce == "sum":
            return self.to_tokens(self.sums(masked_T[None])[0])
        total_S, count_S = self.sums(torch.stack([masked_T, mask_T.to(masked_T.dtype)]))
        return self.to_tokens(total_S / count_S.clamp_min(1.0))

    def batch_total(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        """Sum the values ``[..., T]`` of unmasked tokens over all ranks."""
        return self._over_all_ranks(torch.where(mask_T, values_T, 0.0).sum(-1))

    def nth_smallest(self, values_T: Tensor, mask_T: Tensor, number: Tensor) -> Tensor:
        """0-dim float32: the ``number``-th smallest value in the mask, over all ranks; the largest if there are fewer.

        A radix selection: floats sort like their bits if the bits of negative floats are inverted. So ranks exchange
        only counts, at most 16 KiB per gather, and every rank finds the same bits, for any number and distribution of
        values. NaN if the mask is empty.
        """
        bits_T = _ordered(values_T.float())
        found = bits_T.new_zeros(())
        for place, width in _DIGITS:
            digit_T = (bits_T >> place) & ((1 << width) - 1)
            counts = torch.zeros(1 << width, dtype=torch.int64, device=bits_T.device)
            # Integers, whose sum does not depend on the order.
            counts = self._over_all_ranks(counts.index_add(0, digit_T, mask_T.long()))
            running = counts.cumsum(0)
            number = torch.minimum(number, running[-1])
            digit = (running < number).sum()
            number = number - (running - counts).index_select(0, digit.view(1)).squeeze(0)
            mask_T = mask_T & (digit_T == digit)
            found = (found << width) | digit
        return _number(found)

    def count(self, mask_T: Tensor) -> Tensor:
        """``[T]``: the number of tokens of the mask in the sequence of each token."""
        return self.to_tokens(self.sums(mask_T.float()[None])[0])

    def position(self, mask_T: Tensor) -> Tensor:
        """``[T]``: the position among the tokens of the mask in the sequence, from 1."""
        return self._prefix_sum(mask_T.long())

    def over_sequences(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        """``[S]``: the sum of each sequence over the tokens of the mask."""
        return self.sums(torch.where(mask_T, values_T, 0)[None])[0]

    def to_tokens(self, values_S: Tensor) -> Tensor:
        """``[T]``: the value of each token's sequence."""
        return self._layout.spread(values_S)

    def sums(self, rows_FT: Tensor) -> Tensor:
        """``[F, S]``: sums over all tokens of each sequence."""
        return self._sum_over(self._cp_group, self._layout.sums(rows_FT).to(rows_FT.dtype))

    def _over_all_ranks(self, total: Tensor) -> Tensor:
        for group in (self._cp_group, self._dp_group):
            total = self._sum_over(group, total)
        return total

    def _sum_over(self, group: Group | None, row: Tensor) -> Tensor:
        return row if group is None else self._gather(row, group).sum(0)

    def _gather(self, row: Tensor, group: Group | None) -> Tensor:
        rows = gather_rows(row, group) if self._num_gathers >= self._num_joined else row.unsqueeze(0)
        self._num_gathers += 1
        return rows

    def _batch_rank_mean(self, values_T: Tensor, mask_T: Tensor) -> Tensor:
        if self.has_other_sequences:
            raise ValueError("a ranking of all tokens of the batch needs them on one rank: pass no dp_group")
        values_R, counted_R = self._whole(values_T, mask_T)
        order_R = torch.where(counted_R, values_R, torch.inf).argsort(stable=True)
        ranked_R = counted_R[order_R]
        place_R = torch.arange(len(order_R), device=order_R.device)
        # A scan, because cumsum of floats is not deterministic on a GPU.
        total_R = running_sums(torch.where(ranked_R, values_R[order_R], 0.0).double(), place_R, len(order_R))
        running_R = total_R / ranked_R.cumsum(0).clamp_min(1)
        return self._layout.local_part(torch.empty_like(values_R).scatter(0, order_R, running_R.to(values_T.dtype)))

    def _whole(self, values_T: Tensor, mask_T: Tensor) -> tuple[Tensor, Tensor]:
        """``[R]`` each: values and mask of the tokens of whole responses."""
        if self._layout.is_whole:
            return values_T, mask_T
        rows_FT = torch.stack([values_T, mask_T.to(values_T.dtype)])
        values_R, mask_R = whole_rows(rows_FT, self._layout, functools.partial(self._gather, group=self._cp_group))
        return values_R, mask_R > 0.0

    def _prefix_sum(self, values_T: Tensor) -> Tensor:
        layout = self._layout
        if layout.is_whole:
            offset_T = runs(torch.zeros_like(layout.length_S), layout.length_S, total=layout.num_local_tokens)
            return running_sums(values_T, offset_T, max(layout.local_lengths, default=0))
        pieces = layout.pieces
        piece_T, offset_T, start_P = _piece_index(pieces.lengths, pieces.whole_starts, values_T.device)
        values_T = running_sums(values_T, offset_T, max(pieces.lengths, default=0))
        is_last_T = torch.nn.functional.pad(offset_T[1:] == 0, (0, 1), value=True)[: len(offset_T)]
        # Each piece has one such token, so the order of additions does not matter.
        total_P = values_T.new_zeros(len(start_P)).index_add(0, piece_T, torch.where(is_last_T, values_T, 0))
        mine_SP = start_P.view(-1, pieces.per_sequence)
        starts_WSP = self._gather(mine_SP, self._cp_group)
        totals_WSP = self._gather(total_P.view_as(mine_SP), self._cp_group)
        is_before = starts_WSP[:, :, None, :] < mine_SP[None, :, :, None]
        earlier_SP = torch.where(is_before, totals_WSP[:, :, None, :], 0).sum(dim=(0, 3))
        return values_T + earlier_SP.flatten().index_select(0, piece_T)


def running_sums(values_T: Tensor, offset_T: Tensor, longest: int) -> Tensor:
    """``[T]``: the sum over the run of each token up to this token; ``offset_T``: tokens of the run before it.

    The order of additions is fixed: after ``k`` steps ``values_T[t]`` is the sum of the last ``16^k`` tokens of the run
    up to ``t``.
    """
    size, device = len(values_T), values_T.device
    if not values_T.is_floating_point():
        # Integers have the same sum in every order, so torch's own scan is deterministic.
        running_T = values_T.cumsum(0)
        first_T = torch.arange(size, device=device) - offset_T
        return running_T - (running_T - values_T).index_select(0, first_T)
    reach = 1
    while reach < longest:
        furthest = (_FAN_IN - 1) * reach
        before_FT = torch.nn.functional.pad(values_T, (furthest, 0)).as_strided((_FAN_IN, size), (reach, 1))
        distance_F1 = torch.arange(furthest, -1, -reach, device=device).unsqueeze(-1)
        values_T = torch.where(distance_F1 <= offset_T, before_FT, 0.0).sum(0)
        reach *= _FAN_IN
    return values_T


_FAN_IN = 16
"""Terms per step of a scan. Fewer steps need fewer launches; a step needs memory for this many values per token."""


@functools.lru_cache(maxsize=2)
def _piece_index(
    lengths: tuple[int, ...], whole_starts: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the contiguous run of each token, its offset there, and the start of each run in the whole responses."""
    length_P, start_P = torch.tensor([lengths, whole_starts], dtype=torch.int64)
    total = sum(lengths)
    piece_T = torch.arange(len(lengths)).repeat_interleave(length_P, output_size=total)
    offset_T = torch.arange(total) - (length_P.cumsum(0) - length_P)[piece_T]
    together = to_device(torch.cat([piece_T, offset_T, start_P]), device)
    piece_T, offset_T, start_P = torch.split(together, [total, total, len(lengths)])
    return piece_T, offset_T, start_P


class Batch:
    """Tokens of one call, finite everywhere. ``valid_T``: response tokens with finite log-probs, advantage and value.

    Args:
        log_probs: ``[T]`` per policy that the method uses, nats, detached.
        advantages_T: ``[T]``.
        response_mask_T: ``[T]`` bool, the tokens that the policy generated.
        state_values_T: ``[T]``, the mean advantage in the token's state; None if it is not used.
        reductions: Reductions from tokens to sequences.
        whole_sequences: Whether a token without a value makes its whole sequence invalid.
    """

    def __init__(
        self,
        log_probs: Mapping[Policy, Tensor],
        *,
        advantages_T: Tensor,
        response_mask_T: Tensor,
        reductions: Reductions,
        whole_sequences: bool,
        state_values_T: Tensor | None = None,
    ) -> None:
        self.reductions = reductions
        self.response_T = response_mask_T
        values = () if state_values_T is None else (state_values_T,)
        rows = torch.stack([advantages_T, *values, *log_probs.values()])
        # A non-finite value minus itself is NaN. This needs few launches for all rows together.
        self._zero_or_nan_T = (rows - rows).sum(0)
        valid_T = response_mask_T & (self._zero_or_nan_T == 0.0)
        if whole_sequences:
            valid_T = response_mask_T & (reductions.count(response_mask_T != valid_T) == 0.0)
        self.valid_T = valid_T
        finite = torch.where(valid_T, rows, 0.0).unbind()
        self.advantages_T = finite[0]
        self._state_values_T = finite[1] if values else None
        self._log_probs = dict(zip(log_probs, finite[1 + len(values) :], strict=True))
        self._position_T: Tensor | None = None
        self._tokens: dict[Pair, Tokens] = {}
        self._reduced: dict[tuple[str, Pair, Reduce, When], Tensor] = {}

    def log_prob(self, policy: Policy) -> Tensor:
        """The log-probs ``[T]`` of a policy in nats; 0 for a token that is not valid."""
        return self._log_probs[policy]

    @property
    def state_values_T(self) -> Tensor:
        """The critic's values ``[T]``, in units of the advantage; 0 for a token that is not valid."""
        assert self._state_values_T is not None
        return self._state_values_T

    def log_ratio(self, pair: Pair, reduce: Reduce = "token") -> Tensor:
        """``[T]`` log of numerator / denominator, or its reduction."""
        return self.statistic("ratio", pair, reduce)

    def statistic(self, name: str, pair: Pair, reduce: Reduce = "token", *, of: When = "always") -> Tensor:
        """``[T]`` on the scale of its bounds (for a ratio, its log), over the valid tokens that ``of`` selects."""
        key = (name, pair, reduce, of)
        if key not in self._reduced:
            mask_T = self.valid_T if of == "always" else self.valid_T & self.when(of, pair)
            self._reduced[key] = self.reductions.reduce(self._of_tokens(name, pair), mask_T, reduce)
        return self._reduced[key]

    def effective_share(self, pair: Pair) -> Tensor:
        """0-dim: ``(sum w)^2 / (n sum w^2)`` over the valid tokens of all ranks; 1 if all ratios are equal."""
        key: tuple[str, Pair, Reduce, When] = ("effective_share", pair, "batch_mean", "always")
        if key not in self._reduced:
            ratio_T = bounded_exp(self.log_ratio(pair))
            rows_FT = torch.stack([torch.ones_like(ratio_T), ratio_T, ratio_T.square()])
            count, total, squared = self.reductions.batch_total(rows_FT, self.valid_T).unbind()
            share = total.square() / torch.where(count > 0.0, count * squared, 1.0)
            self._reduced[key] = torch.where(count > 0.0, share, 1.0)
        return self._reduced[key]

    def worst(self, name: str, pair: Pair, reduce: Reduce, *, of: When = "always") -> Tensor:
        """``[T]``: :meth:`statistic` as a minimum or maximum; NaN if a response token of the sequence is not valid.

        A minimum with a NaN is NaN, so that one reduction finds both.
        """
        mask_T = self.response_T
        if of != "always":
            mask_T = mask_T & (self.when(of, pair) | ~self.valid_T)
        return self.reductions.reduce(self._of_tokens(name, pair) + self._zero_or_nan_T, mask_T, reduce)

    def when(self, when: Condition, pair: Pair) -> Tensor:
        """``[T]`` bool: tokens for which the condition holds, by advantage or by the move of the ratio away from 1."""
        if when == "positive":
            return self.advantages_T > 0.0
        if when == "negative":
            return self.advantages_T < 0.0
        log_ratio_T = self.log_ratio(pair)
        return ((self.advantages_T > 0.0) & (log_ratio_T > 0.0)) | ((self.advantages_T < 0.0) & (log_ratio_T < 0.0))

    def by_sign(self, positive: float, negative: float) -> Tensor:
        """``[T]``: one value where the advantage is positive, the other value elsewhere."""
        is_positive_T = (self.advantages_T > 0.0).to(self.advantages_T.dtype)
        return is_positive_T * positive + (1.0 - is_positive_T) * negative

    @property
    def position_T(self) -> Tensor:
        """``[T]``: the position among the valid tokens of the response, from 1."""
        if self._position_T is None:
            position_T = self.reductions.position(self.valid_T).clamp_min(1)
            self._position_T = position_T.to(self.advantages_T.dtype)
        return self._position_T

    def _of_tokens(self, name: str, pair: Pair) -> Tensor:
        if pair not in self._tokens:
            numerator_T, denominator_T = map(self.log_prob, pair)
            self._tokens[pair] = Tokens(
                numerator_T - denominator_T, numerator_T, denominator_T, self.response_T, self.valid_T
            )
        return STATISTICS[name].of(self._tokens[pair])


_DIGITS = ((21, 11), (10, 11), (0, 10))
"""Position and width of the digits of 32 bits, from the leading digit."""
_SIGN = 1 << 31


def _ordered(values_N: Tensor) -> Tensor:
    """32 bits of each float32, as int64, that sort like the floats; -0 is 0."""
    bits_N = torch.where(values_N == 0.0, 0.0, values_N).view(torch.int32).long()
    return torch.where(bits_N < 0, -1 - bits_N, bits_N + _SIGN)


def _number(bits: Tensor) -> Tensor:
    """The inverse of :func:`_ordered`."""
    return torch.where(bits < _SIGN, -1 - bits, bits - _SIGN).to(torch.int32).view(torch.float32)
