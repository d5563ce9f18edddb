# SPDX-License-Identifier: Apache-2.0
"""Comparison of all fields of a response about one generation.

A response has most values more than once: ids next to log-probs, counts in ``usage``, the end in two fields.
:func:`settle` compares all places of each value. :class:`Choice` opens the OpenAI-style responses of both servers.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal, TypeVar

from mis_ext.rollout.generation import (
    Contradiction,
    CountMismatch,
    FinishReason,
    Generation,
    LogProbError,
    MalformedResponse,
    UnprovenTokenIds,
)
from mis_ext.rollout.readers.json_fields import Field, Json, open_exchange

T = TypeVar("T")
# A missing place is None, or an absent field.
Places = Iterable[Field | None]


def settle(
    request_id: str,
    *,
    sampled_ids: Places,
    log_probs: Places,
    prompt_ids: Places,
    finish_reason: FinishReason,
    text: str | None,
    ids_advice: str,
    prompt_advice: str,
    sampled_counts: Places = (),
    prompt_counts: Places = (),
    stop_matches: Places = (),
    kept_ids: Field | None = None,
    versions: Field | None = None,
    last_version: Field | None = None,
) -> Generation:
    """The generation, if all places of a response agree.

    The lists of the prompt are compared without a check of their entries, because a conversation repeats them in every
    turn. ``ids_advice``, ``prompt_advice``: how to request the ids, for the error if no place has them. ``kept_ids``:
    the server's sampling support of each token. ``versions``: spans with ``start``, ``end`` (exclusive) and the
    ``version`` of the weights that sampled these ids. ``last_version``: the version at the end.

    Raises:
        Contradiction: Two places differ, the end token is not the last sampled id, or a sampled id is not in its
            sampling support.
        CountMismatch: Two places differ in length, a count differs, or the spans of versions are not contiguous.
        LogProbError: A log-prob is missing, not finite or above 0.
        MalformedResponse: A place has a value of a wrong type.
        UnprovenTokenIds: No place has the sampled ids, or no place has the ids of the prompt.
    """
    ids = agree(sampled_ids, Field.token_ids)
    if ids is None:
        raise UnprovenTokenIds(request_id, f"the response has no token ids: {ids_advice}")
    # A truncated list is visible in the length of another list, or in the server's count.
    scores = agree(log_probs, Field.log_probs) or []
    if len(scores) != len(ids):
        raise CountMismatch(request_id, f"{len(ids)} sampled ids, but {len(scores)} log-probs")
    _check_counts(sampled_counts, len(ids), "sampled ids")
    prompt = agree(prompt_ids, Field.prompt_ids)
    if prompt is None:
        raise UnprovenTokenIds(request_id, f"the prompt's token ids are not known: {prompt_advice}")
    _check_counts(prompt_counts, len(prompt), "ids of the prompt")
    matches = [*filter(None, stop_matches)]
    for other in matches[1:]:
        check_same(matches[0], other)
    # The id of an end token is the last sampled id; a stop string has no id.
    match = matches[0].token_or_text() if matches else None
    if isinstance(match, int) and ids[-1:] != [match]:
        raise Contradiction(request_id, f"token {match} ended the generation, but the sampled ids end with {ids[-1:]}")
    kept = _read_kept(kept_ids, ids) if kept_ids else None
    version = last_version.string() if last_version else None
    version_of_each = _read_versions(versions, last_version, len(ids)) if versions else []
    return Generation(
        request_id=request_id,
        prompt_ids=prompt,
        sampled_ids=ids,
        log_probs=scores,
        finish_reason=finish_reason,
        stop_match=match,
        text=text,
        weight_version=version_of_each[-1] if version_of_each else version,
        weight_versions=version_of_each if len(set(version_of_each)) > 1 else None,
        kept_ids=kept,
    )


def agree(places: Places, read: Callable[[Field], list[T]]) -> list[T] | None:
    """The list of the first place, checked by ``read``; all places must have the same list. None without a place."""
    fields = [*filter(None, places)]
    if not fields:
        return None
    first, values = fields[0], read(fields[0])
    for other in fields[1:]:
        others = read(other)
        if len(others) != len(values):
            counts = f"{first.path} has {len(values)} entries, {other.path} has {len(others)}"
            raise CountMismatch(first.request_id, counts)
        if others != values:
            position = next(i for i, (a, b) in enumerate(zip(values, others, strict=True)) if a != b)
            check_same(first.entry(position), other.entry(position))
    return values


def check_same(first: Field, second: Field) -> None:
    """Raise a ``Contradiction`` unless both fields have the same value."""
    if first.value != second.value:
        values = f"{first.path} is {reprlib.repr(first.value)}, {second.path} is {reprlib.repr(second.value)}"
        raise Contradiction(first.request_id, values)


def _check_counts(places: Places, length: int, what: str) -> None:
    for count in filter(None, places):
        if count.count() != length:
            raise CountMismatch(count.request_id, f"{count.path} is {count.value}, but there are {length} {what}")


def _read_kept(mask: Field, sampled_ids: list[int]) -> list[list[int]]:
    rows = mask.entries()
    kept = [row.token_ids() for row in rows]
    if len(kept) != len(sampled_ids):
        counts = f"{mask.path} has {len(kept)} entries, but {len(sampled_ids)} ids were sampled"
        raise CountMismatch(mask.request_id, counts)
    for row, sampled, ids in zip(rows, sampled_ids, kept, strict=True):
        if sampled not in ids:
            raise Contradiction(mask.request_id, f"id {sampled} was sampled, but {row.path} is {reprlib.repr(ids)}")
    return kept


def _read_versions(spans: Field, last: Field | None, length: int) -> list[str]:
    """The version of the weights that sampled each of ``length`` ids."""
    versions: list[str] = []
    for span in spans.entries():
        start, end = span["start"].count(), span["end"].count()
        if start != len(versions) or not start <= end <= length:
            found = f"{span.path} is from {start} to {end}"
            raise CountMismatch(span.request_id, f"{found}, but {len(versions)} of {length} sampled ids are before it")
        versions += [span["version"].string()] * (end - start)
    if len(versions) != length:
        raise CountMismatch(spans.request_id, f"{spans.path} cover {len(versions)} ids, but {length} were sampled")
    if versions and last:
        check_same(last, spans.entry(-1)["version"])
    return versions


class Choice:
    """One choice of an OpenAI-style response: the fields that all servers share.

    Its request id is ``id#position`` if there are several choices.

    Args:
        api: The form of the response.
        choice: The position of the choice; None: the only one.

    Attributes:
        asked: The request.
        answer: The response.
        body: The choice itself.
        position: Its position among the choices.
        log_probs: The log-probs of its tokens.
        finish_reason: Why the generation ended.
        text: Its text; None if reasoning or tool calls were parsed out of it.
        prompt_count: The field with the number of tokens of its prompt; None if it includes other prompts.
    """

    def __init__(
        self,
        request: Json,
        response: Json,
        *,
        api: Literal["chat", "completions", "generate"],
        choice: int | None,
        request_id: str | None,
    ) -> None:
        self.asked, self.answer = open_exchange(request, response, request_id=request_id)
        bodies = self.answer["choices"].entries()
        count = len(bodies)
        if choice is None and count != 1:
            raise MalformedResponse(
                self.answer.request_id, f"response.choices has {count} entries: select one with choice="
            )
        self.position = choice or 0
        if not 0 <= self.position < count:
            raise MalformedResponse(self.answer.request_id, f"choice must be in [0, {count - 1}], got {self.position}")
        if count > 1:
            bodies = [replace(body, request_id=f"{body.request_id}#{i}") for i, body in enumerate(bodies)]
        self.body = body = bodies[self.position]
        check_same(body["index"], replace(body, value=self.position, path="its position"))
        self.finish_reason = body["finish_reason"].finish_reason()
        scored = [_log_probs(each, api) for each in bodies]
        # Only the server's count of sampled tokens, over all choices, shows a truncated list.
        usage, sampled = self.answer["usage"], sum(len(log_probs.array()) for log_probs in scored)
        counted = usage["completion_tokens"]
        if counted.count() != sampled:
            raise CountMismatch(
                body.request_id, f"{counted.path} is {counted.value}, but there are {sampled} log-probs"
            )
        self.log_probs = scored[self.position]
        prompt_count = usage["prompt_tokens"]
        self.prompt_count = prompt_count if api != "completions" or count == 1 else None
        parsed_out = []
        if api == "chat":
            message = body["message"]
            content = message.get("content")
            parsed_out = [message.get(part).value for part in ("reasoning_content", "reasoning", "tool_calls")]
        else:
            content = body["text"] if api == "completions" else body.get("text")
        self.text = content.string() if content and not any(parsed_out) else None

    def sent(self, key: str) -> Field | None:
        """Return the ids of one prompt under ``key`` of the request; None for text and for several prompts."""
        prompt = self.asked.get(key)
        if not isinstance(prompt.value, (list, tuple)) or isinstance(next(iter(prompt.value), 0), (list, tuple, str)):
            return None
        return prompt


def _log_probs(body: Field, api: str) -> Field:
    """The log-probs of a choice."""
    log_probs = body.get("logprobs")
    rows = log_probs.get("token_logprobs" if api == "completions" else "content")
    if not rows:
        raise LogProbError(body.request_id, f"{body.path}.logprobs are missing: request them with logprobs")
    return rows if api == "completions" else rows.column("logprob")
