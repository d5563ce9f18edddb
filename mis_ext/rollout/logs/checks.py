"""What is in one logged conversation, by class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from mis_ext.rollout.conversations.boundary import Boundary, BoundaryKind, Built, Policy
from mis_ext.rollout.conversations.builder import build_samples
from mis_ext.rollout.errors import BoundaryError, RolloutError
from mis_ext.rollout.generation import Generation, Tokenizer, TrainingSample
from mis_ext.rollout.logs.lines import LoggedCall
from mis_ext.rollout.post_processing import detect_post_processing

# What they go on from is there in the ids that were sampled.
_BRANCHES = (BoundaryKind.RETRY, BoundaryKind.DUPLICATE, BoundaryKind.FORK)
REASONING = ("<think>", "</think>")
"""Qwen's, DeepSeek's and others' markers of a reasoning block."""

_NOT_COMPARED = "not_compared"


class Finding(NamedTuple):
    """One thing found at one line of a log.

    Attributes:
        kind: Its class.
        harmless: Whether what was sampled, and what the server was given, is known nevertheless.
        example: Where it is and what it is, as plain values.
    """

    kind: str
    harmless: bool
    example: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationCheck:
    """What was found in one conversation of a log.

    Attributes:
        calls: Lines.
        sampled_tokens: Tokens that the responses that were read sampled.
        unchecked_texts: Texts that an agent kept and that were not compared, for want of a tokenizer.
        refused: One per response that proves no sample, by the name of its error.
        boundaries: One per call after the first of those that were read.
        texts: One per response that was read: how its text compares with the sampled ids. A text that an agent kept and
            that was not compared is counted in ``unchecked_texts`` instead.
        weight_versions: At most one: whether the responses that were read name one version, several, or not all name
            one.
        policy_errors: At most one: the policy refuses the conversation.
        samples: What is trained under the policy.
        metrics: :meth:`~mis_ext.rollout.conversations.boundary.Built.metrics` under the policy; empty without one.
    """

    calls: int
    sampled_tokens: int
    unchecked_texts: int
    refused: tuple[Finding, ...]
    boundaries: tuple[Finding, ...]
    texts: tuple[Finding, ...]
    weight_versions: tuple[Finding, ...]
    policy_errors: tuple[Finding, ...]
    samples: tuple[TrainingSample, ...]
    metrics: Mapping[str, int]


def check_conversation(
    calls: Iterable[LoggedCall],
    *,
    tokenizer: Tokenizer | None = None,
    policy: Policy | None = None,
    reasoning: tuple[str, str] = REASONING,
) -> ConversationCheck:
    """What is in a conversation; a refused call is left out, and the next one compared with the calls before it.

    Args:
        calls: The conversation's, in order.
        tokenizer: Tells the class of a boundary where ids differ, and the text of ids; None leaves both open.
        policy: What is trained under it is built; None builds nothing. The classes do not depend on it.
        reasoning: The markers before and behind a reasoning block.

    Raises:
        ValueError: The tokenizer is of unknown form.
    """
    logged = list[LoggedCall]()
    read: list[tuple[LoggedCall, Generation]] = []
    refused = []
    for call in calls:
        # Whatever was read of a response is in the generation; the rest is most of a log.
        logged.append(replace(call, response=None))
        try:
            read.append((logged[-1], call.read(tokenizer)))
        except RolloutError as error:
            refused.append(Finding(type(error).__name__, False, _place(call) | {"message": str(error)}))
    generations = [generation for _, generation in read]
    build = partial(build_samples, generations, tokenizer=tokenizer, reasoning=reasoning)
    # The policy that never raises.
    classified = build(policy="split")
    later = [call for call, _ in read[1:]]
    samples, metrics, policy_error = _build(build, generations, policy)
    place = {"conversation": logged[0].conversation} if logged else {}
    return ConversationCheck(
        calls=len(logged),
        sampled_tokens=classified.sampled_tokens,
        unchecked_texts=sum(call.text is not None for call, _ in read) if tokenizer is None else 0,
        refused=tuple(refused),
        boundaries=tuple(_boundary_finding(*pair) for pair in zip(later, classified.boundaries, strict=True)),
        texts=tuple(_text_findings(read, tokenizer)),
        weight_versions=tuple(_version_finding(generations, place)),
        policy_errors=() if policy_error is None else (Finding(str(policy), False, place | {"message": policy_error}),),
        samples=samples,
        metrics=metrics,
    )


def _build(
    build: Callable[..., Built], generations: Sequence[Generation], policy: Policy | None
) -> tuple[tuple[TrainingSample, ...], dict[str, int], str | None]:
    if policy is None:
        return (), {}, None
    try:
        built = build(policy=policy)
    except BoundaryError as error:
        num_tokens = sum(len(each.sampled_ids) for each in generations)
        return (), {"sampled_tokens": num_tokens, "sampled_tokens/dropped": num_tokens}, str(error)
    return built.samples, built.metrics(), None


def _boundary_finding(call: LoggedCall, boundary: Boundary) -> Finding:
    names = ("earlier", "later", "position", "expected_id", "found_id", "expected_text", "found_text")
    return Finding(
        kind="unclassified" if boundary.kind is None else boundary.kind.value,
        harmless=boundary.position is None or boundary.kind in _BRANCHES,
        example=_place(call) | {name: getattr(boundary, name) for name in names},
    )


def _text_findings(read: Iterable[tuple[LoggedCall, Generation]], tokenizer: Tokenizer | None) -> Iterator[Finding]:
    for call, generation in read:
        text = generation.text if call.text is None else call.text
        if text is None:
            detail = "the response has no text of all sampled tokens: reasoning or tool calls were parsed out of it"
            yield Finding(_NOT_COMPARED, True, _place(call) | {"detail": detail, "cure": "log the text that was kept"})
        elif tokenizer is None and call.text is None:
            detail = "only a tokenizer tells the text of the sampled tokens"
            yield Finding(_NOT_COMPARED, True, _place(call) | {"detail": detail, "cure": "give a tokenizer"})
        elif tokenizer is not None:
            found = detect_post_processing(generation, text, tokenizer, stop=_stop_strings(call.request))
            example = _place(call) | {"detail": found.detail, "cure": found.cure}
            yield Finding(found.kind.value, found.keeps_ids, example)


def _stop_strings(request: Mapping[str, Any]) -> list[str]:
    parameters = request.get("sampling_params", request)
    stop = parameters.get("stop") if isinstance(parameters, Mapping) else None
    return [each for each in (stop if isinstance(stop, list) else [stop]) if isinstance(each, str) and each]


def _version_finding(generations: Sequence[Generation], place: Mapping[str, Any]) -> Iterator[Finding]:
    found = list[str | None]()
    for each in generations:
        found += each.weight_versions or [each.weight_version]
    named = [version for version in dict.fromkeys(found) if version is not None]
    if found:
        kind = "several" if len(named) > 1 else "unknown" if None in found else "one"
        yield Finding(kind, True, {**place, "versions": named})


def _place(call: LoggedCall) -> dict[str, Any]:
    return {"conversation": call.conversation, "file": call.file, "line": call.line}
