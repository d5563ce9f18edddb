# SPDX-License-Identifier: Apache-2.0
"""Of which distribution a log-prob is, and what makes the trainer's comparable with it."""

import math
from dataclasses import replace

import pytest
import torch
from log_prob_definitions import LOGITS, NUCLEUS, define, read

from mis_ext.rollout.comparable_log_probs import trainer_log_probs
from mis_ext.rollout.definition import Distribution, Truncation
from mis_ext.rollout.sampling_parameters import SamplingParameters

# Server, its switches, the request, what the tokens were drawn from, and what was returned.
DEFINITIONS = {
    "sglang, plain": ("sglang", {}, {}, "softmax(logits)", "softmax(logits)"),
    "sglang": (
        *("sglang", {}, NUCLEUS),
        *("softmax(logits / 0.7), renormalized over top_p=0.9", "softmax(logits / 0.7)"),
    ),
    "sglang, original": (
        *("sglang", {"original": True}, NUCLEUS),
        *("softmax(logits / 0.7), renormalized over top_p=0.9", "softmax(logits)"),
    ),
    "sglang, bias and original": (
        *("sglang", {"original": True}, {"temperature": 0.7, "logit_bias": {"3": 1.5}}),
        *("softmax((logits + logit_bias) / 0.7)", "softmax(logits + logit_bias)"),
    ),
    "sglang, greedy": (
        *("sglang", {}, {"temperature": 0.0, "top_p": 0.9}),
        *("softmax(logits), renormalized over top_k=1", "softmax(logits)"),
    ),
    "sglang, penalty": (
        *("sglang", {}, {"presence_penalty": 0.5}),
        *("softmax(changed logits)", "softmax(changed logits)"),
    ),
    "vllm, raw": (
        *("vllm", {}, {**NUCLEUS, "logit_bias": {"3": 1.5}}),
        *("softmax((logits + logit_bias) / 0.7), renormalized over top_p=0.9", "softmax(logits)"),
    ),
    "vllm, processed": (
        *("vllm", {"mode": "processed_logprobs"}, {**NUCLEUS, "top_k": 40, "min_p": 0.1}),
        *(["softmax(logits / 0.7), renormalized over top_k=40, top_p=0.9, min_p=0.1"] * 2),
    ),
    "vllm, greedy and processed": (
        *("vllm", {"mode": "processed_logprobs"}, {"temperature": 0.0}),
        *("softmax(logits), renormalized over top_k=1", "softmax(logits)"),
    ),
    "vllm, grammar and raw": (
        *("vllm", {}, {"structured_outputs": {"regex": "[0-9]"}, "repetition_penalty": 1.2}),
        *("softmax(changed logits)", "softmax(changed logits)"),
    ),
}


@pytest.mark.parametrize(
    ("server", "switches", "request_", "sampled", "returned"), DEFINITIONS.values(), ids=DEFINITIONS
)
def test_the_truth_and_what_is_returned(server, switches, request_, sampled, returned) -> None:
    definition = define(server, **switches, **request_)
    assert (str(definition.sampled), str(definition.returned)) == (sampled, returned)
    lines = definition.explain()
    assert lines[:2] == [f"sampled from {sampled}", f"returned: log-probs of {returned}"]


def test_which_numbers_are_those_of_the_behavior_policy() -> None:
    for is_behavior, definition in (
        (True, define()),
        (True, define(temperature=0.7)),
        (False, define(**NUCLEUS)),
        (False, define(temperature=0.7, original=True)),
        (True, define("vllm")),
        (False, define("vllm", temperature=0.7)),
        (True, define("vllm", mode="processed_logprobs", **NUCLEUS)),
        (False, define("vllm", mode="processed_logits", **NUCLEUS)),
        (False, define("vllm", presence_penalty=0.5)),
        (True, define("vllm", mode="processed_logprobs", presence_penalty=0.5)),
    ):
        assert definition.is_behavior == is_behavior
        assert any("not those of the behavior policy" in line for line in definition.explain()) != is_behavior


def test_what_cannot_be_repeated_is_named_with_the_reason_and_refused() -> None:
    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.25}
    definition = define(**penalties, regex="a+", min_new_tokens=4, custom_logit_processor="code")
    lines = "\n".join(definition.explain())
    assert not definition.is_comparable
    assert "the trainer's log-probs cannot be made comparable" in lines
    for reason in (
        "repetition_penalty=1.2: it scales the logits of tokens that occur in the response by their sign",
        "frequency_penalty=0.5: it lowers logits by the count",
        "presence_penalty=0.25: it lowers the logits",
        "regex='a+': the forbidden tokens",
        "min_new_tokens=4: it changes logits inside the server",
        "custom_logit_processor='code'",
    ):
        assert lines.count(reason) == 1
    with pytest.raises(ValueError, match="cannot compute this: regex"):
        trainer_log_probs(torch.tensor([LOGITS]), [0], definition.returned)
    in_vllm = define("vllm", **penalties)
    assert in_vllm.is_comparable
    assert "repetition_penalty=1.2: it scales the logits of tokens that occur in the prompt and response" in "\n".join(
        in_vllm.explain()
    )
    watermarked = define(watermark={"key": 1}, temperature=0.7)
    assert watermarked.is_comparable
    assert not watermarked.is_behavior


def test_logits_are_never_comparable() -> None:
    for mode in ("raw_logits", "processed_logits"):
        definition = define("vllm", mode=mode)
        assert not definition.is_comparable
        assert not definition.is_behavior
        assert definition.explain()[1] == "returned: logits of softmax(logits)"
        assert "--logprobs-mode processed_logprobs" in definition.explain()[2]


def test_greedy_is_no_draw_and_a_top_k_of_1_at_a_temperature_is_doubtful_in_sglang() -> None:
    for definition in (define(temperature=0.0), define(temperature=1e-7), define("vllm", top_k=1)):
        assert definition.is_greedy
        assert any("not an importance weight" in line for line in definition.explain())
        assert not definition.doubts
    assert not define(temperature=5e-6).is_greedy
    doubtful = define(temperature=0.7, top_k=1)
    assert doubtful.is_greedy
    assert "SGLang divides by temperature=0.7 only if the batch has a request" in doubtful.explain()[-1]


def test_a_trainers_log_probs_agree_after_the_correction_and_not_before() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 3 * torch.randn(64, 100, dtype=torch.float64, generator=generator)
    # A server in plain float32: temperature, then softmax, then the truncated weights.
    tempered = (logits.float() / 0.7).softmax(-1)
    order = tempered.sort(dim=-1, descending=True)
    weights = order.values.masked_fill(order.values.cumsum(-1) - order.values >= 0.9, 0.0)
    ids = order.indices.gather(1, torch.multinomial(weights, 1, generator=generator))[:, 0]
    returned = tempered.gather(1, ids[:, None])[:, 0].log().double()
    drawn_from = torch.zeros_like(weights).scatter(1, order.indices, weights / weights.sum(-1, keepdim=True))
    behavior = drawn_from.gather(1, ids[:, None])[:, 0].log().double()

    definition = define(**NUCLEUS)
    plain = trainer_log_probs(logits, ids, Distribution()).log_probs_T
    assert (plain - returned).abs().max() > 0.1
    assert (trainer_log_probs(logits, ids, definition.returned).log_probs_T - returned).abs().max() < 1e-6
    sampled = trainer_log_probs(logits, ids, definition.sampled)
    assert not sampled.outside_T.any()
    assert (sampled.log_probs_T - behavior).abs().max() < 1e-6
    assert (sampled.log_probs_T - returned).abs().max() > 0.05


def test_the_servers_keep_different_tokens_at_the_edge() -> None:
    request = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    rules = {
        "flashinfer": define(**request).sampled.truncation,
        "pytorch": define(**request, backend="pytorch").sampled.truncation,
        "vllm": define("vllm", **request).sampled.truncation,
    }
    limits = {"top_k": 3, "top_p": 0.5, "min_p": 0.1}
    assert rules == {
        "flashinfer": Truncation(**limits, mass_of="top_k", keeps_ties="all"),
        "pytorch": Truncation(**limits, keeps_next=True),
        "vllm": Truncation(**limits, mass_of="top_k_and_min_p", keeps_ties="all"),
    }
    # What the processed modes return is cut by Triton, since FlashInfer cannot return it, or by PyTorch.
    for backend, ties in ((None, "none"), ("triton", "none"), ("pytorch", "top_k")):
        processed = define("vllm", mode="processed_logprobs", backend=backend, **request)
        assert processed.returned.truncation == Truncation(**limits, mass_of="top_k_and_min_p", keeps_ties=ties)
    for alone in ({"top_k": 3, "top_p": 0.5}, {"top_p": 0.5, "min_p": 0.1}):
        assert define(**alone).sampled.truncation.mass_of == "all"
        # One kernel for the whole batch, which another request with min-p changes.
        doubts = " ".join(define(**alone).doubts)
        assert ("if the batch has a request with min_p" in doubts) is ("top_k" in alone)
        assert not define(**alone, backend="pytorch").doubts
    assert not define(top_p=0.5).doubts
    assert define("vllm", top_p=0.5).sampled.truncation.mass_of == "all"
    assert define("vllm", top_p=0.5, top_k=3).sampled.truncation.mass_of == "top_k_and_min_p"


def test_slimes_request_for_the_kept_tokens_is_known() -> None:
    request = {**NUCLEUS, "custom_params": {"return_top_p_token_ids": True}}
    definition = define(**request)
    assert read(**request).unknown == ()
    # slime's SGLang renormalizes over what it returns.
    assert definition.is_behavior
    assert definition.returned.truncation == define(**NUCLEUS).sampled.truncation
    assert any("only slime's SGLang supports it" in doubt for doubt in definition.doubts)
    assert not define(custom_params={"return_top_p_token_ids": False}, **NUCLEUS).is_behavior
    assert read(custom_params={"seed_of_mine": 1}).unknown == ("custom_params.seed_of_mine",)
    with pytest.raises(TypeError, match="custom_params must be a mapping, got 3"):
        read(custom_params=3)


def test_a_request_is_read_with_nulls_and_absent_keys_as_neutral() -> None:
    neutral = SamplingParameters()
    assert read() == neutral
    nulls = dict.fromkeys(("temperature", "top_p", "top_k", "min_p", "logit_bias", "repetition_penalty", "regex"))
    assert read(**nulls) == neutral
    harmless = {"max_new_tokens": 5, "stop": ["a"], "messages": [], "response_format": {"type": "text"}}
    read_harmless = read(**harmless, tool_choice="auto", min_new_tokens=0, json_schema="")
    assert replace(read_harmless, doubts=()) == neutral
    for all_tokens in (0, -1):
        assert read(top_k=all_tokens).top_k is None
    assert read(logit_bias={"7": 1, "3": -2.5, "4": 0}).logit_bias == ((3, -2.5), (7, 1.0))
    # Only vLLM clamps it.
    assert read(messages=[], logit_bias={"7": 150}).logit_bias == ((7, 150.0),)


def test_what_constrains_the_tokens_is_read() -> None:
    assert read(tool_choice="required").grammars == ("tool_choice='required'",)
    assert read(response_format={"type": "json_object"}).grammars == ("response_format={'type': 'json_object'}",)
    # Any JSON, and no other text.
    assert read(messages=[], guided_json={}).grammars == ("guided_json={}",)
    assert read(sampling_params={"json_schema": {}}).grammars == ("json_schema={}",)
    assert read(min_tokens=3, bad_words=["x"]).processors == ("min_tokens=3", "bad_words=['x']")
    read_unknown = read(temprature=0.7, mirostat=2)
    assert read_unknown.unknown == ("mirostat", "temprature")
    assert define(mirostat=2).explain()[-1] == "mirostat: unknown, it may change the sampled distribution"


@pytest.mark.parametrize(
    ("request_", "error", "message"),
    [
        ({"temperature": -0.1}, ValueError, r"temperature must be in \[0, inf\], got -0.1"),
        ({"temperature": math.inf}, ValueError, "temperature must be finite, got inf"),
        ({"temperature": math.nan}, ValueError, "temperature must be in"),
        ({"temperature": "0.7"}, TypeError, "temperature must be a number"),
        ({"temperature": True}, TypeError, "temperature must be a number"),
        ({"top_p": 0.0}, ValueError, "top_p must be above 0"),
        ({"top_p": 1.5}, ValueError, r"top_p must be in \[0, 1\], got 1.5"),
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty must be above 0"),
        ({"presence_penalty": 3}, ValueError, r"presence_penalty must be in \[-2, 2\], got 3"),
        ({"top_k": -2}, ValueError, "top_k must be at least 1, or 0 or -1 for all tokens, got -2"),
        ({"top_k": 1.0}, TypeError, "top_k must be a whole number"),
        ({"top_k": True}, TypeError, "top_k must be a whole number"),
        ({"tools": 5}, TypeError, "tools must be a list or tuple, got 5"),
        ({"logit_bias": [1]}, TypeError, r"logit_bias must map token ids to numbers, got \[1\]"),
        ({"logit_bias": {"yes": 1.0}}, ValueError, "keys of logit_bias must be token ids, .* got 'yes'"),
        ({"logit_bias": {"-1": 1.0}}, ValueError, "keys of logit_bias must be token ids, .* got '-1'"),
        ({"logit_bias": {"1": math.nan}}, ValueError, r"logit_bias\[1\] must be in"),
    ],
)
def test_a_parameter_out_of_range_is_named(request_, error, message) -> None:
    with pytest.raises(error, match=message):
        read(**request_)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"server": "sglagn"}, r"server must be one of sglang \| vllm, got 'sglagn' \(did you mean 'sglang'\?\)"),
        ({"mode": "raw"}, "logprobs_mode must be one of raw_logprobs"),
        ({"backend": "torch"}, r"sampling_backend must be one of flashinfer \| pytorch, got"),
        ({"backend": "triton"}, r"sampling_backend must be one of flashinfer \| pytorch, got"),
        (
            {"server": "vllm", "mode": "processed_logits", "backend": "flashinfer"},
            r"sampling_backend must be one of triton \| pytorch, got 'flashinfer'",
        ),
    ],
)
def test_an_unknown_server_mode_or_backend_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        define(**change)


@pytest.mark.parametrize("server", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("around", "line"),
    [
        ({"custom_logit_processor": "x"}, "custom_logit_processor='x'"),
        ({"lora_path": "a"}, "lora_path"),
        ({"foo": 1}, "foo"),
        ({"logit_bias": {"5": 9.0}}, "logit_bias"),
        ({"temperature": 0.7}, "temperature"),
        ({"extra_body": {"top_k": 2}}, "extra_body"),
    ],
)
def test_what_stands_around_the_sampling_parameters_is_not_lost(server, around, line) -> None:
    whole = {"input_ids": [1], "sampling_params": {"temperature": 1.0}, "stream": False, "rid": None}
    assert define(server, **whole).is_comparable
    definition = define(server, **whole, **around)
    assert any(each.startswith(line) for each in definition.explain())
    found = read(server, **whole, **around)
    # Where the server ignores it, nothing else is known to change.
    assert (found.temperature, found.logit_bias) == (1.0, ())
    assert found.unknown or found.processors
    # Said twice, it is known.
    assert not read(server, temperature=1.0, **whole).unknown


def test_sampling_parameters_in_a_chat_replace_nothing() -> None:
    for value, unknown in (({"top_k": 2}, ("sampling_params",)), (None, ())):
        found = read(messages=[], temperature=0.5, sampling_params=value)
        assert (found.temperature, found.top_k, found.unknown) == (0.5, None, unknown)
