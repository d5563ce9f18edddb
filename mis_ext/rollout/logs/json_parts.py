"""JSON in which a conversation repeats, call after call, the same long list of token ids."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from mis_ext.rollout.generation import CheckedIds
from mis_ext.rollout.readers.reading import are_token_ids

Parts = dict[str, msgspec.Raw]
"""An object whose values are still text."""

_DECODE = msgspec.json.Decoder().decode
_DECODE_PARTS = msgspec.json.Decoder(list[Parts]).decode
_IDS = ("input_ids", "prompt", "prompt_token_ids")


def decode(text: bytes | msgspec.Raw) -> Any:
    """What :func:`json.loads` makes of a text, in less time; also where only it reads the text, as NaN.

    Raises:
        ValueError: The text is no JSON, or no UTF-8.
        RecursionError: It is nested more deeply than Python reads.
    """
    try:
        return _DECODE(text)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return json.loads(bytes(text))


def peek(value: Any) -> Any:
    """What a text holds, but of a list of objects the keys only; any other value as it is."""
    if not isinstance(value, msgspec.Raw):
        return value
    try:
        return _DECODE_PARTS(value)
    except msgspec.MsgspecError:
        return decode(value)


class RepeatedIds:
    """Decodes lists of token ids, each of which begins as the one before: only what is new is looked at."""

    def __init__(self) -> None:
        self._text = b""
        self._ids = CheckedIds()

    def decode_object(self, parts: Any) -> Any:
        """A request or a response whose values are text; any other value as it is."""
        if not isinstance(parts, dict):
            return parts
        return {key: self._decode_value(key, value) for key, value in parts.items()}

    def decode_ids(self, text: bytes) -> Any:
        """What a text holds; a list of token ids as :class:`~mis_ext.rollout.generation.CheckedIds`."""
        # All before a comma of both texts are whole ids, as many as the list before has there.
        comma = text.rfind(b",", 0, _num_shared(self._text, text))
        if comma < 0:
            known, new = CheckedIds(), decode(text)
        else:
            known = CheckedIds(self._ids[: len(self._ids) - self._text.count(b",", comma)])
            new = decode(b"[" + text[comma + 1 :])
        if not isinstance(new, list) or not are_token_ids(new):
            return [*known, *new] if known else new
        known += new
        self._text, self._ids = text, known
        return known

    def _decode_value(self, key: str, value: Any) -> Any:
        if not isinstance(value, msgspec.Raw):
            return value
        if key in _IDS:
            return self.decode_ids(bytes(value))
        if key == "choices":
            found = peek(value)
            return [self.decode_object(choice) for choice in found] if isinstance(found, list) else found
        return decode(value)


def _num_shared(first: bytes, second: bytes) -> int:
    """The number of bytes with which both begin."""
    size = step = min(len(first), len(second))
    shared = 0
    while step:
        end = shared + step
        if end <= size and first[shared:end] == second[shared:end]:
            shared = end
        else:
            step //= 2
    return shared
