# SPDX-License-Identifier: Apache-2.0
"""Events of a stream, cut from whole responses, in more ways than a server cuts them."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

Event = dict[str, Any]
# The name of the request in a chunk, and the type of the chunk.
_NAMES = {"chat.completion": "chat.completion.chunk", "text_completion": "text_completion"}
_COLUMNS = ("content", "tokens", "token_logprobs", "text_offset", "top_logprobs")


def lines_of(events: Iterable[Event], *, end: bool = True) -> list[str]:
    """The lines in which a server sends events."""
    lines = [": ping", *(f"data: {json.dumps(event)}" for event in events), ""]
    return [*lines, "data: [DONE]"] if end else lines


def pieces(items: Any, cuts: Sequence[int]) -> list[Any]:
    """A list or a text, cut at positions."""
    bounds = [0, *cuts, len(items)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def chunked(response: dict[str, Any], rng: random.Random) -> list[Event]:
    """The chunks of all choices, in a drawn order that keeps that of each choice.

    Args:
        response: Of chat, completions, or vLLM's ``/inference/v1/generate``.
        rng: Draws the cuts and the order.
    """
    if "output_mode" in response:
        common = {key: response[key] for key in ("request_id", "output_mode")}
    else:
        common = {"id": response["id"], "object": _NAMES[response["object"]]}
    queues = [_chunks_of(choice, rng) for choice in response["choices"]]
    events: list[Event] = []
    while any(queues):
        queue = rng.choice([queue for queue in queues if queue])
        events.append({**common, "choices": [queue.pop(0)]})
    if "prompt_token_ids" in response:
        events[0]["prompt_token_ids"] = response["prompt_token_ids"]
    later = [{key: response[key]} for key in ("sglext", "usage") if key in response]
    return [*events, *({**common, "choices": [], **each} for each in later)]


def _chunks_of(choice: dict[str, Any], rng: random.Random) -> list[Event]:
    message, rows = choice.get("message"), {name: choice["logprobs"].get(name) for name in _COLUMNS}
    ids = choice.get("token_ids", rows["content"])
    cuts = sorted(rng.sample(range(1, len(ids)), rng.randint(0, len(ids) - 1))) if ids else []
    columns = {name: pieces(column, cuts) for name, column in rows.items() if column is not None}
    parts: list[Event] = []
    for number, part in enumerate(pieces(ids, cuts)):
        log_probs = {name: column[number] for name, column in columns.items()}
        parts.append({"index": choice["index"], "logprobs": log_probs, "finish_reason": None})
        parts[-1] |= {"token_ids": part} if "token_ids" in choice else {}
    text = choice.get("text") if message is None else message["content"]
    for part, piece in zip(parts, pieces(text or "", [1] * len(cuts)), strict=True):
        part |= {"text": piece} if message is None else {"delta": {"content": piece}}
    if message is not None:
        parts[0:0] = [{"index": choice["index"], "delta": {"role": "assistant", "content": ""}}]
        for piece in reversed(message.get("reasoning") or ""):
            parts.insert(1, {"index": choice["index"], "delta": {"reasoning": piece}})
        parts += _tool_parts(choice, rng)
    last = ("finish_reason", "stop_reason", "weight_versions")
    parts[-1] |= {key: choice[key] for key in last if key in choice}
    if "prompt_token_ids" in choice:
        parts[0]["prompt_token_ids"] = choice["prompt_token_ids"]
    return parts


def _tool_parts(choice: dict[str, Any], rng: random.Random) -> list[Event]:
    """Names in order, then the arguments of all calls in pieces that alternate."""
    calls = choice["message"].get("tool_calls") or []
    parts = [
        {"index": i, "id": call["id"], "type": "function", "function": {"name": call["function"]["name"]}}
        for i, call in enumerate(calls)
    ]
    queues = [
        [{"index": i, "function": {"arguments": x}} for x in c["function"]["arguments"]] for i, c in enumerate(calls)
    ]
    while any(queues):
        parts.append(rng.choice([queue for queue in queues if queue]).pop(0))
    return [{"index": choice["index"], "delta": {"tool_calls": [part]}} for part in parts]


def generate_events(response: dict[str, Any]) -> list[Event]:
    """Chunks of SGLang's ``/generate``: each contains all earlier ones."""
    events = []
    for count in range(1, len(response["output_ids"])):
        event = copy.deepcopy(response)
        event["output_ids"] = event["output_ids"][:count]
        rows = event["meta_info"]["output_token_logprobs"][:count]
        event["meta_info"] |= {"completion_tokens": count, "output_token_logprobs": rows, "finish_reason": None}
        events.append(event)
    events.append(copy.deepcopy(response))
    return events


def pieces_of(events: list[Event]) -> list[Event]:
    """Chunks of a server with --incremental-streaming-output: total counts, and only new content."""
    cut = copy.deepcopy(events)
    for before, event in zip(events, cut[1:], strict=False):
        count = len(before["output_ids"])
        event["output_ids"] = event["output_ids"][count:]
        event["meta_info"]["output_token_logprobs"] = event["meta_info"]["output_token_logprobs"][count:]
    text = events[-1]["text"]
    for event, part in zip(cut, pieces(text, range(1, len(cut))), strict=True):
        event["text"] = part
    return cut
