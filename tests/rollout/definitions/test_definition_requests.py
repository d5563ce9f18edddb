# SPDX-License-Identifier: Apache-2.0
"""What a request and a server say of a distribution, and what is refused."""

import math

import pytest
from log_prob_definitions import define, read


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
        ({"logit_bias": [1]}, TypeError, r"logit_bias must map token ids to numbers, got \[1\]"),
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
