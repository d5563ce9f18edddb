"""Turns of a response: runs of trained tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Turns(NamedTuple):
    """Of each trained token ``[T]`` the number of its turn, from 0 in each response, and its place in the turn."""

    turn_T: Tensor
    place_T: Tensor


def turns_of(trained_T: Tensor, position_T: Tensor) -> Turns:
    """Turns of whole responses, one after the other: a turn begins behind a masked token, or with the response.

    Args:
        trained_T: ``[T]`` bool.
        position_T: Of each token in its response.
    """
    begins_T = trained_T & (position_T == 0)
    begins_T[1:] |= trained_T[1:] & ~trained_T[:-1]
    index_T = torch.arange(len(begins_T), device=begins_T.device)
    count_T = begins_T.long().cumsum(0)
    before_T = torch.cat([count_T.new_zeros(1), count_T])[index_T - position_T]
    last_begin_T = torch.where(begins_T, index_T, 0)
    place_T = index_T - (last_begin_T.cummax(0).values if len(index_T) else index_T)
    return Turns((count_T - before_T - 1).clamp_min(0), place_T)
