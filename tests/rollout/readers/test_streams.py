# SPDX-License-Identifier: Apache-2.0
"""Streams joined into responses: the readers give what they give without streaming.

The events are cut from responses (``streamed.py``): ``test_vllm_responses.py`` and ``test_sglang_rollout.py`` join what
servers sent.
"""

import copy
import itertools
import json
import random

import pytest

pytest.importorskip("transformers")

from responses import recorded, vllm_chat, vllm_completions
from streamed import chunked, counted, generate_events, lines_of, pieces_of

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


@pytest.mark.parametrize("seed", range(5))
def test_reasoning_and_parallel_tool_calls_come_back_whole(seed) -> None:
    request, response = with_calls(vllm_chat())
    joined = join_stream(line.encode() for line in lines_of(chunked(response, random.Random(seed))))
    message = joined["choices"][0]["message"]
    assert message["tool_calls"] == response["choices"][0]["message"]["tool_calls"]
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
    with pytest.raises(CountMismatch):
        join_stream(lines_of(events[-1:]))


def test_events_that_hold_only_what_is_new_are_added_up() -> None:
    request, response = recorded("generate_length")
    events = pieces_of(generate_events(response))
    assert read_sglang_generate(request, join_stream(lines_of(events))) == read_sglang_generate(request, response)
    for lost in range(len(events)):
        with pytest.raises((CountMismatch, MalformedResponse)):
            read_sglang_generate(request, join_stream(lines_of(events[:lost] + events[lost + 1 :])))


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


def test_a_short_last_event_is_not_taken_for_what_is_new() -> None:
    """Without one of three ids, the two events hold as many together as there should be."""
    request, response = recorded("generate_length")
    rows = response["meta_info"]["output_token_logprobs"]
    for count, lost in ((3, 2), (3, 1), (4, 3)):
        known = [row[1] for row in rows]
        short = copy.deepcopy(response)
        short["output_ids"] = known[:lost] + known[lost + 1 : count]
        short["meta_info"] |= {
            "completion_tokens": count,
            "finish_reason": {"type": "length", "length": count},
            "output_token_logprobs": rows[:lost] + rows[lost + 1 : count],
            "weight_versions": None,
        }
        # With streaming at intervals there are two events.
        first, *_, last = generate_events(short)
        with pytest.raises(CountMismatch):
            read_sglang_generate(request, join_stream(lines_of([first, last])))


def test_what_is_new_may_begin_as_what_came_before() -> None:
    request, response = recorded("generate_length")
    ids, rows = response["output_ids"], response["meta_info"]["output_token_logprobs"]
    ids[1] = rows[1][1] = ids[0]
    events = generate_events(response)
    for chosen in ([events[0], events[-1]], events):
        joined = join_stream(lines_of(pieces_of(chosen)))
        assert read_sglang_generate(request, joined).sampled_ids == ids
    # At temperature 0 the same id may come again and again with the same log-prob.
    for row in rows:
        row[:2] = [0.0, ids[0]]
    response["output_ids"] = [ids[0]] * len(ids)
    joined = join_stream(lines_of(pieces_of(generate_events(response))))
    assert read_sglang_generate(request, joined).sampled_ids == response["output_ids"]


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


def incremental(name):
    request, response = recorded(name)
    return request, pieces_of(generate_events(response))


def cumulative(name):
    request, response = recorded(name)
    return request, generate_events(response)


def chunks(name):
    request, lines = recorded(name)
    return request, counted([json.loads(line[5:]) for line in lines if line.startswith("data: {")])


def as_counted(name):
    request, lines = recorded(name)
    return request, [json.loads(line[5:]) for line in lines if line.startswith("data: {")]


STREAMS = {
    "sglang, cumulative": (read_sglang_generate, cumulative, "generate_length"),
    "sglang, incremental": (read_sglang_generate, incremental, "generate_length"),
    "sglang, incremental, two versions": (read_sglang_generate, incremental, "generate_two_versions"),
    "sglang-chat": (read_sglang_chat, chunks, "chat_two_stream"),
    "sglang-completions": (read_sglang_completions, chunks, "completions_stream"),
    "vllm": (read_vllm_generate, chunks, "vllm/processed/generate_stream"),
    "vllm-chat": (read_vllm_chat, chunks, "vllm/processed/chat_stream"),
    "vllm-completions": (read_vllm_completions, chunks, "vllm/processed/completions_stream"),
    "vllm-completions, two": (read_vllm_completions, chunks, "vllm/processed/completions_two_stream"),
    # With continuous_usage_stats, as vLLM itself counts.
    "vllm, counted": (read_vllm_generate, as_counted, "vllm/processed/generate_counted_stream"),
    "vllm-chat, counted": (read_vllm_chat, as_counted, "vllm/processed/chat_counted_stream"),
    "vllm-completions, counted": (read_vllm_completions, as_counted, "vllm/processed/completions_counted_stream"),
}


def samples_of(read, request, events):
    joined = join_stream(lines_of(events))
    numbers = range(len(joined["choices"])) if "choices" in joined else [None]
    samples = [read(request, joined, **({} if number is None else {"choice": number})) for number in numbers]
    return [(each.prompt_ids, each.sampled_ids, each.log_probs, each.weight_versions) for each in samples]


def silent_faults(read, request, events):
    """Pairs of events that change places, or of which one comes in the place of the other, unseen."""
    truth, silent = samples_of(read, request, events), []
    pairs = [*itertools.permutations(range(len(events)), 2)]
    for first, second in random.Random(len(events)).sample(pairs, 25):
        doubled = [*events]
        doubled[second] = events[first]
        swapped = [*doubled]
        swapped[first] = events[second]
        for spoilt in (doubled, swapped):
            try:
                if samples_of(read, request, spoilt) != truth:
                    silent.append((first, second))
            except RolloutError:
                continue
    return silent


@pytest.mark.parametrize("name", STREAMS)
def test_events_in_disorder_are_refused_or_leave_the_truth(name) -> None:
    """Two events of the recorded streams, drawn, where each says how many tokens there are: without it nobody can."""
    read, events_of, record = STREAMS[name]
    request, events = events_of(record)
    assert silent_faults(read, request, events) == []
    if events_of is chunks and not name.startswith("vllm-completions"):
        for event in events:
            if event["choices"]:
                event["usage"] = None
        assert silent_faults(read, request, events) != []


def test_the_count_of_a_chunk_is_of_its_own_choice_and_of_what_came_until_then() -> None:
    _, events = chunks("chat_two_stream")
    events[3]["choices"][0]["index"] = 1
    with pytest.raises(CountMismatch, match="completion_tokens is 1, but 2 log-probs of choice 1 came until then"):
        join_stream(lines_of(events))


def test_a_parsed_call_may_come_before_the_log_probs_that_its_chunk_counts() -> None:
    """As SGLang sends them; and after an abort it sends the last id once more."""
    request, events = chunks("chat_two_stream")
    call = {"index": 0, "function": {"name": "weather", "arguments": "{}"}}
    early = {"index": 0, "delta": {"tool_calls": [call]}, "logprobs": None, "finish_reason": None}
    first = next(i for i, event in enumerate(events) if event["choices"][0]["index"] == 0 and event["usage"])
    whole = samples_of(read_sglang_chat, request, events)
    events.insert(
        first, {**events[first], "choices": [early], "usage": {**events[first]["usage"], "completion_tokens": 1}}
    )
    assert samples_of(read_sglang_chat, request, events) == whole
    _, events = incremental("generate_length")
    events[-1] |= {"output_ids": events[-2]["output_ids"]}
    events[-1]["meta_info"] |= {"completion_tokens": 7, "finish_reason": {"type": "abort", "message": "Aborted"}}
    with pytest.raises(AbortedRequest):
        join_stream(lines_of(events))


@pytest.mark.parametrize("name", ["vllm-chat", "vllm", "sglang-completions"])
def test_without_counts_the_ids_of_the_prompt_show_what_is_first(name) -> None:
    _, lines = recorded(STREAMS[name][2])
    lines = [line for line in lines if line.startswith("data: {")]
    for other in range(2, len(lines) - 2):
        lines[0], lines[other] = lines[other], lines[0]
        with pytest.raises(MalformedResponse, match="prompt_token_ids come after sampled tokens"):
            join_stream([*lines, "data: [DONE]"])
        lines[0], lines[other] = lines[other], lines[0]


def test_the_offsets_of_vllms_completions_show_the_order_of_tokens_with_a_text() -> None:
    _, lines = recorded("vllm/processed/completions_stream")
    events = [json.loads(line[5:]) for line in lines if line.startswith("data: {")]
    events[4], events[5] = events[5], events[4]
    with pytest.raises(MalformedResponse, match=r"text_offset\[0\] must be 5 or 6, the end of what came until then"):
        join_stream(lines_of(events))
    # Before vLLM counted the texts of tokens, it counted the text that it had sent.
    request, response = vllm_completions()
    events = chunked(response, random.Random(3))
    text = ""
    for event in events[:-1]:
        event["choices"][0]["logprobs"]["text_offset"][0] = len(text)
        text += event["choices"][0]["text"]
    assert read_vllm_completions(request, join_stream(lines_of(events))) == read_vllm_completions(request, response)
    events[0]["choices"][0]["logprobs"]["text_offset"] = ["0"]
    with pytest.raises(MalformedResponse, match="a list of integers"):
        join_stream(lines_of(events))


def test_events_of_two_requests_are_refused() -> None:
    _, events = cumulative("generate_length")
    events[0]["meta_info"]["id"] = "other"
    with pytest.raises(MalformedResponse, match="2 requests"):
        join_stream(lines_of(events))


@pytest.mark.parametrize("line", ["event without data", "data: {", "data: 5"])
def test_a_line_that_is_no_event_is_refused(line) -> None:
    with pytest.raises(MalformedResponse):
        join_stream([line, "data: [DONE]"])
