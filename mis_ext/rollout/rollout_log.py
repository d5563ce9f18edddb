# SPDX-License-Identifier: Apache-2.0
"""Logs of calls of inference servers: JSON lines, plain or compressed with gzip, one call per line.

Also counts of their contents by class, per conversation and in total, and a verdict.

| key of a line | |
|---|---|
| ``conversation`` | id; calls of one id belong together, in the order of lines and files |
| ``request``, ``response`` | as they were sent and came, decoded |
| ``format`` | a key of :data:`READERS` |
| ``request_id`` | optional: names the call; else the server's name for it |
| ``text`` | optional: what the agent kept of the response's text |
| ``choice`` | which choice of a response, where it has several; not for ``sglang`` |
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mis_ext.rollout.builder import build_samples
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
# The types of the keys; some of them may be absent.
_TYPES = {"conversation": str, "request_id": str, "text": str, "choice": int}


class Line(NamedTuple):
    """A line of a file."""

    file: str
    number: int
    content: bytes

    def parse(self) -> dict[str, Any]:
        """The call in the line, else a ``ValueError``. Its request and response are not checked."""
        try:
            row = json.loads(self.content)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from error
        if not isinstance(row, dict):
            raise ValueError(f"a line must be an object, got a {type(row).__name__}")
        check_known("keys", row, {"format", "request", "response", *_TYPES})
        missing = [key for key in ("conversation", "format", "request", "response") if key not in row]
        if missing:
            raise ValueError(f"{' and '.join(missing)} missing")
        for key, kind in _TYPES.items():
            # True is an int, but not a choice.
            if key in row and type(row[key]) is not kind and (row[key] is not None or key == "conversation"):
                raise ValueError(f"{key} must be of type {kind.__name__}, got {row[key]!r:.80}")
        check_choice("format", row["format"], READERS)
        return row


def read_call(row: Mapping[str, Any]) -> Generation:
    """Read the input and the sampled output of a call, and check all ids of the prompt."""
    # A response of SGLang's /generate has one sample.
    keys = ("request_id",) if row["format"] == "sglang" else ("request_id", "choice")
    generation = READERS[row["format"]](row["request"], row["response"], **{key: row.get(key) for key in keys})
    Field(value=generation.prompt_ids, path="prompt_ids", request_id=generation.request_id).token_ids()
    return generation


_COUNTS = ("conversations", "calls", "sampled_tokens", "unchecked_texts")
_SHOWN = ("earlier", "later", "position", "expected_id", "found_id", "expected_text", "found_text")


class LogReport:
    """Counts over conversations, with one example per class.

    ``refused``: lines without a call, and responses that prove no sample, by the name of the error. ``boundaries``:
    those of all read calls except the first. ``texts``: the relation of each response's text to its sampled ids.
    ``policy_errors``: conversations that the policy refuses.

    Args:
        files: The logs.
        tokenizer: Decodes ids; None leaves texts unchecked.
        policy: The policy for which training samples are built; None builds none. The classes do not depend on it.
    """

    def __init__(
        self, files: Iterable[Path], *, tokenizer: Tokenizer | None = None, policy: Policy | None = None
    ) -> None:
        self._files, self._tokenizer, self._policy = [*files], tokenizer, policy
        self._counts = Counter[str]()
        self._metrics = Counter[str]()
        self._refused, self._boundaries, self._texts, self._policy_errors = (_Table() for _ in range(4))

    def read(self) -> dict[str, list[Line]]:
        """The lines of each conversation, in the order of their first calls; lines without a call are counted.

        The lines are not decoded here: decoded, they would need many times the memory.
        """
        conversations: dict[str, list[Line]] = {}
        for path in self._files:
            number, holds_nothing = 0, True
            with path.open("rb") as raw:
                lines = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == b"\x1f\x8b" else raw
                try:
                    for number, content in enumerate(lines, start=1):
                        if content.isspace():
                            continue
                        holds_nothing, line = False, Line(str(path), number, content)
                        try:
                            conversations.setdefault(line.parse()["conversation"], []).append(line)
                        # Nesting beyond Python's stack limit is a RecursionError.
                        except (ValueError, RecursionError) as error:
                            self._refuse_line(path, number, str(error))
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    # Earlier lines are still reported; a log that is being written ends like this.
                    holds_nothing = False
                    self._refuse_line(path, number + 1, f"the rest cannot be decompressed: {error}")
            if holds_nothing:
                self._refuse_line(path, number + 1, "the file has no call")
        return conversations

    def _refuse_line(self, path: Path, line: int, reason: str) -> None:
        example = {"conversation": None, "file": str(path), "line": line, "message": reason}
        self._refused.add("LogLineError", False, example)

    def add(self, lines: Iterable[Line]) -> tuple[TrainingSample, ...]:
        """Count one more conversation; return its training samples under the policy.

        A refused call is omitted. The next call is compared with the calls before it.
        """
        self._counts["conversations"] += 1
        generations: list[Generation] = []
        places: list[dict[str, Any]] = []
        for line in lines:
            row = line.parse()
            place = {"conversation": row["conversation"], "file": line.file, "line": line.number}
            self._counts["calls"] += 1
            try:
                generation = read_call(row)
            except RolloutError as error:
                self._refused.add(type(error).__name__, False, place | {"message": str(error)})
                continue
            self._add_text(row, generation, place)
            generations.append(generation)
            places.append(place)
        build = partial(build_samples, generations, tokenizer=self._tokenizer)
        # The policy that never raises.
        classified = build(policy="split")
        self._counts["sampled_tokens"] += classified.sampled_tokens
        for place, boundary in zip(places[1:], classified.boundaries, strict=True):
            example = place | {name: getattr(boundary, name) for name in _SHOWN}
            self._boundaries.add(boundary.kind.value, boundary.kind is not BoundaryKind.DIFFERENT, example)
        if self._policy is None:
            return ()
        try:
            built = build(policy=self._policy)
        except BoundaryError as error:
            self._metrics["sampled_tokens/dropped"] += classified.sampled_tokens
            example = {"conversation": places[0]["conversation"], "message": str(error)}
            self._policy_errors.add(self._policy, False, example)
            return ()
        self._metrics.update(built.metrics())
        return built.samples

    def _add_text(self, row: Mapping[str, Any], generation: Generation, place: Mapping[str, Any]) -> None:
        kept: str | None = row.get("text")
        text = generation.text if kept is None else kept
        if self._tokenizer is None:
            self._counts["unchecked_texts"] += kept is not None
        elif text is not None:
            request = row["request"]
            parameters = request.get("sampling_params", request)
            stop = parameters.get("stop") if isinstance(parameters, Mapping) else None
            strings = [each for each in (stop if isinstance(stop, list) else [stop]) if isinstance(each, str) and each]
            found = detect_post_processing(generation, text, self._tokenizer, stop=strings)
            example = {**place, "detail": found.detail, "cure": found.cure}
            self._texts.add(found.kind.value, found.keeps_ids, example)

    def reasons(self) -> list[str]:
        """Why the log does not pass: empty if it does, never empty if no sampled token was read."""
        refused, boundaries, texts, errors = self._refused, self._boundaries, self._texts, self._policy_errors
        unchecked = self._counts["unchecked_texts"]
        reasons = {
            "nothing was measured: no sampled token could be read": not self._counts["sampled_tokens"],
            f"{refused.failing} lines or responses were refused": refused.failing,
            f"{boundaries.failing} of {boundaries.total} turn boundaries have different ids": boundaries.failing,
            f"{texts.failing} of {texts.total} texts are not the text of the sampled ids": texts.failing,
            f"{unchecked} texts were not compared with the sampled ids: give --tokenizer": unchecked,
            f"{errors.failing} conversations are refused by policy {self._policy}": errors.failing,
        }
        return [reason for reason, holds in reasons.items() if holds]

    def to_dict(self) -> dict[str, Any]:
        """All results, including ``passed``, as values for JSON."""
        metrics, reasons = self._metrics, self.reasons()
        policy = {
            "name": self._policy,
            "samples": metrics["samples"],
            "trained_tokens": metrics["sampled_tokens/trained"],
            "dropped_tokens": metrics["sampled_tokens/dropped"],
            "actions": {action.value: metrics[f"boundaries/{action.value}"] for action in BoundaryAction},
            "errors": self._policy_errors.to_dict(),
        }
        return {
            "passed": not reasons,
            "reasons": reasons,
            "files": [*map(str, self._files)],
            **{name: self._counts[name] for name in _COUNTS},
            "refused": self._refused.to_dict(),
            "boundaries": self._boundaries.to_dict(),
            "texts": self._texts.to_dict(),
            "policy": None if self._policy is None else policy,
        }


class _Table:
    """Counts by class, with the first element as an example."""

    def __init__(self) -> None:
        self._classes: dict[str, dict[str, Any]] = {}

    def add(self, kind: str, harmless: bool, example: Mapping[str, Any]) -> None:
        found = self._classes.setdefault(kind, {"count": 0, "failing": 0, "first": example})
        found["count"] += 1
        found["failing"] += not harmless

    @property
    def total(self) -> int:
        return sum(found["count"] for found in self._classes.values())

    @property
    def failing(self) -> int:
        return sum(found["failing"] for found in self._classes.values())

    def to_dict(self) -> dict[str, Any]:
        by_count = sorted(self._classes.items(), key=lambda each: -each[1]["count"])
        return {kind: {"share": found["count"] / self.total, **found} for kind, found in by_count}
