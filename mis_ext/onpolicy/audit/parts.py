"""What each rank found, and what all of them found."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from mis_ext.onpolicy.audit.checks import Sample
from mis_ext.onpolicy.audit.findings import Evidence, Problem
from mis_ext.onpolicy.audit.sample import Facts, examine


class Part(NamedTuple):
    """What one rank found; sample indices are its own."""

    provenance: Any
    evidence: Evidence
    num_samples: int
    problems: list[Problem]
    facts: list[Facts]


def examine_rows(rows: Iterable[Sample], *, provenance: Any, evidence: Evidence) -> Part:
    """Every sample alone; what cannot even be read is a problem of the sample, and no exception."""
    num_samples, problems, facts = 0, [], []
    for index, row in enumerate(rows):
        num_samples += 1
        try:
            found = examine(row, index)
        except Exception as error:
            found = Problem(f"not comparable: {type(error).__name__}: {error}", sample=index, name=row.name)
        if isinstance(found, Problem):
            problems.append(found)
        elif found is not None:
            facts.append(found)
    return Part(provenance, evidence, num_samples, problems, facts)


def join(parts: list[Part]) -> Part:
    """One part of all, with samples numbered in rank order, and the problems that only all of them have."""
    num_samples, problems, facts = 0, [], []
    for part in parts:
        problems += [
            problem if problem.sample is None else problem._replace(sample=problem.sample + num_samples)
            for problem in part.problems
        ]
        for found in part.facts:
            first = found.first_divergence
            if first is not None:
                found = found._replace(first_divergence=first._replace(sample=first.sample + num_samples))
            facts.append(found)
        num_samples += part.num_samples
    provenances = {part.provenance for part in parts}
    if len(provenances) > 1:
        problems.append(Problem(f"ranks differ in the provenance of their log-probs: {', '.join(sorted(provenances))}"))
    for side, dtypes in (
        ("train", {found.train_dtype for found in facts}),
        ("rollout", {found.rollout_dtype for found in facts}),
    ):
        if len(dtypes) > 1:
            problems.append(
                Problem(f"the {side} log-probs of some samples are {' and of others '.join(sorted(dtypes))}")
            )
    if not problems and not facts:
        problems.append(Problem("no active token: nothing was compared"))
    return Part(parts[0].provenance, _of_all(parts), num_samples, problems, facts)


def _of_all(parts: list[Part]) -> Evidence:
    """The evidence that all ranks have; what one rank alone can show says nothing about the others."""
    sides = zip(*(part.evidence for part in parts), strict=True)
    return Evidence(*(None if None in shown else "; ".join(dict.fromkeys(shown)) for shown in sides))
