# SPDX-License-Identifier: Apache-2.0
"""The table of causes, in the order of the search.

First faults of the data itself, then affected responses and tokens, then the distribution of the log-probs, then the
start of the mismatch, then the size of the rest. The report calls :func:`search`, the audit :func:`diagnose`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mis_ext.tools.diagnosis import data, groups, places, sampling, size, steps
from mis_ext.tools.diagnosis.cause import Cause, Diagnosis, Found, Left
from mis_ext.tools.diagnosis.evidence import Evidence
from mis_ext.tools.diagnosis.thresholds import SHAPE_OF_CHANGE

CAUSES: dict[str, Cause] = {
    cause.name: cause
    for cause in (
        data.placeholders,
        size.equal,
        data.not_log_probs,
        data.shifted,
        groups.packed,
        groups.other_text,
        places.prefix,
        places.late,
        sampling.temperature,
        sampling.truncation,
        sampling.penalties,
        sampling.rounded,
        steps.stale,
        places.experts,
        size.size,
    )
}
"""All causes by name, in the order of the search."""


def diagnose(evidence: Evidence) -> list[Diagnosis]:
    """Return the causes that match the evidence, in the order of :func:`search`."""
    return search(evidence)[0]


def search(evidence: Evidence) -> tuple[list[Diagnosis], Left]:
    """Return the result of :func:`diagnose`, and the tokens left to explain.

    Each rule gets what earlier rules leave: a fault removes its tokens, and a cause that explains a share of k3 leaves
    the rest. The result has faults first, which can be headlines, then causes with their own evidence, then the size of
    the rest, then causes with few tokens; within each, in order of confidence.
    """
    found: list[Diagnosis] = []
    left = Left(evidence, evidence)
    for cause in CAUSES.values():
        result = _asked(cause, left)
        if result is None:
            continue
        each, taken_T = result
        tokens, explained = left.tokens, left.explained
        # Limit the share to the rest; NaN stays NaN.
        share = each.k3_share if taken_T is not None else min(each.k3_share, 1.0 - explained)
        found.append(replace(each, k3_share=share, is_of_rest=any(before.takes_out for before in found)))
        if taken_T is not None:
            tokens = tokens.where(~taken_T)
        elif not math.isnan(share):
            explained = min(explained + share, 1.0)
        left = replace(left, tokens=tokens, explained=explained, found=(*left.found, cause.name))
        if explained == 1.0 and not each.is_up_to:
            break
    order = ("certain", "likely", "possible")
    return sorted(found, key=lambda each: (_rank(each), order.index(each.confidence))), left


def _asked(cause: Cause, left: Left) -> Found | None:
    """Apply a rule. If k3 changed, a setting must also show in earlier steps; a shape must have nearly all of k3."""
    finding = cause.rule(left)
    if finding is None or not (cause.is_setting or cause.is_shape):
        return finding
    reference = steps.reference_of(left.tokens)
    if reference is left.tokens:
        return finding
    if cause.is_shape:
        return finding if finding.diagnosis.k3_share >= SHAPE_OF_CHANGE else None
    return finding if cause.rule(replace(left, tokens=reference)) is not None else None


def _rank(found: Diagnosis) -> int:
    if found.is_of_few_tokens:
        return 3
    return 0 if found.is_fault else 1 if found.cause in CAUSES else 2
