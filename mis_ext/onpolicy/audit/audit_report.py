# SPDX-License-Identifier: Apache-2.0
"""Report of an audit: verdict, problems, and differences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from mis_ext.files import to_jsonable
from mis_ext.tools.diagnosis.cause import Diagnosis


class Verdict(str, Enum):
    """Verdict on the equality of trainer and rollout. It does not use a mean that could round to zero."""

    EXACT = "EXACT"
    """The log-probs of every active token are equal (+0 equals -0), and the engine's records equal those of the
    rollout.
    """
    DIFFERENT = "DIFFERENT"
    """The log-probs of at least one active token differ."""
    UNPROVED = "UNPROVED"
    """The log-probs of every active token are equal, but a sample lacks its engine record, so one side may be a copy.
    Not a pass.
    """
    INVALID = "INVALID"
    """The log-probs could not be compared. Never a pass."""


class Problem(NamedTuple):
    """Why and where log-probs could not be compared; None for all samples, or for a whole sample."""

    reason: str
    sample: int | None = None
    position: int | None = None
    name: str | None = None

    def __str__(self) -> str:
        return f"{_where(self)}{self.reason}"


class Divergence(NamedTuple):
    """An active token whose two log-probs differ, by ``ulps`` in the dtype of the comparison."""

    sample: int
    position: int
    token_id: int | None
    train: float
    rollout: float
    ulps: int
    name: str | None = None

    def __str__(self) -> str:
        token = "" if self.token_id is None else f"token {self.token_id}: "
        apart = f"{self.ulps} ULP{'s' if self.ulps != 1 else ''} apart"
        return f"{_where(self)}{token}train {self.train!r}, rollout {self.rollout!r}, {apart}"


def _where(found: Problem | Divergence) -> str:
    if found.sample is None:
        return ""
    name = "" if found.name is None else f" ({found.name})"
    position = "" if found.position is None else f", position {found.position}"
    return f"sample {found.sample}{name}{position}: "


_MAX_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """The verdict and all its measurements.

    Measurements cover the active tokens of samples without a problem. They are None if there is no such token.

    Attributes:
        verdict: The verdict.
        num_samples: Number of given samples, with or without a problem.
        num_recorded: Number of samples without a problem whose rollout log-probs equal the engine's records.
        num_active_tokens: Number of compared tokens.
        num_nonzero: Number of tokens whose two log-probs differ.
        mean_abs_diff: Nats; over all active tokens, from differences in float64.
        max_abs_diff: Nats.
        max_ulp: Largest distance in units in the last place of the wider dtype.
        first_divergence: The first token in ``num_nonzero``, by sample, then position.
        train_dtype: As given, such as ``"float32"``; all, if there are several.
        rollout_dtype: As given.
        problems: Why the verdict is INVALID: the first problem of each sample that has one.
        diagnoses: The likely causes of a difference, and mistakes in equal log-probs, the most certain first.
        skipped: Inputs that were not audited, and why.
    """

    verdict: Verdict
    num_samples: int
    num_recorded: int
    num_active_tokens: int
    num_nonzero: int
    mean_abs_diff: float | None
    max_abs_diff: float | None
    max_ulp: int | None
    first_divergence: Divergence | None
    train_dtype: str | None
    rollout_dtype: str | None
    problems: tuple[Problem, ...]
    diagnoses: tuple[Diagnosis, ...]
    skipped: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True if the verdict is EXACT."""
        return self.verdict is Verdict.EXACT

    @property
    def hint(self) -> str | None:
        """The likely causes in words, with their evidence; None if no rule fits."""
        return ". ".join(f"{each.confidence} {each.in_words}" for each in self.diagnoses) or None

    def to_dict(self) -> dict[str, Any]:
        """All fields, including ``passed``, as values for JSON."""
        plain: dict[str, Any] = to_jsonable(self)
        return plain | {"passed": self.passed, "hint": self.hint}

    def rows(self) -> list[tuple[str, str]]:
        """Names and values of all results, for display."""
        share = f" ({100.0 * self.num_nonzero / self.num_active_tokens:.3g} %)" if self.num_active_tokens else ""
        rows = [
            ("samples", f"{self.num_samples}, {self.num_recorded} of them equal to the engine's records"),
            ("active tokens", f"{self.num_active_tokens}"),
            ("different tokens", f"{self.num_nonzero}{share}"),
            ("mean abs diff", _number(self.mean_abs_diff)),
            ("max abs diff", _number(self.max_abs_diff)),
            ("max ULPs", "-" if self.max_ulp is None else f"{self.max_ulp}"),
            ("dtypes", f"train {self.train_dtype or '-'}, rollout {self.rollout_dtype or '-'}"),
        ]
        if self.first_divergence is not None:
            rows.append(("first divergent", str(self.first_divergence)))
        rows += [("cause", f"{each.confidence} {each.in_words}") for each in self.diagnoses]
        if self.verdict is Verdict.UNPROVED:
            rows.append(("to prove it", "pass the engine's records from before training (--engine-records)"))
        return rows + _first_ones("problem", self.problems) + _first_ones("skipped", self.skipped)

    def __str__(self) -> str:
        return "\n".join([f"log-prob audit: {self.verdict.value}", *(f"  {n:<20}{value}" for n, value in self.rows())])


def _first_ones(name: str, found: Sequence[object]) -> list[tuple[str, str]]:
    rows = [(name, str(one)) for one in found[:_MAX_LISTED]]
    return rows if len(found) <= _MAX_LISTED else [*rows, (name, f"... and {len(found) - _MAX_LISTED} more")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
