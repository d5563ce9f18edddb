# SPDX-License-Identifier: Apache-2.0
"""Segments: runs of generated tokens within a response, such as the turns of an agent.

A rank may hold any part of a segment. So the values of all ranks are first laid out as whole responses, in one gather;
then every rank adds up the same numbers in the same order, whatever the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.config import Gate
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.tokens import Tokens

# Terms of a step of a scan: few steps are few launches, and a step takes memory for so many numbers per token.
_FAN_IN = 16


class Segments(NamedTuple):
    """The statistics of each token's segment by the label of their gate; and bool, whether all its tokens have a ratio.

    The statistics count those that have one.
    """

    values: dict[str, Tensor]
    known: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Segments:
        """The function of each tensor."""
        return Segments({label: function(value) for label, value in self.values.items()}, function(self.known))


class Runs(NamedTuple):
    """``[R]`` each: the place of a token, where the run that it is in begins, and where the next run does."""

    place_R: Tensor
    first_R: Tensor
    next_R: Tensor

    @classmethod
    def of(cls, mask_R: Tensor, sequence_R: Tensor) -> Runs:
        """Runs of tokens of the mask, each within its sequence; a token outside of it is a run of its own."""
        is_first_R = torch.ones_like(mask_R)
        is_first_R[1:] = ~(mask_R[1:] & mask_R[:-1] & (sequence_R[1:] == sequence_R[:-1]))
        run_R = is_first_R.cumsum(0)
        # Where runs begin, the first at 1; behind the last one the end of all tokens.
        size = len(mask_R)
        place_R = torch.arange(size, device=mask_R.device)
        first_N = (place_R.new_zeros(size + 2) + size).scatter(0, torch.where(is_first_R, run_R, 0), place_R)
        return cls(place_R, first_N.index_select(0, run_R), first_N.index_select(0, run_R + 1))

    @property
    def length_R(self) -> Tensor:
        """``[R]``: tokens of the run; at least 1."""
        return self.next_R - self.first_R

    def sums(self, rows_FR: Sequence[Tensor], layout: PackedLayout) -> list[Tensor]:
        """``F`` times ``[R]``: the sum of each row over a token's run."""
        offset_R, last_R = self.place_R - self.first_R, self.next_R - 1
        longest = max(layout.response_lengths, default=0)
        return [running_sums(row_R, offset_R, longest).index_select(0, last_R) for row_R in rows_FR]


def segment_values(
    t: Tokens,
    gates: Mapping[str, Gate],
    layout: PackedLayout,
    mask_R: Tensor,
    gather: Callable[[Tensor], Tensor],
) -> Segments:
    """``[T]``: the statistics of the segments of local tokens."""
    rows = [t.valid.float(), *(torch.where(t.valid, gate.row.of(t), 0.0) for gate in gates.values())]
    rows_FR = whole_rows(torch.stack(rows), layout, gather)
    generated_R = mask_R != 0
    runs = Runs.of(generated_R, layout.sequence_R)
    size_R, count_R, *totals = runs.sums([generated_R.float(), *rows_FR.unbind()], layout)
    values = {}
    for (label, gate), total_R in zip(gates.items(), totals, strict=True):
        value_R = total_R / count_R.clamp(min=1.0) if gate.reduce == "segment_mean" else total_R
        values[label] = layout.local_part(value_R)
    return Segments(values, layout.local_part(count_R == size_R))


def whole_rows(rows_FT: Tensor, layout: PackedLayout, gather: Callable[[Tensor], Tensor]) -> Tensor:
    """``[F, R]``: rows of local tokens as rows of whole responses; ``gather`` those of all context-parallel ranks."""
    if layout.is_whole:
        return rows_FT
    rows_FR = rows_FT.new_zeros(len(rows_FT), layout.num_whole_tokens)
    # Each token lies on one rank, so that nothing is rounded.
    return gather(rows_FR.index_copy(-1, layout.position_T, rows_FT)).sum(0)


def running_sums(values_T: Tensor, offset_T: Tensor, longest: int) -> Tensor:
    """``[T]``: of each token, the sum over its run up to it; ``offset_T`` tokens of the run are before it.

    The order of additions is fixed: after ``k`` steps ``values_T[t]`` is the sum of the last ``16^k`` tokens of the run
    up to ``t``.
    """
    size, device = len(values_T), values_T.device
    if not values_T.is_floating_point():
        # Whole numbers have the same sum in every order, so torch's own scan is deterministic.
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
