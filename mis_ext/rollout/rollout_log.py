# SPDX-License-Identifier: Apache-2.0
"""Logs of calls of inference servers: JSON lines, plain or compressed with gzip, a call a line.

Below: what is in them, by class: of a conversation, and summed over all of them to a verdict.

| key of a line | |
|---|---|
| ``conversation`` | id; calls of one id belong together, in the order of lines and files |
| ``request``, ``response`` | as they were sent and came, decoded |
| ``format`` | a key of :data:`READERS`; may be left out where the response proves it |
| ``request_id`` | optional: names the call; else the server's name for it |
| ``text`` | optional: what the agent kept of the response's text |
| ``choice`` | which choice of a response, where it has several; not for ``sglang`` |
| ``prompt_ids`` | ids of the prompt, where request and response have none; for vLLM and OpenAI |
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import msgspec

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
from mis_ext.rollout.readers.json_fields import Field
from mis_ext.rollout.readers.servers import (
    read_openai_chat,
    read_openai_completions,
    read_sglang_chat,
    read_sglang_completions,
    read_sglang_generate,
    read_vllm_chat,
    read_vllm_completions,
    read_vllm_generate,
)
from mis_ext.validation import check_choice, check_known


class Reader(NamedTuple):
    """The reader of a format, and which keys of a line it takes besides those that all take."""

    read: Callable[..., Generation]
    keys: tuple[str, ...] = ()
    needs_tokenizer: bool = False


READERS = {
    "sglang": Reader(read_sglang_generate),
    "sglang-chat": Reader(read_sglang_chat, ("choice",)),
    "sglang-completions": Reader(read_sglang_completions, ("choice",)),
    "vllm": Reader(read_vllm_generate, ("choice",)),
    "vllm-chat": Reader(read_vllm_chat, ("choice", "prompt_ids")),
    "vllm-completions": Reader(read_vllm_completions, ("choice", "prompt_ids")),
    "openai-chat": Reader(read_openai_chat, ("choice", "prompt_ids"), needs_tokenizer=True),
    "openai-completions": Reader(read_openai_completions, ("choice", "prompt_ids"), needs_tokenizer=True),
}
"""The formats of a line."""
_KEYS = ("conversation", "format", "request", "response", "request_id", "text")
_APIS = {"chat.completion": "chat", "text_completion": "completions"}
_DECODE = msgspec.json.Decoder().decode


class LogLineError(ValueError):
    """A line that holds no call."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(f"{file}, line {line}: {reason}")
        self.file, self.line, self.reason = file, line, reason


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedCall:
    """One line of a log; ``format`` is a key of :data:`READERS`, None stands for what the line does not have."""

    file: str
    line: int
    conversation: str
    format: str
    request: Any
    response: Any
    request_id: str | None
    text: str | None
    choice: int | None
    prompt_ids: Any

    def read(self, tokenizer: Tokenizer | None) -> Generation:
        """What the server was given and what it sampled, all ids of the prompt checked.

        Args:
            tokenizer: Proves the ids of formats that have none; None refuses these.
        """
        reader = READERS[self.format]
        options: dict[str, Any] = {key: getattr(self, key) for key in reader.keys}
        if reader.needs_tokenizer:
            options["tokenizer"] = tokenizer
        generation = reader.read(self.request, self.response, request_id=self.request_id, **options)
        Field(value=generation.prompt_ids, path="prompt_ids", request_id=generation.request_id).token_ids()
        return generation


def parse_line(content: bytes, *, file: str, line: int) -> LoggedCall:
    """The call that a line holds; its request and response are not looked into, but to tell a format not given."""
    try:
        row = _decode(content)
        if not isinstance(row, dict):
            raise ValueError(f"a line must be an object, got a {type(row).__name__}")
        check_known("keys", row, {*_KEYS, *(key for reader in READERS.values() for key in reader.keys)})
        missing = [key for key in ("conversation", "request", "response") if key not in row]
        if missing:
            raise ValueError(f"{' and '.join(missing)} missing, of the keys {', '.join(_KEYS)}")
        format = _tell_format(row["response"]) if row.get("format") is None else row["format"]
        if format is None:
            raise ValueError(f"the response does not prove its format: name it by format, one of {' | '.join(READERS)}")
        check_choice("format", format, READERS)
        check_known(f"keys for format {format}", row, {*_KEYS, *READERS[format].keys})
        return LoggedCall(
            file=file,
            line=line,
            conversation=_check_type(row, "conversation", str),
            format=format,
            request=row["request"],
            response=row["response"],
            request_id=_check_type(row, "request_id", str, None),
            text=_check_type(row, "text", str, None),
            choice=_check_type(row, "choice", int, None),
            prompt_ids=_check_type(row, "prompt_ids", list, None),
        )
    except json.JSONDecodeError as error:
        raise LogLineError(file, line, f"no JSON: {error.msg} at character {error.pos}") from error
    # Nesting beyond what Python's stack holds is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise LogLineError(file, line, str(error)) from error


def _decode(content: bytes) -> Any:
    """What :func:`json.loads` makes of a line, in half the time; also where only it reads the line, as NaN."""
    try:
        return _DECODE(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return json.loads(content)


def _check_type(row: Mapping[str, Any], key: str, kind: type, *default: None) -> Any:
    value = row.get(key)
    # True is an int and no choice.
    if type(value) is not kind and not (value is None and default):
        raise ValueError(f"{key} must be of type {kind.__name__}, got {value!r:.80}")
    return value


def _tell_format(response: Any) -> str | None:
    """The format that only this response can have; None where there are several, as for plain OpenAI log-probs."""
    if not isinstance(response, Mapping):
        return None
    # An error is refused by every reader alike.
    kind = response.get("object")
    if "meta_info" in response or response.get("error") is not None or kind == "error":
        return "sglang"
    if "output_mode" in response:
        return "vllm"
    api, choices = _APIS.get(str(kind)), response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    if api is None or not isinstance(first, Mapping):
        return None
    # Both servers write their key in every choice, null included.
    servers = [server for server, key in (("sglang", "matched_stop"), ("vllm", "stop_reason")) if key in first]
    return f"{servers[0]}-{api}" if len(servers) == 1 else None


class LinePlace(NamedTuple):
    """Where a line is: its file among those of the log, its number, its first byte and how many it has."""

    file: int
    number: int
    offset: int
    size: int


class RolloutLog:
    """Log files, read one conversation at a time, wherever its calls are.

    Two passes: :meth:`scan` finds the lines of each conversation, :meth:`calls` reads them again. In memory are only
    the places of the lines and what is being read. A file that cannot be read twice, because it is compressed or a
    pipe, is copied to a temporary file.

    Args:
        paths: The files; they stay open until the log is closed.

    Attributes:
        size: Bytes of all files, those of compressed ones after decompression.
        places: The lines of each conversation, in the order of their first calls; none before :meth:`scan`.
        problems: The lines that hold no call; none before :meth:`scan`.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.problems: list[LogLineError] = []
        self.places: dict[str, list[LinePlace]] = {}
        with ExitStack() as stack:
            self._files = [_open(path, stack) for path in paths]
            self._stack = stack.pop_all()
        self.size = sum(os.fstat(each.content.fileno()).st_size for each in self._files)

    def __enter__(self) -> RolloutLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def scan(self) -> Iterator[int]:
        """Find the conversations; yields the bytes of each line that was looked at."""
        for index, file in enumerate(self._files):
            offset = number = num_lines = 0
            for number, content in enumerate(file.content, start=1):
                if not content.isspace():
                    num_lines += 1
                    try:
                        call = parse_line(content, file=file.name, line=number)
                        place = LinePlace(index, number, offset, len(content))
                        self.places.setdefault(call.conversation, []).append(place)
                    except LogLineError as problem:
                        self.problems.append(problem)
                offset += len(content)
                yield len(content)
            if file.damage:
                self.problems.append(LogLineError(file.name, number + 1, file.damage))
            elif not num_lines:
                self.problems.append(LogLineError(file.name, 1, "the file holds no call"))

    def calls(self, places: Iterable[LinePlace]) -> Iterator[LoggedCall]:
        """The calls of a conversation, in order."""
        for place in places:
            file = self._files[place.file]
            content = os.pread(file.content.fileno(), place.size, place.offset)
            yield parse_line(content, file=file.name, line=place.number)


class _LogFile(NamedTuple):
    name: str
    content: IO[bytes]
    damage: str


def _open(path: Path, stack: ExitStack) -> _LogFile:
    # Pipes are read; of a device nobody knows where it ends.
    if path.is_char_device() or path.is_block_device():
        raise ValueError(f"{path}: is a device, not a file or a pipe")
    raw = stack.enter_context(path.open("rb"))
    compressed = raw.peek(2)[:2] == b"\x1f\x8b"
    if not compressed and raw.seekable():
        return _LogFile(str(path), raw, "")
    source = gzip.GzipFile(fileobj=raw) if compressed else raw
    copy = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
    damage = ""
    try:
        while block := source.read1(1 << 20):
            copy.write(block)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        # What came before is worth a report; a log that is being written ends like this.
        damage = f"the rest cannot be decompressed: {error}"
    copy.seek(0)
    return _LogFile(str(path), copy, damage)


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
