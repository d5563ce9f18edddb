# SPDX-License-Identifier: Apache-2.0
"""The custom generate function: each turn holds the earlier ones as they were sampled, within its limits."""

import copy
import sys
from pathlib import Path

import pytest
from tiny_tokenizers import TURN_END, render

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from generate_runs import LIMITS, QUESTION, TOOL_RESULT, WITH_ENVIRONMENT, run
from sglang_answers import END, TOKENIZER, answer, cut, stopped
from tiny_tokenizers import encode, encode_bytewise
from tokens.sample import Sample, Status

pytestmark = pytest.mark.usefixtures("short_pauses")


def test_one_turn_gives_the_servers_tokens_log_probs_and_version_as_they_came(tokenizer_folder):
    sample, params = Sample(prompt="The weather", index=3), copy.deepcopy(LIMITS)
    prompt_ids = encode(TOKENIZER, "The weather")
    responses = []
    server = run(
        [lambda r: responses.append(stopped(r, "mild")) or responses[0]], tokenizer_folder, sample, params=params
    )
    assert server.requests == [
        {"path": "/generate", "input_ids": prompt_ids, "sampling_params": LIMITS, "return_logprob": True}
    ]
    assert params == LIMITS
    rows = responses[0]["meta_info"]["output_token_logprobs"]
    assert sample.tokens == prompt_ids + [token for _, token, _ in rows]
    assert sample.rollout_log_probs == [log_prob for log_prob, _, _ in rows]
    assert sample.loss_mask == [1] * 5
    assert sample.response_length == 5
    assert sample.response == f"mild{TURN_END}"
    assert sample.weight_versions == ["7"]
    assert sample.status is Status.COMPLETED


def test_messages_go_through_the_chat_template_with_the_tools_of_the_sample(tokenizer_folder):
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    sample = Sample(prompt=QUESTION, metadata={"tools": tools})
    server = run([lambda r: stopped(r, "mild")], tokenizer_folder, sample)
    assert server.requests[0]["input_ids"] == render(TOKENIZER, QUESTION, tools=tools)
    assert server.requests[0]["input_ids"] != render(TOKENIZER, QUESTION)


def test_a_turn_that_a_stop_string_ended_gets_the_templates_end_as_a_masked_token(tokenizer_folder, environment):
    environment(TOOL_RESULT, None)
    call = "<tool_call>Paris</tool_call>"
    ids = encode(TOKENIZER, call)
    sample = Sample(prompt=QUESTION)
    server = run(
        [
            lambda r: answer(r, ids, {"type": "stop", "matched": "</tool_call>"}),
            lambda r: stopped(r, "rain"),
        ],
        tokenizer_folder,
        sample,
        settings=WITH_ENVIRONMENT,
    )
    prompt = render(TOKENIZER, QUESTION)
    second = server.requests[1]["input_ids"]
    assert second == render(TOKENIZER, [*QUESTION, {"role": "assistant", "content": call}, *TOOL_RESULT])
    assert second[len(prompt) + len(ids)] == END
    assert sample.loss_mask[: len(ids) + 1] == [1] * len(ids) + [0]


def test_a_sampled_character_is_not_taken_for_the_beginning_of_the_templates_end(tokenizer_folder, environment):
    environment(TOOL_RESULT, None)
    ids = encode_bytewise(TOKENIZER, "1 <")
    sample = Sample(prompt=QUESTION)
    script = [lambda r: answer(r, ids, {"type": "stop", "matched": "<"}), lambda r: stopped(r, "rain")]
    server = run(script, tokenizer_folder, sample, settings=WITH_ENVIRONMENT)
    known = render(TOKENIZER, QUESTION) + ids
    assert server.requests[1]["input_ids"][: len(known) + 1] == [*known, END]


def test_a_chat_template_that_rewrites_assistants_is_refused_for_messages(tokenizer_folder, environment, tmp_path):
    environment(TOOL_RESULT)
    template = tmp_path / "template.jinja"
    template.write_text("{%- for message in messages %}{{ message.content | length }}{%- endfor %}")
    with pytest.raises(ValueError, match="changes an assistant's content"):
        run(
            [lambda r: stopped(r, "look")],
            tokenizer_folder,
            Sample(prompt="The weather"),
            settings=WITH_ENVIRONMENT,
            chat_template_path=str(template),
        )


def test_a_turn_at_the_token_limit_truncates_and_the_environment_is_not_asked(tokenizer_folder, environment):
    said = environment()
    sample = Sample(prompt="The weather")
    run(
        [lambda r: cut(r, "is mild")],
        tokenizer_folder,
        sample,
        params={**LIMITS, "max_new_tokens": 7},
        settings=WITH_ENVIRONMENT,
    )
    assert sample.status is Status.TRUNCATED
    assert sample.loss_mask == [1] * 7
    assert said.told == []


def test_the_context_caps_the_turns_and_ends_the_conversation_without_a_dangling_observation(
    tokenizer_folder, environment
):
    environment("?", "!" * 40)
    sample = Sample(prompt="The weather")
    room = len(encode(TOKENIZER, "The weather")) + 20
    server = run(
        [lambda r: stopped(r, "look"), lambda r: stopped(r, "rain")],
        tokenizer_folder,
        sample,
        settings=WITH_ENVIRONMENT,
        rollout_max_context_len=room,
    )
    # 5 sampled and 1 said.
    assert [r["sampling_params"]["max_new_tokens"] for r in server.requests] == [20, 14]
    assert sample.status is Status.TRUNCATED
    assert sample.loss_mask == [1] * 5 + [0] + [1] * 5


def test_a_conversation_of_too_many_turns_is_truncated(tokenizer_folder, environment):
    said = environment("?", "?", "?")
    sample = Sample(prompt="The weather")
    script = [lambda r: stopped(r, "look")] * 2
    run(script, tokenizer_folder, sample, settings={**WITH_ENVIRONMENT, "max_turns": 2})
    assert len(said.told) == 2
    assert sample.status is Status.TRUNCATED
    assert sum(sample.loss_mask) == 10


def test_a_prompt_without_room_is_truncated_without_a_request(tokenizer_folder):
    sample = Sample(prompt="The weather")
    run([], tokenizer_folder, sample, rollout_max_context_len=1)
    assert sample.status is Status.TRUNCATED
    assert sample.response_length == 0
    # The hosts ask the first sample of a batch whether there are log-probs.
    assert sample.rollout_log_probs == []


@pytest.mark.parametrize("limit", [None, 0])
def test_an_environment_needs_a_limit_of_the_context(tokenizer_folder, environment, limit):
    environment(TOOL_RESULT)
    with pytest.raises(ValueError, match="environment needs rollout_max_context_len, at most the context length"):
        run([], tokenizer_folder, Sample(prompt="The"), settings=WITH_ENVIRONMENT, rollout_max_context_len=limit)
    sample = Sample(prompt="The weather")
    run([lambda r: stopped(r, "mild")], tokenizer_folder, sample, rollout_max_context_len=limit)
    assert sample.status is Status.COMPLETED
