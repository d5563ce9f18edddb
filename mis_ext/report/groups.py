"""Which groups of samples still teach something: those whose advantages are not all equal."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from mis_ext.report.part import Part

MIN_SPREAD = 1e-6
"""Advantages of equal rewards differ by less."""


@dataclass(eq=False)
class Groups:
    """Samples by group; tensors of a part are shared by all configurations that are tried on it."""

    _numbers: list[Tensor] = field(default_factory=list)
    _values: list[Tensor] = field(default_factory=list)
    _kept: list[Tensor] = field(default_factory=list)

    def add(self, part: Part, kept_S: Tensor) -> None:
        """Take in the samples of one more part: their groups, advantages or rewards, and whether they are kept."""
        self._numbers.append(part.group_S)
        self._values.append(part.advantage_S if part.has_advantages else part.reward_S)
        self._kept.append(kept_S)

    def num_effective(self, *, only_kept: bool = False) -> float:
        """Groups whose samples, or whose kept samples, do not all have one advantage; NaN where that is not known."""
        if not self._numbers:
            return math.nan
        numbers, values, kept = (torch.cat(each) for each in (self._numbers, self._values, self._kept))
        is_known = (numbers >= 0) & ~values.isnan()
        if not bool(is_known.any()):
            return math.nan
        chosen = is_known & kept if only_kept else is_known
        _, index = torch.unique(numbers[chosen], return_inverse=True)
        lowest, highest = (
            values.new_full((len(index),), math.nan).scatter_reduce(0, index, values[chosen], how, include_self=False)
            for how in ("amin", "amax")
        )
        return float((highest - lowest > MIN_SPREAD).sum())
