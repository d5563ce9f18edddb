# SPDX-License-Identifier: Apache-2.0
"""Logs of calls of inference servers: JSON lines, plain or compressed with gzip, a call a line.

Below: what is in them, by class: of a conversation, and summed over all of them to a verdict.

| key of a line | |
|---|---|
| ``conversation`` | id; calls of one id belong together, in the order of lines and files |
| ``request``, ``response`` | as they were sent and came, decoded |
| ``format`` | a key of :data:`READERS`; may be omitted where the response proves it |
| ``request_id`` | optional: names the call; else the server's name for it |
| ``text`` | optional: what the agent kept of the response's text |
| ``choice`` | which choice of a response, where it has several; not for ``sglang`` |
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
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.generation import (
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
    read_sglang_chat,
    read_sglang_completions,
    read_sglang_generate,
    read_vllm_chat,
    read_vllm_completions,
    read_vllm_generate,
)
from mis_ext.validation import check_choice, check_known

READERS: dict[str, Callable[..., Generation]] = {
    "sglang": read_sglang_generate,
    "sglang-chat": read_sglang_chat,
    "sglang-completions": read_sglang_completions,
    "vllm": read_vllm_generate,
    "vllm-chat": read_vllm_chat,
    "vllm-completions": read_vllm_completions,
}
"""The formats of a line, and the reader of each."""
# What may be absent has the type that it must have otherwise.
_TYPES = {"conversation": str, "request_id": str, "text": str, "choice": int}
_APIS = {"chat.completion": "chat", "text_completion": "completions"}


class LogLineError(ValueError):
    """A line that holds no call."""

    def __init__(self, file: str, line: int, reason: str) -> None:
        super().__init__(f"{file}, line {line}: {reason}")
        self.file, self.line, self.reason = file, line, reason


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedCall:
    """One line of a log: where it is, its object, and its format, a key of :data:`READERS`."""

    file: str
    line: int
    row: Mapping[str, Any]
    format: str

    @property
    def place(self) -> dict[str, Any]:
        """Return its place as plain values."""
        return {"conversation": self.row["conversation"], "file": self.file, "line": self.line}

    def read(self) -> Generation:
        """Read the input and the sampled output, and check all ids of the prompt."""
        # A response of SGLang's /generate is one sample.
        keys = ("request_id",) if self.format == "sglang" else ("request_id", "choice")
        options = {key: self.row.get(key) for key in keys}
        generation = READERS[self.format](self.row["request"], self.row["response"], **options)
        Field(value=generation.prompt_ids, path="prompt_ids", request_id=generation.request_id).token_ids()
        return generation


def parse_line(content: bytes, *, file: str, line: int) -> LoggedCall:
    """The call that a line holds; its request and response are not looked into, but to tell a format not given."""
    try:
        row = json.loads(content)
        if not isinstance(row, dict):
            raise ValueError(f"a line must be an object, got a {type(row).__name__}")
        check_known("keys", row, {"format", "request", "response", *_TYPES})
        missing = [key for key in ("conversation", "request", "response") if key not in row]
        if missing:
            raise ValueError(f"{' and '.join(missing)} missing")
        for key, kind in _TYPES.items():
            # True is an int and no choice.
            if key in row and type(row[key]) is not kind and (row[key] is not None or key == "conversation"):
                raise ValueError(f"{key} must be of type {kind.__name__}, got {row[key]!r:.80}")
        format = _tell_format(row["response"]) if row.get("format") is None else row["format"]
        if format is None:
            raise ValueError(f"the response does not prove its format: name it by format, one of {' | '.join(READERS)}")
        return LoggedCall(file=file, line=line, row=row, format=check_choice("format", format, READERS))
    except json.JSONDecodeError as error:
        raise LogLineError(file, line, f"no JSON: {error.msg} at character {error.pos}") from error
    # Nesting beyond what Python's stack holds is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise LogLineError(file, line, str(error)) from error


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


class RolloutLog:
    """Log files, read one conversation at a time, wherever its calls are.

    Two passes: one finds the lines of each conversation, :meth:`calls` reads them again. In memory are only the places
    of the lines and what is being read. A file that cannot be read twice, because it is compressed or a pipe, is copied
    to a temporary file.

    Args:
        paths: The files; they stay open until the log is closed.

    Attributes:
        places: For each conversation, in the order of their first calls, its lines: file, number, first byte, size.
        problems: The lines that hold no call.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.problems: list[LogLineError] = []
        self.places: dict[str, list[tuple[int, int, int, int]]] = {}
        with ExitStack() as stack:
            self._files = [_open(path, stack) for path in paths]
            for index in range(len(paths)):
                self._scan(index)
            self._stack = stack.pop_all()

    def __enter__(self) -> RolloutLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _scan(self, index: int) -> None:
        name, content, damage = self._files[index]
        offset = number = num_lines = 0
        for number, line in enumerate(content, start=1):
            if not line.isspace():
                num_lines += 1
                try:
                    call = parse_line(line, file=name, line=number)
                    self.places.setdefault(call.row["conversation"], []).append((index, number, offset, len(line)))
                except LogLineError as problem:
                    self.problems.append(problem)
            offset += len(line)
        if damage or not num_lines:
            self.problems.append(LogLineError(name, number + 1, damage or "the file holds no call"))

    def calls(self, conversation: str) -> Iterator[LoggedCall]:
        """The calls of a conversation, in order."""
        for index, number, offset, size in self.places[conversation]:
            name, content, _ = self._files[index]
            yield parse_line(os.pread(content.fileno(), size, offset), file=name, line=number)


def _open(path: Path, stack: ExitStack) -> tuple[str, IO[bytes], str]:
    """The file's name, its content, and what is wrong with the rest of it."""
    raw = stack.enter_context(path.open("rb"))
    compressed = raw.peek(2)[:2] == b"\x1f\x8b"
    if not compressed and raw.seekable():
        return str(path), raw, ""
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
    return str(path), copy, damage


_TABLES = ("refused", "boundaries", "texts", "policy_errors")
_COUNTS = ("conversations", "calls", "sampled_tokens", "unchecked_texts")
_SHOWN = ("earlier", "later", "position", "expected_id", "found_id", "expected_text", "found_text")


class LogReport:
    """The sums over conversations; one of each class is kept as an example.

    ``refused`` are the lines that hold no call, and the responses that prove no sample, by the name of the error;
    ``boundaries`` are those of all calls but the first that were read; ``texts`` is how the text of each response
    compares with its sampled ids; ``policy_errors`` are the conversations that the policy refuses.

    Args:
        files: Their names.
        tokenizer: Tells the text of ids; None leaves texts unchecked.
        policy: What is trained under it is built; None builds nothing. The classes do not depend on it.
    """

    def __init__(
        self, files: Sequence[str], *, tokenizer: Tokenizer | None = None, policy: Policy | None = None
    ) -> None:
        self._files, self._tokenizer, self._policy = [*files], tokenizer, policy
        self._counts = Counter[str]()
        self._metrics = Counter[str]()
        self._tables = {name: _Table() for name in _TABLES}

    def add_problem(self, problem: LogLineError) -> None:
        """Count one more line that holds no call."""
        example = {"conversation": None, "file": problem.file, "line": problem.line, "message": problem.reason}
        self._tables["refused"].add(type(problem).__name__, False, example)

    def add(self, calls: Iterable[LoggedCall]) -> tuple[TrainingSample, ...]:
        """Count one more conversation; returns what is trained under the policy.

        A refused call is omitted, and the next one compared with the calls before it.
        """
        self._counts["conversations"] += 1
        read: list[tuple[LoggedCall, Generation]] = []
        for call in calls:
            self._counts["calls"] += 1
            try:
                read.append((call, call.read()))
            except RolloutError as error:
                self._tables["refused"].add(type(error).__name__, False, call.place | {"message": str(error)})
        build = partial(build_samples, [generation for _, generation in read], tokenizer=self._tokenizer)
        # The policy that never raises.
        classified = build(policy="split")
        self._counts["sampled_tokens"] += classified.sampled_tokens
        for (call, _), boundary in zip(read[1:], classified.boundaries, strict=True):
            example = call.place | {name: getattr(boundary, name) for name in _SHOWN}
            self._tables["boundaries"].add(boundary.kind.value, boundary.kind is not BoundaryKind.DIFFERENT, example)
        for call, generation in read:
            self._add_text(call, generation)
        if self._policy is None:
            return ()
        try:
            built = build(policy=self._policy)
        except BoundaryError as error:
            self._metrics["sampled_tokens/dropped"] += classified.sampled_tokens
            example = {"conversation": read[0][0].row["conversation"], "message": str(error)}
            self._tables["policy_errors"].add(self._policy, False, example)
            return ()
        self._metrics.update(built.metrics())
        return built.samples

    def _add_text(self, call: LoggedCall, generation: Generation) -> None:
        kept: str | None = call.row.get("text")
        text = generation.text if kept is None else kept
        if self._tokenizer is None:
            self._counts["unchecked_texts"] += kept is not None
        elif text is not None:
            request = call.row["request"]
            parameters = request.get("sampling_params", request)
            stop = parameters.get("stop") if isinstance(parameters, Mapping) else None
            strings = [each for each in (stop if isinstance(stop, list) else [stop]) if isinstance(each, str) and each]
            found = detect_post_processing(generation, text, self._tokenizer, stop=strings)
            example = call.place | {"detail": found.detail, "cure": found.cure}
            self._tables["texts"].add(found.kind.value, found.keeps_ids, example)

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
    """Counts by class, with the first as an example."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._failing = Counter[str]()
        self._examples: dict[str, Mapping[str, Any]] = {}

    def add(self, kind: str, harmless: bool, example: Mapping[str, Any]) -> None:
        self._examples.setdefault(kind, example)
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
