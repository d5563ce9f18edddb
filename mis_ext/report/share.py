"""One rank's share of a rollout's mismatch: sums that add up over ranks, whether these share sequences or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.packing import PackedStreams
from mis_ext.report.part import Origin, Part
from mis_ext.report.sequences import COLUMNS, Sequences
from mis_ext.report.summary import Mismatch, mismatch_of
from mis_ext.report.tally import TokenTally

SUMS = slice(COLUMNS.index("num_response"), COLUMNS.index("behavior") + 1)
"""The columns of sequences that are sums over tokens; the others are known of no rollout."""


@dataclass(frozen=True, eq=False)
class Share:
    """Sums of some tokens of ``S`` sequences.

    Attributes:
        tally: Of all tokens. Those by position and by turn are wrong where a sequence is split: use none of them.
        columns: ``[S, len(COLUMNS)]`` float64, as in :class:`Sequences`.
    """

    tally: TokenTally
    columns: Tensor

    @classmethod
    def of(cls, streams: PackedStreams) -> Share:
        """The sums of the tokens that this rank holds."""
        layout = streams.layout
        # Sums do not ask where in its response a token lies: the local tokens of a sequence are a whole one here.
        local = PackedStreams(
            streams.proximal_logprobs_T.cpu(),
            streams.behavior_logprobs_T.cpu(),
            (layout.local_part(streams.response_mask_R) != 0).cpu(),
            PackedLayout.whole(layout.local_lengths),
        )
        without_advantage_T = torch.full((layout.num_local_tokens,), torch.nan)
        origins = [Origin()] * layout.num_sequences
        part = Part(step="", streams=local, advantages_T=without_advantage_T, origins=origins)
        return cls(TokenTally.of(part), Sequences.of(part).columns)


def of_same_sequences(shares: Sequence[Share]) -> Share:
    """The share of context-parallel ranks: each has some tokens of every sequence."""
    columns = shares[0].columns.clone()
    columns[:, SUMS] = torch.stack([share.columns[:, SUMS] for share in shares]).sum(0)
    return Share(_added(shares), columns)


def of_other_sequences(shares: Sequence[Share]) -> Share:
    """The share of data-parallel ranks: each has sequences of its own."""
    return Share(_added(shares), torch.cat([share.columns for share in shares]))


def mismatch_of_share(share: Share) -> Mismatch:
    """The numbers of the report's summary; the reward is NaN."""
    count = len(share.columns)
    return mismatch_of(share.tally, Sequences(share.columns, [Origin()] * count, [""] * count))


def _added(shares: Sequence[Share]) -> TokenTally:
    first, *rest = (share.tally for share in shares)
    for tally in rest:
        first = first + tally
    return first
