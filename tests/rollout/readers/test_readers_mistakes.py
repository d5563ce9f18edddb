# SPDX-License-Identifier: Apache-2.0
"""Why a response proves nothing: each mistake is refused by name."""

import copy
import math

import pytest

pytest.importorskip("transformers")

from responses import recorded, vllm_chat

from mis_ext.rollout.generation import (
    AbortedRequest,
    Contradiction,
    CountMismatch,
    LogProbError,
    MalformedResponse,
    NotASample,
    RolloutError,
    UnprovenTokenIds,
)
from mis_ext.rollout.readers.servers import (
    read_sglang_chat,
    read_sglang_completions,
    read_sglang_generate,
    read_vllm_chat,
    read_vllm_completions,
)


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
ENDING = ("meta_info", "finish_reason")
SPANS = ("meta_info", "weight_versions")
CHOICE = ("choices", 0)
META = (*CHOICE, "meta_info")
TOKEN = (*CHOICE, "logprobs", "content", 1)
# The message has the key, and both values where two differ.
GENERATE_MISTAKES = {
    "no response": (lambda q, r: r.clear(), MalformedResponse, "response.meta_info"),
    "no log-probs": (drop(*ROWS), LogProbError, "output_token_logprobs"),
    "one id fewer": (lambda q, r: r["output_ids"].pop(), CountMismatch, "output_ids has 7 .*logprobs has 8"),
    "one log-prob fewer": (lambda q, r: r["meta_info"]["output_token_logprobs"].pop(), CountMismatch, "8 .* has 7"),
    "another count": (set_at("meta_info", "completion_tokens", 9), CountMismatch, "completion_tokens is 9, .* 8"),
    "a count that is true": (set_at("meta_info", "completion_tokens", True), MalformedResponse, "got True"),
    "a negative count": (set_at("meta_info", "completion_tokens", -1), MalformedResponse, "got -1"),
    "another limit": (set_at(*ENDING, "length", 7), CountMismatch, "length is 7, .* 8"),
    "another prompt count": (set_at("meta_info", "prompt_tokens", 4), CountMismatch, "prompt_tokens is 4, .* 3"),
    "other ids": (set_at("output_ids", 2, 5), Contradiction, r"output_ids\[2\] is 5, .*logprobs\[2\]\[1\] is \d+"),
    "no list of ids": (set_at("output_ids", 7), MalformedResponse, "output_ids must be a list, got 7"),
    "a float for an id": (set_at("output_ids", 2, 5.0), MalformedResponse, r"output_ids\[2\] .*got 5.0"),
    "true for an id": (set_at(*ROWS, 1, 1, True), MalformedResponse, r"logprobs\[1\]\[1\] .* got True"),
    "a negative id": (set_at("output_ids", 0, -1), MalformedResponse, r"output_ids\[0\] .* got -1"),
    "an id above int32": (set_at("output_ids", 0, 2**31), MalformedResponse, "got 2147483648"),
    "a log-prob of null": (set_at(*ROWS, 3, 0, None), LogProbError, r"logprobs\[3\]\[0\] is missing"),
    "a log-prob of NaN": (set_at(*ROWS, 3, 0, math.nan), LogProbError, "got nan"),
    "a log-prob of -inf": (set_at(*ROWS, 3, 0, -math.inf), LogProbError, "got -inf"),
    "a log-prob above 0": (set_at(*ROWS, 3, 0, 1e-6), LogProbError, "got 1e-06"),
    "a log-prob of -9999": (set_at(*ROWS, 3, 0, -9999.0), LogProbError, "got -9999.0, .* minus infinity"),
    "a log-prob of false": (set_at(*ROWS, 3, 0, False), LogProbError, "got False"),
    "a log-prob as text": (set_at(*ROWS, 3, 0, "-1.0"), LogProbError, "got '-1.0'"),
    "a row of two": (lambda q, r: r["meta_info"]["output_token_logprobs"][4].pop(), MalformedResponse, r"\[4\]"),
    "given up": (set_at(*ENDING, {"type": "abort", "message": "Aborted"}), AbortedRequest, "type is 'abort'"),
    "not finished": (set_at(*ENDING, None), MalformedResponse, "finish_reason"),
    "an unknown end": (set_at(*ENDING, "type", "function_call"), MalformedResponse, "must be stop | length"),
    "NaN in the logits": (set_at(*ENDING, {"type": "stop", "matched": "NaN happened"}), AbortedRequest, "matched"),
    "another end token": (set_at(*ENDING, {"type": "stop", "matched": 545}), Contradiction, "token 545"),
    "an end token of true": (set_at(*ENDING, {"type": "stop", "matched": True}), MalformedResponse, "got True"),
    "another request": (set_sent("rid", "r-1"), Contradiction, "request.rid is 'r-1', response.meta_info.id is '"),
    "a text that is none": (set_at("text", 5), MalformedResponse, "response.text .*got 5"),
    "no prompt ids": (set_sent("input_ids", None), UnprovenTokenIds, "input_ids"),
    "prompts of a batch": (set_sent("input_ids", [[316], [284], [277]]), MalformedResponse, "input_ids"),
    "another prompt": (set_at("prompt_token_ids", [316, 284, 278]), Contradiction, r"input_ids\[2\] is 277, .* is 278"),
    "a gap between weights": (set_at(*SPANS, 0, "start", 1), CountMismatch, r"\[0\] is from 1 to 8, .*0 of 8"),
    "weights for too many": (set_at(*SPANS, 0, "end", 10**400), CountMismatch, "0 of 8"),
    "weights for too few": (set_at(*SPANS, 0, "end", 5), CountMismatch, "cover 5 ids, .*8"),
    "other weights": (set_at(*SPANS, 0, "version", "6"), Contradiction, "weight_version is '7', .* is '6'"),
}
CHAT_MISTAKES = {
    "an error": (set_at("error", {"message": "out of memory"}), AbortedRequest, "out of memory"),
    "no choices": (set_at("choices", []), MalformedResponse, "choices has 0 entries"),
    "another position": (set_at(*CHOICE, "index", 1), Contradiction, "index is 1"),
    "no log-probs": (set_at(*CHOICE, "logprobs", None), LogProbError, "logprobs"),
    "no log-prob in a row": (drop(*TOKEN, "logprob"), LogProbError, r"content\[1\].logprob"),
    "another count": (set_at("usage", "completion_tokens", 5), CountMismatch, "completion_tokens is 5, .* 8"),
    "another prompt count": (set_at("usage", "prompt_tokens", 14), CountMismatch, "prompt_tokens is 14, .* 15"),
    "another count in meta": (set_at(*META, "completion_tokens", 9), CountMismatch, "meta_info.completion_tokens is 9"),
    "another prompt count in meta": (set_at(*META, "prompt_tokens", 9), CountMismatch, "meta_info.prompt_tokens is 9"),
    "another limit": (set_at(*META, "finish_reason", "length", 9), CountMismatch, "finish_reason.length is 9"),
    "other ids": (set_at(*CHOICE, "response_token_ids", 1, 3), Contradiction, r"response_token_ids\[1\] is 3"),
    "other log-probs": (set_at(*META, "output_token_logprobs", 1, 0, -1.0), Contradiction, r"\[1\]\[0\] is -1.0"),
    "another match": (
        lambda q, r: (set_at(*CHOICE, "matched_stop", "a")(q, r), set_at(*META, "finish_reason", "matched", "b")(q, r)),
        Contradiction,
        "matched_stop is 'a', .*matched is 'b'",
    ),
    "NaN in the logits": (set_at(*CHOICE, "matched_stop", "NaN happened"), AbortedRequest, "matched_stop"),
    "filtered": (set_at(*CHOICE, "finish_reason", "content_filter"), AbortedRequest, "'content_filter'"),
    "another prompt": (set_sent("input_ids", [5] * 15), Contradiction, r"input_ids\[0\] is 5, .*prompt_token_ids\[0\]"),
    "a message that is none": (set_at(*CHOICE, "message", "text"), MalformedResponse, "message must be an object"),
}
VLLM_MISTAKES = {
    "an error": (set_at("object", "error"), AbortedRequest, "returned an error"),
    "an id above int32": (
        set_at(*CHOICE, "token_ids", 1, 2**40),
        MalformedResponse,
        r"token_ids\[1\] must be a token id",
    ),
    "another end token": (set_at(*CHOICE, "stop_reason", 3), Contradiction, r"token 3 .* sampled ids end with \[2\]"),
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


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"use_beam_search": True}, "use_beam_search is True, so the response is not a sample of the policy"),
        ({"best_of": 3}, "best_of is 3"),
        ({"best_of": 3, "n": 2}, "best_of is 3"),
        ({"beam_width": 4}, "beam_width is 4"),
    ],
)
def test_what_was_searched_or_chosen_among_samples_is_none(sent, message) -> None:
    exchanges = (
        (read_sglang_generate, recorded("generate_length")),
        (read_sglang_chat, recorded("chat_meta_info")),
        (read_vllm_chat, vllm_chat()),
    )
    for read, (request, response) in exchanges:
        for asked in (request | sent, request | {"sampling_params": sent}):
            with pytest.raises(NotASample, match=message):
                read(asked, response)
        harmless = {"use_beam_search": False, "best_of": 3, "n": 3, "beam_width": None}
        assert read(request | harmless, response) == read(request, response)


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
    for read in (read_sglang_generate, read_sglang_chat, read_vllm_completions):
        with pytest.raises(MalformedResponse, match=r"request 'r-1': response (must be an object|is a list)"):
            read({"rid": "r-1"}, response)
        with pytest.raises(MalformedResponse, match="request 'unnamed': request must be an object"):
            read(response, {})
