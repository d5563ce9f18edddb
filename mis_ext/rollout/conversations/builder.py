"""From the calls of a conversation to training samples."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from mis_ext.checks import check_choice
from mis_ext.rollout.conversations.boundary import (
    Boundary,
    BoundaryAction,
    BoundaryKind,
    Finding,
    classify,
    find_mismatch,
)
from mis_ext.rollout.conversations.built import Built
from mis_ext.rollout.conversations.conversation import Conversation
from mis_ext.rollout.conversations.policies import Policy, choose_action
from mis_ext.rollout.errors import BoundaryError, CountMismatch, MalformedResponse
from mis_ext.rollout.generation import LARGEST_ID, Generation
from mis_ext.rollout.text import Tokenizer
from mis_ext.rollout.training_sample import TrainingSample

_CONTEXT_TOKENS = 8


def build_samples(
    generations: Iterable[Generation],
    *,
    policy: Policy = "strict",
    tokenizer: Tokenizer | None = None,
    vocab_size: int | None = None,
    reasoning: tuple[str, str] = ("<think>", "</think>"),
) -> Built:
    """Training samples of one conversation, in which every sampled token stands as it was sampled.

    Whatever the policy, a duplicate is left out, and so is a call that sampled nothing.

    Args:
        generations: The calls of one conversation, in order.
        policy: What to do with a prompt that does not begin with exactly the ids that are known. ``"strict"`` raises.
            ``"correct"`` puts the sampled ids in the place of the prompt's where it is the same conversation
            (re-tokenized, re-templated, a truncated generation), and splits where it is not. ``"split"`` begins a new
            sample with the call's own prompt; after a retry, the call before it becomes a sample of its own.
            ``"truncate"`` leaves out this and all later calls. ``"off"`` takes the prompt from the known length on and
            compares nothing: the sample may hold what no server was given.
        tokenizer: What the ids mean. ``"correct"`` needs it at a boundary where ids differ; the other policies use it
            to tell the class.
        vocab_size: Ids must be below it; None: they are not bounded.
        reasoning: The markers before and behind a reasoning block.

    Raises:
        BoundaryError: A boundary under ``"strict"``.
        MalformedResponse: A token id is no ``int``, negative, or not below ``vocab_size``.
        CountMismatch: Not one log-prob per sampled id.
        ValueError: An unknown policy; or a tokenizer is needed, or of unknown form.
    """
    check_choice("policy", policy, get_args(Policy))
    calls = tuple(generations)
    builder = _Builder(policy=policy, tokenizer=tokenizer, vocab_size=vocab_size, reasoning=reasoning)
    for call in calls:
        if not builder.truncated:
            builder.add(call)
    return Built(
        samples=builder.finish(),
        boundaries=tuple(builder.boundaries),
        generations=len(calls),
        empty_generations=sum(not call.sampled_ids for call in calls),
        sampled_tokens=sum(len(call.sampled_ids) for call in calls),
    )


class _Builder:
    def __init__(
        self, *, policy: Policy, tokenizer: Tokenizer | None, vocab_size: int | None, reasoning: tuple[str, str]
    ) -> None:
        self.boundaries: list[Boundary] = []
        self._policy = policy
        self._tokenizer = tokenizer
        self._largest_id = LARGEST_ID if vocab_size is None else vocab_size - 1
        self._reasoning = reasoning
        self._conversation = Conversation()
        self._ended: list[Conversation] = []
        self._previous: Generation | None = None
        self._seen: dict[tuple[float, ...], list[Generation]] = {}

    def add(self, call: Generation) -> None:
        """Take one more call; later ones are to be left out once the action is ``TRUNCATED``."""
        conversation, prompt = self._conversation, call.prompt_ids
        prompt = prompt if isinstance(prompt, list) else [*prompt]
        known = conversation.known
        position = find_mismatch(known, prompt)
        first_new = len(known) if position is None else position
        self._check(call, prompt, first_new=first_new)
        if position is not None:
            # Known ids were checked; what equals them in the prompt may be True or 1.0.
            prompt = known[:position] + prompt[position:]
        finding = Finding(BoundaryKind.DUPLICATE, position)
        if not self._came_before(call):
            finding = classify(
                conversation, call, prompt, position, tokenizer=self._tokenizer, reasoning=self._reasoning
            )
        action = choose_action(self._policy, call, finding)
        if self._previous is not None:
            self._record(self._previous, call, prompt, finding, action)
        if call.sampled_ids:
            self._apply(action, call, prompt, finding)
        self._previous = call

    def _came_before(self, call: Generation) -> bool:
        if not call.sampled_ids:
            return False
        # Few calls have these in common, so few prompts are compared.
        key = (len(call.prompt_ids), len(call.sampled_ids), call.sampled_ids[0], call.log_probs[0], call.log_probs[-1])
        alike = self._seen.setdefault(key, [])
        if any(_is_copy(call, each) for each in alike):
            return True
        alike.append(call)
        return False

    def finish(self) -> tuple[TrainingSample, ...]:
        return tuple(each.build() for each in [*self._ended, self._conversation] if each.last)

    @property
    def truncated(self) -> bool:
        return bool(self.boundaries) and self.boundaries[-1].action is BoundaryAction.TRUNCATED

    def _check(self, call: Generation, prompt: list[int], *, first_new: int) -> None:
        if len(call.log_probs) != len(call.sampled_ids):
            counts = f"{len(call.sampled_ids)} sampled ids, but {len(call.log_probs)} log-probs"
            raise CountMismatch(call.request_id, counts)
        versions = call.weight_versions
        if versions is not None and len(versions) != len(call.sampled_ids):
            counts = f"{len(call.sampled_ids)} sampled ids, but {len(versions)} weight versions"
            raise CountMismatch(call.request_id, counts)
        for key, ids, start in (("prompt_ids", prompt, first_new), ("sampled_ids", call.sampled_ids, 0)):
            index = _find_illegal_id(ids[start:], self._largest_id)
            if index is not None:
                found = f"got {reprlib.repr(ids[start + index])}"
                message = f"{key}[{start + index}] must be an int in [0, {self._largest_id}], {found}"
                raise MalformedResponse(call.request_id, message)

    def _record(
        self, earlier: Generation, call: Generation, prompt: list[int], finding: Finding, action: BoundaryAction
    ) -> None:
        kind, position, known = finding.kind, finding.position, self._conversation.known
        if position is None and not earlier.sampled_ids and kind is not BoundaryKind.DUPLICATE:
            kind = BoundaryKind.EMPTY_GENERATION
        boundary = Boundary(kind=kind, action=action, earlier=earlier.request_id, later=call.request_id)
        if position is not None:
            boundary = replace(
                boundary,
                position=position,
                expected_id=known[position],
                found_id=prompt[position] if position < len(prompt) else None,
                expected_text=self._decode_around(known, position),
                found_text=self._decode_around(prompt, position),
            )
        if action is BoundaryAction.RAISED:
            raise _error(boundary)
        self.boundaries.append(boundary)

    def _decode_around(self, ids: list[int], position: int) -> str | None:
        if self._tokenizer is None:
            return None
        around = ids[max(0, position - _CONTEXT_TOKENS) : position + _CONTEXT_TOKENS]
        return self._tokenizer.decode(around, skip_special_tokens=False)

    def _apply(self, action: BoundaryAction, call: Generation, prompt: list[int], finding: Finding) -> None:
        if action in (BoundaryAction.DROPPED, BoundaryAction.TRUNCATED):
            return
        rest = finding.rest
        if action is BoundaryAction.SPLIT and finding.kind is BoundaryKind.RETRY:
            self._ended.append(self._conversation.take_last())
            rest = len(prompt)
        elif action is BoundaryAction.SPLIT:
            self._ended.append(self._conversation)
            self._conversation = Conversation()
            # Earlier turns are in the new prompt, where they may be written another way next time.
            self._conversation.rewrite(prompt, finding.spans or [])
            rest = 0
        elif finding.position is not None:
            self._conversation.rewrite(prompt, finding.spans or [])
        if self._policy == "off":
            rest = self._conversation.size
        assert rest is not None
        self._conversation.append(prompt, rest, call)


def _is_copy(call: Generation, other: Generation) -> bool:
    same_sample = (call.sampled_ids, call.log_probs) == (other.sampled_ids, other.log_probs)
    return same_sample and [*call.prompt_ids] == [*other.prompt_ids]


def _find_illegal_id(ids: list[int], largest: int) -> int | None:
    # Types before values, each in one pass in C: the loop below runs only to name the position.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= largest):
        return None
    return next(index for index, each in enumerate(ids) if type(each) is not int or not 0 <= each <= largest)


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
