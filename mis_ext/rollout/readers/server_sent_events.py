# SPDX-License-Identifier: Apache-2.0
"""Streamed responses: joins the events of one request into a response for the readers.

The readers check the joined response like any other.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from mis_ext.rollout.generation import AbortedRequest, MalformedResponse
from mis_ext.rollout.readers.json_fields import Field

_DATA, _END = "data:", "[DONE]"
_OBJECTS = {"chat.completion.chunk": "chat.completion", "text_completion": "text_completion"}
# Fields of a response and of a choice that are sent once, or again with a later value.
_LATEST = ("usage", "prompt_token_ids", "metadata", "metrics", "sglext")
_LATEST_OF_A_CHOICE = ("finish_reason", "stop_reason", "matched_stop", "routed_experts", "weight_versions")


def join_stream(lines: Iterable[str | bytes], *, request_id: str = "unnamed") -> dict[str, Any]:
    """Join lines of server-sent events into a response.

    For chat, completions and vLLM's ``/inference/v1/generate``, the function joins texts, reasoning, log-probs and ids
    of chunks in the order of arrival, and lists parts of tool calls. Request
    ``stream_options: {"include_usage": true}``: without it the readers have no count to compare with. An event of
    SGLang's ``/generate`` contains all earlier events, so the last event is the response. With
    ``--incremental-streaming-output`` it does not, and the readers refuse it.

    Args:
        lines: The lines from the server, including empty lines.
        request_id: The request id for errors.

    Raises:
        AbortedRequest: The stream ends early, or has an error.
        MalformedResponse: A line is not an event, or an event is not part of a response.
    """
    events = _events(lines, request_id)
    for event in events:
        if error := event.get("error"):
            raise AbortedRequest(request_id, f"the stream has an error: {str(error.value)[:500]}")
    if not events[0].get("meta_info"):
        return _join_chunks(events)
    names = {event["meta_info"]["id"].value for event in events}
    if len(names) > 1:
        raise MalformedResponse(request_id, f"the stream has {len(names)} requests: send each prompt separately")
    return dict(events[-1].value)


def _events(lines: Iterable[str | bytes], request_id: str) -> list[Field]:
    events: list[Field] = []
    for number, raw in enumerate(lines):
        try:
            line = (raw.decode() if isinstance(raw, bytes) else raw).strip()
        except UnicodeDecodeError as error:
            raise MalformedResponse(request_id, f"line {number} is not UTF-8: {error}") from error
        # A comment keeps the connection open. The data of a named event contains its type.
        if not line or line.startswith((":", "event:")):
            continue
        if not line.startswith(_DATA):
            raise MalformedResponse(request_id, f"line {number} is not an event: {line[:80]!r}")
        data = line[len(_DATA) :].strip()
        if data == _END:
            if not events:
                raise MalformedResponse(request_id, "the stream has no events")
            return events
        try:
            event = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise MalformedResponse(request_id, f"line {number} is not JSON: {error}") from error
        events.append(Field(value=event, path=f"event[{len(events)}]", request_id=request_id))
    raise AbortedRequest(request_id, f"the stream ends after {len(events)} events, without {_END}")


def _join_chunks(events: list[Field]) -> dict[str, Any]:
    first = events[0]
    # The key of the request id in every event, and the first fields of the response.
    if mode := first.get("output_mode"):
        name, response = "request_id", {"request_id": first["request_id"].string(), "output_mode": mode.string()}
    else:
        kind = first["object"].string()
        if kind not in _OBJECTS:
            raise first["object"].malformed(" | ".join(_OBJECTS))
        name, response = "id", {"id": first["id"].string(), "object": _OBJECTS[kind]}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        response |= _present(event, _LATEST)
        for chunk in event["choices"].entries():
            index = chunk["index"].count()
            _add_chunk(choices.setdefault(index, {"index": index}), chunk)
    # SGLang's chat has one id per choice, and one of these ids for the ends of all choices.
    others = [event[name] for event in events if event[name].value != response[name]]
    if len({other.string() for other in others}) >= max(len(choices), 1):
        raise others[-1].malformed(f"{response[name]!r} as before: one stream is one request")
    return response | {"choices": [choices[index] for index in sorted(choices)]}


def _present(holder: Field, keys: Iterable[str]) -> dict[str, Any]:
    return {key: found.value for key in keys if (found := holder.get(key))}


def _add_chunk(choice: dict[str, Any], chunk: Field) -> None:
    # Each choice of a completion has its own prompt ids, as without streaming.
    choice |= _present(chunk, ("prompt_token_ids",))
    log_probs, delta, text = (chunk.get(key) for key in ("logprobs", "delta", "text"))
    choice |= _present(chunk, _LATEST_OF_A_CHOICE)
    for key in ("token_ids", "sampling_mask"):
        if found := chunk.get(key):
            choice.setdefault(key, []).extend(found.array())
    if text:
        choice["text"] = choice.get("text", "") + text.string()
    if log_probs:
        joined = choice.setdefault("logprobs", {})
        for key in log_probs.value:
            if found := log_probs.get(key):
                joined.setdefault(key, []).extend(found.array())
    if delta:
        message = choice.setdefault("message", {"role": "assistant", "content": None})
        for key in ("content", "reasoning", "reasoning_content"):
            if found := delta.get(key):
                message[key] = (message.get(key) or "") + found.string()
        if calls := delta.get("tool_calls"):
            message.setdefault("tool_calls", []).extend(calls.array())
