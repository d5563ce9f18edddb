# SPDX-License-Identifier: Apache-2.0
"""What vLLM 0.32.0 changes in a request on its way: of each kind answers of a real server, beside transformers' truth.

Each has the log-probs that transformers gives its ids in float32, by what the request says and by what vLLM makes of
it.
"""

import json
from pathlib import Path

import pytest

from mis_ext.rollout import define_log_probs, tell_logprobs_mode
from mis_ext.rollout.generation import NotASample
from mis_ext.rollout.readers.servers import read_vllm_chat, read_vllm_completions, read_vllm_generate
from mis_ext.rollout.sampling_parameters import SamplingParameters

FOLDER = Path(__file__).parents[2] / "data" / "rollout_responses" / "vllm"
READ = {"generate": read_vllm_generate, "chat": read_vllm_chat, "completions": read_vllm_completions}
ENDPOINTS = tuple(READ)
# Logits agree to 1e-5, and a temperature of 0.01 makes a hundred times as much of it.
TOLERANCE = 2e-3


def record(path):
    return json.loads((FOLDER / f"{path}.json").read_text())


def parameters_of(found):
    return SamplingParameters.from_request(found["request"], server="vllm")


def define(found):
    return define_log_probs(
        parameters_of(found), server="vllm", logprobs_mode="processed_logprobs", sampling_backend="pytorch"
    )


def read(path):
    found = record(path)
    return READ[path.split("/")[1].split("_")[0]](found["request"], found["response"])


def error_of(path, label):
    """By how much the log-probs that the reader takes differ from transformers' at most."""
    truth = record(path)["transformers_log_probs"][label]
    return max(abs(a - b) for a, b in zip(read(path).log_probs, truth, strict=True))


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize("kind", ["cold", "colder"])
def test_a_cold_request_is_sampled_at_a_hundredth(endpoint, kind) -> None:
    path = f"changed/{endpoint}_{kind}"
    assert error_of(path, "as_changed") < TOLERANCE
    assert error_of(path, "as_asked") > 0.05
    definition = define(record(path))
    assert definition.returned.temperature == 0.01
    assert not definition.is_greedy
    assert definition.is_behavior


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_bias_is_clamped_where_vllm_clamps_it(endpoint) -> None:
    path = f"changed/{endpoint}_bias"
    assert error_of(path, "as_changed") < TOLERANCE
    bias = dict(define(record(path)).returned.logit_bias)
    if endpoint == "generate":
        assert bias == {300: 160.0, 301: 110.0, 302: -170.0}
    else:
        assert bias == {300: 100.0, 301: 100.0, 302: -100.0}
        assert error_of(path, "as_asked") > 0.05


def test_a_bias_of_parameters_without_their_request_is_doubtful_beyond_the_clamp() -> None:
    for size, is_doubtful in ((100.0, False), (100.5, True)):
        parameters = SamplingParameters.from_request({"logit_bias": {"1": -size}}, server="vllm")
        assert any("pass the whole request" in doubt for doubt in parameters.doubts) == is_doubtful


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("chat_strict_tool", "tools with strict=True: the forbidden tokens"),
        ("chat_one_call", "tools with parallel_tool_calls=False: the forbidden tokens"),
    ],
)
def test_a_grammar_that_vllm_makes_of_tools_is_not_comparable(name, reason) -> None:
    found = record(f"changed/{name}")
    assert error_of(f"changed/{name}", "as_asked") > 0.05
    for mode in ("raw_logprobs", "processed_logprobs"):
        definition = define_log_probs(parameters_of(found), server="vllm", logprobs_mode=mode)
        assert not definition.is_comparable
        assert any(line.startswith(reason) for line in definition.explain())
    # None is made where no tool may be called.
    found["request"]["tool_choice"] = "none"
    assert define(found).is_comparable


def test_tools_are_free_or_not_by_a_flag_of_the_server_and_so_doubtful() -> None:
    free, bound = record("changed/chat_free_tools"), record("defaults/chat_tools")
    assert error_of("changed/chat_free_tools", "as_asked") < TOLERANCE
    assert error_of("defaults/chat_tools", "as_asked") > 0.05
    for found in (free, bound):
        assert define(found).is_comparable
        assert any("--tool-strict-level" in doubt for doubt in define(found).doubts)
    in_sglang = SamplingParameters.from_request(free["request"], server="sglang")
    assert any("SGLANG_TOOL_STRICT_LEVEL" in doubt for doubt in in_sglang.doubts)
    strict = record("changed/chat_strict_tool")["request"]
    for server in ("sglang", "vllm"):
        found = SamplingParameters.from_request(strict, server=server)
        assert found.grammars == ("tools with strict=True",)
        assert not any(doubt.startswith("tools: ") for doubt in found.doubts)


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_what_a_request_leaves_out_is_the_models_default_but_in_generate(endpoint) -> None:
    """The model's defaults are a temperature of 0.5 and a top_k of 20."""
    path = f"defaults/{endpoint}_absent"
    doubts = define(record(path)).doubts
    if endpoint == "generate":
        assert error_of(path, "as_asked") < TOLERANCE
        assert not doubts
    else:
        assert error_of(path, "as_asked") > 0.05
        (doubt,) = doubts
        assert doubt.startswith("temperature, top_p, top_k, min_p, repetition_penalty,")
        assert "--generation-config vllm" in doubt
        in_sglang = SamplingParameters.from_request(record(path)["request"], server="sglang").doubts
        assert any("--sampling-defaults openai" in doubt for doubt in in_sglang)


def test_tokens_that_the_request_prescribed_are_no_sample() -> None:
    """vLLM answers so with ``--enable-trace-replay``, which its runner of a CPU does not have."""
    found = record("changed/generate_cold")
    found["request"]["sampling_params"]["trace_decode_token_ids"] = found["response"]["choices"][0]["token_ids"]
    with pytest.raises(NotASample, match="trace_decode_token_ids"):
        read_vllm_generate(found["request"], found["response"])
    found["request"]["sampling_params"]["trace_decode_token_ids"] = []
    assert read_vllm_generate(found["request"], found["response"]) == read("changed/generate_cold")


def test_the_mode_is_not_told_by_what_another_cause_explains() -> None:
    def told(rows, **request):
        return tell_logprobs_mode(SamplingParameters.from_request(request, server="vllm"), rows)

    whole, truncated = [[-1.0, -2.0, -3.0]], [[-0.5, -1.0, -9999.0]]
    assert told(whole, top_k=2) == "raw_logprobs"
    assert told(truncated, top_k=2) == "processed_logprobs"
    # A greedy request is not truncated, a grammar forbids tokens in both modes, and the k-th may have its equals.
    assert told(whole, top_k=2, temperature=0.0) is None
    assert told(truncated, top_k=2, structured_outputs={"regex": "a"}) is None
    assert told(truncated, top_k=2, tools=[{"function": {"name": "f"}}]) is None
    assert told([[-1.0, -2.0, -2.0]], top_k=2) is None
    # In bfloat16 log(1/20) is -2.984375, and 20 of its probabilities add up to 1.012; of log(1/100), to 1.011.
    for row in ([-2.984375] * 20, [-4.59375] * 100):
        assert told([row]) is None
