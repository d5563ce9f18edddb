"""Denominators: from losses of tokens to the loss of a batch; explicit, exact over all ranks, and convertible."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.layout import PackedLayout
from mis_ext.methods.reductions import Reductions

Over = Literal["tokens", "sequences"]


def terms_of(reductions: Reductions, mask_T: Tensor, over: Over, dtype: torch.dtype = torch.float32) -> Tensor:
    """``[T]``: how many terms of a mean each token of the mask is: 1, or 1 / tokens of its sequence."""
    count_T = reductions.count(mask_T).to(dtype)
    return torch.ones_like(count_T) if over == "tokens" else count_T.clamp_min(1.0).reciprocal()


def mean_weights(
    counted_T: Tensor,
    *,
    over: Over,
    layout: PackedLayout,
    cp_group: Group | None = None,
    dp_group: Group | None = None,
) -> Tensor:
    """``[T]`` float32: multiply losses of tokens by it, and sum over tokens and ranks for their mean.

    ``counted_T`` says whose mean: the response mask for denominators that do not depend on what is rejected, what a
    method keeps for those of kept tokens. Both differ by one factor: ``loss(response) = loss(kept) * kept / response``,
    with terms of the mean counted on both sides. A sequence without a counted token is no term.

    Args:
        counted_T: ``[T]`` bool.
        over: ``tokens``: all alike. ``sequences``: the mean of per-sequence means.
        layout: Where the local tokens lie.
        cp_group: Ranks that hold other parts of the same sequences.
        dp_group: Ranks that hold other sequences.
    """
    reductions = Reductions(layout, cp_group=cp_group, dp_group=dp_group)
    term_T = terms_of(reductions, counted_T, over)
    total = reductions.batch_total(term_T, counted_T)
    # Of sequences the sum of 1 / n is their number up to rounding, and none is 0.
    return torch.where(total > 0.0, term_T / torch.where(total > 0.0, total, 1.0), 0.0)
