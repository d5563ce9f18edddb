"""From the calls of a conversation to training samples."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import get_args

from mis_ext.rollout.conversations.boundary import Boundary, BoundaryAction, BoundaryKind, Built, Policy
from mis_ext.rollout.conversations.classification import Comparison, compare
from mis_ext.rollout.conversations.prefix_tree import KnownCall, PrefixTree
from mis_ext.rollout.generation import (
    LARGEST_ID,
    BoundaryError,
    CountMismatch,
    Generation,
    MalformedResponse,
    Tokenizer,
    TrainingSample,
    find_illegal_id,
)
from mis_ext.validation import check_choice

_CONTEXT_TOKENS = 8


def build_samples(
    generations: Iterable[Generation],
    *,
    policy: Policy = "strict",
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    reasoning: tuple[str, str] = ("<think>", "</think>"),
) -> Built:
    """Training samples of one conversation, in which every sampled token has the id that was sampled.

    A prompt is compared with all earlier calls. Calls that share ids form a tree, and each path of the tree is a
    sample. Best of n, retries, sub-agents and interleaved conversations need no ids of their own. A sampled token is
    trained in one sample at most; other samples have it in their prompt.

    With every policy, duplicates and calls that sampled nothing are left out.

    Args:
        generations: The calls of one conversation, in order.
        policy: What to do with a prompt that does not continue an earlier call with exactly its ids. ``"strict"``
            raises an error. ``"split"`` starts another sample with the call's own prompt: it is exact, and loses no
            token.
        tokenizer: The server's tokenizer, to find the class of a boundary at which ids differ. The samples do not
            depend on it.
        vocab_size: Ids must be below it. None: they are not checked.
        reasoning: The markers before and after a reasoning block.

    Raises:
        BoundaryError: A boundary under ``"strict"``.
        MalformedResponse: A token id is no ``int``, negative, or not below ``vocab_size``.
        CountMismatch: Not one log-prob per sampled id.
        ValueError: An unknown policy, or the tokenizer is of unknown form.
    """
    check_choice("policy", policy, get_args(Policy))
    calls = tuple(generations)
    builder = _Builder(policy=policy, tokenizer=tokenizer, vocab_size=vocab_size, reasoning=reasoning)
    for call in calls:
        builder.add(call)
    return Built(
        samples=collect_samples(builder.calls),
        boundaries=tuple(builder.boundaries),
        generations=len(calls),
        empty_generations=sum(not call.sampled_ids for call in calls),
        sampled_tokens=sum(len(call.sampled_ids) for call in calls),
    )


class _Builder:
    def __init__(
        self, *, policy: Policy, tokenizer: Tokenizer | None, vocab_size: int | None, reasoning: tuple[str, str]
    ) -> None:
        self.calls: list[KnownCall] = []
        self.boundaries: list[Boundary] = []
        self._policy = policy
        self._tokenizer = tokenizer
        self._largest_id = LARGEST_ID if vocab_size is None else vocab_size - 1
        self._reasoning = reasoning
        self._tree = PrefixTree()
        self._previous: Generation | None = None

    def add(self, call: Generation) -> None:
        """Take one more call."""
        prompt = call.prompt_ids if isinstance(call.prompt_ids, list) else [*call.prompt_ids]
        place = self._tree.find(prompt)
        self._check(call, prompt, first_new=place.depth)
        last = self.calls[-1] if self.calls else None
        found = compare(call, prompt, place, last, tokenizer=self._tokenizer, reasoning=self._reasoning)
        action = choose_action(self._policy, call, found)
        # Known ids were checked; what equals them in the prompt may be True or 1.0.
        if found.position is not None or place.depth != (place.ancestor.end if place.ancestor else 0):
            prompt = place.with_known_ids(prompt)
        known = KnownCall(
            number=len(self.calls), generation=call, prompt=prompt, spans=[*found.spans], ancestor=place.ancestor
        )
        known.spans.append((len(prompt), known.end))
        if self._previous is not None:
            self._record(self._previous, known, found, action)
        self._previous = call
        if not call.sampled_ids or action is BoundaryAction.DROPPED:
            return
        for each in (place.ancestor, found.rewritten):
            if each is not None:
                each.continued = True
        self._tree.add(known, place)
        self.calls.append(known)

    def _check(self, call: Generation, prompt: list[int], *, first_new: int) -> None:
        for name, values in (("log-probs", call.log_probs), ("weight versions", call.weight_versions)):
            if values is not None and len(values) != len(call.sampled_ids):
                counts = f"{len(call.sampled_ids)} sampled ids, but {len(values)} {name}"
                raise CountMismatch(call.request_id, counts)
        for key, ids, start in (("prompt_ids", prompt, first_new), ("sampled_ids", call.sampled_ids, 0)):
            index = find_illegal_id(ids[start:], self._largest_id)
            if index is not None:
                found = f"got {reprlib.repr(ids[start + index])}"
                message = f"{key}[{start + index}] must be an int in [0, {self._largest_id}], {found}"
                raise MalformedResponse(call.request_id, message)

    def _record(self, previous: Generation, call: KnownCall, found: Comparison, action: BoundaryAction) -> None:
        kind, position, compared = found.kind, found.position, found.compared
        earlier = previous if compared is None else compared.generation
        if position is None and not previous.sampled_ids:
            kind, earlier = BoundaryKind.EMPTY_GENERATION, previous
        is_used = action is not BoundaryAction.DROPPED
        boundary = Boundary(
            kind=kind,
            action=action,
            earlier=earlier.request_id,
            later=call.generation.request_id,
            continues=call.ancestor.generation.request_id if call.ancestor is not None and is_used else None,
        )
        if position is not None and compared is not None:
            expected_id, found_id = compared.known(position, position + 1), call.prompt[position : position + 1]
            around = slice(max(0, position - _CONTEXT_TOKENS), position + _CONTEXT_TOKENS)
            boundary = replace(
                boundary,
                position=position,
                expected_id=expected_id[0] if expected_id else None,
                found_id=found_id[0] if found_id else None,
                expected_text=self._decode(compared.known(around.start, around.stop)),
                found_text=self._decode(call.prompt[around]),
            )
        if action is BoundaryAction.RAISED:
            raise _error(boundary)
        self.boundaries.append(boundary)

    def _decode(self, ids: list[int]) -> str | None:
        return None if self._tokenizer is None else self._tokenizer.decode([*map(int, ids)], skip_special_tokens=False)


def choose_action(policy: Policy, call: Generation, found: Comparison) -> BoundaryAction:
    """The action that a policy takes at a boundary of this class."""
    if found.position is None:
        return BoundaryAction.CONTINUED
    if policy == "strict":
        return BoundaryAction.RAISED
    if found.kind is BoundaryKind.DUPLICATE or not call.sampled_ids:
        return BoundaryAction.DROPPED
    return BoundaryAction.SPLIT


def _error(boundary: Boundary) -> BoundaryError:
    kind = "the class is unknown without a tokenizer" if boundary.kind is None else boundary.kind.value
    found = "the prompt ends" if boundary.found_id is None else f"the prompt has id {boundary.found_id}"
    message = (
        f"the prompt does not continue request {boundary.earlier!r} ({kind}): at position {boundary.position} "
        f"{found}, id {boundary.expected_id} is known"
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
