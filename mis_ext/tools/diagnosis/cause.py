# SPDX-License-Identifier: Apache-2.0
"""Causes: their rows, the input of their rules, and findings."""

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
    """The tokens that earlier causes leave to a rule.

    Attributes:
        tokens: Those that no cause before has taken out.
        whole: All of them.
        explained: Share of the k3 of ``tokens`` that causes before explain.
        found: Their names.
    """

    tokens: Evidence
    whole: Evidence
    explained: float = 0.0
    found: tuple[str, ...] = ()

    @property
    def k3(self) -> float:
        """Per token, without what is explained."""
        return self.tokens.k3 * (1.0 - self.explained)

    @cached_property
    def powers(self) -> tuple[Power, Power]:
        """Of the engine's distribution the trainer's, and the reverse: each as if the former had sampled."""
        tokens = self.tokens
        return Power.of(tokens.engine_T, tokens.trainer_T), Power.of(tokens.trainer_T, tokens.engine_T)


Rule = Callable[[Left], "Found | None"]


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A row of the table.

    Attributes:
        name: Stable for programs.
        title: What it is.
        looks_like: What shows it, for the documentation.
        rule: What is found.
        advice: What to do.
        is_fault: Whether it is a mistake to repair first, which no configuration corrects.
        is_setting: Whether it is the same in all steps: the steps before a change must show it, too.
        is_shape: Whether it is a place or a tail: where k3 changes over steps, it must have nearly all of it.
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
        """What its rule found; what that does not say is what the row says."""
        row = {"cause": self.name, "title": self.title, "advice": self.advice, "is_fault": self.is_fault}
        fields: dict[str, Any] = {**row, "takes_out": taken_T is not None, **result}
        made = Diagnosis(**fields)
        return Found(replace(made, confidence="possible") if made.is_of_few_tokens else made, taken_T)


def cause(**row: Any) -> Callable[[Rule], Cause]:
    """A rule with its row: the other fields of :class:`Cause`."""
    return lambda rule: Cause(rule=rule, **row)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """A likely cause.

    Attributes:
        cause: Its name, stable for programs.
        confidence: How sure the evidence makes it.
        title: What it is.
        evidence: What was measured.
        advice: What to do.
        is_fault: Whether it is a mistake to repair first, which no configuration corrects.
        k3_share: Of the k3 of the tokens that were left when it was looked for, that it explains; NaN where that is not
            known. What explains all, and not up to all, ends the search.
        takes_out: Whether what follows was looked for without its tokens.
        is_pattern: Whether so many tokens show it that a run should stop.
        alternatives: What would look the same in this evidence.
        is_up_to: Whether the share is the most that it may explain, beside what cannot be told from it.
        is_of_rest: Whether tokens were taken out before it was looked for.
        is_growing: Whether k3 rises above that of the first step, so that a small one is not nothing.
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
        """True if too few tokens show it, with too little of k3, to be certain or to come first."""
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
        return f"could not be told from: {'; '.join(self.alternatives)}" if self.alternatives else ""

    @property
    def in_words(self) -> str:
        """Title, evidence, share and doubt in one line."""
        parts = (f"{self.title}: {self.evidence}", self.share_in_words, self.doubt_in_words)
        return "; ".join(filter(None, parts))


class Found(NamedTuple):
    """What a rule found, and which of the tokens that explains whole: they are left out of what follows."""

    diagnosis: Diagnosis
    taken_T: Tensor | None = None


def of_k3(is_of_rest: bool) -> str:
    """Name the k3 that a share refers to."""
    return "the k3 of the rest" if is_of_rest else "k3"


def percent(share: float) -> str:
    """A share in words: small ones are not 0 %."""
    return "less than 1 %" if 0.0 < share < 0.01 else f"{share:.0%}".replace("%", " %")
