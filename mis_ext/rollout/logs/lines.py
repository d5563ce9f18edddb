"""One line of a log of calls of inference servers: a JSON object.

| key | |
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

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import msgspec

from mis_ext.checks import check_choice, check_known
from mis_ext.rollout.generation import Generation
from mis_ext.rollout.logs.json_parts import Parts, RepeatedIds, peek
from mis_ext.rollout.readers.openai import read_openai_chat, read_openai_completions
from mis_ext.rollout.readers.reading import Field
from mis_ext.rollout.readers.sglang import read_sglang_chat, read_sglang_completions, read_sglang_generate
from mis_ext.rollout.readers.vllm import read_vllm_chat, read_vllm_completions
from mis_ext.rollout.text import Tokenizer


class Reader(NamedTuple):
    """The reader of a format, and which keys of a line it takes besides those that all take."""

    read: Callable[..., Generation]
    keys: tuple[str, ...] = ()
    needs_tokenizer: bool = False


READERS = {
    "sglang": Reader(read_sglang_generate),
    "sglang-chat": Reader(read_sglang_chat, ("choice",)),
    "sglang-completions": Reader(read_sglang_completions, ("choice",)),
    "vllm-chat": Reader(read_vllm_chat, ("choice", "prompt_ids")),
    "vllm-completions": Reader(read_vllm_completions, ("choice", "prompt_ids")),
    "openai-chat": Reader(read_openai_chat, ("choice", "prompt_ids"), needs_tokenizer=True),
    "openai-completions": Reader(read_openai_completions, ("choice", "prompt_ids"), needs_tokenizer=True),
}
"""The formats of a line."""

_KEYS = ("conversation", "format", "request", "response", "request_id", "text")
_NAMES = {"chat.completion": "chat", "text_completion": "completions"}


class LogLineError(ValueError):
    """A line that holds no call.

    Attributes:
        file: The file.
        line: Its line, from 1.
        reason: What is wrong with it.
    """

    def __init__(self, file: str, line: int, reason: str) -> None:
        # All are arguments of the exception, so that it survives the way out of a process.
        super().__init__(file, line, reason)
        self.file, self.line, self.reason = file, line, reason

    def __str__(self) -> str:
        return f"{self.file}, line {self.line}: {self.reason}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoggedCall:
    """One line of a log; ``format`` is a key of :data:`READERS`, None stands for what the line does not have.

    Request and response may be objects whose values are text, until :meth:`decode`.
    """

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

    def decode(self, ids: RepeatedIds) -> LoggedCall:
        """The call with nothing left as text.

        Args:
            ids: Decodes the calls of one conversation, in order.
        """
        prompt_ids = self.prompt_ids
        return replace(
            self,
            request=ids.decode_object(self.request),
            response=ids.decode_object(self.response),
            prompt_ids=ids.decode_ids(bytes(prompt_ids)) if isinstance(prompt_ids, msgspec.Raw) else prompt_ids,
        )

    def read(self, tokenizer: Tokenizer | None) -> Generation:
        """What the server was given and what it sampled, all ids of the prompt checked.

        Args:
            tokenizer: Proves the ids of formats that have none; None refuses these.

        Raises:
            RolloutError: The response proves no sample; the subclass says why.
        """
        reader = READERS[self.format]
        options: dict[str, Any] = {key: getattr(self, key) for key in reader.keys}
        if reader.needs_tokenizer:
            options["tokenizer"] = tokenizer
        generation = reader.read(self.request, self.response, request_id=self.request_id, **options)
        Field(value=generation.prompt_ids, path="prompt_ids", request_id=generation.request_id).token_ids()
        return generation


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line whose request and response are objects."""

    conversation: Any
    request: Parts
    response: Parts
    format: Any = msgspec.UNSET
    request_id: Any = msgspec.UNSET
    text: Any = msgspec.UNSET
    choice: Any = msgspec.UNSET
    prompt_ids: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_DECODE_LINE = msgspec.json.Decoder(_Line).decode


def parse_line(content: bytes, *, file: str, line: int) -> LoggedCall:
    """The call that a line holds; its request and response are not looked into, but to tell a format not given.

    Raises:
        LogLineError: It is no JSON object, or a key is unknown, missing or of another type.
    """
    try:
        row = _split(content)
        every_key = {*_KEYS, *(key for reader in READERS.values() for key in reader.keys)}
        check_known("keys", row, every_key)
        missing = [key for key in ("conversation", "request", "response") if key not in row]
        if missing:
            raise ValueError(f"{' and '.join(missing)} missing, of the keys {', '.join(_KEYS)}")
        format = _check_format(row)
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
            prompt_ids=_check_list(row, "prompt_ids"),
        )
    except json.JSONDecodeError as error:
        raise LogLineError(file, line, f"no JSON: {error.msg} at character {error.pos}") from error
    # Nesting beyond what Python's stack holds is a RecursionError.
    except (ValueError, RecursionError) as error:
        raise LogLineError(file, line, str(error)) from error


def _split(content: bytes) -> dict[str, Any]:
    """The keys of a line; whatever is not as it should be is left to the parser with the better messages."""
    try:
        # The decoder passes over strings that stay text.
        if not content.isascii():
            content.decode()
        line = _DECODE_LINE(content)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        row = json.loads(content)
        if not isinstance(row, dict):
            raise ValueError(f"a line must be an object, got a {type(row).__name__}") from None
        return row
    return {key: value for key, value in msgspec.structs.asdict(line).items() if value is not msgspec.UNSET}


def _check_list(row: Mapping[str, Any], key: str) -> Any:
    value = row.get(key)
    is_list = isinstance(value, msgspec.Raw) and bytes(value).startswith(b"[")
    return value if is_list else _check_type({key: peek(value)}, key, list, None)


def _check_type(row: Mapping[str, Any], key: str, kind: type, *default: None) -> Any:
    value = row.get(key)
    # True is an int and no choice.
    if type(value) is not kind and not (value is None and default):
        raise ValueError(f"{key} must be of type {kind.__name__}, got {value!r:.80}")
    return value


def _check_format(row: Mapping[str, Any]) -> str:
    if row.get("format") is not None:
        return check_choice("format", row["format"], READERS)
    told = _tell_format(row["response"])
    if told is None:
        raise ValueError(f"the response does not prove its format: name it by format, one of {' | '.join(READERS)}")
    return told


def _tell_format(response: Any) -> str | None:
    """The format that only this response can have; None where there are several, as for plain OpenAI log-probs."""
    if not isinstance(response, Mapping):
        return None
    # An error is refused by every reader alike.
    kind, error = peek(response.get("object")), peek(response.get("error"))
    if "meta_info" in response or error is not None or kind == "error":
        return "sglang"
    api, choices = _NAMES.get(str(kind)), peek(response.get("choices"))
    first = choices[0] if isinstance(choices, list) and choices else None
    if api is None or not isinstance(first, Mapping):
        return None
    # Both servers write their key in every choice, null included.
    servers = [server for server, key in (("sglang", "matched_stop"), ("vllm", "stop_reason")) if key in first]
    return f"{servers[0]}-{api}" if len(servers) == 1 else None
