"""One choice of an OpenAI-style response: what OpenAI, vLLM and SGLang have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from mis_ext.rollout.errors import CountMismatch, LogProbError, MalformedResponse
from mis_ext.rollout.generation import FinishReason
from mis_ext.rollout.readers.evidence import check_same
from mis_ext.rollout.readers.reading import Field, open_exchange

Api = Literal["chat", "completions", "generate"]


class Scores(NamedTuple):
    """One list per property of the sampled tokens.

    Attributes:
        tokens: Their texts, or what the server has in that place: vLLM's generate their ids.
        bytes: Their bytes; None in completions and generate, which have none.
        log_probs: Their log-probs.
    """

    tokens: Field
    bytes: Field | None
    log_probs: Field


class Choice(NamedTuple):
    """The parts of a response that are the same for every server.

    Attributes:
        asked: The request.
        answer: The response.
        body: The choice itself.
        position: Its position among the choices.
        scores: Its log-probs and their tokens.
        finish_reason: Why the generation ended.
        text: Its text; None where reasoning or tool calls were parsed out of it.
        prompt_count: Where the response counts the tokens of its prompt; None where it counts those of others with it.
    """

    asked: Field
    answer: Field
    body: Field
    position: int
    scores: Scores
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
    scores = [_scores(each, api) for each in bodies]
    # The server's own count of what it sampled, over all choices: the one witness that sees a list cut short.
    sampled = sum(len(each.log_probs.array()) for each in scores)
    counted = answer["usage"]["completion_tokens"]
    if counted.count() != sampled:
        raise CountMismatch(body.request_id, f"{counted.path} is {counted.value}, but there are {sampled} log-probs")
    prompt_count = answer["usage"]["prompt_tokens"]
    return Choice(
        asked=asked,
        answer=answer,
        body=body,
        position=position,
        scores=scores[position],
        finish_reason=finish_reason,
        text=_text(body, api),
        prompt_count=prompt_count if api != "completions" or count == 1 else None,
    )


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


def _scores(body: Field, api: Api) -> Scores:
    log_probs = body.get("logprobs")
    rows = None if log_probs is None else log_probs.get("token_logprobs" if api == "completions" else "content")
    if log_probs is None or rows is None:
        raise LogProbError(body.request_id, f"{body.path}.logprobs are missing: ask for them with logprobs")
    if api == "chat":
        return Scores(rows.column("token"), rows.column("bytes"), rows.column("logprob"))
    if api == "generate":
        return Scores(rows.column("token_id"), None, rows.column("logprob"))
    return Scores(log_probs["tokens"], None, rows)


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
