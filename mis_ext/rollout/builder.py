# SPDX-License-Identifier: Apache-2.0
"""Training samples from the calls of a conversation: the call that each prompt continues, and the trained tokens.

Only ids are compared: each prompt with all earlier calls.
"""

from __future__ import annotations

import reprlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

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
_ID_BYTES = array("i").itemsize


def build_samples(
    generations: Iterable[Generation],
    *,
    policy: Policy = "strict",
    tokenizer: Tokenizer | None = None,
) -> Built:
    """Build training samples of one conversation. Every sampled token keeps its sampled id.

    A prompt is compared with all earlier calls. Calls that share ids form a tree, and each path of the tree is a
    sample. Best of n, retries, sub-agents and interleaved conversations need no separate ids. A sampled token is
    trained in at most one sample; other samples have it in their prompt.

    With every policy, duplicates and calls that sampled nothing are omitted.

    Args:
        generations: The calls of one conversation, in order.
        policy: The action for a prompt that does not continue an earlier call with exactly its ids. ``"strict"`` raises
            an error. ``"split"`` starts another sample with the call's own prompt, which is exact and loses no token.
        tokenizer: The server's tokenizer, only to show the text where ids differ.

    Raises:
        BoundaryError: A boundary under ``"strict"``.
        MalformedResponse: A token id is not an ``int``, is negative, or is above 2**31 - 1.
        CountMismatch: The numbers of log-probs and sampled ids differ.
        ValueError: The policy is unknown.
    """
    check_choice("policy", policy, get_args(Policy))
    given = tuple(generations)
    calls, boundaries = list[_Call](), list[Boundary]()
    previous: Generation | None = None
    for generation in given:
        call = _checked(generation, calls[-1].known if calls else b"")
        kind, compared, position = _compare(call, calls)
        if position is None:
            action = BoundaryAction.CONTINUED
        elif policy == "strict":
            action = BoundaryAction.RAISED
        elif kind is BoundaryKind.DUPLICATE or not generation.sampled_ids:
            action = BoundaryAction.DROPPED
        else:
            action = BoundaryAction.SPLIT
        if previous is not None:
            boundary = _describe(previous, call, kind, action, compared, position, tokenizer)
            if action is BoundaryAction.RAISED:
                raise _error(boundary)
            boundaries.append(boundary)
        previous = generation
        if generation.sampled_ids and action is not BoundaryAction.DROPPED:
            if call.ancestor is not None:
                call.ancestor.continued = True
            calls.append(call)
    return Built(
        samples=_collect_samples(calls),
        boundaries=tuple(boundaries),
        generations=len(given),
        empty_generations=sum(not call.sampled_ids for call in given),
        sampled_tokens=sum(len(call.sampled_ids) for call in given),
    )


@dataclass(eq=False, slots=True)
class _Call:
    """A call, and its relation to earlier calls.

    Attributes:
        generation: The call.
        prompt: Its prompt.
        known: The known ids after it (its prompt and its sampled ids), as bytes, which are compared faster.
        ancestor: The call with the most known ids that are a prefix of its prompt. A sample continues from it with this
            call. None: a sample begins with this call.
        continued: Whether another call continues this call.
    """

    generation: Generation
    prompt: list[int]
    known: bytes
    ancestor: _Call | None = None
    continued: bool = False

    @property
    def end(self) -> int:
        """The number of known ids."""
        return len(self.prompt) + len(self.generation.sampled_ids)

    def has_sampled(self, position: int) -> bool:
        """True if this call, or a call that it continues, sampled the known id at this position or the next one.

        With another tokenization, the last id of a prompt may contain the beginning of the sampled text.
        """
        call: _Call | None = self
        while call is not None and not len(call.prompt) - 1 <= position < call.end:
            call = call.ancestor
        return call is not None


def _checked(generation: Generation, before: bytes) -> _Call:
    """The call, if its counts and ids are legal. Ids of a common prefix with ``before`` are already checked."""
    sampled, prompt = generation.sampled_ids, [*generation.prompt_ids]
    for name, values in (("log-probs", generation.log_probs), ("weight versions", generation.weight_versions)):
        if values is not None and len(values) != len(sampled):
            raise CountMismatch(generation.request_id, f"{len(sampled)} sampled ids, but {len(values)} {name}")
    try:
        packed = array("i", prompt)
    except (TypeError, OverflowError):
        packed = array("i")
    first_new = _num_equal(packed.tobytes(), before)
    for key, ids, start in (("prompt_ids", prompt, first_new), ("sampled_ids", sampled, 0)):
        index = find_illegal_id(ids[start:])
        if index is not None:
            found = f"got {reprlib.repr(ids[start + index])}"
            message = f"{key}[{start + index}] must be an int in [0, {LARGEST_ID}], {found}"
            raise MalformedResponse(generation.request_id, message)
    return _Call(generation, packed.tolist(), packed.tobytes() + array("i", sampled).tobytes())


def _compare(call: _Call, calls: Sequence[_Call]) -> tuple[BoundaryKind, _Call | None, int | None]:
    """Find the ancestor of a call; return the class of its boundary, the call that proves it, and the first mismatch.

    None: no earlier call sampled, or the ids continue, respectively.
    """
    length = len(call.prompt)
    prompt = call.known[: _ID_BYTES * length]
    shared = [_num_equal(prompt, other.known) for other in calls]
    same = [other for other, size in zip(calls, shared, strict=True) if len(other.prompt) == length == size]
    whole = [other for other, size in zip(calls, shared, strict=True) if other.end == size]
    # Of several calls with the same ids, the last call that is not continued, or else the last call.
    call.ancestor = ancestor = max(reversed(whole), key=lambda other: (other.end, not other.continued), default=None)
    for other in same:
        before, now = other.generation, call.generation
        if (before.sampled_ids, before.log_probs) == (now.sampled_ids, now.log_probs):
            return BoundaryKind.DUPLICATE, other, length
    if not calls:
        return BoundaryKind.CONTIGUOUS, None, None
    if ancestor is not None and not ancestor.continued:
        closed = ancestor.generation.finish_reason == "length" and length > ancestor.end
        kind = BoundaryKind.TRUNCATED_GENERATION if closed else BoundaryKind.CONTIGUOUS
        return kind, ancestor, None
    if same:
        return BoundaryKind.RETRY, same[-1], length
    # The last of the calls with the most shared ids.
    position = max(shared)
    compared = next(other for other, size in zip(reversed(calls), reversed(shared), strict=True) if size == position)
    is_fork = ancestor is not None and not compared.has_sampled(position)
    return BoundaryKind.FORK if is_fork else BoundaryKind.DIFFERENT, compared, position


def _num_equal(one: bytes, other: bytes) -> int:
    """Count the ids of the common prefix."""
    low, high = 0, min(len(one), len(other)) // _ID_BYTES
    # A fast path without a copy, if one continues the other.
    if one.startswith(other) or other.startswith(one):
        return high
    while low < high:
        middle = (low + high + 1) // 2
        begin, end = _ID_BYTES * low, _ID_BYTES * middle
        if one.startswith(other[begin:end], begin):
            low = middle
        else:
            high = middle - 1
    return low


def _describe(
    previous: Generation,
    call: _Call,
    kind: BoundaryKind,
    action: BoundaryAction,
    compared: _Call | None,
    position: int | None,
    tokenizer: Tokenizer | None,
) -> Boundary:
    earlier = previous if compared is None else compared.generation
    if position is None and not previous.sampled_ids:
        kind, earlier = BoundaryKind.EMPTY_GENERATION, previous
    is_used = action is not BoundaryAction.DROPPED
    expected_id = found_id = expected_text = found_text = None
    if position is not None and compared is not None:
        around = slice(max(0, position - _CONTEXT_TOKENS), position + _CONTEXT_TOKENS)
        sides = compared.prompt + compared.generation.sampled_ids, call.prompt
        expected_id, found_id = (next(iter(ids[position : position + 1]), None) for ids in sides)
        if tokenizer is not None:
            decode = partial(tokenizer.decode, skip_special_tokens=False)
            expected_text, found_text = (decode(ids[around]) for ids in sides)
    return Boundary(
        kind=kind,
        action=action,
        earlier=earlier.request_id,
        later=call.generation.request_id,
        continues=call.ancestor.generation.request_id if call.ancestor is not None and is_used else None,
        position=position,
        expected_id=expected_id,
        found_id=found_id,
        expected_text=expected_text,
        found_text=found_text,
    )


def _error(boundary: Boundary) -> BoundaryError:
    found = "the prompt ends" if boundary.found_id is None else f"the prompt has id {boundary.found_id}"
    message = (
        f"the prompt does not continue request {boundary.earlier!r} ({boundary.kind.value}): at position "
        f"{boundary.position} {found}, but the known id is {boundary.expected_id}"
    )
    if boundary.expected_text is not None:
        message += f"; prompt {boundary.found_text!r}, known {boundary.expected_text!r}"
    return BoundaryError(boundary.later, message, boundary)


def _collect_samples(calls: Sequence[_Call]) -> tuple[TrainingSample, ...]:
    """One sample for each call that no other call continues, in order.

    Of the samples that share calls, the sample that ends last trains their tokens. The other samples have them in the
    prompt.
    """
    # For each call, the last call that continues it: the end of the sample in which it is trained.
    last = {call: number for number, call in enumerate(calls)}
    for call in reversed(calls):
        if call.ancestor is not None:
            last[call.ancestor] = max(last[call.ancestor], last[call])
    paths: dict[int, list[_Call]] = {end: [] for end in sorted({*last.values()})}
    for call in calls:
        paths[last[call]].append(call)
    return tuple(_join_path(path) for path in paths.values())


def _join_path(path: list[_Call]) -> TrainingSample:
    tokens = [*path[0].prompt]
    loss_mask, log_probs, versions = list[int](), list[float](), list[str | None]()
    for call in path:
        # Empty for the first call, because the sample begins with its prompt.
        between, sampled = call.prompt[len(tokens) :], call.generation
        num_between, num_sampled = len(between), len(sampled.sampled_ids)
        tokens += [*between, *sampled.sampled_ids]
        loss_mask += [0] * num_between + [1] * num_sampled
        log_probs += [*[0.0] * num_between, *sampled.log_probs]
        versions += [None] * num_between
        versions += sampled.weight_versions or [sampled.weight_version] * num_sampled
    return TrainingSample(
        tokens=tokens,
        response_length=len(loss_mask),
        loss_mask=loss_mask,
        rollout_log_probs=log_probs,
        weight_versions=versions,
        request_ids=[call.generation.request_id for call in path],
    )
