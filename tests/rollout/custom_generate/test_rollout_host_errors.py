# SPDX-License-Identifier: Apache-2.0
"""The custom generate function: what a server may not answer, and what is asked again."""

import asyncio
import copy
import socket
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from generate_runs import LIMITS, TOOL_RESULT, WITH_ENVIRONMENT, run
from sglang_answers import stopped
from tokens.sample import Sample, Status, host_args

from mis_ext.rollout.custom_generate.function import generate
from mis_ext.rollout.generation import AbortedRequest, CountMismatch, RolloutError

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_a_response_that_contradicts_itself_names_sample_and_turn_and_changes_nothing(tokenizer_folder, environment):
    environment(TOOL_RESULT)

    def one_token_more(request):
        response = stopped(request, "rain")
        response["meta_info"]["completion_tokens"] += 1
        return response

    sample = Sample(prompt="The weather", index=11)
    before = copy.deepcopy(sample)
    with pytest.raises(CountMismatch, match="sample 11, turn 1"):
        run([lambda r: stopped(r, "look"), one_token_more], tokenizer_folder, sample, settings=WITH_ENVIRONMENT)
    before.non_generation_time = sample.non_generation_time
    assert sample == before


def test_an_error_of_the_server_is_no_abort(tokenizer_folder):
    sample = Sample(prompt="The weather")
    with pytest.raises(AbortedRequest, match=r"sample 0, turn 0.*out of memory"):
        run([lambda r: {"error": {"message": "out of memory"}}], tokenizer_folder, sample, partial_rollout=True)
    assert sample.status is Status.PENDING


def test_a_response_without_text_is_an_error(tokenizer_folder):
    def no_text(request):
        response = stopped(request, "rain")
        del response["text"]
        return response

    with pytest.raises(RolloutError, match=r"sample 0, turn 0.*response\.text is missing"):
        run([no_text], tokenizer_folder, Sample(prompt="The weather"))


def test_a_server_that_fails_is_asked_again_and_its_last_words_are_in_the_error(tokenizer_folder):
    sample = Sample(prompt="The weather")
    failing = [lambda r: (503, b"warming up")] * 2
    run([*failing, lambda r: stopped(r, "mild")], tokenizer_folder, sample)
    assert sample.status is Status.COMPLETED
    with pytest.raises(ConnectionError, match=r"/generate: no answer after 2 attempts: HTTP 503: warming up"):
        run(failing, tokenizer_folder, Sample(prompt="The weather"), settings={"max_attempts": 2})


def test_what_the_server_refuses_is_not_sent_again(tokenizer_folder):
    refusal = {"error": {"message": "exceeds the model's maximum context length"}}
    with pytest.raises(ConnectionError, match=r"refused the request: HTTP 400: .*maximum context length"):
        run([lambda r: (400, refusal)], tokenizer_folder, Sample(prompt="The weather"))


def test_an_unreachable_server_is_an_error_that_names_the_address(tokenizer_folder):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        args = host_args(port, tokenizer_folder, on_policy_tokens={"max_attempts": 2})
        with pytest.raises(ConnectionError, match=rf"http://127\.0\.0\.1:{port}/generate: no answer after 2 attempts"):
            asyncio.run(generate(args, Sample(prompt="The weather"), LIMITS))
