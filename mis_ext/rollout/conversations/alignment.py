"""A conversation found again in a prompt that writes it with other tokens."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from enum import Enum
from itertools import accumulate
from typing import NamedTuple

from mis_ext.rollout.conversations.rewriting import Marks, find_end, without_reasoning


class Change(Enum):
    """What happened to the text of the turns; the last that holds of any turn."""

    NONE = 0
    REWRITTEN = 1
    REASONING_STRIPPED = 2


class Turn(NamedTuple):
    """What was sampled, and what stands before it since the turn before."""

    template: bytes
    sampled: bytes


class Alignment(NamedTuple):
    """The conversation as it stands in the prompt.

    Attributes:
        change: ``NONE``: byte for byte.
        end: Prompt tokens that hold the conversation; None where a token holds its end and what follows.
        spans: Prompt tokens ``[start, end)`` of each turn's sampled text, a token that holds more of the text included.
    """

    change: Change
    end: int | None
    spans: list[tuple[int, int]]


def align(turns: Sequence[Turn], prompt: Sequence[bytes], *, marks: Marks, cut: bool) -> Alignment | None:
    """Where the turns are in the prompt; None where anything else than the writing of a sampled text was changed.

    Args:
        turns: The conversation.
        prompt: Bytes of each token of the prompt.
        marks: What begins and ends a turn, and what is a tag.
        cut: The token limit ended the last turn.
    """
    text = b"".join(prompt)
    change, ends = Change.NONE, [*accumulate(len(part) for turn in turns for part in turn)]
    if not text.startswith(b"".join(part for turn in turns for part in turn)):
        found = _align_text(turns, _readable(text), marks, cut=cut)
        if found is None:
            return None
        change, ends = found
    token_ends = [0, *accumulate(map(len, prompt))]
    bounds = [(bisect_left(token_ends, start), bisect_left(token_ends, end)) for start, end in _pairs(ends)]
    end = bounds[-1][1]
    return Alignment(change, end if token_ends[end] == ends[-1] else None, bounds)


def _align_text(turns: Sequence[Turn], text: str, marks: Marks, *, cut: bool) -> tuple[Change, list[int]] | None:
    position, change, bounds = 0, Change.REWRITTEN, list[int]()
    for number, turn in enumerate(turns):
        template, sampled = _readable(turn.template), _readable(turn.sampled)
        cut_here = cut and number == len(turns) - 1
        begins = marks.begin_behind(template)
        start = _find_template(text, position, template, marks, behind_a_turn=number > 0)
        end = None if start is None else find_end(text, start, sampled, marks=marks, begins=begins, cut=cut_here)
        if end is None:
            start, end = _find_stripped(text, position, template, sampled, marks, behind_a_turn=number > 0)
            change = Change.REASONING_STRIPPED
        if start is None or end is None:
            return None
        bounds += [start, end]
        position = end
    steps = [0, *bounds]
    sizes = (len(text[a:b].encode("utf-8", "surrogateescape")) for a, b in zip(steps, bounds, strict=False))
    return change, [*accumulate(sizes)]


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


def _readable(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _pairs(bounds: list[int]) -> list[tuple[int, int]]:
    return [*zip(bounds[::2], bounds[1::2], strict=True)]
