# SPDX-License-Identifier: Apache-2.0
"""A conversation found again in a prompt that writes its turns another way, or with other tokens.

A chat template renders earlier turns anew: white space, JSON, reasoning blocks and tokens may change where no word
does. :func:`align` finds the turns in the prompt's text, and :func:`find_end` says where one of them ends.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from mis_ext.rollout.generation import REPLACEMENT, BoundaryKind, Tokenizer
from mis_ext.rollout.vocabulary import token_bytes_of

_TAG = re.compile(r"<[^<>\s]+>")
_PIECE = re.compile(rf"(?P<space>\s+)|(?P<tag>{_TAG.pattern})|[^\s<{{\[]+|.", re.DOTALL)
# What a template may put between a special token and the turn.
_ROLES = ("assistant", "model")
# Each reads on to where the text is no JSON: thousands of open brackets would take quadratic time.
_MAX_FAILURES = 64


class Marks(NamedTuple):
    """The texts that no one writes by hand.

    Attributes:
        special: Of special tokens. A turn begins behind one and ends before one: nothing else proves where it does.
        tags: Of all tokens that were added to the vocabulary, and the reasoning markers.
        reasoning: The markers before and behind a reasoning block.
    """

    special: tuple[str, ...]
    tags: frozenset[str]
    reasoning: tuple[str, str]

    def begin_behind(self, template: str) -> bool:
        """Whether a turn begins behind this text, and does not go on from words in it."""
        head = template.rstrip()
        for role in _ROLES:
            head = head.removesuffix(role)
        tag = head[head.rfind("<") :]
        return head.endswith((*self.special, *self.reasoning)) or tag in self.tags

    def follow(self, text: str, position: int) -> bool:
        """Whether a special token is next, but for white space."""
        while text[position : position + 1].isspace():
            position += 1
        return text.startswith(self.special, position)

    def without_end(self, turn: str) -> str | None:
        """A turn without the special token that ends it; None where none does."""
        ends = [mark for mark in self.special if turn.endswith(mark)]
        return turn[: -max(map(len, ends))] if ends else None

    def end_behind(self, text: str, position: int) -> int | None:
        """Where the special token that begins here ends; None where none does."""
        marks = [mark for mark in self.special if text.startswith(mark, position)]
        return position + max(map(len, marks)) if marks else None


@lru_cache(maxsize=4)
def marks_of(tokenizer: Tokenizer, reasoning: tuple[str, str]) -> Marks:
    """The marks of a tokenizer; the same object for the same arguments."""
    table = token_bytes_of(tokenizer)
    return Marks(table.special_texts, table.added_texts | {*reasoning}, reasoning)


class Turn(NamedTuple):
    """What was sampled, and what stands before it since the turn before."""

    template: bytes
    sampled: bytes


def align(
    turns: Sequence[Turn], prompt: Sequence[bytes], *, marks: Marks, cut: bool
) -> tuple[BoundaryKind, int | None, list[tuple[int, int]]] | None:
    """Where the turns are in the prompt, the bytes of whose tokens are given; ``cut``: a limit ended the last turn.

    Returns:
        None where anything else than the writing of a sampled text was changed. Else what happened to any turn,
        ``RETOKENIZED`` being byte for byte; how many prompt tokens hold the conversation, None where a token holds its
        end and what follows; and the prompt tokens ``[start, end)`` of each turn's sampled text, a token that holds
        more of the text included.
    """
    # In other tokens, byte for byte, or else as a template may have rendered it again.
    text, parts = b"".join(prompt), [part for turn in turns for part in turn]
    kind, ends = BoundaryKind.RETOKENIZED, [*accumulate(map(len, parts))]
    if not text.startswith(b"".join(parts)):
        found = _align_text(turns, _readable(text), marks, cut=cut)
        if found is None:
            return None
        kind, ends = found
    # From bytes to tokens: the first token at whose end so many bytes are there.
    token_ends = [0, *accumulate(map(len, prompt))]
    tokens = [bisect_left(token_ends, end) for end in ends]
    is_whole = token_ends[tokens[-1]] == ends[-1]
    return kind, tokens[-1] if is_whole else None, [*zip(tokens[::2], tokens[1::2], strict=True)]


def _align_text(turns: Sequence[Turn], text: str, marks: Marks, *, cut: bool) -> tuple[BoundaryKind, list[int]] | None:
    position, kind, bounds = 0, BoundaryKind.RETEMPLATED, list[int]()
    for number, turn in enumerate(turns):
        template, sampled = _readable(turn.template), _readable(turn.sampled)
        cut_here = cut and number == len(turns) - 1
        begins = marks.begin_behind(template)
        start = _find_template(text, position, template, marks, behind_a_turn=number > 0)
        end = None if start is None else find_end(text, start, sampled, marks=marks, begins=begins, cut=cut_here)
        # Not there as it was sampled: perhaps without its reasoning.
        if end is None:
            start, end = _find_stripped(text, position, template, sampled, marks, behind_a_turn=number > 0)
            kind = BoundaryKind.REASONING_STRIPPED
        if start is None or end is None:
            return None
        bounds += [start, end]
        position = end
    steps = [0, *bounds]
    sizes = (len(text[a:b].encode("utf-8", "surrogateescape")) for a, b in zip(steps, bounds, strict=False))
    return kind, [*accumulate(sizes)]


def _find_template(text: str, position: int, template: str, marks: Marks, *, behind_a_turn: bool) -> int | None:
    """Where the template's text ends; white space of the turn before it may have changed."""
    is_free = behind_a_turn and marks.follow(template, 0)
    while not text.startswith(template, position):
        if not (is_free and text[position : position + 1].isspace()):
            return None
        position += 1
    return position + len(template)


def _find_stripped(
    text: str, position: int, template: str, sampled: str, marks: Marks, *, behind_a_turn: bool
) -> tuple[int | None, int | None]:
    opening, closing = map(re.escape, marks.reasoning)
    cut_at = len(template)
    # A generation prompt may open the block, or hold an empty one: that, too, goes with the reasoning.
    head = template.rfind(marks.reasoning[0])
    if head >= 0 and re.fullmatch(rf"{opening}\s*(?:{closing}\s*)?", template[head:]):
        cut_at = len(template[:head].rstrip())
    start = _find_template(text, position, template[:cut_at], marks, behind_a_turn=behind_a_turn)
    if start is None:
        return None, None
    begins = marks.begin_behind(template[:cut_at])
    for rest in without_reasoning(template[cut_at:] + sampled, marks.reasoning):
        end = find_end(text, start, rest, marks=marks, begins=begins)
        # Harmony ends what was sampled with <|return|>, and what is history with <|end|>.
        body = marks.without_end(rest)
        if end is None and body is not None:
            end = find_end(text, start, body, marks=marks, begins=begins)
            end = None if end is None else marks.end_behind(text, end)
        if end is not None:
            return start, end
    return None, None


def find_end(
    text: str, start: int, sampled: str, *, marks: Marks, begins: bool = True, cut: bool = False
) -> int | None:
    """Where ``sampled`` ends in ``text`` if it stands at ``start``, there perhaps written another way; else None.

    Another way is: other white space at the ends of a turn or beside a tag such as ``</think>``, JSON objects and lists
    written otherwise (white space, order of keys, escapes), another Unicode normalization, U+FFFD for bytes that are no
    text. White space between words is not free: it means something in a program. And a turn is written anew only once
    it has ended: where it goes on, each byte counts.

    Invalid bytes are surrogates in both texts. ``begins``: a turn begins with ``sampled``. ``cut``: the token limit
    ended it, so nothing need be left of an incomplete last character if the turn ends there.
    """
    if text.startswith(sampled, start):
        return start + len(sampled)
    # The client could not write the invalid bytes. Those of the prompt stay surrogates, which equal no U+FFFD.
    readable = sampled.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    end = _match(text, start, readable, marks, begins=begins)
    if end is None and cut and readable.endswith(REPLACEMENT):
        end = _match(text, start, readable.rstrip(REPLACEMENT), marks, begins=begins)
        # Were it not the end of the turn, other text could stand for the character.
        if end is not None and not text.startswith(marks.special, end):
            return None
    has_ended = readable.rstrip().endswith(marks.special) or (end is not None and marks.follow(text, end))
    return end if has_ended else None


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


def _match(text: str, start: int, sampled: str, marks: Marks, *, begins: bool) -> int | None:
    if not begins:
        leading = sampled[: len(sampled) - len(sampled.lstrip())]
        behind = start + len(leading)
        if not text.startswith(leading, start) or text[behind : behind + 1].isspace():
            return None
    end = start
    found = _pieces(text, start, marks.tags)
    for piece, _ in _pieces(sampled.strip(), 0, marks.tags):
        found_piece, end = next(found, ("", end))
        if found_piece != piece:
            return None
    for character in sampled[len(sampled.rstrip()) :]:
        if not text.startswith(character, end):
            break
        end += 1
    return end


def _pieces(text: str, start: int, tags: frozenset[str]) -> Iterator[tuple[str, int]]:
    """Tags, JSON values, words and what white space is left, each in one way of writing, and where each ends."""
    skip_space, failures, position = True, 0, start
    while match := _PIECE.match(text, position):
        piece, position = match[0], match.end()
        if match["space"]:
            behind = _PIECE.match(text, position)
            if not skip_space and behind and behind["tag"] not in tags:
                yield piece, position
            continue
        if piece in ("{", "[") and failures < _MAX_FAILURES:
            value = _json_value(text, position - 1)
            failures += value is None
            piece, position = value or (piece, position)
        skip_space = match["tag"] in tags
        yield re.sub(f"{REPLACEMENT}+", REPLACEMENT, unicodedata.normalize("NFC", piece)), position


def _json_value(text: str, start: int) -> tuple[str, int] | None:
    if _nests_deep(text, start):
        return None
    try:
        value, end = _DECODER.raw_decode(text, start)
        # Numbers that overflow are all one to JSON.
        return json.dumps(value, sort_keys=True, allow_nan=False), end
    # Python refuses integers of thousands of digits, and nesting on a deep stack: then the text counts as it stands.
    except (ValueError, RecursionError):
        return None


def _nests_deep(text: str, start: int) -> bool:
    # What Python refuses depends on its version and on the stack, which may differ between two readings of a text.
    depth = 0
    for bracket in _BRACKET.finditer(text, start):
        depth += 1 if bracket[0] in "[{" else -1
        if depth == 0 or depth > _MAX_NESTING:
            break
    return depth > _MAX_NESTING


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise ValueError("an object with a key twice says more than a dict")
    return value


_BRACKET, _MAX_NESTING = re.compile(r"[][{}]"), 200
_DECODER = json.JSONDecoder(object_pairs_hook=_object_of_unique_keys)


def _readable(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")
