# SPDX-License-Identifier: Apache-2.0
"""Streams joined into responses: the readers give what they give without streaming.

The events are cut from responses (``streamed.py``): ``test_vllm_responses.py`` and ``test_sglang_rollout.py`` join what
servers sent.
"""

import copy
import json
import random

import pytest

pytest.importorskip("transformers")

from responses import recorded, vllm_chat, vllm_completions
from streamed import chunked, generate_events, lines_of, pieces_of

from mis_ext.rollout.generation import (
    AbortedRequest,
    Contradiction,
    CountMismatch,
    MalformedResponse,
    RolloutError,
    UnprovenTokenIds,
)
from mis_ext.rollout.readers.server_sent_events import join_stream
from mis_ext.rollout.readers.servers import (
    read_sglang_chat,
    read_sglang_completions,
    read_sglang_generate,
    read_vllm_chat,
    read_vllm_completions,
    read_vllm_generate,
)

CALLS = [("call-a", "weather", '{"city": "Paris"}'), ("call-b", "time", '{"zone": "CET"}')]


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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("change", [lambda exchange: exchange, two_choices])
@pytest.mark.parametrize(("exchange", "read"), [(vllm_chat, read_vllm_chat), (vllm_completions, read_vllm_completions)])
def test_chunks_give_the_generation_of_the_whole_response(exchange, read, change, seed) -> None:
    request, response = change(exchange())
    joined = join_stream(lines_of(chunked(response, random.Random(seed))))
    for choice in range(len(response["choices"])):
        assert read(request, joined, choice=choice) == read(request, response, choice=choice)


def test_reasoning_comes_back_whole_and_pieces_of_tool_calls_as_they_came() -> None:
    request, response = with_calls(vllm_chat())
    joined = join_stream(line.encode() for line in lines_of(chunked(response, random.Random(0))))
    message = joined["choices"][0]["message"]
    pieces = [[part for part in message["tool_calls"] if part["index"] == number] for number in (0, 1)]
    arguments = ["".join(part["function"].get("arguments", "") for part in each) for each in pieces]
    assert arguments == [text for _, _, text in CALLS]
    assert message["reasoning"] == "aa"
    assert read_vllm_chat(request, joined) == read_vllm_chat(request, response)


def test_the_last_event_of_generate_is_the_response() -> None:
    request, response = recorded("generate_length")
    events = generate_events(response)
    assert read_sglang_generate(request, join_stream(lines_of(events))) == read_sglang_generate(request, response)
    with pytest.raises(MalformedResponse, match=r"meta_info\.finish_reason is missing"):
        read_sglang_generate(request, join_stream(lines_of(events[:-1])))
    events[-1]["output_ids"] = events[-1]["output_ids"][-1:]
    with pytest.raises(CountMismatch):
        read_sglang_generate(request, join_stream(lines_of(events)))


def test_events_that_hold_only_what_is_new_are_refused() -> None:
    request, response = recorded("generate_length")
    with pytest.raises((CountMismatch, MalformedResponse)):
        read_sglang_generate(request, join_stream(lines_of(pieces_of(generate_events(response)))))


def test_a_stream_of_sglangs_chat_is_read_where_its_ids_stand_beside_the_choices() -> None:
    request, lines = recorded("chat_two_stream")
    joined = join_stream(lines)
    for choice in range(2):
        found = read_sglang_chat(request, joined, choice=choice)
        assert found.sampled_ids == joined["sglext"]["output_ids"][choice]
        assert found.prompt_ids == joined["sglext"]["input_ids"]
        assert len(found.log_probs) == len(found.sampled_ids) == request["max_tokens"]
    # The header x-sglext-ids-framed gives the event a name.
    framed = [part for line in lines for part in (["event: sglext_ids"] * ("sglext" in line) + [line])]
    assert join_stream(framed) == joined
    without = [line for line in lines if "sglext" not in line]
    with pytest.raises(UnprovenTokenIds, match="return_output_ids_in_sglext"):
        read_sglang_chat(request, join_stream(without), choice=0)
    joined["sglext"]["output_ids"] = []
    with pytest.raises(MalformedResponse, match="a list of ids for each choice"):
        read_sglang_chat(request, joined, choice=0)


def test_log_probs_that_sglangs_chat_leaves_out_of_a_stream_are_missed() -> None:
    """Of a token that ends within a character it sends none."""
    request, lines = recorded("chat_stream")
    with pytest.raises(CountMismatch, match="completion_tokens is 8, but there are 6 log-probs"):
        read_sglang_chat(request, join_stream(lines))


def test_ids_beside_the_choices_are_one_more_witness() -> None:
    request, response = recorded("chat_ids_beside")
    assert read_sglang_chat(request, response).sampled_ids == response["sglext"]["output_ids"][0]
    response["choices"][0]["response_token_ids"] = [5, *response["sglext"]["output_ids"][0][1:]]
    with pytest.raises(Contradiction, match=r"sglext\.output_ids\[0\]\[0\] is"):
        read_sglang_chat(request, response)
    del response["choices"][0]["response_token_ids"]
    response["sglext"]["input_ids"].append(5)
    with pytest.raises(CountMismatch):
        read_sglang_chat(request, response)


def test_a_stream_of_sglangs_completions_is_read() -> None:
    request, lines = recorded("completions_stream")
    found = read_sglang_completions(request, join_stream(lines))
    assert (len(found.sampled_ids), len(found.log_probs), found.prompt_ids) == (8, 8, [316, 284, 277])
    # An event that is lost is never silent.
    for lost in [line for line in lines if line.startswith("data: {")]:
        with pytest.raises(RolloutError):
            read_sglang_completions(request, join_stream([line for line in lines if line != lost]))


def test_a_stream_that_breaks_off_anywhere_gives_no_sample() -> None:
    request, response = vllm_chat()
    events = chunked(response, random.Random(3))
    for count in range(len(events)):
        with pytest.raises(AbortedRequest, match=f"ends after {count} events"):
            join_stream(lines_of(events[:count], end=False))
        with pytest.raises(RolloutError):
            read_vllm_chat(request, join_stream(lines_of(events[:count])))
    with pytest.raises(AbortedRequest, match="out of memory"):
        join_stream(lines_of([*events[:2], {"error": {"message": "out of memory"}}]))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda events: events[1].update(id="other"), "one stream is one request"),
        (lambda events: events[0].update(object="list"), r"chat\.completion\.chunk"),
        (lambda events: events[1]["choices"][0].update(index=-1), "an integer of 0 or more"),
        (lambda events: events[1]["choices"][0].update(delta={"tool_calls": 3}), "tool_calls must be a list"),
    ],
)
def test_events_that_do_not_belong_together_are_refused(spoil, message) -> None:
    _, response = vllm_chat()
    events = chunked(response, random.Random(3))
    spoil(events)
    with pytest.raises(MalformedResponse, match=message):
        join_stream(lines_of(events))


def cumulative(name):
    request, response = recorded(name)
    return request, generate_events(response)


def test_a_parsed_call_may_come_before_the_log_probs_that_its_chunk_counts() -> None:
    """As SGLang sends them."""
    request, lines = recorded("chat_two_stream")
    events = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    call = {"index": 0, "function": {"name": "weather", "arguments": "{}"}}
    early = {"index": 0, "delta": {"tool_calls": [call]}, "logprobs": None, "finish_reason": None}
    whole = read_sglang_chat(request, join_stream(lines), choice=0)
    first = next(i for i, event in enumerate(events) if event["choices"] and event["choices"][0]["index"] == 0)
    events.insert(first, {**events[first], "choices": [early]})
    found = read_sglang_chat(request, join_stream(lines_of(events)), choice=0)
    assert (found.sampled_ids, found.log_probs) == (whole.sampled_ids, whole.log_probs)


@pytest.mark.parametrize("read", [read_vllm_chat, read_vllm_completions, read_vllm_generate])
def test_a_chunk_that_is_lost_or_doubled_is_missed_by_the_final_count(read) -> None:
    name = {read_vllm_chat: "chat", read_vllm_completions: "completions"}.get(read, "generate")
    request, lines = recorded(f"vllm/processed/{name}_stream")
    for place, line in enumerate(lines):
        if line.startswith("data: {") and (json.loads(line[5:])["choices"] or [{}])[0].get("logprobs"):
            for spoilt in ([*lines[:place], *lines[place + 1 :]], [*lines[:place], line, *lines[place:]]):
                with pytest.raises(RolloutError):
                    read(request, join_stream(spoilt))


def test_events_of_two_requests_are_refused() -> None:
    _, events = cumulative("generate_length")
    events[0]["meta_info"]["id"] = "other"
    with pytest.raises(MalformedResponse, match="2 requests"):
        join_stream(lines_of(events))


NESTED = pytest.param("data: " + "[" * 100_000, id="nested")


@pytest.mark.parametrize("line", ["event without data", "data: {", "data: 5", b"data: \xff", NESTED])
def test_a_line_that_is_no_event_is_refused(line) -> None:
    with pytest.raises(MalformedResponse, match=r"request 'r7': (line 0|event\[0\]) "):
        join_stream([line, "data: [DONE]"], request_id="r7")
