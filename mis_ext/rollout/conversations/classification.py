"""What a prompt is, compared with the calls before it: by ids where they decide it, else by the bytes of the tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from mis_ext.rollout.conversations.boundary import BoundaryKind
from mis_ext.rollout.conversations.prefix_tree import KnownCall, Place, find_mismatch
from mis_ext.rollout.conversations.rewriting import Turn, align, marks_of
from mis_ext.rollout.generation import Generation, Tokenizer
from mis_ext.rollout.vocabulary import token_bytes_of


class Comparison(NamedTuple):
    """How a prompt compares with the calls before it.

    Attributes:
        kind: The class; None where only a tokenizer could tell and none was given.
        compared: The call that it was compared with; None where none sampled before it.
        position: The first mismatch; None where the ids continue.
        spans: The prompt's ids that hold what was sampled.
    """

    kind: BoundaryKind | None
    compared: KnownCall | None
    position: int | None
    spans: list[tuple[int, int]]

    @property
    def rewritten(self) -> KnownCall | None:
        """The call that the prompt goes on from in other ids."""
        return self.compared if self.kind in _REWRITTEN and self.position is not None else None


_MARKER_TOKENS = 16
_BEST_FIRST = (BoundaryKind.TRUNCATED_GENERATION, BoundaryKind.RETEMPLATED, BoundaryKind.REASONING_STRIPPED)
_REWRITTEN = (BoundaryKind.RETOKENIZED, *_BEST_FIRST)


def compare(
    call: Generation,
    prompt: list[int],
    place: Place,
    last: KnownCall | None,
    *,
    tokenizer: Tokenizer | None,
    reasoning: tuple[str, str],
) -> Comparison:
    """The class of a boundary, and the call that proves it.

    The prompt of ``call`` parts at ``place`` from those of the calls before, of which ``last`` is the last one that
    sampled. A tokenizer says what ids mean where they differ; ``reasoning`` are the markers around a reasoning block.
    """
    # Ids decide first: a repeated call, a prompt that begins with all that is known, the same prompt once more.
    ancestor, same = place.ancestor, place.calls_with_prompt(prompt)
    for each in same:
        if call.sampled_ids and _sample(each.generation) == _sample(call):
            return Comparison(BoundaryKind.DUPLICATE, each, len(prompt), [])
    if last is None:
        return Comparison(BoundaryKind.CONTIGUOUS, None, None, [])
    if ancestor is not None and not ancestor.continued:
        closed = ancestor.was_cut and len(prompt) > ancestor.end
        kind = BoundaryKind.TRUNCATED_GENERATION if closed else BoundaryKind.CONTIGUOUS
        return Comparison(kind, ancestor, None, ancestor.spans)
    if same:
        return Comparison(BoundaryKind.RETRY, same[-1], len(prompt), same[-1].spans[:-1])
    # Then the text of the ids, as far as a tokenizer tells it.
    return _compare_text(prompt, place, last, tokenizer=tokenizer, reasoning=reasoning)


def _sample(call: Generation) -> tuple[list[int], list[float]]:
    return call.sampled_ids, call.log_probs


def _compare_text(
    prompt: list[int], place: Place, last: KnownCall, *, tokenizer: Tokenizer | None, reasoning: tuple[str, str]
) -> Comparison:
    ancestor = place.ancestor
    spans = ancestor.spans if ancestor else []
    differing, found, tried = list[tuple[KnownCall, int]](), list[Comparison](), set[KnownCall]()
    for each in _candidates(prompt, place, last, tokenizer):
        if each in tried:
            continue
        tried.add(each)
        # The ids of the latest are known to be those of the prompt so far.
        position = place.depth if each is place.latest else find_mismatch(each.known(), prompt)
        if position is not None and position < each.end:
            differing.append((each, position))
            if tokenizer is None:
                return Comparison(None, each, position, spans)
            found += _align(each, prompt, position, tokenizer=tokenizer, reasoning=reasoning)
            if found and found[-1].kind is BoundaryKind.RETOKENIZED:
                return found[-1]
    if found:
        return min(found, key=lambda each: _BEST_FIRST.index(each.kind))
    if ancestor is None:
        return Comparison(BoundaryKind.HISTORY_EDITED, *differing[0], [])
    # What is known of the latest calls may be all there, and they were continued in other tokens only.
    compared, position = differing[0] if differing else (ancestor, ancestor.end)
    return Comparison(BoundaryKind.FORK, compared, position, spans)


def _candidates(prompt: list[int], place: Place, last: KnownCall, tokenizer: Tokenizer | None) -> Iterator[KnownCall]:
    """The calls that the prompt may go on from in other tokens."""
    yield place.latest or last
    yield last
    # In which of the calls of one prompt does it part from the latest?
    call = place.latest or last
    while call.ancestor is not None and call.ancestor.end > place.depth:
        call = call.ancestor
    if tokenizer is not None and len(call.siblings) > 1:
        start = min(place.depth, len(call.prompt))
        text, before = _bytes_of(prompt[start:], tokenizer), call.prompt[start:]
        for each in call.siblings:
            if text.startswith(_bytes_of(before + each.generation.sampled_ids, tokenizer)):
                yield each


def _bytes_of(ids: list[int], tokenizer: Tokenizer) -> bytes:
    return b"".join(map(token_bytes_of(tokenizer).__getitem__, ids))


def _align(
    known_call: KnownCall, prompt: list[int], position: int, *, tokenizer: Tokenizer, reasoning: tuple[str, str]
) -> list[Comparison]:
    """How the prompt writes a call and those before it; nothing where it does not hold them."""
    spans = known_call.spans
    # Whatever is before the first mismatch is the same ids, but a marker may have begun there.
    first = next(number for number, (_, end) in enumerate(spans) if position < end)
    while first and spans[first - 1][1] == spans[first][0]:
        first -= 1
    origin = max(spans[first - 1][1] if first else 0, min(position, spans[first][0]) - _MARKER_TOKENS)
    table = token_bytes_of(tokenizer)
    known = known_call.known(origin)
    pieces = [*map(table.__getitem__, known)]
    turns, end = list[Turn](), origin
    for start, stop in spans[first:]:
        turn = Turn(*(b"".join(pieces[a - origin : b - origin]) for a, b in ((end, start), (start, stop))))
        # What goes on without a template is one turn: its middle is no end, and may be inside a character.
        if turns and not turn.template:
            turn = Turn(turns[-1].template, turns.pop().sampled + turn.sampled)
        turns.append(turn)
        end = stop
    theirs = [*map(table.__getitem__, prompt[origin:])]
    found = align(turns, theirs, marks=marks_of(tokenizer, reasoning), cut=known_call.was_cut)
    if found is None:
        return []
    kind = found.kind
    if kind is not BoundaryKind.REASONING_STRIPPED:
        if known_call.was_cut and position >= spans[-1][0]:
            kind = BoundaryKind.TRUNCATED_GENERATION
        # A special token and the same characters in plain tokens are another conversation.
        same_text = prompt[origin:] if found.end is None else prompt[origin : origin + found.end]
        before, now = ([*filter(table.special_ids.__contains__, ids)] for ids in (known, same_text))
        if found.end is not None and before != now:
            return []
    moved = [(origin + start, origin + stop) for start, stop in found.spans]
    return [Comparison(kind, known_call, position, spans[:first] + moved)]
