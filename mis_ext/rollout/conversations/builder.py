# SPDX-License-Identifier: Apache-2.0
"""Training samples from the calls of a conversation: the call that each prompt continues, and the trained tokens.

Only ids decide. A :class:`PrefixTree` finds what a prompt shares with any of the calls before it, in one pass.
"""

from __future__ import annotations

import operator
import reprlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import NamedTuple, get_args

from mis_ext.rollout.generation import (
    LARGEST_ID,
    Boundary,
    BoundaryAction,
    BoundaryError,
    BoundaryKind,
    Built,
    CountMismatch,
    Generation,
    MalformedResponse,
    Policy,
    Tokenizer,
    TrainingSample,
    find_illegal_id,
)
from mis_ext.validation import check_choice

# Tokens shown on each side of a mismatch.
_CONTEXT_TOKENS = 8


def build_samples(
    generations: Iterable[Generation],
    *,
    policy: Policy = "strict",
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
) -> Built:
    """Training samples of one conversation, in which every sampled token has the id that was sampled.

    A prompt is compared with all earlier calls. Calls that share ids form a tree, and each path of the tree is a
    sample. Best of n, retries, sub-agents and interleaved conversations need no ids of their own. A sampled token is
    trained in one sample at most; other samples have it in their prompt.

    With every policy, duplicates and calls that sampled nothing are omitted.

    Args:
        generations: The calls of one conversation, in order.
        policy: What to do with a prompt that does not continue an earlier call with exactly its ids. ``"strict"``
            raises an error. ``"split"`` starts another sample with the call's own prompt: it is exact, and loses no
            token.
        tokenizer: The server's tokenizer, to show the text where ids differ. Nothing else depends on it.
        vocab_size: Ids must be below it. None: they are not checked.

    Raises:
        BoundaryError: A boundary under ``"strict"``.
        MalformedResponse: A token id is no ``int``, negative, or not below ``vocab_size``.
        CountMismatch: Not one log-prob per sampled id.
        ValueError: An unknown policy.
    """
    check_choice("policy", policy, get_args(Policy))
    given = tuple(generations)
    largest_id = LARGEST_ID if vocab_size is None else vocab_size - 1
    calls, boundaries, tree = list[KnownCall](), list[Boundary](), PrefixTree()
    previous: Generation | None = None
    for call in given:
        prompt = call.prompt_ids if isinstance(call.prompt_ids, list) else [*call.prompt_ids]
        place = tree.find(prompt)
        _check(call, prompt, first_new=place.depth, largest_id=largest_id)
        found = _compare(call, prompt, place)
        action = choose_action(policy, call, found)
        # Known ids were checked; what equals them in the prompt may be True or 1.0.
        if found.position is not None or place.depth != (place.ancestor.end if place.ancestor else 0):
            prompt = place.with_known_ids(prompt)
        known = KnownCall(number=len(calls), generation=call, prompt=prompt, ancestor=place.ancestor)
        if previous is not None:
            boundary = _describe(previous, known, found, action, tokenizer)
            if action is BoundaryAction.RAISED:
                raise _error(boundary)
            boundaries.append(boundary)
        previous = call
        if not call.sampled_ids or action is BoundaryAction.DROPPED:
            continue
        if place.ancestor is not None:
            place.ancestor.continued = True
        tree.add(known, place)
        calls.append(known)
    return Built(
        samples=collect_samples(calls),
        boundaries=tuple(boundaries),
        generations=len(given),
        empty_generations=sum(not call.sampled_ids for call in given),
        sampled_tokens=sum(len(call.sampled_ids) for call in given),
    )


def _check(call: Generation, prompt: list[int], *, first_new: int, largest_id: int) -> None:
    for name, values in (("log-probs", call.log_probs), ("weight versions", call.weight_versions)):
        if values is not None and len(values) != len(call.sampled_ids):
            raise CountMismatch(call.request_id, f"{len(call.sampled_ids)} sampled ids, but {len(values)} {name}")
    for key, ids, start in (("prompt_ids", prompt, first_new), ("sampled_ids", call.sampled_ids, 0)):
        index = find_illegal_id(ids[start:], largest_id)
        if index is not None:
            found = f"got {reprlib.repr(ids[start + index])}"
            message = f"{key}[{start + index}] must be an int in [0, {largest_id}], {found}"
            raise MalformedResponse(call.request_id, message)


def choose_action(policy: Policy, call: Generation, found: Comparison) -> BoundaryAction:
    """The action that a policy takes at a boundary of this class."""
    if found.position is None:
        return BoundaryAction.CONTINUED
    if policy == "strict":
        return BoundaryAction.RAISED
    if found.kind is BoundaryKind.DUPLICATE or not call.sampled_ids:
        return BoundaryAction.DROPPED
    return BoundaryAction.SPLIT


def _describe(
    previous: Generation, call: KnownCall, found: Comparison, action: BoundaryAction, tokenizer: Tokenizer | None
) -> Boundary:
    kind, position, compared = found.kind, found.position, found.compared
    earlier = previous if compared is None else compared.generation
    if position is None and not previous.sampled_ids:
        kind, earlier = BoundaryKind.EMPTY_GENERATION, previous
    is_used = action is not BoundaryAction.DROPPED
    expected_id = found_id = expected_text = found_text = None
    if position is not None and compared is not None:
        start, stop = max(0, position - _CONTEXT_TOKENS), position + _CONTEXT_TOKENS
        expected, there = compared.known(start, stop), call.prompt[start:stop]
        expected_id, found_id = (next(iter(ids[position - start :]), None) for ids in (expected, there))
        if tokenizer is not None:
            decode = partial(tokenizer.decode, skip_special_tokens=False)
            expected_text, found_text = (decode([*map(int, ids)]) for ids in (expected, there))
    return Boundary(
        kind=kind,
        action=action,
        earlier=earlier.request_id,
        later=call.generation.request_id,
        continues=call.ancestor.generation.request_id if call.ancestor is not None and is_used else None,
        position=position if compared is not None else None,
        expected_id=expected_id,
        found_id=found_id,
        expected_text=expected_text,
        found_text=found_text,
    )


class Comparison(NamedTuple):
    """Comparison of a prompt with the calls before it.

    Attributes:
        kind: The class.
        compared: The call that it was compared with; None where none sampled before it.
        position: The first mismatch; None where the ids continue.
    """

    kind: BoundaryKind
    compared: KnownCall | None
    position: int | None


def _compare(call: Generation, prompt: list[int], place: Place) -> Comparison:
    """The class of a boundary, and the call that proves it; at ``place`` the prompt parts from the calls before."""
    # A repeated call, a prompt that begins with all that is known, the same prompt once more.
    ancestor, same = place.ancestor, place.calls_with_prompt(prompt)
    for each in same:
        before = each.generation
        if (before.sampled_ids, before.log_probs) == (call.sampled_ids, call.log_probs):
            return Comparison(BoundaryKind.DUPLICATE, each, len(prompt))
    compared = place.latest
    if compared is None:
        return Comparison(BoundaryKind.CONTIGUOUS, None, None)
    if ancestor is not None and not ancestor.continued:
        closed = ancestor.was_cut and len(prompt) > ancestor.end
        return Comparison(BoundaryKind.TRUNCATED_GENERATION if closed else BoundaryKind.CONTIGUOUS, ancestor, None)
    if same:
        return Comparison(BoundaryKind.RETRY, same[-1], len(prompt))
    is_fork = ancestor is not None and not compared.has_sampled(place.depth)
    return Comparison(BoundaryKind.FORK if is_fork else BoundaryKind.DIFFERENT, compared, place.depth)


def _error(boundary: Boundary) -> BoundaryError:
    found = "the prompt ends" if boundary.found_id is None else f"the prompt has id {boundary.found_id}"
    message = (
        f"the prompt does not continue request {boundary.earlier!r} ({boundary.kind.value}): at position "
        f"{boundary.position} {found}, id {boundary.expected_id} is known"
    )
    if boundary.expected_text is not None:
        message += f"; prompt {boundary.found_text!r}, known {boundary.expected_text!r}"
    return BoundaryError(boundary.later, message, boundary)


def collect_samples(calls: Sequence[KnownCall]) -> tuple[TrainingSample, ...]:
    """One sample for each call from which none goes on, in their order.

    Of the samples that share calls, the one that ends last has their tokens; the others have them as a prompt.
    """
    # For each call the last one that goes on from it: the end of the sample in which it is trained.
    last = {call.number: call.number for call in calls}
    for call in reversed(calls):
        if call.ancestor is not None:
            last[call.ancestor.number] = max(last[call.ancestor.number], last[call.number])
    paths: dict[int, list[KnownCall]] = {end: [] for end in sorted({*last.values()})}
    for call in calls:
        paths[last[call.number]].append(call)
    return tuple(_join_path(path) for path in paths.values())


def _join_path(path: list[KnownCall]) -> TrainingSample:
    # Known ids may be equal numbers of another type where a prompt repeats them.
    tokens = [*map(int, path[0].prompt)] if path[0].ancestor else [*path[0].prompt]
    response = len(tokens)
    loss_mask, log_probs = list[int](), list[float]()
    versions, request_ids = list[str | None](), list[str]()
    for number, call in enumerate(path):
        if number:
            between = call.prompt[len(tokens) :]
            tokens += between
            loss_mask += [0] * len(between)
            log_probs += [0.0] * len(between)
            versions += [None] * len(between)
        sampled = call.generation
        count = len(sampled.sampled_ids)
        tokens += sampled.sampled_ids
        loss_mask += [1] * count
        log_probs += sampled.log_probs
        versions += sampled.weight_versions or [sampled.weight_version] * count
        request_ids.append(sampled.request_id)
    return TrainingSample(
        tokens=tokens,
        response_length=len(tokens) - response,
        loss_mask=loss_mask,
        rollout_log_probs=log_probs,
        weight_versions=versions,
        request_ids=request_ids,
    )


@dataclass(eq=False, kw_only=True, slots=True)
class KnownCall:
    """A call that sampled, and where it stands among those before it.

    Attributes:
        number: Its place in the order of calls.
        generation: The call.
        prompt: Its prompt; ids that an earlier call has too may be equal numbers of another type.
        ancestor: The call of the most known ids with which its prompt begins, from which a sample goes on with this
            one; None: a sample begins with it.
        continued: There is a call that goes on from this one.
    """

    number: int
    generation: Generation
    prompt: list[int]
    ancestor: KnownCall | None
    continued: bool = False

    def known(self, start: int = 0, stop: int | None = None) -> list[int]:
        """Ids that the server received and then sampled, from one position to another."""
        size, stop = len(self.prompt), self.end if stop is None else stop
        return self.prompt[start:stop] + self.generation.sampled_ids[max(start - size, 0) : max(stop - size, 0)]

    @property
    def end(self) -> int:
        """The number of ids that are known after the call: its prompt and what it sampled."""
        return len(self.prompt) + len(self.generation.sampled_ids)

    def has_sampled(self, position: int) -> bool:
        """True if this call, or one that it continues, sampled the known id there or the one behind it.

        In other tokens the last id of a prompt may hold the beginning of what was sampled.
        """
        call: KnownCall | None = self
        while call is not None and not len(call.prompt) - 1 <= position < call.end:
            call = call.ancestor
        return call is not None

    @property
    def was_cut(self) -> bool:
        """True if the token limit ended it."""
        return self.generation.finish_reason == "length"


_CHUNK = 1024


class Node:
    """A node of the radix tree: ids that follow each other in all calls that come by; the root has none.

    Attributes:
        children: The nodes behind this one, by their first id.
        prompted: Calls whose prompt ends here.
        ended: Calls whose sampled ids end here.
        latest: The last call that comes by.
    """

    def __init__(self, ids: list[int], start: int, stop: int, parent: Node | None) -> None:
        self.ids, self.start, self.stop, self.parent = ids, start, stop, parent
        self.children: dict[int, Node] = {}
        self.prompted: list[KnownCall] = []
        self.ended: list[KnownCall] = []
        self.latest: KnownCall | None = None

    @property
    def size(self) -> int:
        """The number of ids of the node."""
        return self.stop - self.start

    def count_equal(self, ids: list[int], position: int) -> int:
        """Count the ids of this node that equal those of a list, starting at a position."""
        for start in range(self.start, self.stop, _CHUNK):
            mine = self.ids[start : min(start + _CHUNK, self.stop)]
            # Slices are compared in C.
            theirs = ids[position : position + len(mine)]
            if mine != theirs:
                num_equal: int = sum(takewhile(bool, map(operator.eq, mine, theirs)))
                return start - self.start + num_equal
            position += len(mine)
        return self.size

    def split(self, size: int) -> Node:
        """Cut this node in two; returns the first part."""
        first = Node(self.ids, self.start, self.start + size, self.parent)
        assert self.parent is not None
        self.parent.children[self.ids[self.start]] = first
        self.start += size
        self.parent = first
        first.children[self.ids[self.start]] = self
        return first


class Place(NamedTuple):
    """Position that a list of ids reaches in a tree of calls.

    Attributes:
        node: Where they part from it, or end.
        offset: How many ids of that node they have.
        depth: How many ids they share with the tree.
        ancestor: The call of the most ids, sampled ones included, that they begin with; of several with the same
            ids the last from which none goes on, or the last.
    """

    node: Node
    offset: int
    depth: int
    ancestor: KnownCall | None

    @property
    def latest(self) -> KnownCall | None:
        """The last of the calls that share the most ids; None where none sampled."""
        return self.node.latest

    def with_known_ids(self, prompt: list[int]) -> list[int]:
        """The prompt, which is what was looked up, with the ids that it shares with the tree as they stand there."""
        node: Node | None = self.node
        parts, size = list[list[int]](), self.offset
        while node is not None:
            parts.append(node.ids[node.start : node.start + size])
            node = node.parent
            size = node.size if node else 0
        ids = list[int]()
        for part in (*reversed(parts), prompt[self.depth :]):
            ids += part
        return ids

    def calls_with_prompt(self, prompt: list[int]) -> list[KnownCall]:
        """The calls of exactly this prompt, which is what was looked up."""
        return self.node.prompted if (self.depth, self.offset) == (len(prompt), self.node.size) else []


class PrefixTree:
    """Known calls, none yet. To look up a prompt, or to add a call, takes time that grows with its ids alone."""

    def __init__(self) -> None:
        self._root = Node([], 0, 0, None)

    def find(self, prompt: list[int]) -> Place:
        """Find the ids that a prompt shares with the calls so far."""
        return _walk(self._root, prompt)

    def add(self, call: KnownCall, place: Place) -> None:
        """Add a call whose prompt was found at a place; none was added since."""
        asked = _end_at(place, call.prompt)
        asked.prompted.append(call)
        sampled = call.generation.sampled_ids
        node: Node | None = _end_at(_walk(asked, sampled), sampled)
        assert node is not None
        node.ended.append(call)
        while node is not None:
            node.latest = call
            node = node.parent


def _walk(node: Node, ids: list[int]) -> Place:
    """The place that ``ids``, which begin behind a node, reach in its tree."""
    depth, offset, ancestors = 0, node.size, list[KnownCall]()
    while offset == node.size:
        ancestors = node.ended or ancestors
        if depth == len(ids) or not isinstance(ids[depth], Hashable) or ids[depth] not in node.children:
            break
        node = node.children[ids[depth]]
        offset = node.count_equal(ids, depth)
        depth += offset
    ancestor = next((each for each in reversed(ancestors) if not each.continued), ancestors[-1] if ancestors else None)
    return Place(node, offset, depth, ancestor)


def _end_at(place: Place, ids: list[int]) -> Node:
    """The node at whose end these ids end; it is made if need be."""
    node = place.node
    if place.offset < node.size:
        node = node.split(place.offset)
    if place.depth < len(ids):
        node.children[ids[place.depth]] = node = Node(ids, place.depth, len(ids), node)
    return node
