# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.32.0 itself answered on a CPU, whole and streamed, is read; ``data/rollout_responses`` says how."""

import base64
import copy
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mis_ext.onpolicy.routing.experts import RoutedExperts
from mis_ext.onpolicy.routing.routing_layout import RoutingLayout
from mis_ext.rollout import SamplingParameters, define_log_probs, tell_logprobs_mode
from mis_ext.rollout.generation import AbortedRequest, Contradiction, CountMismatch
from mis_ext.rollout.readers.server_sent_events import join_stream
from mis_ext.rollout.readers.servers import read_vllm_chat, read_vllm_completions, read_vllm_generate

FOLDER = Path(__file__).parents[2] / "data" / "rollout_responses" / "vllm"
READ = {"generate": read_vllm_generate, "chat": read_vllm_chat, "completions": read_vllm_completions}
WHOLE = [
    *("generate", "generate_stop_token", "generate_text", "generate_later_experts", "generate_two_versions"),
    *("chat", "chat_as_token_ids", "chat_stop_string", "completions", "completions_stop_token"),
]
MODEL = {"num_experts": 8, "moe_layers": [0, 2]}


def record(name, mode="processed"):
    return json.loads((FOLDER / mode / f"{name}.json").read_text())


def exchange(name, mode="processed"):
    found = record(name, mode)
    return found["request"], found["response"]


def read(name, mode="processed", **options):
    return READ[name.split("_")[0]](*exchange(name, mode), **options)


def top_log_probs(choice):
    if "top_logprobs" in choice["logprobs"]:
        return [[*row.values()] for row in choice["logprobs"]["top_logprobs"]]
    return [[entry["logprob"] for entry in row["top_logprobs"]] for row in choice["logprobs"]["content"]]


@pytest.mark.parametrize("name", WHOLE)
def test_a_response_is_read(name) -> None:
    _, response = exchange(name)
    generation, choice = read(name), response["choices"][0]
    assert generation.sampled_ids == choice["token_ids"]
    assert len(generation.log_probs) == len(generation.sampled_ids) == response["usage"]["completion_tokens"]
    assert generation.request_id == response.get("id", response.get("request_id"))
    if "stop_token" in name:
        assert generation.stop_match == generation.sampled_ids[-1] == choice["stop_reason"]
    if name == "chat_stop_string":
        assert generation.stop_match in ("e", "a")


def test_the_endpoints_agree_where_the_seed_does() -> None:
    by_generate, by_completions, as_text = read("generate"), read("completions"), read("generate_text")
    assert by_generate.log_probs == by_completions.log_probs == as_text.log_probs
    assert by_generate.prompt_ids == by_completions.prompt_ids
    assert replace(as_text, text=None) == by_generate
    assert as_text.text == by_completions.text


@pytest.mark.parametrize(
    ("name", "streamed"),
    [("chat", "chat_stream"), ("completions", "completions_stream"), ("generate", "generate_stream")],
)
def test_a_stream_gives_what_the_whole_response_gives(name, streamed) -> None:
    request, lines = exchange(streamed)
    joined = join_stream(lines)
    generation = READ[name](request, joined)
    assert replace(generation, request_id="") == replace(read(name), request_id="")
    if name == "generate":
        for key in ("routed_experts", "sampling_mask", "weight_versions"):
            assert joined["choices"][0][key] == record(name)["response"]["choices"][0][key]


def test_each_of_several_choices_is_read() -> None:
    request, lines = exchange("completions_two_stream")
    streamed = [read_vllm_completions(request, join_stream(lines), choice=choice).sampled_ids for choice in (0, 1)]
    assert streamed[0] == read("completions").sampled_ids != streamed[1]
    assert [len(read("generate_two", choice=choice).sampled_ids) for choice in (0, 1)] == [3, 3]
    assert read("chat_two", choice=1).sampled_ids != read("chat_two", choice=0).sampled_ids


def test_an_abort_and_an_error_are_no_samples() -> None:
    for name in ("generate_abort", "completions_error"):
        with pytest.raises(AbortedRequest):
            read(name)


def test_the_weights_that_changed_in_between_are_told_for_each_id() -> None:
    generation = read("generate_two_versions")
    assert (generation.weight_versions[0], generation.weight_versions[-1]) == ("7", "8")
    assert (generation.weight_version, len(generation.weight_versions)) == ("8", 40)
    assert (read("generate").weight_version, read("generate").weight_versions) == ("7", None)


def test_processed_log_probs_are_the_raw_ones_over_what_was_kept() -> None:
    """Of two servers, with one seed: what the definitions say of both modes is what vLLM does."""
    raw, processed = read("generate", "raw"), read("generate")
    assert raw.sampled_ids == processed.sampled_ids
    assert raw.log_probs != processed.log_probs
    rows = exchange("generate", "raw")[1]["choices"][0]["logprobs"]["content"]
    for row, ids, log_prob, expected in zip(rows, processed.kept_ids, raw.log_probs, processed.log_probs, strict=True):
        by_id = {entry["token_id"]: entry["logprob"] / 0.7 for entry in row["top_logprobs"]}
        mass = math.fsum(math.exp(by_id[one]) for one in ids)
        assert log_prob / 0.7 - math.log(mass) == pytest.approx(expected, abs=2e-6)
    parameters = SamplingParameters.from_request(exchange("generate")[0]["sampling_params"], server="vllm")
    for mode, is_behavior in (("raw_logprobs", False), ("processed_logprobs", True)):
        definition = define_log_probs(parameters, server="vllm", logprobs_mode=mode)
        assert (definition.is_behavior, definition.doubts) == (is_behavior, ())


@pytest.mark.parametrize("name", ["generate", "completions"])
def test_the_mode_is_told_by_what_the_truncation_did(name) -> None:
    request, _ = exchange(name)
    parameters = SamplingParameters.from_request(request.get("sampling_params", request), server="vllm")
    for mode in ("raw", "processed"):
        rows = top_log_probs(exchange("generate", mode)[1]["choices"][0])
        assert tell_logprobs_mode(parameters, [[], *rows]) == f"{mode}_logprobs"
        assert tell_logprobs_mode(parameters, [sorted(row)[-4:] for row in rows]) is None
    with pytest.raises(ValueError, match="these are logits"):
        tell_logprobs_mode(parameters, [[0.0, -0.1]])
    with pytest.raises(ValueError, match="others of the whole distribution"):
        tell_logprobs_mode(parameters, [[-9999.0, -0.1], [-3.0, -3.1, -3.2, -3.3, -3.4, -3.5]])


def test_kept_ids_are_those_of_the_mask_and_hold_what_was_sampled() -> None:
    request, response = exchange("generate")
    choice = response["choices"][0]
    assert read("generate").kept_ids == choice["sampling_mask"]
    assert read("chat").kept_ids is None
    choice["sampling_mask"][3] = [1, 2]
    with pytest.raises(Contradiction, match=r"sampling_mask\[3\] is \[1, 2\]"):
        read_vllm_generate(request, response)
    del choice["sampling_mask"][3]
    with pytest.raises(CountMismatch, match="has 7 entries, but 8 ids were sampled"):
        read_vllm_generate(request, response)


# --- experts


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_its_experts_are_those_that_transformers_chooses(name) -> None:
    found = record(name)
    tokens = [*found["response"]["prompt_token_ids"], *found["response"]["choices"][0]["token_ids"]]
    sample = RoutedExperts.from_vllm(found["response"]["choices"][0], num_tokens=len(tokens), **MODEL)
    assert sample.recorded_T.tolist() == [True] * (len(tokens) - 1) + [False]
    expected = torch.tensor(found["transformers_experts"], dtype=torch.int32)
    assert torch.equal(sample.experts_TLK[:-1].sort(-1).values, expected.sort(-1).values)
    # The dense layer in between has a column of zeros.
    with pytest.raises(ValueError, match="expert 0 is chosen twice at token 0, layer 1"):
        RoutedExperts.from_vllm(found["response"]["choices"][0], num_tokens=len(tokens), num_experts=8)
    assert (RoutingLayout.packed([len(tokens)]).local([sample]).experts_TLK[:-1] >= 0).all()


def test_experts_that_were_asked_for_from_a_position_on_are_placed_there() -> None:
    choice = exchange("generate_later_experts")[1]["choices"][0]
    whole = RoutedExperts.from_vllm(exchange("generate")[1]["choices"][0], num_tokens=11, **MODEL)
    later = RoutedExperts.from_vllm(choice, num_tokens=11, start=2, **MODEL)
    assert later.recorded_T.tolist() == [False] * 2 + [True] * 8 + [False]
    assert torch.equal(later.experts_TLK[2:], whole.experts_TLK[2:])
    with pytest.raises(ValueError, match="8 rows starting at position start = 0, but num_tokens = 11 needs 10"):
        RoutedExperts.from_vllm(choice, num_tokens=11, **MODEL)


def encoded(data):
    return base64.b64encode(data).decode()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: None, "start vLLM with --enable-return-routed-experts"),
        (lambda data: "§", "is not base64"),
        (lambda data: encoded(b"noth" + data), r"a NumPy file of \[rows, layers, topk\], got \[48\]"),
        (lambda data: encoded(data[:30]), "not of a NumPy file"),
        (lambda data: encoded(data[:-1]), "not of a NumPy file"),
        (lambda data: encoded(data.replace(b"'descr'", b"'other'")), "not of a NumPy file"),
        (lambda data: encoded(data.replace(b"|u1", b"|i1")), "must be of int32, uint16, uint8, got int8"),
        (lambda data: encoded(data.replace(b"(10, 3, 2)", b"(10, 6)   ")), r"got \[10, 6\]"),
        (lambda data: encoded(data[:-60] + bytes(60)), "recorded nothing"),
    ],
)
def test_experts_that_cannot_be_decoded_are_refused(change, message) -> None:
    choice = copy.deepcopy(exchange("generate")[1]["choices"][0])
    choice["routed_experts"] = change(base64.b64decode(choice["routed_experts"]))
    with pytest.raises(ValueError, match=message):
        RoutedExperts.from_vllm(choice, num_tokens=11, **MODEL)


def test_experts_of_another_type_are_refused() -> None:
    choice = exchange("generate")[1]["choices"][0]
    for key in ("num_tokens", "start"):
        with pytest.raises(TypeError, match=f"{key} must be an integer, got '11'"):
            RoutedExperts.from_vllm(choice, **{"num_tokens": 11, **MODEL, key: "11"})
    for choice, message in (([[0]], "choice must be a mapping"), ({"routed_experts": [[0]]}, "must be base64")):
        with pytest.raises(TypeError, match=message):
            RoutedExperts.from_vllm(choice, num_tokens=11, **MODEL)
