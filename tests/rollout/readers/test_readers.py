# SPDX-License-Identifier: Apache-2.0
"""What is read from each server's response."""

import copy
from dataclasses import replace

import pytest

pytest.importorskip("transformers")

from responses import recorded, vllm_chat, vllm_completions

from mis_ext.rollout.generation import Contradiction, CountMismatch, LogProbError, MalformedResponse, UnprovenTokenIds
from mis_ext.rollout.readers.servers import (
    read_sglang_chat,
    read_sglang_completions,
    read_sglang_generate,
    read_vllm_chat,
    read_vllm_completions,
)

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
    with pytest.raises(LogProbError, match="request them with return_logprob"):
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


def test_every_choice_is_read_and_none_is_left_out_silently() -> None:
    request, response = recorded("chat_two")
    with pytest.raises(MalformedResponse, match="2 entries: select one with choice="):
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
    with pytest.raises(CountMismatch, match=rf"weight_versions cover {length - 1} ids, but {length} were sampled"):
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


def test_a_vllm_response_needs_the_ids_of_prompt_and_tokens() -> None:
    request, response = vllm_chat()
    last = response["choices"][0]["token_ids"].pop()
    with pytest.raises(CountMismatch, match="3 sampled ids, but 4 log-probs"):
        read_vllm_chat(request, response)
    response["choices"][0]["token_ids"] += [last, last]
    with pytest.raises(CountMismatch, match="5 sampled ids, but 4 log-probs"):
        read_vllm_chat(request, response)
    del response["choices"][0]["token_ids"]
    with pytest.raises(UnprovenTokenIds, match="no token ids"):
        read_vllm_chat(request, response)
    request, response = vllm_chat()
    del response["prompt_token_ids"]
    with pytest.raises(UnprovenTokenIds, match="prompt's token ids are not known"):
        read_vllm_chat(request, response)


def test_an_empty_generation_has_no_ids_to_prove() -> None:
    request, response = vllm_chat()
    response["choices"][0]["logprobs"]["content"] = []
    response["choices"][0]["token_ids"] = []
    del response["choices"][0]["stop_reason"]
    response["usage"]["completion_tokens"] = 0
    assert read_vllm_chat(request, response).sampled_ids == []


@pytest.mark.parametrize("part", ["reasoning", "reasoning_content", "tool_calls"])
def test_a_message_out_of_which_something_was_parsed_has_no_text(part) -> None:
    request, response = vllm_chat()
    response["choices"][0]["message"][part] = "it is raining" if part != "tool_calls" else [{"id": "call-1"}]
    response["choices"][0]["finish_reason"] = "tool_calls"
    generation = read_vllm_chat(request, response)
    assert (generation.text, generation.finish_reason) == (None, "tool_calls")


def test_the_callers_name_is_used_before_the_servers() -> None:
    request, response = recorded("generate_length")
    assert read_sglang_generate(request, response, request_id="turn 3").request_id == "turn 3"
    del response["meta_info"]["finish_reason"]
    with pytest.raises(MalformedResponse, match=r"request 'turn 3': response.meta_info.finish_reason is missing"):
        read_sglang_generate(request, response, request_id="turn 3")


@pytest.mark.parametrize(("name", "read"), [("generate_length", read_sglang_generate), ("chat_stop", read_sglang_chat)])
def test_the_ids_that_a_sampling_mask_keeps_are_told(name, read) -> None:
    """The mask is put into the recorded response here: its format is that of ``test_sglang_definition.py``."""
    request, response = recorded(name)
    meta = response["meta_info"] if "meta_info" in response else response["choices"][0]["meta_info"]
    assert read(request, response).kept_ids is None
    sampled = [row[1] for row in meta["output_token_logprobs"]]
    meta["output_token_sampling_mask"] = [[7, token] for token in sampled]
    assert read(request, response).kept_ids == [[7, token] for token in sampled]
    meta["output_token_sampling_mask"][1] = [7]
    with pytest.raises(Contradiction, match="was sampled, but"):
        read(request, response)
