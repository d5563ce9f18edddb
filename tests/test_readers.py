"""What each server's response proves, and why a response proves nothing."""

import copy
import json
import math
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from responses import recorded, recorded_tokenizer, vllm_chat, vllm_completions
from tiny_tokenizers import multibyte_tokenizer

from mis_ext.rollout.errors import (
    AbortedRequest,
    Contradiction,
    CountMismatch,
    LogProbError,
    MalformedResponse,
    RolloutError,
    UnprovenTokenIds,
)
from mis_ext.rollout.readers.openai import read_openai_chat, read_openai_completions
from mis_ext.rollout.readers.sglang import read_sglang_chat, read_sglang_completions, read_sglang_generate
from mis_ext.rollout.readers.vllm import read_vllm_chat, read_vllm_completions

GENERATE = {
    "generate_length": ("length", None),
    "generate_stop_token": ("stop", int),
    "generate_stop_string": ("stop", str),
    "generate_empty": ("length", None),
    "generate_input_log_probs": ("length", None),
    "generate_text_input_log_probs": ("length", None),
    "generate_text_prompt_ids": ("length", None),
    "generate_two_versions": ("length", None),
}


@pytest.fixture(scope="module")
def tokenizer():
    return recorded_tokenizer()


@pytest.mark.parametrize(("name", "ending"), GENERATE.items(), ids=GENERATE)
def test_a_recorded_generate_response_is_read(name, ending, tokenizer) -> None:
    request, response = recorded(name)
    generation = read_sglang_generate(request, response)
    reason, match = ending
    assert (generation.finish_reason, type(generation.stop_match)) == (reason, type(None) if match is None else match)
    assert generation.prompt_ids == tokenizer.encode("The answer is")
    if match is not str:
        # The server leaves the end token and special tokens out of the text.
        assert (
            tokenizer.decode(generation.sampled_ids[: -1 if match else None], skip_special_tokens=True)
            == generation.text
        )
    assert generation.log_probs == [row[0] for row in response["meta_info"]["output_token_logprobs"]]
    assert generation.text == response["text"]
    assert generation.request_id == response["meta_info"]["id"]


def test_the_stop_string_is_sampled_and_not_in_the_text(tokenizer) -> None:
    generation = read_sglang_generate(*recorded("generate_stop_string"))
    whole = tokenizer.decode(generation.sampled_ids)
    assert generation.stop_match in ("e", "a")
    assert generation.text == whole[: whole.index(generation.stop_match)]


def test_the_end_token_is_the_last_sampled_one() -> None:
    generation = read_sglang_generate(*recorded("generate_stop_token"))
    assert generation.sampled_ids[-1] == generation.stop_match


def test_the_prompt_is_the_list_that_was_sent_and_its_entries_are_not_looked_at() -> None:
    request, response = recorded("generate_length")
    request["input_ids"] = [316, "left to the builder", 277]
    assert read_sglang_generate(request, response).prompt_ids is request["input_ids"]


def test_tuples_of_the_engine_in_this_process_are_read_as_lists() -> None:
    request, response = recorded("generate_length")
    meta = response["meta_info"]
    expected = read_sglang_generate(request, copy.deepcopy(response))
    meta["output_token_logprobs"] = tuple(tuple(row) for row in meta["output_token_logprobs"])
    response["output_ids"] = tuple(response["output_ids"])
    assert read_sglang_generate(request, response) == expected


def test_the_log_probs_are_floats_also_where_json_has_integers() -> None:
    request, response = recorded("generate_length")
    response["meta_info"]["output_token_logprobs"][0][0] = 0
    first = read_sglang_generate(request, response).log_probs[0]
    assert (first, type(first)) == (0.0, float)


def test_the_weights_that_changed_in_between_are_told_for_each_id() -> None:
    request, response = recorded("generate_two_versions")
    (first, last) = response["meta_info"]["weight_versions"]
    generation = read_sglang_generate(request, response)
    assert generation.weight_version == "8"
    assert generation.weight_versions == ["7"] * first["end"] + ["8"] * (last["end"] - first["end"])
    assert read_sglang_generate(*recorded("generate_length")).weight_versions is None


def test_a_server_that_does_not_say_its_weights_is_read() -> None:
    request, response = recorded("generate_length")
    del response["meta_info"]["weight_version"]
    assert read_sglang_generate(request, response).weight_version == "7"
    del response["meta_info"]["weight_versions"]
    assert read_sglang_generate(request, response).weight_version is None


def test_a_response_of_sglang_0_4_has_its_ids_beside_the_log_probs_only() -> None:
    request, response = recorded("generate_length")
    expected = read_sglang_generate(request, response)
    del response["output_ids"]
    assert read_sglang_generate(request, response) == expected
    del response["meta_info"]["output_token_logprobs"]
    with pytest.raises(LogProbError, match="ask for them with return_logprob"):
        read_sglang_generate(request, response)


def test_each_of_several_responses_is_read_by_itself() -> None:
    request, responses = recorded("generate_two")
    with pytest.raises(MalformedResponse, match="list of 2 responses: read each of its entries"):
        read_sglang_generate(request, responses)
    request["rid"] = "of the client"
    ids = [read_sglang_generate(request, response).sampled_ids for response in responses]
    assert ids == [response["output_ids"] for response in responses]


@pytest.mark.parametrize("name", ["chat_meta_info", "chat_stop", "chat_input_ids"])
def test_a_recorded_chat_response_is_read(name, tokenizer) -> None:
    request, response = recorded(name)
    generation = read_sglang_chat(request, response)
    meta = response["choices"][0]["meta_info"]
    assert generation.sampled_ids == [row[1] for row in meta["output_token_logprobs"]]
    assert generation.log_probs == [row["logprob"] for row in response["choices"][0]["logprobs"]["content"]]
    prompt = (
        "The answer is" if "input_ids" in request else "<|im_start|>user\nWhat is the weather in Paris?<|im_end|>\n"
    )
    assert tokenizer.decode(generation.prompt_ids).startswith(prompt)
    assert generation.text == response["choices"][0]["message"]["content"]
    assert (generation.weight_version, generation.stop_match) == ("7", meta["finish_reason"].get("matched"))


def test_chat_needs_only_one_witness_of_the_sampled_ids() -> None:
    request, response = recorded("chat_meta_info")
    expected = read_sglang_chat(request, response)
    del response["choices"][0]["meta_info"]
    assert read_sglang_chat(request, response) == expected


def test_every_choice_is_read_and_none_is_left_out_silently() -> None:
    request, response = recorded("chat_two")
    with pytest.raises(MalformedResponse, match="2 entries: name one by choice="):
        read_sglang_chat(request, response)
    for position, body in enumerate(response["choices"]):
        generation = read_sglang_chat(request, response, choice=position)
        assert generation.sampled_ids == body["response_token_ids"]
        assert generation.request_id == f"{response['id']}#{position}"
    with pytest.raises(MalformedResponse, match=r"choice must be in \[0, 1\], got 2"):
        read_sglang_chat(request, response, choice=2)


def test_the_response_tells_the_weights_of_its_first_choice_only() -> None:
    request, response = recorded("chat_two")
    for body in response["choices"]:
        del body["meta_info"]
    assert [read_sglang_chat(request, response, choice=i).weight_version for i in range(2)] == ["7", None]


@pytest.mark.parametrize("name", ["completions_token_ids", "completions_stop"])
def test_a_recorded_completion_is_read(name, tokenizer) -> None:
    request, response = recorded(name)
    (body,) = response["choices"]
    generation = read_sglang_completions(request, response)
    assert (generation.sampled_ids, generation.prompt_ids) == (body["token_ids"], tokenizer.encode("The answer is"))
    assert generation.log_probs == body["logprobs"]["token_logprobs"]
    assert (generation.finish_reason, generation.stop_match) == (body["finish_reason"], body["matched_stop"])
    assert (generation.text, generation.weight_version) == (body["text"], "7")


def test_a_vllm_chat_response_in_its_documented_format_is_read() -> None:
    generation = read_vllm_chat(*vllm_chat())
    assert generation.prompt_ids == [1, 382, 201, 406, 277]
    assert generation.sampled_ids == [17, 250, 9, 2]
    assert generation.log_probs == [-0.25, -1.5, -3.0625, 0.0]
    assert (generation.finish_reason, generation.stop_match, generation.text) == ("stop", 2, "rain today")
    assert (generation.request_id, generation.weight_version) == ("chatcmpl-5f3c", None)


def test_a_vllm_completion_in_its_documented_format_is_read() -> None:
    generation = read_vllm_completions(*vllm_completions())
    assert (generation.prompt_ids, generation.sampled_ids) == ([316, 284, 277], [464, 116, 88])
    assert generation.log_probs == [-0.5, -2.75, -0.125]
    assert (generation.finish_reason, generation.stop_match, generation.text) == ("length", None, " two v")


@pytest.mark.parametrize(
    ("exchange", "read", "module", "name"),
    [
        (vllm_chat, read_vllm_chat, "chat_completion", "ChatCompletion"),
        (vllm_completions, read_vllm_completions, "completion", "Completion"),
    ],
)
def test_vllms_own_classes_know_every_field_and_write_what_is_read(exchange, read, module, name) -> None:
    place = f"vllm.entrypoints.openai.{module}.protocol"
    protocol = pytest.importorskip(place, reason="vllm is not installed", exc_type=ImportError)
    request, response = exchange()
    asked = getattr(protocol, f"{name}Request").model_validate(request)
    answer = getattr(protocol, f"{name}Response").model_validate(response)
    assert [each.model_extra for each in (asked, answer, answer.choices[0])] == [{}] * 3
    assert read(request, json.loads(answer.model_dump_json())) == read(request, response)


@pytest.mark.parametrize(("exchange", "read"), [(vllm_chat, read_vllm_chat), (vllm_completions, read_vllm_completions)])
def test_vllm_says_which_weights_sampled_each_id(exchange, read) -> None:
    request, response = exchange()
    (choice,) = response["choices"]
    length = len(choice["token_ids"])
    choice["weight_versions"] = [{"version": "a", "start": 0, "end": 1}, {"version": "b", "start": 1, "end": length}]
    generation = read(request, response)
    assert (generation.weight_version, generation.weight_versions) == ("b", ["a"] + ["b"] * (length - 1))
    choice["weight_versions"] = [{"version": "a", "start": 0, "end": length}]
    assert (read(request, response).weight_version, read(request, response).weight_versions) == ("a", None)
    choice["weight_versions"][0]["end"] -= 1
    with pytest.raises(CountMismatch, match=rf"weight_versions are of {length - 1} ids, but {length} were sampled"):
        read(request, response)


@pytest.mark.parametrize("prompts", [[[316, 284, 277], [5, 6]], ["The answer is", "no"]])
def test_completions_of_several_prompts_are_read_each_with_its_own(prompts) -> None:
    request, response = vllm_completions()
    request["prompt"] = prompts
    other = copy.deepcopy(response["choices"][0]) | {"index": 1, "prompt_token_ids": [5, 6]}
    response["choices"].append(other)
    response["usage"] |= {"prompt_tokens": 5, "completion_tokens": 6}
    assert [read_vllm_completions(request, response, choice=i).prompt_ids for i in range(2)] == [
        [316, 284, 277],
        [5, 6],
    ]
    response["usage"]["completion_tokens"] = 7
    with pytest.raises(CountMismatch, match="completion_tokens is 7, but there are 6 log-probs"):
        read_vllm_completions(request, response, choice=0)


@pytest.mark.parametrize(("exchange", "read"), [(vllm_chat, read_vllm_chat), (vllm_completions, read_vllm_completions)])
def test_a_model_that_repeats_itself_is_cut_by_vllm_as_by_a_limit(exchange, read) -> None:
    request, response = exchange()
    expected = read(request, response)
    response["choices"][0] |= {"finish_reason": "repetition", "stop_reason": "repetition_detected"}
    assert read(request, response) == replace(expected, finish_reason="length", stop_match=None)


def test_token_ids_of_vllm_are_read_from_tokens_as_from_lists() -> None:
    request, response = vllm_chat()
    expected = read_vllm_chat(request, copy.deepcopy(response))
    del response["prompt_token_ids"], response["choices"][0]["token_ids"]
    assert read_vllm_chat(request, response, prompt_ids=expected.prompt_ids) == expected
    with pytest.raises(UnprovenTokenIds, match=r"prompt's token ids are not known: .*prompt_ids="):
        read_vllm_chat(request, response)


def test_token_ids_of_vllm_are_read_from_lists_where_the_tokens_are_text() -> None:
    request, response = vllm_chat()
    expected = read_vllm_chat(request, copy.deepcopy(response))
    for row, text in zip(response["choices"][0]["logprobs"]["content"], ["rain", " to", "day", ""], strict=True):
        row["token"] = text
    assert read_vllm_chat(request, response) == expected
    last = response["choices"][0]["token_ids"].pop()
    with pytest.raises(CountMismatch, match="3 sampled ids, but 4 log-probs"):
        read_vllm_chat(request, response)
    response["choices"][0]["token_ids"] += [last, last]
    with pytest.raises(CountMismatch, match="5 sampled ids, but 4 log-probs"):
        read_vllm_chat(request, response)
    del response["choices"][0]["token_ids"]
    with pytest.raises(UnprovenTokenIds, match="no token ids"):
        read_vllm_chat(request, response)


def test_an_empty_generation_has_no_ids_to_prove() -> None:
    request, response = vllm_chat()
    response["choices"][0]["logprobs"]["content"] = []
    del response["choices"][0]["token_ids"], response["choices"][0]["stop_reason"]
    response["usage"]["completion_tokens"] = 0
    assert read_vllm_chat(request, response).sampled_ids == []


@pytest.mark.parametrize("part", ["reasoning", "reasoning_content", "tool_calls"])
def test_a_message_out_of_which_something_was_parsed_has_no_text(part) -> None:
    request, response = vllm_chat()
    response["choices"][0]["message"][part] = "it is raining" if part != "tool_calls" else [{"id": "call-1"}]
    response["choices"][0]["finish_reason"] = "tool_calls"
    generation = read_vllm_chat(request, response)
    assert (generation.text, generation.finish_reason) == (None, "tool_calls")


@pytest.mark.parametrize("name", ["chat_meta_info", "chat_stop", "chat_input_ids"])
def test_bytes_and_a_tokenizer_prove_the_ids_that_the_server_sampled(name, tokenizer) -> None:
    request, response = recorded(name)
    known = read_sglang_chat(request, response)
    proven = read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=known.prompt_ids)
    assert any("\ufffd" in tokenizer.decode([i]) for i in known.sampled_ids) or name == "chat_stop"
    assert (proven.sampled_ids, proven.log_probs) == (known.sampled_ids, known.log_probs)


def ascii_tokens_only(response) -> list[int]:
    """Leave out other tokens; return the positions of those that stay."""
    scores = response["choices"][0]["logprobs"]
    kept = [position for position, text in enumerate(scores["tokens"]) if text.isascii()]
    for key in ("tokens", "token_logprobs"):
        scores[key] = [scores[key][position] for position in kept]
    response["usage"]["completion_tokens"] = len(kept)
    return kept


def test_ascii_text_and_a_tokenizer_prove_the_ids_of_a_completion(tokenizer) -> None:
    request, response = recorded("completions_token_ids")
    kept = ascii_tokens_only(response)
    generation = read_openai_completions(request, response, tokenizer=tokenizer, prompt_ids=[316, 284, 277])
    assert len(kept) >= 4
    assert generation.sampled_ids == [response["choices"][0]["token_ids"][position] for position in kept]


def test_the_prompt_of_a_completion_is_what_was_sent_as_ids(tokenizer) -> None:
    request, response = recorded("completions_stop")
    ascii_tokens_only(response)
    assert read_openai_completions(request, response, tokenizer=tokenizer).prompt_ids is request["prompt"]


def test_the_bytes_of_a_part_of_a_character_prove_its_id_whatever_its_text(tokenizer) -> None:
    request, response = recorded("chat_meta_info")
    known = read_sglang_chat(request, response)
    rows = response["choices"][0]["logprobs"]["content"]
    parts = [row for row in rows if row["token"] == "\ufffd"]
    for row in parts:
        row["token"] = "".join(f"\\x{byte:02x}" for byte in row["bytes"])
    assert parts
    proven = read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=known.prompt_ids)
    assert proven.sampled_ids == known.sampled_ids


def test_text_that_may_stand_for_a_part_of_a_character_proves_nothing(tokenizer) -> None:
    request, response = recorded("completions_plain")
    # SGLang writes a byte above 0x7F as the letter that it is in Latin-1.
    assert not all(text.isascii() for text in response["choices"][0]["logprobs"]["tokens"])
    with pytest.raises(
        UnprovenTokenIds, match=r"the bytes of response.choices\[0\].logprobs.tokens\[\d\] are not known"
    ):
        read_openai_completions(request, response, tokenizer=tokenizer)
    request, response = recorded("chat_plain")
    response["choices"][0]["logprobs"]["content"][0] |= {"token": "\ufffd", "bytes": [0xEF, 0xBF, 0xBD]}
    with pytest.raises(UnprovenTokenIds, match=r"bytes of response.choices\[0\].logprobs.content\[0\].token are not"):
        read_openai_chat(request, response, tokenizer=tokenizer)


@pytest.mark.parametrize(
    ("read", "name"), [(read_openai_chat, "chat_plain"), (read_openai_completions, "completions_plain")]
)
def test_text_without_a_tokenizer_or_a_prompt_proves_nothing(read, name, tokenizer) -> None:
    request, response = recorded(name)
    if read is read_openai_completions:
        ascii_tokens_only(response)
    with pytest.raises(UnprovenTokenIds, match="text and no token ids: ask the server for ids"):
        read(request, response)
    with pytest.raises(UnprovenTokenIds, match="prompt's token ids are not known: give prompt_ids="):
        read(request, response, tokenizer=tokenizer)
    with pytest.raises(CountMismatch, match=r"usage.prompt_tokens is \d+, but there are 2 ids of the prompt"):
        read(request, response, tokenizer=tokenizer, prompt_ids=[316, 284])


def test_tokenizers_whose_texts_lose_something_prove_nothing() -> None:
    request, response = recorded("chat_plain")
    with pytest.raises(UnprovenTokenIds, match=r"proves no ids: its decoder is .*, not ByteLevel"):
        read_openai_chat(request, response, tokenizer=multibyte_tokenizer())
    with pytest.raises(UnprovenTokenIds, match="clean_up_tokenization_spaces is true"):
        read_openai_chat(request, response, tokenizer=recorded_tokenizer(clean_up_tokenization_spaces=True))


def test_bytes_of_two_ids_or_of_none_prove_nothing() -> None:
    request, response = recorded("chat_plain")
    row = response["choices"][0]["logprobs"]["content"][0]
    row |= {"token": " the", "bytes": list(b" the")}
    tokenizer = recorded_tokenizer()
    (the,) = tokenizer.encode(" the")
    prompt = [1] * response["usage"]["prompt_tokens"]
    assert read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=prompt).sampled_ids[0] == the
    tokenizer.add_tokens([" the"])
    with pytest.raises(UnprovenTokenIds, match=rf"has the bytes b' the', which are those of ids \[.*{the}.*\]"):
        read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=prompt)
    row |= {"token": "qzx", "bytes": list(b"qzx")}
    with pytest.raises(UnprovenTokenIds, match=r"those of ids \[\]"):
        read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=prompt)


def test_the_id_of_an_added_token_is_proven_by_its_text(tokenizer) -> None:
    request, response = recorded("chat_plain")
    response["choices"][0]["logprobs"]["content"][0] |= {"token": "<|im_end|>", "bytes": list(b"<|im_end|>")}
    prompt = [1] * response["usage"]["prompt_tokens"]
    assert read_openai_chat(request, response, tokenizer=tokenizer, prompt_ids=prompt).sampled_ids[0] == 2


@pytest.mark.parametrize(
    ("spoiled", "error"), [([114, 97], Contradiction), ([300], MalformedResponse), (None, UnprovenTokenIds)]
)
def test_bytes_that_are_not_those_of_the_token_prove_nothing(spoiled, error, tokenizer) -> None:
    request, response = recorded("chat_plain")
    response["choices"][0]["logprobs"]["content"][1]["bytes"] = spoiled
    with pytest.raises(error, match=r"logprobs.content\[1\]"):
        read_openai_chat(request, response, tokenizer=tokenizer)


def test_the_callers_name_is_used_before_the_servers() -> None:
    request, response = recorded("generate_length")
    assert read_sglang_generate(request, response, request_id="turn 3").request_id == "turn 3"
    del response["meta_info"]["finish_reason"]
    with pytest.raises(MalformedResponse, match=r"request 'turn 3': response.meta_info.finish_reason is missing"):
        read_sglang_generate(request, response, request_id="turn 3")


def set_at(*path):
    """Sets the last of ``path`` at the keys before it."""

    def change(request, response):
        *keys, last, value = path
        for key in keys:
            response = response[key]
        response[last] = value

    return change


def drop(*path):
    def change(request, response):
        for key in path[:-1]:
            response = response[key]
        del response[path[-1]]

    return change


def set_sent(key, value):
    return lambda request, response: request.__setitem__(key, value)


ROWS = ("meta_info", "output_token_logprobs")
CHOICE = ("choices", 0)
META = (*CHOICE, "meta_info")
SPANS = ("meta_info", "weight_versions")
GENERATE_MISTAKES = {
    "no response": (lambda q, r: r.clear(), MalformedResponse, "response.meta_info is missing"),
    "no log-probs": (drop(*ROWS), LogProbError, "output_token_logprobs are missing: .*return_logprob: true"),
    "one id fewer": (
        lambda q, r: r["output_ids"].pop(),
        CountMismatch,
        "output_ids has 7 .*output_token_logprobs has 8",
    ),
    "one log-prob fewer": (lambda q, r: r["meta_info"]["output_token_logprobs"].pop(), CountMismatch, "8 .* has 7"),
    "another count": (
        set_at("meta_info", "completion_tokens", 9),
        CountMismatch,
        "completion_tokens is 9, .* 8 sampled",
    ),
    "a count that is true": (set_at("meta_info", "completion_tokens", True), MalformedResponse, "got True"),
    "another limit": (set_at("meta_info", "finish_reason", "length", 7), CountMismatch, "length is 7, .* 8 sampled"),
    "another prompt count": (
        set_at("meta_info", "prompt_tokens", 4),
        CountMismatch,
        "is 4, but there are 3 ids of the",
    ),
    "other ids": (
        set_at("output_ids", 2, 5),
        Contradiction,
        r"output_ids\[2\] is 5, .*output_token_logprobs\[2\]\[1\] is \d+",
    ),
    "a float for an id": (
        set_at("output_ids", 2, 5.0),
        MalformedResponse,
        r"output_ids\[2\] must be a token id.*got 5.0",
    ),
    "true for an id": (set_at(*ROWS, 1, 1, True), MalformedResponse, r"output_token_logprobs\[1\]\[1\] .* got True"),
    "a negative id": (set_at("output_ids", 0, -1), MalformedResponse, r"output_ids\[0\] must be .* got -1"),
    "an id above int32": (set_at("output_ids", 0, 2**31), MalformedResponse, "got 2147483648"),
    "a log-prob of null": (set_at(*ROWS, 3, 0, None), LogProbError, r"output_token_logprobs\[3\]\[0\] is missing"),
    "a log-prob of NaN": (set_at(*ROWS, 3, 0, math.nan), LogProbError, "finite and at most 0, got nan"),
    "a log-prob of -inf": (set_at(*ROWS, 3, 0, -math.inf), LogProbError, "got -inf"),
    "a log-prob above 0": (set_at(*ROWS, 3, 0, 1e-6), LogProbError, "got 1e-06"),
    "a log-prob of -9999": (set_at(*ROWS, 3, 0, -9999.0), LogProbError, "got -9999.0, which stands for minus infinity"),
    "a log-prob of false": (set_at(*ROWS, 3, 0, False), LogProbError, "got False"),
    "a log-prob as text": (set_at(*ROWS, 3, 0, "-1.0"), LogProbError, "got '-1.0'"),
    "a row of two": (
        lambda q, r: r["meta_info"]["output_token_logprobs"][4].pop(),
        MalformedResponse,
        r"\[4\] must be a list of three",
    ),
    "given up": (
        set_at("meta_info", "finish_reason", {"type": "abort", "message": "Aborted"}),
        AbortedRequest,
        "type is 'abort'",
    ),
    "not finished": (set_at("meta_info", "finish_reason", None), MalformedResponse, "finish_reason is missing"),
    "an unknown end": (
        set_at("meta_info", "finish_reason", "type", "function_call"),
        MalformedResponse,
        "must be stop | length",
    ),
    "NaN in the logits": (
        set_at("meta_info", "finish_reason", {"type": "stop", "matched": "NaN happened"}),
        AbortedRequest,
        "the last id was never sampled",
    ),
    "another end token": (
        set_at("meta_info", "finish_reason", {"type": "stop", "matched": 545}),
        Contradiction,
        "token 545 ended the generation, but it ends with",
    ),
    "an end token of true": (
        set_at("meta_info", "finish_reason", {"type": "stop", "matched": True}),
        MalformedResponse,
        "must be a token id or a string, got True",
    ),
    "another request": (set_sent("rid", "r-1"), Contradiction, "request.rid is 'r-1', response.meta_info.id is '"),
    "a text that is none": (set_at("text", 5), MalformedResponse, "response.text must be a string, got 5"),
    "no prompt ids": (set_sent("input_ids", None), UnprovenTokenIds, "send the prompt as input_ids"),
    "prompts of a batch": (set_sent("input_ids", [[316], [284], [277]]), MalformedResponse, "token ids of one prompt"),
    "another prompt": (set_at("prompt_token_ids", [316, 284, 278]), Contradiction, r"input_ids\[2\] is 277, .* is 278"),
    "a gap between weights": (set_at(*SPANS, 0, "start", 1), CountMismatch, r"\[0\] is from 1 to 8, but 0 of 8"),
    "weights for too many": (set_at(*SPANS, 0, "end", 10**400), CountMismatch, "but 0 of 8 sampled ids"),
    "weights for too few": (set_at(*SPANS, 0, "end", 5), CountMismatch, "are of 5 ids, but 8 were sampled"),
    "other weights": (set_at(*SPANS, 0, "version", "6"), Contradiction, "weight_version is '7', .* is '6'"),
}
CHAT_MISTAKES = {
    "an error": (set_at("error", {"message": "out of memory"}), AbortedRequest, "answered with an error: .*out of mem"),
    "no choices": (set_at("choices", []), MalformedResponse, "choices has 0 entries"),
    "another position": (set_at(*CHOICE, "index", 1), Contradiction, "index is 1, its position is 0"),
    "no log-probs": (set_at(*CHOICE, "logprobs", None), LogProbError, "logprobs are missing: ask"),
    "no log-prob in a row": (
        drop(*CHOICE, "logprobs", "content", 0, "logprob"),
        LogProbError,
        r"content\[0\].logprob is missing",
    ),
    "another count": (
        set_at("usage", "completion_tokens", 5),
        CountMismatch,
        "completion_tokens is 5, but there are 8 log-probs",
    ),
    "another prompt count": (
        set_at("usage", "prompt_tokens", 14),
        CountMismatch,
        "prompt_tokens is 14, but there are 15 ids",
    ),
    "another count in meta": (set_at(*META, "completion_tokens", 9), CountMismatch, "meta_info.completion_tokens is 9"),
    "another prompt count in meta": (set_at(*META, "prompt_tokens", 9), CountMismatch, "meta_info.prompt_tokens is 9"),
    "another limit": (set_at(*META, "finish_reason", "length", 9), CountMismatch, "finish_reason.length is 9"),
    "other ids": (
        set_at(*CHOICE, "response_token_ids", 1, 3),
        Contradiction,
        r"response_token_ids\[1\] is 3, .*\[1\]\[1\] is \d+",
    ),
    "other log-probs": (
        set_at(*META, "output_token_logprobs", 1, 0, -1.0),
        Contradiction,
        r"content\[1\].logprob is -.*\[1\]\[0\] is -1.0",
    ),
    "other text": (
        set_at(*CHOICE, "logprobs", "content", 1, "token", "x"),
        Contradiction,
        r"\.token is 'x', .*\[1\]\[2\] is '",
    ),
    "another end": (
        set_at(*CHOICE, "finish_reason", "stop"),
        Contradiction,
        "finish_reason is 'stop', .*type is 'length'",
    ),
    "another match": (
        lambda q, r: (set_at(*CHOICE, "matched_stop", "a")(q, r), set_at(*META, "finish_reason", "matched", "b")(q, r)),
        Contradiction,
        "matched_stop is 'a', .*matched is 'b'",
    ),
    "NaN in the logits": (set_at(*CHOICE, "matched_stop", "NaN happened"), AbortedRequest, "never sampled"),
    "filtered": (
        set_at(*CHOICE, "finish_reason", "content_filter"),
        AbortedRequest,
        "finish_reason is 'content_filter'",
    ),
    "other weights": (
        set_at("metadata", "weight_version", "6"),
        Contradiction,
        "metadata.weight_version is '6', .* is '7'",
    ),
    "other spans": (set_at("metadata", "weight_versions", 0, "end", 6), Contradiction, "metadata.weight_versions is"),
    "another prompt": (
        set_sent("input_ids", [5] * 15),
        Contradiction,
        r"request.input_ids\[0\] is 5, .*prompt_token_ids\[0\] is 1",
    ),
    "a message that is none": (set_at(*CHOICE, "message", "text"), MalformedResponse, "message must be an object"),
}
VLLM_MISTAKES = {
    "an error": (set_at("object", "error"), AbortedRequest, "answered with an error"),
    "other ids": (
        set_at(*CHOICE, "token_ids", 0, 18),
        Contradiction,
        r"token_ids\[0\] is 18, .*content\[0\].token is 17",
    ),
    "fewer ids": (lambda q, r: r["choices"][0]["token_ids"].pop(), CountMismatch, "token_ids has 3 .* has 4"),
    "fewer rows": (lambda q, r: r["choices"][0]["logprobs"]["content"].pop(), CountMismatch, "is 4, but there are 3"),
    "text among ids": (
        set_at(*CHOICE, "logprobs", "content", 1, "token", " to"),
        MalformedResponse,
        "token_id:<int>.*' to'",
    ),
    "other digits": (
        set_at(*CHOICE, "logprobs", "content", 1, "token", "token_id:٢"),
        MalformedResponse,
        "token_id:<int>",
    ),
    "digits without end": (
        set_at(*CHOICE, "logprobs", "content", 1, "token", "token_id:" + "9" * 5000),
        MalformedResponse,
        "token_id:<int>",
    ),
    "an id above int32": (
        set_at(*CHOICE, "logprobs", "content", 1, "token", f"token_id:{2**40}"),
        MalformedResponse,
        "token id",
    ),
    "-inf": (set_at(*CHOICE, "logprobs", "content", 1, "logprob", -9999.0), LogProbError, "stands for minus infinity"),
    "another end token": (set_at(*CHOICE, "stop_reason", 3), Contradiction, r"token 3 ended .* ends with \[2\]"),
    "given up": (set_at(*CHOICE, "finish_reason", "abort"), AbortedRequest, "finish_reason is 'abort'"),
    "another prompt": (set_at("prompt_token_ids", [1]), CountMismatch, "prompt_tokens is 5, but there are 1 ids"),
}


@pytest.mark.parametrize(("spoil", "error", "message"), GENERATE_MISTAKES.values(), ids=GENERATE_MISTAKES)
def test_a_generate_response_with_a_mistake_is_refused_by_name(spoil, error, message) -> None:
    refuse(read_sglang_generate, recorded("generate_length"), spoil, error, message)


@pytest.mark.parametrize(("spoil", "error", "message"), CHAT_MISTAKES.values(), ids=CHAT_MISTAKES)
def test_a_chat_response_with_a_mistake_is_refused_by_name(spoil, error, message) -> None:
    refuse(read_sglang_chat, recorded("chat_meta_info"), spoil, error, message)


@pytest.mark.parametrize(("spoil", "error", "message"), VLLM_MISTAKES.values(), ids=VLLM_MISTAKES)
def test_a_vllm_response_with_a_mistake_is_refused_by_name(spoil, error, message) -> None:
    refuse(read_vllm_chat, vllm_chat(), spoil, error, message)


def refuse(read, exchange, spoil, error, message) -> None:
    request, response = exchange
    assert read(request, copy.deepcopy(response)).sampled_ids
    name = response.get("meta_info", response).get("id")
    spoil(request, response)
    with pytest.raises(RolloutError, match=message) as caught:
        read(request, response)
    assert type(caught.value) is error
    assert caught.value.request_id == (name if response else "unnamed")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("generate_abort", AbortedRequest, "finish_reason.type is 'abort'"),
        ("generate_error", AbortedRequest, "temperature must be a non-negative"),
        ("generate_text", UnprovenTokenIds, "prompt's token ids are not known: .*return_prompt_token_ids"),
    ],
)
def test_a_recorded_response_that_proves_no_sample_is_refused(name, error, message) -> None:
    with pytest.raises(error, match=message):
        read_sglang_generate(*recorded(name))


@pytest.mark.parametrize(
    ("read", "name"), [(read_sglang_chat, "chat_plain"), (read_sglang_completions, "completions_plain")]
)
def test_a_recorded_response_without_ids_is_refused(read, name) -> None:
    with pytest.raises(UnprovenTokenIds, match=r"no token ids: .*return_token_ids: true"):
        read(*recorded(name))


def test_the_log_probs_of_a_part_of_the_prompt_are_no_witness_of_it() -> None:
    request, response = recorded("generate_input_log_probs")
    scored = response["meta_info"]["input_token_logprobs"]
    scored[1][1] += 1
    with pytest.raises(Contradiction, match=r"request.input_ids\[1\] is 284, .*input_token_logprobs\[1\]\[1\] is 285"):
        read_sglang_generate(request, response)
    del scored[0]
    assert read_sglang_generate(request, response).prompt_ids == request["input_ids"]


@pytest.mark.parametrize("response", [None, 5, "text", [], [{}], True])
def test_what_is_no_response_is_refused(response) -> None:
    for read in (read_sglang_generate, read_sglang_chat, read_vllm_completions, read_openai_chat):
        with pytest.raises(MalformedResponse, match=r"request 'r-1': response (must be an object|is a list)"):
            read({"rid": "r-1"}, response)
        with pytest.raises(MalformedResponse, match="request 'unnamed': request must be an object"):
            read(response, {})
