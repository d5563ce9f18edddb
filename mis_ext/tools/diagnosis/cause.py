# SPDX-License-Identifier: Apache-2.0
"""What a cause is, and what its rule finds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, Literal

from mis_ext.correction.config import GuardName
from mis_ext.tools.diagnosis.measuring import Kind

Confidence = Literal["certain", "likely", "possible"]
Need = Literal["tokens", "signals", "samples"]
"""What a rule looks at, as attributes of :class:`~mis_ext.tools.diagnosis.measuring.Measured` that must be there."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found: the fields of :class:`Diagnosis`, and what the search does then.

    Attributes:
        advice: What to do, where it is not what the row says.
        is_all: Whether it is all that differs: then nothing else is looked for.
        takes_out: Which tokens are left out of the search for what follows, besides those that have no log-prob.
        hides: Causes that its tokens would be taken for, whatever it explains.
    """

    confidence: Confidence
    evidence: str
    k3_share: float = math.nan
    is_up_to: bool = False
    advice: str = ""
    is_pattern: bool = True
    is_all: bool = False
    takes_out: Kind | None = None
    alternatives: tuple[str, ...] = ()
    hides: tuple[str, ...] = ()


Rule = Callable[..., Finding | None]
"""Of what was measured, and of what the row says that the rule looks at."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A row of the table.

    Attributes:
        name: Stable for programs.
        title: What it is.
        looks_like: What shows it, for the documentation.
        needs: What its rule looks at.
        rule: What is found, from what was measured and from what it looks at; None where nothing is.
        advice: What to do.
        is_fault: Whether it is a mistake to repair first, which no configuration corrects.
        guard: Which guard of a run stops on it.
        takes_out: Tokens that show it are left out of the search for what follows.
        hides: Causes that this one would be taken for: they are not looked for where it is found.
    """

    name: str
    title: str
    looks_like: str
    needs: tuple[Need, ...]
    rule: Rule
    advice: str
    is_fault: bool = False
    guard: GuardName | None = None
    takes_out: bool = False
    hides: tuple[str, ...] = ()


TAILS = ("few_tokens", "expert_routing")

MIN_K3_SHARE = 0.01
"""What is less of k3, and shown by less than a hundredth of the tokens, is never certain and makes no headline."""


def cause(**row: Any) -> Callable[[Rule], Cause]:
    """A rule with its row: the other fields of :class:`Cause`, which say what it finds.

    What the rule looks at are its parameters behind the first, by name. :mod:`~mis_ext.tools.diagnosis.table` has the
    causes in their order.
    """

    def with_row(rule: Rule) -> Cause:
        looked_at: Any = tuple(signature(rule).parameters)[1:]
        return Cause(rule=rule, needs=looked_at, **row)

    return with_row


@dataclass(frozen=True)
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
            known.
        takes_out: Whether what follows was looked for without its tokens.
        is_pattern: Whether so many tokens show it that a run should stop.
        alternatives: What would look the same in this evidence.
        is_up_to: Whether the share is the most that it may explain, beside what cannot be told from it.
        is_of_rest: Whether tokens were taken out before it was looked for.
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

    @classmethod
    def of(cls, cause: Cause, finding: Finding, *, is_of_rest: bool = False) -> Diagnosis:
        """A row with what its rule found."""
        same = ("confidence", "evidence", "k3_share", "is_up_to", "is_pattern", "alternatives")
        made = cls(
            cause=cause.name,
            title=cause.title,
            advice=finding.advice or cause.advice,
            is_fault=cause.is_fault,
            takes_out=cause.takes_out,
            is_of_rest=is_of_rest,
            **{name: getattr(finding, name) for name in same},
        )
        return replace(made, confidence="possible") if made.is_of_few_tokens else made

    @property
    def is_of_few_tokens(self) -> bool:
        """Whether too few tokens show it, with too little of k3, to be sure of it or to begin with it."""
        return not (self.is_pattern or self.k3_share >= MIN_K3_SHARE)

    @property
    def share_in_words(self) -> str:
        """How much of k3 it explains; empty where that is nothing, or not known."""
        if not self.k3_share > 0.0:
            return ""
        return f"explains {'up to ' if self.is_up_to else ''}{percent(self.k3_share)} of {of_k3(self.is_of_rest)}"

    @property
    def doubt_in_words(self) -> str:
        """What it could not be told from; empty where nothing looks like it."""
        return f"could not be told from: {'; '.join(self.alternatives)}" if self.alternatives else ""

    @property
    def in_words(self) -> str:
        """Title, evidence, share and doubt in one line."""
        parts = (f"{self.title}: {self.evidence}", self.share_in_words, self.doubt_in_words)
        return "; ".join(filter(None, parts))


def of_k3(is_of_rest: bool) -> str:
    """What a share is of."""
    return "the k3 of the rest" if is_of_rest else "k3"


def percent(share: float) -> str:
    """A share in words: small ones are not 0 %."""
    return "less than 1 %" if 0.0 < share < 0.01 else f"{share:.0%}".replace("%", " %")
