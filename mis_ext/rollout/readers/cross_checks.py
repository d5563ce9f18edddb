# SPDX-License-Identifier: Apache-2.0
"""Everything that a response says about one generation, held against each other.

A response says most things more than once: ids beside log-probs, counts in ``usage``, the end in two fields.
:func:`settle` compares all places of each. :class:`Choice` opens the OpenAI-style responses of both servers.
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
# One that this response lacks is None, or a field that is absent.
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
    """The generation on which all places of a response agree.

    Of the prompt the lists are compared, and their entries not checked: a conversation repeats them in every turn. The
    two pieces of advice say how to get the ids of response and prompt, for the error when no place has them.
    ``kept_ids`` is the server's list of the ids that each token was drawn from, ``versions`` says which ids, from
    ``start`` to before ``end``, each ``version`` of the weights sampled, ``last_version`` which it was at the end.

    Raises:
        Contradiction: Two places differ, the end token is not the last sampled one, or a sampled id is not among those
            that it was drawn from.
        CountMismatch: Two places differ in length, a count is another, or the versions' ids do not follow each other.
        LogProbError: A log-prob is missing, not finite or above 0.
        MalformedResponse: A place has something of another type.
        UnprovenTokenIds: No place has the sampled ids, or none the prompt's.
    """
    ids = agree(sampled_ids, Field.token_ids)
    if ids is None:
        raise UnprovenTokenIds(request_id, f"the response has no token ids: {ids_advice}")
    # A list cut short shows in its length beside another one, or in the server's own count.
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
    # The id of an end token is the last one that was sampled; a stop string has none.
    match = matches[0].token_or_text() if matches else None
    if isinstance(match, int) and ids[-1:] != [match]:
        raise Contradiction(request_id, f"token {match} ended the generation, but it ends with {ids[-1:]}")
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
    """The list that every place holds, as the first of them has it, each checked by ``read``; None without any place.

    Raises:
        Contradiction: Two places differ in an entry.
        CountMismatch: Two places differ in length.
    """
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
        counts = f"{mask.path} has {len(kept)} entries, {len(sampled_ids)} ids were sampled"
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
        raise CountMismatch(spans.request_id, f"{spans.path} are of {len(versions)} ids, but {length} were sampled")
    if versions and last:
        check_same(last, spans.entry(-1)["version"])
    return versions


class Choice:
    """One choice of an OpenAI-style response: the parts that are the same for every server.

    Its request is named ``id#position`` where there are several choices.

    Args:
        api: Which of the three forms the response has.
        choice: The position of the choice; None: the only one.

    Attributes:
        asked: The request.
        answer: The response.
        body: The choice itself.
        position: Its position among the choices.
        log_probs: The log-probs of its tokens.
        finish_reason: Why the generation ended.
        text: Its text; None where reasoning or tool calls were parsed out of it.
        prompt_count: Where the response counts the tokens of its prompt; None where it counts those of others with it.

    Raises:
        AbortedRequest: The server answered with an error, or gave the choice up.
        Contradiction: The choice's index is not its position.
        CountMismatch: ``usage`` counts another number of sampled tokens than have log-probs.
        LogProbError: There are no log-probs.
        MalformedResponse: A field is missing or has another type, or ``choice`` does not name a choice.
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
                self.answer.request_id, f"response.choices has {count} entries: name one by choice="
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
        # The server's own count of what it sampled, over all choices: the one witness that sees a list cut short.
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
        raise LogProbError(body.request_id, f"{body.path}.logprobs are missing: ask for them with logprobs")
    return rows if api == "completions" else rows.column("logprob")
