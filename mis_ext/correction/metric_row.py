"""What a metric is: over what it is a mean, and how it is kept until it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from mis_ext.correction.formula import Formula, where

PREFIX = "mis_"

Population = Literal["T", "R", "S", "C", "G"]
"""T: valid tokens. R: response tokens. S: sequences with a valid token. C: sequences with a response token. G: one
number of all data-parallel ranks."""

Stage = Literal["token", "sequence", "group"]


@dataclass(frozen=True, slots=True, eq=False)
class Mean:
    """A mean kept as ``(total, count)``: exact under any later sum over calls or data-parallel ranks."""

    total: Tensor
    count: Tensor

    def value(self) -> Tensor:
        """``total / count``; NaN when nothing was counted."""
        return self.total / self.count


@dataclass(frozen=True, slots=True, eq=False)
class GroupNumber:
    """One number of this call on all data-parallel ranks, 0-dim; NaN when nothing was measured."""

    number: Tensor

    def value(self) -> Tensor:
        """The number of all data-parallel ranks, 0-dim."""
        return self.number


Metric = Mean | GroupNumber


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric.

    Attributes:
        name: Without prefix.
        over: What it is a mean over.
        stage: Of what the formula is: a token, a sequence, or the whole group. With ``over`` T or R, the formula of a
            sequence is the sum over its tokens.
        formula: Its parameters name what it needs.
        text: What it measures, for the documentation.
        is_core: Whether it is on the short list to watch.
        alias_of: Another row with the same values, which are not computed twice.
        mask: Name of the mask of which a sequence needs a token to be measured; by default what ``over`` says.
    """

    name: str
    over: Population
    stage: Stage
    formula: Formula
    text: str
    is_core: bool = False
    alias_of: str | None = None
    mask: str | None = None

    @property
    def token_name(self) -> str:
        """Name of the formula of a token, whose sum over a sequence is needed."""
        return self.formula.needs[0] if self.formula.is_name else f"metric_{self.name}"

    @property
    def count_name(self) -> str:
        """How many tokens of a sequence count; a sequence without one was not measured."""
        return f"num_{self.mask or ('response' if self.over in ('R', 'C') else 'valid')}"

    @property
    def total_formula(self) -> Formula:
        """What one sequence adds to the total of the mean."""
        return Formula.named(f"sum_{self.token_name}") if self.stage == "token" else self.formula

    @property
    def sequence_formula(self) -> Formula:
        """Its value of one sequence, NaN where it was not measured; G: the same number for every sequence."""
        total, is_mean = self.total_formula, self.over in ("T", "R")
        if self.over == "G":
            return total

        def value(*values: Tensor) -> Tensor:
            *arguments, count = values
            numerator = total.function(*arguments)
            return where(count > 0.0, numerator / count.clamp_min(1.0) if is_mean else numerator, math.nan)

        return Formula(value, (*total.needs, self.count_name))

    def alias(self, name: str, text: str) -> MetricRow:
        """The same values under another name."""
        return replace(self, name=name, text=text, is_core=False, alias_of=self.name)


def row(
    name: str,
    over: Population,
    function: Callable[..., Tensor] | Formula,
    text: str,
    *,
    stage: Stage,
    core: bool = False,
    mask: str | None = None,
) -> MetricRow:
    """A row from a function whose parameters name what it needs."""
    formula = function if isinstance(function, Formula) else Formula.of(function)
    return MetricRow(name, over, stage, formula, text, is_core=core, mask=mask)
