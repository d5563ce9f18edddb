"""Everything that a response says about one generation, held against each other.

A response says most things more than once: ids beside log-probs, counts in ``usage``, the end in two fields.
:func:`settle` compares all places of each. :func:`open_choice` opens the OpenAI-style responses of any server.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from mis_ext.rollout.errors import Contradiction, CountMismatch, LogProbError, MalformedResponse, UnprovenTokenIds
from mis_ext.rollout.generation import FinishReason, Generation
from mis_ext.rollout.readers.json_fields import Field, open_exchange

T = TypeVar("T")
Places = Sequence[Field | None]


def settle(
    request_id: str,
    *,
    sampled_ids: Places,
    sampled_counts: Places,
    log_probs: Places,
    prompt_ids: Places,
    prompt_counts: Places,
    finish_reason: FinishReason,
    stop_matches: Places,
    text: str | None,
    ids_advice: str,
    prompt_advice: str,
) -> Generation:
    """The generation on which all places of a response agree; None stands for a place that this response lacks.

    Of the prompt the lists are compared, and their entries not checked: a conversation repeats them in every turn. The
    two pieces of advice say how to get the ids of response and prompt, for the error when no place has them.

    Raises:
        Contradiction: Two places differ, or the end token is not the last sampled one.
        CountMismatch: Two places differ in length, or a count is another.
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
    matches = [match for match in stop_matches if match is not None]
    for other in matches[1:]:
        check_same(matches[0], other)
    # The id of an end token is the last one that was sampled; a stop string has none.
    match = matches[0].token_or_text() if matches else None
    if isinstance(match, int) and ids[-1:] != [match]:
        raise Contradiction(request_id, f"token {match} ended the generation, but it ends with {ids[-1:]}")
    return Generation(
        request_id=request_id,
        prompt_ids=prompt,
        sampled_ids=ids,
        log_probs=scores,
        finish_reason=finish_reason,
        stop_match=match,
        text=text,
    )


def agree(places: Places, read: Callable[[Field], list[T]]) -> list[T] | None:
    """The list that every place holds, as the first of them has it, each checked by ``read``; None without any place.

    Raises:
        Contradiction: Two places differ in an entry.
        CountMismatch: Two places differ in length.
    """
    fields = [field for field in places if field is not None]
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


def with_versions(generation: Generation, spans: Field | None, last: Field | None) -> Generation:
    """``generation`` with the version, or the versions, of the weights that sampled it.

    Args:
        generation: What was sampled.
        spans: Which ids, from ``start`` to before ``end``, each ``version`` sampled; None where the response lacks it.
        last: The version at the end; None likewise.

    Raises:
        Contradiction: The last span has another version than ``last``.
        CountMismatch: The spans do not follow each other from the first to the last sampled id.
        MalformedResponse: Something is missing or has another type.
    """
    version = None if last is None else last.string()
    if spans is None:
        return generation if version is None else replace(generation, weight_version=version)
    length = len(generation.sampled_ids)
    versions: list[str] = []
    for span in [spans.entry(position) for position in range(len(spans.array()))]:
        start, end = span["start"].count(), span["end"].count()
        if start != len(versions) or not start <= end <= length:
            found = f"{span.path} is from {start} to {end}"
            raise CountMismatch(span.request_id, f"{found}, but {len(versions)} of {length} sampled ids are before it")
        versions += [span["version"].string()] * (end - start)
    if len(versions) != length:
        raise CountMismatch(spans.request_id, f"{spans.path} are of {len(versions)} ids, but {length} were sampled")
    if versions and last is not None:
        check_same(last, spans.entry(-1)["version"])
    return replace(
        generation,
        weight_version=version or next(reversed(versions), None),
        weight_versions=versions if len(set(versions)) > 1 else None,
    )


def with_kept_ids(generation: Generation, mask: Field | None) -> Generation:
    """``generation`` with the ids that each of its own was drawn from; unchanged where ``mask`` is None.

    Args:
        generation: What was sampled.
        mask: The server's sampling mask: a list of ids for each sampled one.

    Raises:
        Contradiction: A sampled id is not among those that its token was drawn from.
        CountMismatch: There is another number of lists than of sampled ids.
        MalformedResponse: It is no list of lists of ids.
    """
    if mask is None:
        return generation
    kept = [mask.entry(position).token_ids() for position in range(len(mask.array()))]
    if len(kept) != len(generation.sampled_ids):
        counts = f"{mask.path} has {len(kept)} entries, {len(generation.sampled_ids)} ids were sampled"
        raise CountMismatch(mask.request_id, counts)
    for position, (sampled, ids) in enumerate(zip(generation.sampled_ids, kept, strict=True)):
        if sampled not in ids:
            where = mask.entry(position).path
            raise Contradiction(mask.request_id, f"id {sampled} was sampled, but {where} is {reprlib.repr(ids)}")
    return replace(generation, kept_ids=kept)


def _check_counts(places: Places, length: int, what: str) -> None:
    for count in places:
        if count is not None and count.count() != length:
            raise CountMismatch(count.request_id, f"{count.path} is {count.value}, but there are {length} {what}")


Api = Literal["chat", "completions", "generate"]


class Choice(NamedTuple):
    """The parts of an OpenAI-style response that are the same for every server.

    Attributes:
        asked: The request.
        answer: The response.
        body: The choice itself.
        position: Its position among the choices.
        tokens: The texts of its tokens, or what the server has in that place: vLLM's generate their ids.
        token_bytes: Their bytes; None in completions and generate, which have none.
        log_probs: Their log-probs.
        finish_reason: Why the generation ended.
        text: Its text; None where reasoning or tool calls were parsed out of it.
        prompt_count: Where the response counts the tokens of its prompt; None where it counts those of others with it.
    """

    asked: Field
    answer: Field
    body: Field
    position: int
    tokens: Field
    token_bytes: Field | None
    log_probs: Field
    finish_reason: FinishReason
    text: str | None
    prompt_count: Field | None


def open_choice(
    request: Mapping[str, Any], response: Mapping[str, Any], *, api: Api, choice: int | None, request_id: str | None
) -> Choice:
    """The choice at position ``choice`` of a response, None the only one; its request is named ``id#position`` if not.

    Raises:
        AbortedRequest: The server answered with an error, or gave the choice up.
        Contradiction: The choice's index is not its position.
        CountMismatch: ``usage`` counts another number of sampled tokens than have log-probs.
        LogProbError: There are no log-probs.
        MalformedResponse: A field is missing or has another type, or ``choice`` does not name a choice.
    """
    asked, answer = open_exchange(request, response, request_id=request_id)
    choices = answer["choices"]
    count = len(choices.array())
    if choice is None and count != 1:
        raise MalformedResponse(answer.request_id, f"response.choices has {count} entries: name one by choice=")
    position = choice or 0
    if not 0 <= position < count:
        raise MalformedResponse(answer.request_id, f"choice must be in [0, {count - 1}], got {position}")
    bodies = [choices.entry(i) for i in range(count)]
    if count > 1:
        bodies = [replace(body, request_id=f"{body.request_id}#{i}") for i, body in enumerate(bodies)]
    body = bodies[position]
    check_same(body["index"], replace(body, value=position, path="its position"))
    finish_reason = body["finish_reason"].finish_reason()
    scored = [_scored_tokens(each, api) for each in bodies]
    # The server's own count of what it sampled, over all choices: the one witness that sees a list cut short.
    sampled = sum(len(log_probs.array()) for _, _, log_probs in scored)
    counted = answer["usage"]["completion_tokens"]
    if counted.count() != sampled:
        raise CountMismatch(body.request_id, f"{counted.path} is {counted.value}, but there are {sampled} log-probs")
    tokens, token_bytes, log_probs = scored[position]
    prompt_count = answer["usage"]["prompt_tokens"]
    return Choice(
        asked=asked,
        answer=answer,
        body=body,
        position=position,
        tokens=tokens,
        token_bytes=token_bytes,
        log_probs=log_probs,
        finish_reason=finish_reason,
        text=_text(body, api),
        prompt_count=prompt_count if api != "completions" or count == 1 else None,
    )


def _scored_tokens(body: Field, api: Api) -> tuple[Field, Field | None, Field]:
    """The tokens of a choice, their bytes, and their log-probs."""
    log_probs = body.get("logprobs")
    rows = None if log_probs is None else log_probs.get("token_logprobs" if api == "completions" else "content")
    if log_probs is None or rows is None:
        raise LogProbError(body.request_id, f"{body.path}.logprobs are missing: ask for them with logprobs")
    if api == "chat":
        return rows.column("token"), rows.column("bytes"), rows.column("logprob")
    if api == "generate":
        return rows.column("token_id"), None, rows.column("logprob")
    return log_probs["tokens"], None, rows


def sent_ids(asked: Field, key: str) -> Field | None:
    """What a request has under ``key`` if that is one prompt's ids; None for text and for several prompts."""
    prompt = asked.get(key)
    if prompt is None or not isinstance(prompt.value, (list, tuple)):
        return None
    return None if any(isinstance(first, (list, tuple, str)) for first in prompt.value[:1]) else prompt


def given_ids(found: Choice, prompt_ids: Sequence[int] | None) -> Field | None:
    """The prompt's ids that the caller knows, as one more witness of this choice."""
    if prompt_ids is None:
        return None
    return Field(value=list(prompt_ids), path="prompt_ids", request_id=found.body.request_id)


def _text(body: Field, api: Api) -> str | None:
    if api == "completions":
        return body["text"].string()
    if api == "generate":
        text = body.get("text")
        return None if text is None else text.string()
    message = body["message"]
    content = message.get("content")
    parsed_out = [message.get(part) for part in ("reasoning_content", "reasoning", "tool_calls")]
    whole = not any(part is not None and part.value for part in parsed_out)
    return content.string() if content is not None and whole else None
