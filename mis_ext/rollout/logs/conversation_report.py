"""What is in logged conversations, by class: of one, and summed over all of them to a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from mis_ext.rollout.conversations.boundary import Boundary, BoundaryAction, BoundaryKind, Built, Policy
from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.generation import BoundaryError, Generation, RolloutError, Tokenizer, TrainingSample
from mis_ext.rollout.logs.rollout_log import LoggedCall, LogLineError
from mis_ext.rollout.post_processing import detect_post_processing

# What they go on from is there in the ids that were sampled.
_BRANCHES = (BoundaryKind.RETRY, BoundaryKind.DUPLICATE, BoundaryKind.FORK)
REASONING = ("<think>", "</think>")
"""Qwen's, DeepSeek's and others' markers of a reasoning block."""
_NOT_COMPARED = "not_compared"


class Finding(NamedTuple):
    """One thing found at one line of a log.

    Attributes:
        kind: Its class.
        harmless: Whether what was sampled, and what the server was given, is known nevertheless.
        example: Where it is and what it is, as plain values.
    """

    kind: str
    harmless: bool
    example: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationCheck:
    """What was found in one conversation of a log.

    Attributes:
        calls: Lines.
        sampled_tokens: Tokens that the responses that were read sampled.
        unchecked_texts: Texts that an agent kept and that were not compared, for want of a tokenizer.
        refused: One per response that proves no sample, by the name of its error.
        boundaries: One per call after the first of those that were read.
        texts: One per response that was read: how its text compares with the sampled ids. A text that an agent kept and
            that was not compared is counted in ``unchecked_texts`` instead.
        weight_versions: At most one: whether the responses that were read name one version, several, or not all name
            one.
        policy_errors: At most one: the policy refuses the conversation.
        samples: What is trained under the policy.
        metrics: :meth:`~mis_ext.rollout.conversations.boundary.Built.metrics` under the policy; empty without one.
    """

    calls: int
    sampled_tokens: int
    unchecked_texts: int
    refused: tuple[Finding, ...]
    boundaries: tuple[Finding, ...]
    texts: tuple[Finding, ...]
    weight_versions: tuple[Finding, ...]
    policy_errors: tuple[Finding, ...]
    samples: tuple[TrainingSample, ...]
    metrics: Mapping[str, int]


def check_conversation(
    calls: Iterable[LoggedCall],
    *,
    tokenizer: Tokenizer | None = None,
    policy: Policy | None = None,
    reasoning: tuple[str, str] = REASONING,
) -> ConversationCheck:
    """What is in a conversation; a refused call is left out, and the next one compared with the calls before it.

    Args:
        calls: The conversation's, in order.
        tokenizer: Tells the class of a boundary where ids differ, and the text of ids; None leaves both open.
        policy: What is trained under it is built; None builds nothing. The classes do not depend on it.
        reasoning: The markers before and behind a reasoning block.

    Raises:
        ValueError: The tokenizer is of unknown form.
    """
    logged = list[LoggedCall]()
    read: list[tuple[LoggedCall, Generation]] = []
    refused = []
    for call in calls:
        # Whatever was read of a response is in the generation; the rest is most of a log.
        logged.append(replace(call, response=None))
        try:
            read.append((logged[-1], call.read(tokenizer)))
        except RolloutError as error:
            refused.append(Finding(type(error).__name__, False, _place(call) | {"message": str(error)}))
    generations = [generation for _, generation in read]
    build = partial(build_samples, generations, tokenizer=tokenizer, reasoning=reasoning)
    # The policy that never raises.
    classified = build(policy="split")
    later = [call for call, _ in read[1:]]
    samples, metrics, policy_error = _build(build, generations, policy)
    place = {"conversation": logged[0].conversation} if logged else {}
    return ConversationCheck(
        calls=len(logged),
        sampled_tokens=classified.sampled_tokens,
        unchecked_texts=sum(call.text is not None for call, _ in read) if tokenizer is None else 0,
        refused=tuple(refused),
        boundaries=tuple(_boundary_finding(*pair) for pair in zip(later, classified.boundaries, strict=True)),
        texts=tuple(_text_findings(read, tokenizer)),
        weight_versions=tuple(_version_finding(generations, place)),
        policy_errors=() if policy_error is None else (Finding(str(policy), False, place | {"message": policy_error}),),
        samples=samples,
        metrics=metrics,
    )


def _build(
    build: Callable[..., Built], generations: Sequence[Generation], policy: Policy | None
) -> tuple[tuple[TrainingSample, ...], dict[str, int], str | None]:
    if policy is None:
        return (), {}, None
    try:
        built = build(policy=policy)
    except BoundaryError as error:
        num_tokens = sum(len(each.sampled_ids) for each in generations)
        return (), {"sampled_tokens": num_tokens, "sampled_tokens/dropped": num_tokens}, str(error)
    return built.samples, built.metrics(), None


def _boundary_finding(call: LoggedCall, boundary: Boundary) -> Finding:
    names = ("earlier", "later", "position", "expected_id", "found_id", "expected_text", "found_text")
    return Finding(
        kind="unclassified" if boundary.kind is None else boundary.kind.value,
        harmless=boundary.position is None or boundary.kind in _BRANCHES,
        example=_place(call) | {name: getattr(boundary, name) for name in names},
    )


def _text_findings(read: Iterable[tuple[LoggedCall, Generation]], tokenizer: Tokenizer | None) -> Iterator[Finding]:
    for call, generation in read:
        text = generation.text if call.text is None else call.text
        if text is None:
            detail = "the response has no text of all sampled tokens: reasoning or tool calls were parsed out of it"
            yield Finding(_NOT_COMPARED, True, _place(call) | {"detail": detail, "cure": "log the text that was kept"})
        elif tokenizer is None and call.text is None:
            detail = "only a tokenizer tells the text of the sampled tokens"
            yield Finding(_NOT_COMPARED, True, _place(call) | {"detail": detail, "cure": "give a tokenizer"})
        elif tokenizer is not None:
            parameters = call.request.get("sampling_params", call.request)
            stop = parameters.get("stop") if isinstance(parameters, Mapping) else None
            strings = [each for each in (stop if isinstance(stop, list) else [stop]) if isinstance(each, str) and each]
            found = detect_post_processing(generation, text, tokenizer, stop=strings)
            example = _place(call) | {"detail": found.detail, "cure": found.cure}
            yield Finding(found.kind.value, found.keeps_ids, example)


def _version_finding(generations: Sequence[Generation], place: Mapping[str, Any]) -> Iterator[Finding]:
    found = list[str | None]()
    for each in generations:
        found += each.weight_versions or [each.weight_version]
    named = [version for version in dict.fromkeys(found) if version is not None]
    if found:
        kind = "several" if len(named) > 1 else "unknown" if None in found else "one"
        yield Finding(kind, True, {**place, "versions": named})


def _place(call: LoggedCall) -> dict[str, Any]:
    return {"conversation": call.conversation, "file": call.file, "line": call.line}


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
