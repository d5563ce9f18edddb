"""Streams joined into responses: the readers give what they give without streaming.

The events are cut here from responses, in more ways than a server cuts them: ``test_vllm_responses.py`` and
``test_sglang_rollout.py`` join what servers sent.
"""

import copy
import itertools
import json
import random

import pytest

pytest.importorskip("transformers")

from responses import recorded, vllm_chat, vllm_completions

from mis_ext.rollout.errors import AbortedRequest, CountMismatch, MalformedResponse, RolloutError, UnprovenTokenIds
from mis_ext.rollout.readers.sglang import read_sglang_chat, read_sglang_generate
from mis_ext.rollout.readers.vllm import read_vllm_chat, read_vllm_completions
from mis_ext.rollout.streams.joining import join_stream

CALLS = [("call-a", "weather", '{"city": "Paris"}'), ("call-b", "time", '{"zone": "CET"}')]


def lines_of(events, *, end=True):
    lines = [": ping", *(f"data: {json.dumps(event)}" for event in events), ""]
    return [*lines, "data: [DONE]"] if end else lines


def pieces(items, cuts):
    bounds = [0, *cuts, len(items)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def chunked(response, rng):
    """The chunks of all choices, in a drawn order that keeps that of each choice."""
    is_chat = response["object"] == "chat.completion"
    common = {"id": response["id"], "object": "chat.completion.chunk" if is_chat else "text_completion"}
    queues = []
    for choice in response["choices"]:
        ids = choice["token_ids"]
        cuts = sorted(rng.sample(range(1, len(ids)), rng.randint(0, len(ids) - 1)))
        parts = []
        names = ["content"] if is_chat else ["tokens", "token_logprobs", "text_offset", "top_logprobs"]
        columns = {name: pieces(choice["logprobs"][name], cuts) for name in names}
        for number, part in enumerate(pieces(ids, cuts)):
            log_probs = {name: column[number] for name, column in columns.items()}
            parts.append({"index": choice["index"], "token_ids": part, "logprobs": log_probs, "finish_reason": None})
        text = choice["message"]["content"] if is_chat else choice["text"]
        for part, piece in zip(parts, pieces(text or "", [1] * len(cuts)), strict=True):
            part |= {"delta": {"content": piece}} if is_chat else {"text": piece}
        if is_chat:
            parts[0:0] = [{"index": choice["index"], "delta": {"role": "assistant", "content": ""}}]
            for key in ("reasoning",):
                for piece in choice["message"][key] or "":
                    parts.insert(1, {"index": choice["index"], "delta": {key: piece}})
            parts += tool_parts(choice, rng)
        parts[-1] |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
        if not is_chat:
            parts[0]["prompt_token_ids"] = choice["prompt_token_ids"]
        queues.append(parts)
    events = []
    while any(queues):
        queue = rng.choice([queue for queue in queues if queue])
        events.append({**common, "choices": [queue.pop(0)]})
    if is_chat:
        events[0]["prompt_token_ids"] = response["prompt_token_ids"]
    return [*events, {**common, "choices": [], "usage": response["usage"]}]


def tool_parts(choice, rng):
    """Names in order, then the arguments of all calls in pieces that alternate."""
    calls = choice["message"]["tool_calls"]
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


def two_choices(exchange):
    request, response = exchange
    second = copy.deepcopy(response["choices"][0]) | {"index": 1}
    response["choices"].append(second)
    response["usage"]["completion_tokens"] *= 2
    return request, response


def with_calls(exchange):
    request, response = exchange
    message = response["choices"][0]["message"]
    message |= {"content": "", "reasoning": "aa"}
    message["tool_calls"] = [
        {"id": name, "type": "function", "function": {"name": function, "arguments": text}}
        for name, function, text in CALLS
    ]
    response["choices"][0]["finish_reason"] = "tool_calls"
    return request, response


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("change", [lambda exchange: exchange, two_choices])
@pytest.mark.parametrize(("exchange", "read"), [(vllm_chat, read_vllm_chat), (vllm_completions, read_vllm_completions)])
def test_chunks_give_the_generation_of_the_whole_response(exchange, read, change, seed) -> None:
    request, response = change(exchange())
    joined = join_stream(lines_of(chunked(response, random.Random(seed))))
    for choice in range(len(response["choices"])):
        assert read(request, joined, choice=choice) == read(request, response, choice=choice)


@pytest.mark.parametrize("seed", range(20))
def test_reasoning_and_parallel_tool_calls_come_back_whole(seed) -> None:
    request, response = with_calls(vllm_chat())
    joined = join_stream(line.encode() for line in lines_of(chunked(response, random.Random(seed))))
    message = joined["choices"][0]["message"]
    assert message["tool_calls"] == response["choices"][0]["message"]["tool_calls"]
    assert message["reasoning"] == "aa"
    assert read_vllm_chat(request, joined) == read_vllm_chat(request, response)


def test_chunks_without_ids_prove_no_sample() -> None:
    request, response = vllm_chat()
    events = chunked(response, random.Random(3))
    for event in events:
        event.pop("prompt_token_ids", None)
        for choice in event["choices"]:
            choice.pop("token_ids", None)
    # SGLang ends a choice in a chunk of its own.
    last = events[-2]["choices"][0]
    events.insert(-1, {**events[-2], "choices": [{"index": 0, "delta": {}, "finish_reason": last["finish_reason"]}]})
    last["finish_reason"] = None
    with pytest.raises(UnprovenTokenIds):
        read_sglang_chat(request, join_stream(lines_of(events)))


def generate_events(response):
    """Each has all that came before."""
    events = []
    for count in range(1, len(response["output_ids"]) + 1):
        event = copy.deepcopy(response)
        event["output_ids"] = event["output_ids"][:count]
        meta = event["meta_info"]
        meta |= {"completion_tokens": count, "output_token_logprobs": meta["output_token_logprobs"][:count]}
        if count < len(response["output_ids"]):
            meta["finish_reason"] = None
        events.append(event)
    return events


def test_the_last_event_of_generate_is_the_response() -> None:
    request, response = recorded("generate_length")
    events = generate_events(response)
    assert read_sglang_generate(request, join_stream(lines_of(events))) == read_sglang_generate(request, response)
    with pytest.raises(MalformedResponse, match=r"meta_info\.finish_reason is missing"):
        read_sglang_generate(request, join_stream(lines_of(events[:-1])))
    events[-1]["output_ids"] = events[-1]["output_ids"][-1:]
    with pytest.raises(CountMismatch):
        read_sglang_generate(request, join_stream(lines_of(events)))


def pieces_of(events):
    """As a server with --incremental-streaming-output sends them: counts of all, and what is new."""
    cut = copy.deepcopy(events)
    for before, event in zip(events, cut[1:], strict=False):
        count = len(before["output_ids"])
        event["output_ids"] = event["output_ids"][count:]
        event["meta_info"]["output_token_logprobs"] = event["meta_info"]["output_token_logprobs"][count:]
    text = events[-1]["text"]
    for event, part in zip(cut, pieces(text, range(1, len(cut))), strict=True):
        event["text"] = part
    return cut


def test_events_that_hold_only_what_is_new_are_added_up() -> None:
    request, response = recorded("generate_length")
    events = pieces_of(generate_events(response))
    assert read_sglang_generate(request, join_stream(lines_of(events))) == read_sglang_generate(request, response)
    for lost in range(len(events)):
        with pytest.raises((CountMismatch, MalformedResponse)):
            read_sglang_generate(request, join_stream(lines_of(events[:lost] + events[lost + 1 :])))


def test_a_stream_that_breaks_off_anywhere_gives_no_sample() -> None:
    request, response = vllm_chat()
    events = chunked(response, random.Random(3))
    for count in range(len(events)):
        with pytest.raises(AbortedRequest, match=f"breaks off after {count} events"):
            join_stream(lines_of(events[:count], end=False))
        with pytest.raises(RolloutError):
            read_vllm_chat(request, join_stream(lines_of(events[:count])))
    with pytest.raises(AbortedRequest, match="out of memory"):
        join_stream(lines_of([*events[:2], {"error": {"message": "out of memory"}}]))


def test_a_choice_may_go_on_without_tokens_behind_its_end() -> None:
    request, response = vllm_chat()
    events = chunked(response, random.Random(3))
    end = copy.deepcopy(events[-2])
    end["choices"] = [{"index": choice["index"], "delta": {}, "logprobs": None} for choice in end["choices"]]
    whole = join_stream(lines_of([*events[:-1], end, events[-1]]))
    assert read_vllm_chat(request, whole) == read_vllm_chat(request, response)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda events: events[1].update(id="other"), "one stream is one request"),
        (lambda events: events[0].update(object="list"), r"chat\.completion\.chunk"),
        (lambda events: events.insert(-1, copy.deepcopy(events[-2])), "tokens after the end of its choice"),
        (lambda events: events[1]["choices"][0].update(index=-1), "an integer of 0 or more"),
        (lambda events: events[1]["choices"][0].update(delta={"tool_calls": [{"index": 3}]}), "at most 0, the number"),
    ],
)
def test_events_that_do_not_belong_together_are_refused(spoil, message) -> None:
    _, response = vllm_chat()
    events = chunked(response, random.Random(3))
    spoil(events)
    with pytest.raises(MalformedResponse, match=message):
        join_stream(lines_of(events))


@pytest.mark.parametrize("line", ["event without data", "data: {", "data: 5"])
def test_a_line_that_is_no_event_is_refused(line) -> None:
    with pytest.raises(MalformedResponse):
        join_stream([line, "data: [DONE]"])
