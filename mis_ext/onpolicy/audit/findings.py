"""What an exactness audit can find: verdicts, problems, differences, evidence."""

from __future__ import annotations

from enum import Enum
from typing import Literal, NamedTuple

Provenance = Literal["decode", "prefill", "unknown"]
PROVENANCES: tuple[Provenance, ...] = ("decode", "prefill", "unknown")


class Verdict(str, Enum):
    """Whether trainer and rollout agree; a mean that rounds to zero has no say in it."""

    EXACT = "EXACT"
    """The same bits on every active token."""
    EXACT_UP_TO_SIGNED_ZERO = "EXACT_UP_TO_SIGNED_ZERO"
    """The same number on every active token, but a +0 meets a -0."""
    DIFFERENT = "DIFFERENT"
    """Another number on at least one active token."""
    UNPROVED = "UNPROVED"
    """The same number on every active token, as a copy has: nothing says that these are two streams. No pass."""
    INVALID = "INVALID"
    """The log-probs could not be compared: this is never a pass."""


class Evidence(NamedTuple):
    """What shows where each stream came from, in words; None where nothing does.

    Attributes:
        rollout: That these are the log-probs which the engine returned.
        train: That the trainer computed its own, and did not take the engine's.
    """

    rollout: str | None = None
    train: str | None = None


class Problem(NamedTuple):
    """Why log-probs could not be compared, and where; None where it concerns all samples, or a sample as a whole."""

    reason: str
    sample: int | None = None
    position: int | None = None
    name: str | None = None
    has_other_ids: bool = False
    """The trainer scored other token ids than the engine sampled."""

    def __str__(self) -> str:
        return f"{_where(self)}{self.reason}"


class Divergence(NamedTuple):
    """An active token on which the two log-probs are different numbers, ``ulps`` apart in the dtype compared in."""

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


class DecileRow(NamedTuple):
    """Active tokens whose rollout probability lies in ``[low, high)``; the last row has 1 in it."""

    low: float
    high: float
    num_tokens: int
    num_nonzero: int
    mean_abs_diff: float | None
    max_abs_diff: float | None


def _where(found: Problem | Divergence) -> str:
    if found.sample is None:
        return ""
    name = "" if found.name is None else f" ({found.name})"
    position = "" if found.position is None else f", position {found.position}"
    return f"sample {found.sample}{name}{position}: "
