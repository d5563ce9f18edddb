"""What happened between two calls of one conversation: the classes of turn boundaries, each proven."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest
from typing import NamedTuple

from mis_ext.rollout.conversations.alignment import Change, Turn, align
from mis_ext.rollout.conversations.conversation import Conversation
from mis_ext.rollout.conversations.rewriting import marks_of
from mis_ext.rollout.generation import Generation
from mis_ext.rollout.text import Tokenizer
from mis_ext.rollout.token_bytes import token_bytes_of


class BoundaryKind(str, Enum):
    """How a call's prompt relates to the conversation before it."""

    CONTIGUOUS = "contiguous"
    """It begins with exactly the ids that are known."""
    RETOKENIZED = "retokenized"
    """It begins with the same text in other tokens."""
    RETEMPLATED = "retemplated"
    """A sampled turn is written another way (white space at its ends and beside tags, JSON), all else is unchanged."""
    REASONING_STRIPPED = "reasoning_stripped"
    """A turn lost its reasoning block, all else is unchanged or re-templated."""
    TRUNCATED_GENERATION = "truncated_generation"
    """The token limit ended the call before, and what was sampled is followed by something else: the template closed
    the turn. The ids may continue exactly, or be re-tokenized or re-templated within that turn."""
    RETRY = "retry"
    """The same prompt as the call before it, and another sample."""
    DUPLICATE = "duplicate"
    """The same prompt, the same sampled ids and log-probs as any call before it."""
    EMPTY_GENERATION = "empty_generation"
    """The call before it sampled nothing; the prompt begins with exactly the ids that are known."""
    HISTORY_EDITED = "history_edited"
    """Anything else: a text that was not sampled, a whole turn, or the words of a sampled turn changed."""


class BoundaryAction(str, Enum):
    """What the builder did at a boundary."""

    CONTINUED = "continued"
    """The call continues the sample."""
    SPLICED = "spliced"
    """The call continues the sample, in which the ids that were sampled stand instead of those of the prompt."""
    SPLIT = "split"
    """A new sample begins; after a retry it is the call before it that becomes a sample of its own."""
    TRUNCATED = "truncated"
    """The call and all after it are left out."""
    DROPPED = "dropped"
    """The call is left out: a duplicate, or one that sampled nothing and does not continue the conversation."""
    RAISED = "raised"
    """The boundary is an error."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Boundary:
    """One call after another.

    Attributes:
        kind: The class; None where only a tokenizer could tell and none was given.
        action: What was done.
        earlier: Request id of the call before.
        later: Request id of the call whose prompt was compared.
        position: Index of the first prompt id that differs from what is known; None if all known ids are there.
        expected_id: The known id at that position.
        found_id: The prompt's id at that position; None where the prompt ends.
        expected_text: The known conversation around that position, decoded; None without a tokenizer.
        found_text: The prompt around that position, decoded; None without a tokenizer.
    """

    kind: BoundaryKind | None
    action: BoundaryAction
    earlier: str
    later: str
    position: int | None = None
    expected_id: int | None = None
    found_id: int | None = None
    expected_text: str | None = None
    found_text: str | None = None


class Finding(NamedTuple):
    """What a prompt is, compared with a conversation.

    Attributes:
        kind: The class; None where only a tokenizer could tell and none was given.
        position: The first mismatch; None if all known ids are there.
        rest: The prompt's ids from here on are new; None where no token boundary, or nothing at all, separates them.
        spans: The prompt's ids that hold what was sampled, where the prompt is the conversation in other tokens.
    """

    kind: BoundaryKind | None
    position: int | None = None
    rest: int | None = None
    spans: list[tuple[int, int]] | None = None


_CHUNK = 1024
_MARKER_TOKENS = 16
_KIND_OF = {
    Change.NONE: BoundaryKind.RETOKENIZED,
    Change.REWRITTEN: BoundaryKind.RETEMPLATED,
    Change.REASONING_STRIPPED: BoundaryKind.REASONING_STRIPPED,
}


def classify(
    conversation: Conversation,
    call: Generation,
    prompt: list[int],
    position: int | None,
    *,
    tokenizer: Tokenizer | None,
    reasoning: tuple[str, str],
) -> Finding:
    """The class of a boundary, by ids where they decide it, else by the bytes of the tokens.

    Args:
        conversation: What is known.
        call: The next call.
        prompt: Its prompt ids.
        position: ``find_mismatch`` of what is known and the prompt.
        tokenizer: What the ids mean; needed where they differ.
        reasoning: The markers before and behind a reasoning block.
    """
    known, last = conversation.known, conversation.last
    cut = last is not None and last.finish_reason == "length"
    if position is None or last is None:
        closed = cut and len(prompt) > len(known)
        return Finding(BoundaryKind.TRUNCATED_GENERATION if closed else BoundaryKind.CONTIGUOUS, rest=len(known))
    if position == len(prompt) == conversation.spans[-1][0]:
        same = call.sampled_ids == last.sampled_ids and call.log_probs == last.log_probs
        return Finding(BoundaryKind.DUPLICATE if same else BoundaryKind.RETRY, position)
    if tokenizer is None:
        return Finding(None, position)
    return _classify_text(conversation, prompt, position, tokenizer=tokenizer, reasoning=reasoning, cut=cut)


def find_mismatch(known: list[int], prompt: list[int]) -> int | None:
    """The first index at which a prompt differs from what is known, None if all of that is there."""
    for start in range(0, len(known), _CHUNK):
        # Slices are compared in C.
        if known[start : start + _CHUNK] != prompt[start : min(start + _CHUNK, len(known))]:
            pairs = enumerate(zip_longest(known[start:], prompt[start : start + _CHUNK]), start)
            return next(index for index, (expected, found) in pairs if expected != found)
    return None


def _classify_text(
    conversation: Conversation,
    prompt: list[int],
    position: int,
    *,
    tokenizer: Tokenizer,
    reasoning: tuple[str, str],
    cut: bool,
) -> Finding:
    known, spans = conversation.known, conversation.spans
    # Whatever is before the first mismatch is the same ids, but a marker may have begun there.
    first = next(number for number, (_, end) in enumerate(spans) if position < end)
    while first and spans[first - 1][1] == spans[first][0]:
        first -= 1
    origin = max(spans[first - 1][1] if first else 0, min(position, spans[first][0]) - _MARKER_TOKENS)
    bytes_of = token_bytes_of(tokenizer).__getitem__
    pieces = [*map(bytes_of, known[origin:])]
    turns, end = list[Turn](), origin
    for start, stop in spans[first:]:
        turn = Turn(*(b"".join(pieces[a - origin : b - origin]) for a, b in ((end, start), (start, stop))))
        # What goes on without a template is one turn: its middle is no end, and may be inside a character.
        if turns and not turn.template:
            turn = Turn(turns[-1].template, turns.pop().sampled + turn.sampled)
        turns.append(turn)
        end = stop
    found = align(turns, [*map(bytes_of, prompt[origin:])], marks=marks_of(tokenizer, reasoning), cut=cut)
    if found is None:
        return Finding(BoundaryKind.HISTORY_EDITED, position)
    kind = _KIND_OF[found.change]
    if cut and position >= spans[-1][0] and found.change is not Change.REASONING_STRIPPED:
        kind = BoundaryKind.TRUNCATED_GENERATION
    if found.end is not None and found.change is not Change.REASONING_STRIPPED:
        # A special token and the same characters in plain tokens are another conversation.
        special_ids = token_bytes_of(tokenizer).special_ids
        same_text = prompt[origin : origin + found.end]
        before, now = ([each for each in ids if each in special_ids] for ids in (known[origin:], same_text))
        if before != now:
            return Finding(BoundaryKind.HISTORY_EDITED, position)
    rest = None if found.end is None else origin + found.end
    moved = [(origin + start, origin + stop) for start, stop in found.spans]
    return Finding(kind, position, rest, spans[:first] + moved)
