# SPDX-License-Identifier: Apache-2.0
"""Logs of calls of inference servers: JSON lines, plain or compressed with gzip, a call a line.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

import msgspec

from mis_ext.rollout.generation import Generation, Tokenizer
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
