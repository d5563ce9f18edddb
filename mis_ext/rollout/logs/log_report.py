"""What became of logged conversations: the counts of every class, and the verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mis_ext.rollout.conversations.boundary import BoundaryAction
from mis_ext.rollout.logs.checks import ConversationCheck, Finding
from mis_ext.rollout.logs.lines import LogLineError

_TABLES = ("refused", "boundaries", "texts", "weight_versions", "policy_errors")


class LogReport:
    """The sums over conversations; one of each class is kept as an example.

    Args:
        files: Names of the files.
        policy: What the conversations are checked under; None for no policy.
    """

    def __init__(self, files: Sequence[str], *, policy: str | None = None) -> None:
        self._files, self._policy = [*files], policy
        self._counts = Counter[str]()
        self._metrics = Counter[str]()
        self._tables = {name: _Table() for name in _TABLES}

    def add(self, check: ConversationCheck) -> None:
        """Count one more conversation."""
        self._counts["conversations"] += 1
        for name in ("calls", "sampled_tokens", "unchecked_texts"):
            self._counts[name] += getattr(check, name)
        for name, table in self._tables.items():
            table.add(getattr(check, name))
        self._metrics.update(check.metrics)

    def add_problem(self, problem: LogLineError) -> None:
        """Count one more line that holds no call."""
        example = {"conversation": None, "file": problem.file, "line": problem.line, "message": problem.reason}
        self._tables["refused"].add([Finding(type(problem).__name__, False, example)])

    @property
    def passed(self) -> bool:
        """Whether the log proves all that it should: there is no reason to fail."""
        return not self.reasons()

    def reasons(self) -> list[str]:
        """Why the log does not pass: empty if it does, never empty if no sampled token was read."""
        refused, boundaries, texts, errors = (
            self._tables[name] for name in ("refused", "boundaries", "texts", "policy_errors")
        )
        unchecked = self._counts["unchecked_texts"]
        reasons = {
            "nothing was measured: no sampled token could be read": not self._counts["sampled_tokens"],
            f"{refused.failing} lines or responses were refused": refused.failing,
            f"{boundaries.failing} of {boundaries.total} turn boundaries have other ids": boundaries.failing,
            f"{texts.failing} of {texts.total} texts are not the text of the sampled ids": texts.failing,
            f"{unchecked} texts were not compared with the sampled ids: give --tokenizer": unchecked,
            f"{errors.failing} conversations are refused by policy {self._policy}": errors.failing,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def to_dict(self) -> dict[str, Any]:
        """Everything, ``passed`` included, as plain values that JSON can hold."""
        metrics = self._metrics
        policy = {
            "name": self._policy,
            "samples": metrics["samples"],
            "trained_tokens": metrics["sampled_tokens/trained"],
            "dropped_tokens": metrics["sampled_tokens/dropped"],
            "actions": {action.value: metrics[f"boundaries/{action.value}"] for action in BoundaryAction},
            "errors": self._tables["policy_errors"].to_dict(),
        }
        return {
            "passed": self.passed,
            "reasons": self.reasons(),
            "files": self._files,
            **{name: self._counts[name] for name in ("conversations", "calls", "sampled_tokens", "unchecked_texts")},
            **{name: self._tables[name].to_dict() for name in _TABLES if name != "policy_errors"},
            "policy": None if self._policy is None else policy,
        }


class _Table:
    """Counts by class, with the first failing one as an example, or the first if none fails."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._failing = Counter[str]()
        self._examples: dict[str, Mapping[str, Any]] = {}

    def add(self, findings: Iterable[Finding]) -> None:
        for kind, harmless, example in findings:
            if not self._counts[kind] or (not self._failing[kind] and not harmless):
                self._examples[kind] = example
            self._counts[kind] += 1
            self._failing[kind] += not harmless

    @property
    def total(self) -> int:
        return self._counts.total()

    @property
    def failing(self) -> int:
        return self._failing.total()

    def to_dict(self) -> dict[str, Any]:
        return {
            kind: {
                "count": count,
                "share": count / self.total,
                "failing": self._failing[kind],
                "first": dict(self._examples[kind]),
            }
            for kind, count in self._counts.most_common()
        }
