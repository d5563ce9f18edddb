"""What a metric is: over what it is a mean, and how it is kept until it is read."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from mis_ext.correction.formula import Formula, where, where_positive

PREFIX = "mis_"

Population = Literal["valid_tokens", "response_tokens", "sequences", "responses", "group"]
"""What a metric is a mean over. ``sequences``: those with a valid token. ``responses``: those with a response token.
``group``: one number of all data-parallel ranks."""

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
        is_scaled: Whether the value is that of the formula times ``scale_factor``, which is known after the totals.
    """

    name: str
    over: Population
    stage: Stage
    formula: Formula
    text: str
    is_core: bool = False
    alias_of: str | None = None
    mask: str | None = None
    is_scaled: bool = False

    @property
    def token_name(self) -> str:
        """Name of the formula of a token, whose sum over a sequence is needed."""
        return self.formula.needs[0] if self.formula.is_name else f"metric_{self.name}"

    @property
    def amount_name(self) -> str:
        """Name of what one sequence adds to the total of the mean."""
        total = self.total_formula
        return total.needs[0] if total.is_name else f"amount_of_{self.name}"

    @property
    def is_of_tokens(self) -> bool:
        """Whether the value of a sequence is a mean over its tokens."""
        return self.over in ("valid_tokens", "response_tokens")

    @property
    def count_name(self) -> str:
        """How many tokens of a sequence count; a sequence without one was not measured."""
        return f"num_{self.mask or ('valid' if self.over in ('valid_tokens', 'sequences') else 'response')}"

    @property
    def total_formula(self) -> Formula:
        """What one sequence adds to the total of the mean."""
        return Formula.named(f"sum_{self.token_name}") if self.stage == "token" else self.formula

    def sequence_formulas(self, *, per_token_loss: bool) -> dict[str, Formula]:
        """By name: its value of one sequence, 0 where it was not measured, and what that adds to the mean of a call.

        Args:
            per_token_loss: The host averages over tokens, so that a sequence counts with its response tokens.
        """
        total, value_name, share_name = self.total_formula, f"value_of_{self.name}", f"share_by_{self.count_name}"
        value = mean_value if self.is_of_tokens else own_value
        formulas = {value_name: Formula(value, (self.amount_name, self.count_name))}
        if not total.is_name:
            formulas[self.amount_name] = total
        if not self.call_totals:
            return formulas

        def share(count: Tensor, num_response: Tensor) -> Tensor:
            return where(count > 0.0, num_response if per_token_loss else 1.0, 0.0)

        return formulas | {
            share_name: Formula(share, (self.count_name, "num_response")),
            f"term_of_{self.name}": Formula(term, (value_name, share_name)),
        }

    @property
    def call_totals(self) -> tuple[str, ...]:
        """Names of the sums over the measured sequences of a call: of what they add, and of their shares.

        None where every sequence with a response token is measured.
        """
        if self.over == "group" or self.count_name == "num_response":
            return ()
        return f"total_term_of_{self.name}", f"total_share_by_{self.count_name}"

    @property
    def kind(self) -> int:
        """Its place in a plan, where rows that one operation takes together stand side by side; see ``MetricTable``."""
        if self.over == "group":
            return 5
        if not self.call_totals:
            return 4 if self.is_of_tokens else 0
        return 3 if self.is_of_tokens else 2 - self.is_scaled

    @property
    def spread_name(self) -> str:
        """Name of what each token of a sequence is given."""
        return f"spread_{self.name}"

    @property
    def spread_formulas(self) -> dict[str, Formula]:
        """By name: what each token of a sequence is given, for a host that divides by all samples.

        A sequence that was not measured counts as the mean of those of its call that were; NaN where none was.
        """
        if self.over == "group":
            return {self.spread_name: self.formula}
        if not self.call_totals:
            assert not self.is_scaled
            return {self.spread_name: Formula.named(f"value_of_{self.name}")}
        scale = ("scale_factor",) if self.is_scaled else ()
        total, share = self.call_totals

        needs = (self.count_name, f"value_of_{self.name}", total, f"inverse_{share}", *scale)
        return {f"inverse_{share}": Formula(inverse, (share,)), self.spread_name: Formula(known_or_mean, needs)}

    def alias(self, name: str, text: str) -> MetricRow:
        """The same values under another name."""
        return replace(self, name=name, text=text, is_core=False, alias_of=self.name)


# Of all rows the same functions, which the eager backend calls once with all rows, one below the other.


def mean_value(amount: Tensor, count: Tensor) -> Tensor:
    """The value of a sequence that is the mean over its tokens; 0 where it was not measured."""
    return where_positive(count, amount / count.clamp_min(1.0))


def own_value(amount: Tensor, count: Tensor) -> Tensor:
    """The value of a sequence that is a number of its own; 0 where it was not measured."""
    return where_positive(count, amount)


def term(value: Tensor, share: Tensor) -> Tensor:
    """What a sequence adds to the total of its call."""
    return value * share


def inverse(share: Tensor) -> Tensor:
    """One over the share of all sequences of a call: one division for all rows; a share is 0, or 1 and more."""
    return where(share > 0.0, 1.0 / share.clamp_min(1.0), math.nan)


def known_or_mean(count: Tensor, value: Tensor, total: Tensor, inverse: Tensor, *scale: Tensor) -> Tensor:
    """What each token of a sequence is given: its value, or that of the others of its call."""
    known = where(count > 0.0, value, total * inverse)
    return known * scale[0] if scale else known


def row(
    name: str,
    over: Population,
    function: Callable[..., Tensor] | Formula,
    text: str,
    *,
    stage: Stage,
    core: bool = False,
    mask: str | None = None,
    scaled: bool = False,
) -> MetricRow:
    """A row from a function whose parameters name what it needs."""
    formula = function if isinstance(function, Formula) else Formula.of(function)
    return MetricRow(name, over, stage, formula, text, is_core=core, mask=mask, is_scaled=scaled)
