"""The same text, written another way: what a chat template changes in a turn when it renders it again."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

_TAG = re.compile(r"<[^<>\s]+>")
_PIECE = re.compile(rf"(?P<space>\s+)|(?P<tag>{_TAG.pattern})|[^\s<{{\[]+|.", re.DOTALL)
_WORD = re.compile(r"\s*\S")
_REPLACEMENT = "\ufffd"
# Each reads on to where the text is no JSON: thousands of open brackets would take quadratic time.
_MAX_FAILURES = 64


def find_end(text: str, start: int, sampled: str, *, cut: bool = False) -> int | None:
    """Where ``sampled`` ends in ``text`` if it stands at ``start``, there perhaps written another way; else None.

    Another way is: other white space at either end or beside a tag such as ``</think>``, JSON objects and lists written
    otherwise (white space, order of keys, escapes), another Unicode normalization, U+FFFD for bytes that are no text.
    White space between words is not free: it means something in a program.

    Args:
        text: A rendered prompt, its invalid bytes as surrogates.
        start: Index into ``text``.
        sampled: What was sampled, its invalid bytes as surrogates.
        cut: The token limit ended the sampling: nothing need be left of an incomplete last character, if a tag follows.
    """
    if text.startswith(sampled, start):
        return start + len(sampled)
    # The client could not write the invalid bytes. Those of the prompt stay surrogates, which equal no U+FFFD.
    readable = sampled.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    end = _match(text, start, readable)
    if end is None and cut and readable.endswith(_REPLACEMENT):
        end = _match(text, start, readable.rstrip(_REPLACEMENT))
        # Were it not the end of the turn, other text could stand for the character.
        if end is not None and not _TAG.match(text, end):
            return None
    return end


def starts_with_tag(text: str) -> bool:
    """Whether a tag is first but for white space."""
    return _TAG.match(text.lstrip()) is not None


def without_reasoning(turn: str, markers: tuple[str, str]) -> list[str]:
    """The texts that a turn may have without its reasoning.

    Less the blocks, or only what is behind the last of them, or that behind an empty block or behind what closes one.
    """
    opening, closing = markers
    reasoned, found, rest = turn.rpartition(closing)
    block = f"{re.escape(opening)}.*?{re.escape(closing)}"
    if not found:
        return []
    without_blocks = re.sub(block, "", reasoned + closing, flags=re.DOTALL)
    return [without_blocks + rest, rest, opening + closing + rest, closing + rest]


def _match(text: str, start: int, sampled: str) -> int | None:
    end = start
    found = _pieces(text, start)
    for piece, _ in _pieces(sampled.strip(), 0):
        found_piece, end = next(found, ("", end))
        if found_piece != piece:
            return None
    for character in sampled[len(sampled.rstrip()) :]:
        if not text.startswith(character, end):
            # Where nothing follows, what is sampled next stands directly behind it, within the turn.
            return end if _WORD.match(text, end) else None
        end += 1
    return end


def _pieces(text: str, start: int) -> Iterator[tuple[str, int]]:
    """Tags, JSON values, words and what white space is left, each in one way of writing, and where each ends."""
    skip_space, failures, position = True, 0, start
    while match := _PIECE.match(text, position):
        piece, position = match[0], match.end()
        if match["space"]:
            behind = _PIECE.match(text, position)
            if not skip_space and behind and not behind["tag"]:
                yield piece, position
            continue
        if piece in ("{", "[") and failures < _MAX_FAILURES:
            value = _json_value(text, position - 1)
            failures += value is None
            piece, position = value or (piece, position)
        skip_space = bool(match["tag"])
        yield re.sub(f"{_REPLACEMENT}+", _REPLACEMENT, unicodedata.normalize("NFC", piece)), position


def _json_value(text: str, start: int) -> tuple[str, int] | None:
    try:
        value, end = _DECODER.raw_decode(text, start)
        # Numbers that overflow are all one to JSON.
        return json.dumps(value, sort_keys=True, allow_nan=False), end
    # Python refuses deep nesting and integers of thousands of digits: then the text counts as it stands.
    except (ValueError, RecursionError):
        return None


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object with a key twice says more than a dict")
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of_unique_keys)
