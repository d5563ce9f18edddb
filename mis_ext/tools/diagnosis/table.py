# SPDX-License-Identifier: Apache-2.0
"""The one table of causes, in the order in which they are looked for.

What is in the data itself comes first, then what the log-probs are of, then how they were computed, then what a
mismatch of this size usually is. Guards, the report and the audit ask :func:`diagnose`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mis_ext.tools.diagnosis import engines, missing, sampling, size, staleness
from mis_ext.tools.diagnosis.cause import Cause, Diagnosis
from mis_ext.tools.diagnosis.measuring import Measured

MIN_HIDING = 0.5
"""Share of k3 from which on a cause hides those that it would be taken for."""

_SIZES = (size.equal, size.kernels, size.kernels_or_low_precision, size.low_precision, size.large)

CAUSES: dict[str, Cause] = {
    cause.name: cause
    for cause in (
        missing.placeholders,
        missing.negated,
        missing.shifted,
        missing.shifted_by_many,
        missing.positive,
        missing.other_ids,
        missing.other_context,
        engines.formula,
        sampling.other_base,
        engines.prefix,
        engines.late,
        sampling.temperature,
        missing.broken_trainer,
        missing.broken_engine,
        sampling.padding,
        sampling.truncation,
        engines.bf16,
        staleness.stale,
        engines.decoding,
        engines.few_tokens,
        engines.experts,
        *_SIZES,
    )
}
"""All causes by name, in the order of the search."""


def diagnose(measured: Measured) -> list[Diagnosis]:
    """Causes that what was measured points to, in the order of :func:`search`."""
    return search(measured)[0]


def search(measured: Measured) -> tuple[list[Diagnosis], Measured]:
    """:func:`diagnose`, and what is left to explain then.

    The search goes on when a cause is found: tokens that a fault spoils are taken out, and a cause that explains a
    share of k3 leaves the rest to others. What a found cause would be mistaken for is not looked for.

    First come faults, which a headline names, then causes that show themselves, then a size of the rest, then what few
    tokens show; of each the surest first.
    """
    found: list[Diagnosis] = []
    hidden: set[str] = set()
    for cause in CAUSES.values():
        looks_at = [getattr(measured, need) for need in cause.needs]
        if cause.name in hidden or any(each is None for each in looks_at):
            continue
        finding = cause.rule(measured, *looks_at)
        if finding is None:
            continue
        if not cause.takes_out:
            # Not more than is left; what is not known stays so.
            finding = replace(finding, k3_share=min(finding.k3_share, 1.0 - measured.explained))
        found.append(Diagnosis.of(cause, finding, is_of_rest=any(each.takes_out for each in found)))
        hidden |= {*finding.hides}
        measured = replace(measured, found=(*measured.found, cause.name))
        if finding.is_all:
            measured = replace(measured, explained=1.0)
            break
        # A small cause must not hide a large one.
        if (cause.takes_out and finding.k3_share != 0.0) or not finding.k3_share < MIN_HIDING:
            hidden |= {*cause.hides}
            measured = replace(measured, has_main=True)
        if finding.takes_out is not None:
            measured = measured.without(finding.takes_out)
        elif not cause.takes_out and not math.isnan(finding.k3_share):
            measured = replace(measured, explained=min(measured.explained + finding.k3_share, 1.0))
    order = ("certain", "likely", "possible")
    return sorted(found, key=lambda each: (_rank(each), order.index(each.confidence))), measured


def _rank(found: Diagnosis) -> int:
    if found.is_of_few_tokens:
        return 3
    return 0 if found.is_fault else 2 if CAUSES[found.cause] in _SIZES else 1
