# SPDX-License-Identifier: Apache-2.0
"""What is in logged conversations, by class: of one, and summed over all of them to a verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.generation import (
    Boundary,
    BoundaryAction,
    BoundaryError,
    BoundaryKind,
    Generation,
    Policy,
    RolloutError,
    Tokenizer,
    TrainingSample,
)
from mis_ext.rollout.post_processing import detect_post_processing
from mis_ext.rollout.rollout_log import LoggedCall, LogLineError

REASONING = ("<think>", "</think>")
"""Qwen's, DeepSeek's and others' markers of a reasoning block."""
# What they go on from is there in the ids that were sampled.
_BRANCHES = (BoundaryKind.RETRY, BoundaryKind.DUPLICATE, BoundaryKind.FORK)
_TABLES = ("refused", "boundaries", "texts", "logprobs_modes", "weight_versions", "policy_errors")
_COUNTS = ("conversations", "calls", "sampled_tokens", "unchecked_texts")


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
        counts: Its lines as ``calls``, the ``sampled_tokens`` of the responses that were read, and ``unchecked_texts``:
            those that an agent kept and that were not compared, for want of a tokenizer.
        findings: ``refused``: one per response that proves no sample, by the name of its error. ``boundaries``: one per
            call after the first of those that were read. ``texts``: one per response that was read, how its text
            compares with the sampled ids. ``logprobs_modes``: one per response whose largest log-probs prove vLLM's
            ``--logprobs-mode``. ``weight_versions``: at most one, whether the responses name one version,
            several, or not all one. ``policy_errors``: at most one, the policy refuses the conversation.
        samples: What is trained under the policy.
        metrics: :meth:`~mis_ext.rollout.generation.Built.metrics` under the policy; empty without one.
    """

    counts: Mapping[str, int]
    findings: Mapping[str, Sequence[Finding]]
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
    """
    read: list[tuple[LoggedCall, Generation]] = []
    refused: list[Finding] = []
    place: dict[str, Any] = {}
    for call in calls:
        place = {"conversation": call.conversation}
        try:
            generation = call.read(tokenizer)
        except RolloutError as error:
            refused.append(Finding(type(error).__name__, False, _place(call) | {"message": str(error)}))
        else:
            # Whatever was read of a response is in the generation; the rest is most of a log.
            read.append((replace(call, response=None), generation))
    generations = [generation for _, generation in read]
    build = partial(build_samples, generations, tokenizer=tokenizer, reasoning=reasoning)
    # The policy that never raises.
    classified = build(policy="split")
    samples: tuple[TrainingSample, ...] = ()
    metrics, policy_errors = dict[str, int](), list[Finding]()
    if policy is not None:
        try:
            built = build(policy=policy)
            samples, metrics = built.samples, built.metrics()
        except BoundaryError as error:
            tokens = classified.sampled_tokens
            metrics = {"sampled_tokens": tokens, "sampled_tokens/dropped": tokens}
            policy_errors.append(Finding(policy, False, place | {"message": str(error)}))
    later = [call for call, _ in read[1:]]
    return ConversationCheck(
        counts={
            "calls": len(read) + len(refused),
            "sampled_tokens": classified.sampled_tokens,
            "unchecked_texts": sum(call.text is not None for call, _ in read) if tokenizer is None else 0,
        },
        findings={
            "refused": refused,
            "boundaries": [_boundary_finding(*pair) for pair in zip(later, classified.boundaries, strict=True)],
            "texts": [found for pair in read if (found := _text_finding(*pair, tokenizer)) is not None],
            "logprobs_modes": [_mode_finding(*pair) for pair in read if pair[1].logprobs_mode is not None],
            "weight_versions": _version_findings(generations, place),
            "policy_errors": policy_errors,
        },
        samples=samples,
        metrics=metrics,
    )


def _place(call: LoggedCall) -> dict[str, Any]:
    return {"conversation": call.conversation, "file": call.file, "line": call.line}


def _boundary_finding(call: LoggedCall, boundary: Boundary) -> Finding:
    names = ("earlier", "later", "position", "expected_id", "found_id", "expected_text", "found_text")
    return Finding(
        kind="unclassified" if boundary.kind is None else boundary.kind.value,
        harmless=boundary.position is None or boundary.kind in _BRANCHES,
        example=_place(call) | {name: getattr(boundary, name) for name in names},
    )


def _text_finding(call: LoggedCall, generation: Generation, tokenizer: Tokenizer | None) -> Finding | None:
    text = generation.text if call.text is None else call.text
    if text is not None and tokenizer is not None:
        parameters = call.request.get("sampling_params", call.request)
        stop = parameters.get("stop") if isinstance(parameters, Mapping) else None
        strings = [each for each in (stop if isinstance(stop, list) else [stop]) if isinstance(each, str) and each]
        found = detect_post_processing(generation, text, tokenizer, stop=strings)
        return Finding(found.kind.value, found.keeps_ids, _place(call) | {"detail": found.detail, "cure": found.cure})
    # A text that an agent kept is counted among ``unchecked_texts``.
    if text is not None and call.text is not None:
        return None
    detail, cure = "only a tokenizer tells the text of the sampled tokens", "give a tokenizer"
    if text is None:
        detail = "the response has no text of all sampled tokens: reasoning or tool calls were parsed out of it"
        cure = "log the text that was kept"
    return Finding("not_compared", True, _place(call) | {"detail": detail, "cure": cure})


def _mode_finding(call: LoggedCall, generation: Generation) -> Finding:
    """Which distribution the log-probs are of; the sampled ids are known in either mode."""
    detail = cure = ""
    if generation.logprobs_mode == "raw_logprobs":
        detail = "the tokens were drawn from a truncated distribution, the log-probs are of the model's whole one"
        cure = "start vLLM with --logprobs-mode processed_logprobs"
    return Finding(str(generation.logprobs_mode), True, _place(call) | {"detail": detail, "cure": cure})


def _version_findings(generations: Sequence[Generation], place: Mapping[str, Any]) -> list[Finding]:
    found = list[str | None]()
    for each in generations:
        found += each.weight_versions or [each.weight_version]
    named = [version for version in dict.fromkeys(found) if version is not None]
    kind = "several" if len(named) > 1 else "unknown" if None in found else "one"
    return [Finding(kind, True, {**place, "versions": named})] if found else []


class LogReport:
    """The sums over conversations; one of each class is kept as an example."""

    def __init__(self, files: Sequence[str], *, policy: str | None = None) -> None:
        self._files, self._policy = [*files], policy
        self._counts = Counter[str]()
        self._metrics = Counter[str]()
        self._tables = {name: _Table() for name in _TABLES}

    def add(self, check: ConversationCheck) -> None:
        """Count one more conversation."""
        self._counts.update(conversations=1, **check.counts)
        self._metrics.update(check.metrics)
        for name, findings in check.findings.items():
            self._tables[name].add(findings)

    def add_problem(self, problem: LogLineError) -> None:
        """Count one more line that holds no call."""
        example = {"conversation": None, "file": problem.file, "line": problem.line, "message": problem.reason}
        self._tables["refused"].add([Finding(type(problem).__name__, False, example)])

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
        metrics, reasons = self._metrics, self.reasons()
        policy = {
            "name": self._policy,
            "samples": metrics["samples"],
            "trained_tokens": metrics["sampled_tokens/trained"],
            "dropped_tokens": metrics["sampled_tokens/dropped"],
            "actions": {action.value: metrics[f"boundaries/{action.value}"] for action in BoundaryAction},
            "errors": self._tables["policy_errors"].to_dict(),
        }
        return {
            "passed": not reasons,
            "reasons": reasons,
            "files": self._files,
            **{name: self._counts[name] for name in _COUNTS},
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
