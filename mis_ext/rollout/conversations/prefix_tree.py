# SPDX-License-Identifier: Apache-2.0
"""The calls of a conversation by the ids that are known of them: what a prompt shares with any of them, in one pass."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from mis_ext.rollout.generation import Generation


@dataclass(eq=False, kw_only=True, slots=True)
class KnownCall:
    """A call that sampled, and where it stands among those before it.

    Attributes:
        number: Its place in the order of calls.
        generation: The call.
        prompt: Its prompt; ids that an earlier call has too may be equal numbers of another type.
        spans: ``[start, end)`` of what was sampled in ``known()``, by call, this one's last.
        ancestor: The call of the most known ids with which its prompt begins, from which a sample goes on with this
            one; None: a sample begins with it.
        siblings: The calls of exactly this prompt so far.
        continued: There is a call that goes on from this one, in the same ids or in others.
    """

    number: int
    generation: Generation
    prompt: list[int]
    spans: list[tuple[int, int]]
    ancestor: KnownCall | None
    siblings: list[KnownCall] = field(default_factory=list)
    continued: bool = False

    def known(self, start: int = 0, stop: int | None = None) -> list[int]:
        """What the server was given, and what it sampled then, from one position to another."""
        size, stop = len(self.prompt), self.end if stop is None else stop
        return self.prompt[start:stop] + self.generation.sampled_ids[max(start - size, 0) : max(stop - size, 0)]

    @property
    def end(self) -> int:
        """The number of ids that are known after the call: its prompt and what it sampled."""
        return len(self.prompt) + len(self.generation.sampled_ids)

    @property
    def was_cut(self) -> bool:
        """Whether the token limit ended it."""
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
        """How many ids of this node are those of a list from a position on."""
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
    """How far a list of ids goes along a tree of calls.

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
        """The last of the calls that share the most ids."""
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
        """What a prompt shares with the calls so far."""
        return _walk(self._root, prompt)

    def add(self, call: KnownCall, place: Place) -> None:
        """Add a call whose prompt was found at a place; none was added since."""
        asked = _end_at(place, call.prompt)
        asked.prompted.append(call)
        call.siblings = asked.prompted
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


def find_mismatch(known: list[int], prompt: list[int]) -> int | None:
    """The first index at which a prompt differs from what is known, None if all of that is there."""
    equal = Node(known, 0, len(known), None).count_equal(prompt, 0)
    return None if equal == len(known) else equal
