"""From what the log-probs show to the likely causes of a mismatch: one rule per cause, mistakes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mis_ext.report.engine_causes import bf16, formula, prefix, size, tail
from mis_ext.report.faults import other_tokens, placeholders, shift, temperature, truncation
from mis_ext.report.finding import Case, Diagnosis
from mis_ext.report.staleness import stale

Rule = Callable[[Case], Iterator[Diagnosis]]

TIERS: tuple[tuple[Rule, ...], ...] = (
    (placeholders,),
    (shift,),
    (other_tokens,),
    (formula,),
    (temperature, truncation),
    (bf16, stale),
    (prefix,),
    (tail,),
    (size,),
)
"""What an earlier rule explains, a later one would misread."""


def diagnose(case: Case) -> list[Diagnosis]:
    """Causes that the data point to, the surest first; what they explain is not named a second time."""
    for rules in TIERS:
        found = [diagnosis for rule in rules for diagnosis in rule(case)]
        if found:
            order = ("certain", "likely", "possible")
            return sorted(found, key=lambda diagnosis: order.index(diagnosis.confidence))
    return []
