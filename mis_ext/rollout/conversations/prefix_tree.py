"""The calls of a conversation by the ids that are known of them: what a prompt shares with any of them, in one pass."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from mis_ext.rollout.conversations.known_call import KnownCall

_CHUNK = 1024


class Run:
    """Ids that follow each other in all calls that come by; the root has none.

    Attributes:
        runs: The runs behind this one, by their first id.
        prompted: Calls whose prompt ends here.
        ended: Calls whose sampled ids end here.
        latest: The last call that comes by.
    """

    def __init__(self, ids: list[int], start: int, stop: int, before: Run | None) -> None:
        self.ids, self.start, self.stop, self.before = ids, start, stop, before
        self.runs: dict[int, Run] = {}
        self.prompted: list[KnownCall] = []
        self.ended: list[KnownCall] = []
        self.latest: KnownCall | None = None

    @property
    def size(self) -> int:
        """The number of ids of the run."""
        return self.stop - self.start

    def count_equal(self, ids: list[int], position: int) -> int:
        """How many ids of this run are those of a list from a position on."""
        for start in range(self.start, self.stop, _CHUNK):
            mine = self.ids[start : min(start + _CHUNK, self.stop)]
            # Slices are compared in C.
            theirs = ids[position : position + len(mine)]
            if mine != theirs:
                return start - self.start + _first_difference(mine, theirs)
            position += len(mine)
        return self.size

    def split(self, size: int) -> Run:
        """Cut this run in two; returns the first part."""
        first = Run(self.ids, self.start, self.start + size, self.before)
        assert self.before is not None
        self.before.runs[self.ids[self.start]] = first
        self.start += size
        self.before = first
        first.runs[self.ids[self.start]] = self
        return first


class Place(NamedTuple):
    """How far a list of ids goes along a tree of calls.

    Attributes:
        run: Where they part from it, or end.
        offset: How many ids of that run they have.
        depth: How many ids they share with the tree.
        ancestor: The call of the most ids, sampled ones included, that they begin with; of several with the same
            ids the last from which none goes on, or the last.
    """

    run: Run
    offset: int
    depth: int
    ancestor: KnownCall | None

    @property
    def latest(self) -> KnownCall | None:
        """The last of the calls that share the most ids."""
        return self.run.latest

    def with_known_ids(self, prompt: list[int]) -> list[int]:
        """The prompt, which is what was looked up, with the ids that it shares with the tree as they stand there."""
        run: Run | None = self.run
        parts, size = list[list[int]](), self.offset
        while run is not None:
            parts.append(run.ids[run.start : run.start + size])
            run = run.before
            size = run.size if run else 0
        ids = list[int]()
        for part in (*reversed(parts), prompt[self.depth :]):
            ids += part
        return ids

    def calls_with_prompt(self, prompt: list[int]) -> list[KnownCall]:
        """The calls of exactly this prompt, which is what was looked up."""
        return self.run.prompted if (self.depth, self.offset) == (len(prompt), self.run.size) else []


class PrefixTree:
    """Known calls, none yet. To look up a prompt, or to add a call, takes time that grows with its ids alone."""

    def __init__(self) -> None:
        self._root = Run([], 0, 0, None)

    def find(self, prompt: list[int]) -> Place:
        """What a prompt shares with the calls so far."""
        return _walk(self._root, prompt)

    def add(self, call: KnownCall, place: Place) -> None:
        """Add a call whose prompt was found at a place; none was added since."""
        asked = _end_at(place, call.prompt)
        asked.prompted.append(call)
        call.siblings = asked.prompted
        sampled = call.generation.sampled_ids
        run: Run | None = _end_at(_walk(asked, sampled), sampled)
        assert run is not None
        run.ended.append(call)
        while run is not None:
            run.latest = call
            run = run.before


def _walk(run: Run, ids: list[int]) -> Place:
    """The place that ``ids``, which begin behind a run, reach in its tree."""
    depth, offset, ancestors = 0, run.size, list[KnownCall]()
    while offset == run.size:
        ancestors = run.ended or ancestors
        if depth == len(ids) or not isinstance(ids[depth], Hashable) or ids[depth] not in run.runs:
            break
        run = run.runs[ids[depth]]
        offset = run.count_equal(ids, depth)
        depth += offset
    ancestor = next((each for each in reversed(ancestors) if not each.continued), ancestors[-1] if ancestors else None)
    return Place(run, offset, depth, ancestor)


def _end_at(place: Place, ids: list[int]) -> Run:
    """The run at whose end these ids end; it is made if need be."""
    run = place.run
    if place.offset < run.size:
        run = run.split(place.offset)
    if place.depth < len(ids):
        run.runs[ids[place.depth]] = run = Run(ids, place.depth, len(ids), run)
    return run


def find_mismatch(known: list[int], prompt: list[int]) -> int | None:
    """The first index at which a prompt differs from what is known, None if all of that is there."""
    equal = Run(known, 0, len(known), None).count_equal(prompt, 0)
    return None if equal == len(known) else equal


def _first_difference(mine: list[int], theirs: list[int]) -> int:
    """The index of the first difference of two lists that differ."""
    low, high = 0, len(mine)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if mine[low:middle] == theirs[low:middle] else (low, middle)
    return low
