# SPDX-License-Identifier: Apache-2.0
"""Causes: rows of the table, the input of rules, and their results."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from torch import Tensor

from mis_ext.tools.diagnosis.evidence import Evidence, Power
from mis_ext.tools.diagnosis.thresholds import MIN_K3_SHARE

Confidence = Literal["certain", "likely", "possible"]


@dataclass(frozen=True, eq=False)
class Left:
    """The tokens that earlier causes did not explain: the input of a rule.

    Attributes:
        tokens: The tokens that no earlier cause has removed.
        whole: All tokens.
        explained: Share of the k3 of ``tokens`` that earlier causes explain.
        found: Names of the earlier causes.
    """

    tokens: Evidence
    whole: Evidence
    explained: float = 0.0
    found: tuple[str, ...] = ()

    @property
    def k3(self) -> float:
        """Mean per token, without the explained share."""
        return self.tokens.k3 * (1.0 - self.explained)

    @cached_property
    def powers(self) -> tuple[Power, Power]:
        """The trainer's distribution as a power of the engine's, and the reverse; each as if the base had sampled."""
        tokens = self.tokens
        return Power.of(tokens.engine_T, tokens.trainer_T), Power.of(tokens.trainer_T, tokens.engine_T)


Rule = Callable[[Left], "Found | None"]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A row of the table.

    Attributes:
        name: Stable identifier.
        title: Short description.
        looks_like: Its symptoms, for the documentation.
        rule: The function that looks for it.
        advice: What to do.
        is_fault: Whether it is a bug to fix first, which no configuration corrects.
        is_setting: Whether it is equal in all steps. If k3 changes, the steps before the change must show it too.
        is_shape: Whether it is a position or a tail. If k3 changes over steps, it must have nearly all of k3.
    """

    name: str
    title: str
    looks_like: str
    rule: Rule
    advice: str
    is_fault: bool = False
    is_setting: bool = False
    is_shape: bool = False

    def found(self, *, taken_T: Tensor | None = None, **result: Any) -> Found:
        """Return the result of the rule. Fields that it does not give come from the row."""
        row = {"cause": self.name, "title": self.title, "advice": self.advice, "is_fault": self.is_fault}
        fields: dict[str, Any] = {**row, "takes_out": taken_T is not None, **result}
        made = Diagnosis(**fields)
        return Found(replace(made, confidence="possible") if made.is_of_few_tokens else made, taken_T)


def cause(**row: Any) -> Callable[[Rule], Cause]:
    """Decorator that makes a :class:`Cause` from a rule; ``row`` gives its other fields."""
    return lambda rule: Cause(rule=rule, **row)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A likely cause.

    Attributes:
        cause: Its name, a stable identifier.
        confidence: How strong the evidence is.
        title: Short description.
        evidence: The measurements.
        advice: What to do.
        is_fault: Whether it is a bug to fix first, which no configuration corrects.
        k3_share: The share of k3 that it explains, over the tokens left at this rule; NaN if unknown. A cause that
            explains all of it (not ``is_up_to``) ends the search.
        takes_out: Whether later rules do not use its tokens.
        is_pattern: Whether enough tokens show it that a run should stop.
        alternatives: Other causes with the same evidence.
        is_up_to: Whether the share is an upper limit, because other causes have the same evidence.
        is_of_rest: Whether earlier rules removed tokens.
        is_growing: Whether k3 rises above that of the first step, so that also a small k3 matters.
    """

    cause: str
    confidence: Confidence
    title: str
    evidence: str
    advice: str
    is_fault: bool = False
    k3_share: float = math.nan
    takes_out: bool = False
    is_pattern: bool = True
    alternatives: tuple[str, ...] = ()
    is_up_to: bool = False
    is_of_rest: bool = False
    is_growing: bool = False

    @property
    def is_of_few_tokens(self) -> bool:
        """True if it has too few tokens and too little of k3 to be certain or to come first."""
        return not (self.is_pattern or self.k3_share >= MIN_K3_SHARE)

    @property
    def share_in_words(self) -> str:
        """Describe the share of k3 that it explains; empty if it is 0 or unknown."""
        if not self.k3_share > 0.0:
            return ""
        return f"explains {'up to ' if self.is_up_to else ''}{percent(self.k3_share)} of {of_k3(self.is_of_rest)}"

    @property
    def doubt_in_words(self) -> str:
        """Describe the alternatives with the same evidence; empty if there are none."""
        return f"the same evidence fits: {'; '.join(self.alternatives)}" if self.alternatives else ""

    @property
    def in_words(self) -> str:
        """Title, evidence, share and doubt in one line."""
        parts = (f"{self.title}: {self.evidence}", self.share_in_words, self.doubt_in_words)
        return "; ".join(filter(None, parts))


class Found(NamedTuple):
    """The result of a rule, and the tokens that it explains completely: later rules do not use them."""

    diagnosis: Diagnosis
    taken_T: Tensor | None = None


def of_k3(is_of_rest: bool) -> str:
    """Name the k3 that a share refers to."""
    return "the k3 of the rest" if is_of_rest else "k3"


def percent(share: float) -> str:
    """Format a share as percent; a small share is not shown as 0 %."""
    return "less than 1 %" if 0.0 < share < 0.01 else f"{share:.0%}".replace("%", " %")
