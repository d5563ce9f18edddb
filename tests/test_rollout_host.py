"""The custom generate function, against a server on the loopback that answers as SGLang 0.5.23 does."""

import asyncio
import copy
import socket
import sys
import types
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import TURN_END, render

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from host_samples import SlimeSample, loopback_server
from sglang_answers import END, TOKENIZER, aborted, answer, cut, stopped
from tiny_tokenizers import encode, encode_bytewise
from tokens.sample import Sample, Status, host_args
from transformers import AutoTokenizer

from mis_ext.rollout.custom_generate import definitions, http
from mis_ext.rollout.custom_generate.function import UNFINISHED, generate
from mis_ext.rollout.errors import AbortedRequest, CountMismatch, RolloutError

QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
LIMITS = {"max_new_tokens": 32, "temperature": 0.7, "top_p": 1.0, "no_stop_trim": True, "skip_special_tokens": False}
TOOL_RESULT = [{"role": "tool", "content": "rain"}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint")
    TOKENIZER.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(http, "_SECONDS_BETWEEN_ATTEMPTS", 0.01)


@pytest.fixture
def environment(monkeypatch):
    """Names an environment that says what it was given, and records what it was told."""

    def install(*replies):
        module = types.ModuleType("an_environment")
        module.told = []
        left = list(replies)

        async def step(sample, text):
            module.told.append(text)
            return left.pop(0)

        module.step = step
        monkeypatch.setitem(sys.modules, "an_environment", module)
        return module

    return install


CONTEXT = 100_000


def run(script, checkpoint, sample, *, params=LIMITS, settings=None, **others):
    """The server's requests after ``generate``; its answers are those of the scripts, in order."""
    scripts = iter(script)

    def serve(number, request):
        reply = next(scripts)(request)
        return reply if isinstance(reply, tuple) else (200, reply)

    others.setdefault("rollout_max_context_len", CONTEXT)
    with loopback_server(serve) as server:
        args = host_args(server.port, checkpoint, on_policy_tokens=settings, **others)
        assert asyncio.run(generate(args, sample, params)) is sample
    assert not list(scripts)
    return server


WITH_ENVIRONMENT = {"environment": "an_environment.step"}


def test_one_turn_gives_the_servers_tokens_log_probs_and_version_as_they_came(checkpoint):
    sample, params = Sample(prompt="The weather", index=3), copy.deepcopy(LIMITS)
    prompt_ids = encode(TOKENIZER, "The weather")
    responses = []
    server = run([lambda r: responses.append(stopped(r, "mild")) or responses[0]], checkpoint, sample, params=params)
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


def test_messages_go_through_the_chat_template_with_the_tools_of_the_sample(checkpoint):
    tools = [{"type": "function", "function": {"name": "get_weather"}}]
    sample = Sample(prompt=QUESTION, metadata={"tools": tools})
    server = run([lambda r: stopped(r, "mild")], checkpoint, sample)
    assert server.requests[0]["input_ids"] == render(TOKENIZER, QUESTION, tools=tools)
    assert server.requests[0]["input_ids"] != render(TOKENIZER, QUESTION)


@pytest.mark.parametrize("sample_class", [Sample, SlimeSample])
def test_later_turns_hold_the_earlier_ones_as_they_were_sampled(checkpoint, environment, sample_class):
    said = environment(TOOL_RESULT, [{"role": "user", "content": "Thanks"}], None)
    turns = ["Let me look", "It says rain", "Welcome"]
    sample = sample_class(prompt=QUESTION)
    script = [lambda r, text=text: stopped(r, text) for text in turns]
    server = run(script, checkpoint, sample, settings=WITH_ENVIRONMENT)

    messages = [*QUESTION, *({"role": "assistant", "content": turn} for turn in turns)]
    messages[2:2], messages[4:4] = TOOL_RESULT, [{"role": "user", "content": "Thanks"}]
    assert TOKENIZER.decode(sample.tokens) + "\n" == TOKENIZER.decode(render(TOKENIZER, messages, generate=False))
    assert said.told == [f"{turn}{TURN_END}" for turn in turns]
    # In tokens, and not in text only: every later request begins with what is known by then.
    known = render(TOKENIZER, QUESTION)
    trained, log_probs = [], []
    for request, turn in zip(server.requests, turns, strict=True):
        assert request["input_ids"][: len(known)] == known
        behind = request["input_ids"][len(known) :]
        sampled = [*encode_bytewise(TOKENIZER, turn), END]
        known = request["input_ids"] + sampled
        trained += [0] * len(behind) + [1] * len(sampled)
        log_probs += [0.0] * len(behind)
        log_probs += [-0.1 - 0.01 * (number + len(request["input_ids"])) for number in range(len(sampled))]
    assert sample.tokens == known
    assert sample.loss_mask == trained
    assert sample.rollout_log_probs == log_probs
    assert sample.response == TOKENIZER.decode(known[len(render(TOKENIZER, QUESTION)) :])
    assert sample.response_length == len(trained)
    assert sample.weight_versions == ["7"] * 3
    assert sample.status is Status.COMPLETED
    assert sample.metadata["on_policy_tokens"]["boundaries/contiguous"] == 2


def test_a_turn_that_a_stop_string_ended_gets_the_templates_end_as_a_masked_token(checkpoint, environment):
    environment(TOOL_RESULT, None)
    call = "<tool_call>Paris</tool_call>"
    ids = encode(TOKENIZER, call)
    sample = Sample(prompt=QUESTION)
    server = run(
        [
            lambda r: answer(r, ids, {"type": "stop", "matched": "</tool_call>"}),
            lambda r: stopped(r, "rain"),
        ],
        checkpoint,
        sample,
        settings=WITH_ENVIRONMENT,
    )
    prompt = render(TOKENIZER, QUESTION)
    second = server.requests[1]["input_ids"]
    assert second == render(TOKENIZER, [*QUESTION, {"role": "assistant", "content": call}, *TOOL_RESULT])
    assert second[len(prompt) + len(ids)] == END
    assert sample.loss_mask[: len(ids) + 1] == [1] * len(ids) + [0]


def test_a_sampled_character_is_not_taken_for_the_beginning_of_the_templates_end(checkpoint, environment):
    environment(TOOL_RESULT, None)
    ids = encode_bytewise(TOKENIZER, "1 <")
    sample = Sample(prompt=QUESTION)
    script = [lambda r: answer(r, ids, {"type": "stop", "matched": "<"}), lambda r: stopped(r, "rain")]
    server = run(script, checkpoint, sample, settings=WITH_ENVIRONMENT)
    known = render(TOKENIZER, QUESTION) + ids
    assert server.requests[1]["input_ids"][: len(known) + 1] == [*known, END]


def test_an_observation_that_is_a_text_is_appended_as_it_stands(checkpoint, environment):
    environment("\n[rain]\n", None)
    sample = Sample(prompt="The weather")
    server = run(
        [lambda r: stopped(r, "look"), lambda r: stopped(r, "rain")], checkpoint, sample, settings=WITH_ENVIRONMENT
    )
    first = [*server.requests[0]["input_ids"], *encode_bytewise(TOKENIZER, "look"), END]
    assert server.requests[1]["input_ids"] == first + encode(TOKENIZER, "\n[rain]\n")
    assert sample.response == f"look{TURN_END}\n[rain]\nrain{TURN_END}"


def test_a_chat_template_that_rewrites_assistants_is_refused_for_messages(checkpoint, environment, tmp_path):
    environment(TOOL_RESULT)
    template = tmp_path / "template.jinja"
    template.write_text("{%- for message in messages %}{{ message.content | length }}{%- endfor %}")
    with pytest.raises(ValueError, match="does not render an assistant's content as it stands"):
        run(
            [lambda r: stopped(r, "look")],
            checkpoint,
            Sample(prompt="The weather"),
            settings=WITH_ENVIRONMENT,
            chat_template_path=str(template),
        )


def test_a_turn_at_the_token_limit_truncates_and_the_environment_is_not_asked(checkpoint, environment):
    said = environment()
    sample = Sample(prompt="The weather")
    run(
        [lambda r: cut(r, "is mild")],
        checkpoint,
        sample,
        params={**LIMITS, "max_new_tokens": 7},
        settings=WITH_ENVIRONMENT,
    )
    assert sample.status is Status.TRUNCATED
    assert sample.loss_mask == [1] * 7
    assert said.told == []


def test_the_context_caps_the_turns_and_ends_the_conversation_without_a_dangling_observation(checkpoint, environment):
    environment("?", "!" * 40)
    sample = Sample(prompt="The weather")
    room = len(encode(TOKENIZER, "The weather")) + 20
    server = run(
        [lambda r: stopped(r, "look"), lambda r: stopped(r, "rain")],
        checkpoint,
        sample,
        settings=WITH_ENVIRONMENT,
        rollout_max_context_len=room,
    )
    # 5 sampled and 1 said.
    assert [r["sampling_params"]["max_new_tokens"] for r in server.requests] == [20, 14]
    assert sample.status is Status.TRUNCATED
    assert sample.loss_mask == [1] * 5 + [0] + [1] * 5


def test_a_conversation_of_too_many_turns_is_truncated(checkpoint, environment):
    said = environment("?", "?", "?")
    sample = Sample(prompt="The weather")
    script = [lambda r: stopped(r, "look")] * 2
    run(script, checkpoint, sample, settings={**WITH_ENVIRONMENT, "max_turns": 2})
    assert len(said.told) == 2
    assert sample.status is Status.TRUNCATED
    assert sum(sample.loss_mask) == 10


def test_a_prompt_without_room_is_truncated_without_a_request(checkpoint):
    sample = Sample(prompt="The weather")
    run([], checkpoint, sample, rollout_max_context_len=1)
    assert sample.status is Status.TRUNCATED
    assert sample.response_length == 0
    # The hosts ask the first sample of a batch whether there are log-probs.
    assert sample.rollout_log_probs == []


@pytest.mark.parametrize("limit", [None, 0])
def test_an_environment_needs_a_limit_of_the_context(checkpoint, environment, limit):
    environment(TOOL_RESULT)
    with pytest.raises(ValueError, match="environment needs rollout_max_context_len, at most the context length"):
        run([], checkpoint, Sample(prompt="The"), settings=WITH_ENVIRONMENT, rollout_max_context_len=limit)
    sample = Sample(prompt="The weather")
    run([lambda r: stopped(r, "mild")], checkpoint, sample, rollout_max_context_len=limit)
    assert sample.status is Status.COMPLETED


@pytest.mark.parametrize(("limits", "room"), [({}, 20), ({"eval_max_context_len": 24}, 24)])
def test_evaluation_has_a_limit_of_its_own_and_no_warning_about_training(checkpoint, limits, room):
    definitions._warn_once.cache_clear()
    num_known = len(encode(TOKENIZER, "The weather"))
    with loopback_server(lambda number, request: (200, stopped(request, "mild"))) as server:
        args = host_args(server.port, checkpoint, rollout_max_context_len=20, **limits)
        with warnings.catch_warnings(action="error"):
            asyncio.run(generate(args, Sample(prompt="The weather"), {**LIMITS, "top_p": 0.7}, evaluation=True))
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == room - num_known


@pytest.mark.parametrize("text", ["is mi", ""])
def test_an_aborted_sample_holds_no_half_response_and_starts_anew(checkpoint, environment, text):
    environment(TOOL_RESULT)
    sample = Sample(prompt="The weather")
    run([lambda r: stopped(r, "look"), lambda r: aborted(r, text)], checkpoint, sample, settings=WITH_ENVIRONMENT)
    assert sample.status is Status.ABORTED
    assert (sample.tokens, sample.response, sample.response_length) == ([], "", 0)
    assert (sample.loss_mask, sample.rollout_log_probs) == (None, None)
    assert sample.metadata == {"on_policy_tokens": {"aborted_requests": 1, "discarded_tokens": 5 + len(text)}}
    run([lambda r: stopped(r, "mild")], checkpoint, sample)
    assert sample.status is Status.COMPLETED
    assert sample.loss_mask == [1] * 5
    assert sample.metadata["on_policy_tokens"]["discarded_tokens"] == 5 + len(text)


@pytest.mark.parametrize("sample_class", [Sample, SlimeSample])
@pytest.mark.parametrize("masked", [False, True])
def test_a_partial_rollout_goes_on_where_it_was_aborted(checkpoint, environment, sample_class, masked):
    said = environment(TOOL_RESULT, None)
    sample = sample_class(prompt=QUESTION)
    partial = {"settings": WITH_ENVIRONMENT, "partial_rollout": True}
    run([lambda r: stopped(r, "look"), lambda r: aborted(r, "It is")], checkpoint, sample, **partial)
    assert sample.status is Status.ABORTED
    kept, log_probs = list(sample.tokens), list(sample.rollout_log_probs)
    observed = sample.loss_mask.count(0)
    assert sample.loss_mask == [1] * 5 + [0] * observed + [1] * 5
    if masked:
        # The hosts do this where old weights' tokens are not to be trained.
        sample.loss_mask = [0] * sample.response_length

    server = run([lambda r: stopped(r, " mild", version="8")], checkpoint, sample, **partial)
    assert server.requests[0]["input_ids"] == kept
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 32 - 5
    assert said.told == [f"look{TURN_END}", f"It is mild{TURN_END}"]
    assert sample.status is Status.COMPLETED
    assert sample.tokens == [*kept, *encode_bytewise(TOKENIZER, " mild"), END]
    assert sample.rollout_log_probs[: len(log_probs)] == log_probs
    before = [0] * (10 + observed) if masked else [1] * 5 + [0] * observed + [1] * 5
    assert sample.loss_mask == before + [1] * 6
    assert sample.weight_versions == ["7", "7", "8"]
    assert UNFINISHED not in sample.metadata
    counts = sample.metadata["on_policy_tokens"]
    assert (counts["aborted_requests"], counts["generations"], counts["sampled_tokens"]) == (1, 3, 16)


def test_a_request_aborted_before_its_first_token_leaves_a_partial_rollout_as_it_was(checkpoint):
    sample = Sample(prompt="The weather")
    run([lambda r: aborted(r, "")], checkpoint, sample, partial_rollout=True)
    assert sample.status is Status.ABORTED
    assert sample.response_length == 0
    run([lambda r: stopped(r, "mild")], checkpoint, sample, partial_rollout=True)
    assert sample.loss_mask == [1] * 5


@pytest.mark.parametrize("sample_class", [Sample, SlimeSample])
def test_an_observation_survives_an_abort_before_the_turn_behind_it(checkpoint, environment, sample_class):
    environment("[rain]", None)
    sample = sample_class(prompt="The weather")
    partial = {"settings": WITH_ENVIRONMENT, "partial_rollout": True}
    waiting = run([lambda r: stopped(r, "look"), lambda r: aborted(r, "")], checkpoint, sample, **partial)
    observed = [0] * len(encode(TOKENIZER, "[rain]"))
    assert sample.loss_mask == [1] * 5 + observed
    again = run([lambda r: stopped(r, "rain")], checkpoint, sample, **partial)
    assert again.requests[0]["input_ids"] == waiting.requests[1]["input_ids"]
    assert sample.loss_mask == [1] * 5 + observed + [1] * 5
    assert sample.response == f"look{TURN_END}[rain]rain{TURN_END}"


def updated_midway(request):
    response = stopped(request, "mild", version="8")
    segments = [{"version": "7", "start": 0, "end": 3}, {"version": "8", "start": 3, "end": 5}]
    response["meta_info"]["weight_versions"] = segments
    return response


@pytest.mark.parametrize("sample_class", [Sample, SlimeSample])
def test_a_response_of_two_weight_versions_names_both(checkpoint, sample_class):
    sample = sample_class(prompt="The weather")
    run([updated_midway], checkpoint, sample)
    assert sample.weight_versions == ["7", "8"]


def test_the_spans_of_versions_of_a_newer_miles_stay_its_own(checkpoint):
    class Spans:
        pass

    class MilesSample(Sample):
        def update_from_meta_info(self, args, meta_info):
            super().update_from_meta_info(args, meta_info)
            self.weight_versions[-1] = Spans()

    sample = MilesSample(prompt="The weather")
    run([updated_midway], checkpoint, sample)
    (version,) = sample.weight_versions
    assert isinstance(version, Spans)


def test_a_sample_that_its_host_cleared_starts_anew(checkpoint, environment):
    said = environment(None)
    sample = Sample(prompt="The weather")
    sample.metadata[UNFINISHED] = (1, 9, "half a turn")
    server = run([lambda r: stopped(r, "mild")], checkpoint, sample, settings=WITH_ENVIRONMENT, partial_rollout=True)
    assert said.told == [f"mild{TURN_END}"]
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 32


def test_the_turn_that_the_hosts_own_function_left_unfinished_counts_against_the_limit(checkpoint):
    ids = encode(TOKENIZER, "The weather")
    sample = Sample(prompt="The", tokens=ids, response=" weather", response_length=1, rollout_log_probs=[-0.5])
    server = run([lambda r: stopped(r, "mild")], checkpoint, sample, partial_rollout=True)
    assert server.requests[0]["input_ids"] == ids
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == 31
    assert sample.loss_mask == [1] * 6
    assert sample.rollout_log_probs[0] == -0.5
    assert sample.response == f" weathermild{TURN_END}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rollout_log_probs": None}, "rollout_log_probs have 0 entries, its response 2"),
        ({"rollout_log_probs": [-0.5]}, "rollout_log_probs have 1 entries, its response 2"),
        ({"loss_mask": [1, 1, 1]}, "loss_mask have 3 entries, its response 2"),
        ({"tokens": [5]}, "tokens have 1 entries, its response 2"),
    ],
)
def test_a_resumed_sample_whose_fields_disagree_is_refused(checkpoint, fields, message):
    whole = {"tokens": [5, 6, 7], "response_length": 2, "rollout_log_probs": [-0.5, -0.5]}
    with pytest.raises(ValueError, match=message):
        run([], checkpoint, Sample(prompt="The", **(whole | fields)))


def test_a_response_that_contradicts_itself_names_sample_and_turn_and_changes_nothing(checkpoint, environment):
    environment(TOOL_RESULT)

    def one_token_more(request):
        response = stopped(request, "rain")
        response["meta_info"]["completion_tokens"] += 1
        return response

    sample = Sample(prompt="The weather", index=11)
    before = copy.deepcopy(sample)
    with pytest.raises(CountMismatch, match="sample 11, turn 1"):
        run([lambda r: stopped(r, "look"), one_token_more], checkpoint, sample, settings=WITH_ENVIRONMENT)
    before.non_generation_time = sample.non_generation_time
    assert sample == before


def test_an_aborted_response_that_contradicts_itself_is_an_error_too(checkpoint):
    def other_ids(request):
        response = aborted(request, "rain")
        response["output_ids"][1] = 9
        return response

    with pytest.raises(RolloutError, match="sample 0, turn 0"):
        run([other_ids], checkpoint, Sample(prompt="The weather"), partial_rollout=True)


def test_an_error_of_the_server_is_no_abort(checkpoint):
    sample = Sample(prompt="The weather")
    with pytest.raises(AbortedRequest, match=r"sample 0, turn 0.*out of memory"):
        run([lambda r: {"error": {"message": "out of memory"}}], checkpoint, sample, partial_rollout=True)
    assert sample.status is Status.PENDING


def test_a_response_without_text_is_an_error(checkpoint):
    def no_text(request):
        response = stopped(request, "rain")
        del response["text"]
        return response

    with pytest.raises(RolloutError, match=r"sample 0, turn 0.*response\.text is missing"):
        run([no_text], checkpoint, Sample(prompt="The weather"))


def test_a_server_that_fails_is_asked_again_and_its_last_words_are_in_the_error(checkpoint):
    sample = Sample(prompt="The weather")
    failing = [lambda r: (503, b"warming up")] * 2
    run([*failing, lambda r: stopped(r, "mild")], checkpoint, sample)
    assert sample.status is Status.COMPLETED
    with pytest.raises(ConnectionError, match=r"/generate: no answer after 2 attempts: HTTP 503: warming up"):
        run(failing, checkpoint, Sample(prompt="The weather"), settings={"max_attempts": 2})


def test_what_the_server_refuses_is_not_sent_again(checkpoint):
    refusal = {"error": {"message": "exceeds the model's maximum context length"}}
    with pytest.raises(ConnectionError, match=r"refused the request: HTTP 400: .*maximum context length"):
        run([lambda r: (400, refusal)], checkpoint, Sample(prompt="The weather"))


@pytest.mark.parametrize("body", [b"no JSON", b"[1]"])
def test_an_answer_that_is_no_json_object_is_an_error(checkpoint, body):
    attempts = 2 if body == b"no JSON" else 1
    with pytest.raises(ConnectionError, match=r"no answer after 2 attempts|no JSON object"):
        run([lambda r: (200, body)] * attempts, checkpoint, Sample(prompt="The"), settings={"max_attempts": 2})


def test_an_unreachable_server_is_an_error_that_names_the_address(checkpoint):
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        args = host_args(port, checkpoint, on_policy_tokens={"max_attempts": 2})
        with pytest.raises(ConnectionError, match=rf"http://127\.0\.0\.1:{port}/generate: no answer after 2 attempts"):
            asyncio.run(generate(args, Sample(prompt="The weather"), LIMITS))


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_a_hosts_sample_is_sent_with_the_hosts_own_client(checkpoint, monkeypatch, host):
    calls = []

    async def post(url, payload, max_retries=60, **options):
        calls.append((url, max_retries, options))
        if len(calls) == 2:
            raise OSError("all connections are gone")
        return stopped(payload, "mild")

    def load_tokenizer(checkpoint, chat_template_path=None, **options):
        loaded.append((chat_template_path, options))
        return AutoTokenizer.from_pretrained(checkpoint)

    loaded = []
    client, loader = (types.ModuleType(f"{host}.utils.{name}") for name in ("http_utils", "processing_utils"))
    client.post, loader.load_tokenizer = post, load_tokenizer
    for module in (types.ModuleType(host), types.ModuleType(f"{host}.utils"), client, loader):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    host_class = type("Sample", (Sample,), {"__module__": f"{host}.utils.types"})
    args = host_args(9, checkpoint, on_policy_tokens={"max_attempts": 5}, router_policy="consistent_hashing")

    sample = asyncio.run(generate(args, host_class(prompt="The weather", session_id="abc"), LIMITS))
    assert sample.loss_mask == [1] * 5
    assert calls == [("http://127.0.0.1:9/generate", 5, {"headers": {"X-SMG-Routing-Key": "abc"}})]
    # The host's loader repairs what newer versions of transformers break.
    assert loaded == [(None, {"trust_remote_code": True})]
    with pytest.raises(ConnectionError, match="no answer after 5 attempts: all connections are gone"):
        asyncio.run(generate(args, host_class(prompt="The weather"), LIMITS))
    assert calls[1][2] == {}


@pytest.mark.parametrize(("policy", "key"), [("consistent_hashing", "abc"), ("round_robin", None), (None, None)])
def test_the_session_is_named_to_a_router_that_routes_by_it(checkpoint, policy, key):
    sample = Sample(prompt="The weather", session_id="abc")
    server = run([lambda r: stopped(r, "mild")], checkpoint, sample, sglang_router_policy=policy)
    assert server.headers[0].get("X-Smg-Routing-Key") == key


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_turn": 3}, ValueError, "unknown keys under on_policy_tokens: 'max_turn' .did you mean 'max_turns'"),
        ({"max_turns": 0}, ValueError, r"on_policy_tokens\.max_turns must be in \[1, 10000\], got 0"),
        ({"max_turns": True}, TypeError, r"on_policy_tokens\.max_turns must be a number"),
        ({"max_turns": 2.5}, TypeError, r"on_policy_tokens\.max_turns must be an integer in \[1, 10000\], got 2.5"),
        ({"max_attempts": 0}, ValueError, r"on_policy_tokens\.max_attempts must be in \[1, 1000\], got 0"),
        ({"environment": "step"}, ValueError, "a dotted path such as my_agent.step, got 'step'"),
        ({"environment": "os.path.join"}, TypeError, "os.path.join must be an async def"),
        ("an_environment.step", TypeError, "on_policy_tokens must be a mapping of environment, max_turns"),
    ],
)
def test_a_setting_that_is_unknown_or_out_of_range_is_named(checkpoint, settings, error, message):
    with pytest.raises(error, match=message):
        run([], checkpoint, Sample(prompt="The weather"), settings=settings)


@pytest.mark.parametrize(
    ("flags", "fields", "message"),
    [
        ({"use_rollout_routing_replay": True}, {}, "does not support use_rollout_routing_replay .got True"),
        ({"use_sampling_support_replay": True}, {}, "does not support use_sampling_support_replay .got True"),
        ({"lora_rank": 8}, {}, "does not support lora_rank .got 8"),
        ({}, {"multimodal_inputs": {"images": ["a"], "videos": None}}, "takes text only, the sample has images"),
    ],
)
def test_what_would_be_lost_is_refused(checkpoint, flags, fields, message):
    with pytest.raises(ValueError, match=message):
        run([], checkpoint, Sample(prompt="The weather", **fields), **flags)


def test_flags_that_are_off_are_not_in_the_way(checkpoint):
    sample = Sample(prompt="The weather", multimodal_inputs={"images": None})
    run([lambda r: stopped(r, "mild")], checkpoint, sample, use_rollout_routing_replay=False, lora_rank=0)
    assert sample.status is Status.COMPLETED
    run([lambda r: stopped(r, "mild")], checkpoint, Sample(prompt="The"), lora_rank=8, lora_train_only=True)


def test_log_probs_that_are_not_those_of_the_behavior_policy_are_said_once(checkpoint):
    definitions._warn_once.cache_clear()
    for params in ({**LIMITS, "top_p": 0.9}, {**LIMITS, "repetition_penalty": 1.1}):
        match = r"top_p=0.9 keeps\) is missing" if params["top_p"] < 1 else "cannot be made comparable"
        with pytest.warns(definitions.LogProbDefinitionWarning, match=match):
            run([lambda r: stopped(r, "mild")], checkpoint, Sample(prompt="The weather"), params=params)
        with warnings.catch_warnings(action="error"):
            run([lambda r: stopped(r, "mild")], checkpoint, Sample(prompt="The weather"), params=params)
    with warnings.catch_warnings(action="error"):
        greedy = {**LIMITS, "temperature": 0.0, "top_p": 0.9}
        run([lambda r: stopped(r, "mild")], checkpoint, Sample(prompt="The weather"), params=greedy)


TOP_P_REPLAY = {**LIMITS, "top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}


def test_log_probs_over_the_kept_tokens_are_those_of_the_behavior_policy_where_slimes_server_says_so(checkpoint):
    def replayed(request):
        response = stopped(request, "mild")
        response["meta_info"]["top_p_token_ids"] = ""
        return response

    definitions._warn_once.cache_clear()
    with warnings.catch_warnings(action="error"):
        run([replayed], checkpoint, Sample(prompt="The weather"), params=TOP_P_REPLAY)
    with pytest.warns(definitions.LogProbDefinitionWarning, match="only slime's SGLang knows it"):
        run([lambda r: stopped(r, "mild")], checkpoint, Sample(prompt="The weather"), params=TOP_P_REPLAY)


@pytest.mark.parametrize(
    ("flags", "match"),
    [
        ({}, "speculative decoding: on a CPU"),
        ({"sglang_speculative_accept_threshold_acc": 0.9}, "_acc=0.9: how likely a token is depends on"),
    ],
)
def test_speculative_decoding_is_said_once(checkpoint, flags, match):
    definitions._warn_once.cache_clear()
    flags = {"sglang_speculative_algorithm": "EAGLE", **flags}
    with pytest.warns(definitions.LogProbDefinitionWarning, match=match):
        run([lambda r: stopped(r, "mild")], checkpoint, Sample(prompt="The weather"), **flags)
    with warnings.catch_warnings(action="error"):
        run([lambda r: stopped(r, "mild")], checkpoint, Sample(prompt="The weather"), **flags)


THINK = """
{%- for turn in messages %}{{- '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + ('' if thinking else '</think>') }}{%- endif %}"""


@dataclass
class EvaluationDataset:
    """As slime's."""

    name: str
    apply_chat_template_kwargs: dict[str, Any] | None = None
    custom_generate_function_path: str | None = None
    metadata_overrides: dict[str, Any] = field(default_factory=dict)

    def inject_metadata(self, metadata):
        return {**metadata, **self.metadata_overrides}


def generation_prompts(checkpoint, environment, tmp_path, sample, datasets, *, evaluation):
    """The prompt of each turn, its end only."""
    environment([{"role": "user", "content": "Thanks"}], None)
    template = tmp_path / "template.jinja"
    template.write_text(THINK)
    with loopback_server(lambda number, request: (200, stopped(request, "mild"))) as server:
        others = {"apply_chat_template_kwargs": {"thinking": True}, "chat_template_path": str(template)}
        args = host_args(server.port, checkpoint, on_policy_tokens=WITH_ENVIRONMENT, **others)
        args.rollout_max_context_len, args.eval_datasets = CONTEXT, datasets
        asyncio.run(generate(args, sample, LIMITS, evaluation=evaluation))
    return [TOKENIZER.decode(r["input_ids"]).rpartition("assistant\n")[2] for r in server.requests]


def test_an_evaluation_dataset_has_its_own_template_options_in_every_turn(checkpoint, environment, tmp_path):
    arguments = (checkpoint, environment, tmp_path)
    plain = EvaluationDataset("plain", {"thinking": False}, metadata_overrides={"dataset": "plain"})
    thinking = EvaluationDataset("thinking", metadata_overrides={"dataset": "thinking"})
    for dataset, expected in ((plain, "</think>"), (thinking, "")):
        sample = Sample(prompt=QUESTION, metadata=dataset.inject_metadata({}))
        found = generation_prompts(*arguments, sample, [plain, thinking], evaluation=True)
        assert found == [expected] * 2
    # Training has the host's, also where an evaluation dataset would fit; a sample's own come first.
    sample = Sample(prompt=QUESTION, metadata={"dataset": "plain"})
    assert generation_prompts(*arguments, sample, [plain], evaluation=False) == [""] * 2
    sample = Sample(prompt=QUESTION, metadata={"dataset": "thinking"})
    sample.apply_chat_template_kwargs = {"thinking": False}
    assert generation_prompts(*arguments, sample, [plain, thinking], evaluation=True) == ["</think>"] * 2


def test_a_sample_that_may_be_of_two_datasets_with_other_options_is_refused(checkpoint, environment, tmp_path):
    arguments = (checkpoint, environment, tmp_path)
    datasets = [EvaluationDataset("a", {"thinking": False}), EvaluationDataset("b")]
    with pytest.raises(ValueError, match=r"evaluation datasets a .* and b .* differ, and sample 0 may be of both"):
        generation_prompts(*arguments, Sample(prompt=QUESTION), datasets, evaluation=True)
    datasets[1].custom_generate_function_path = "of.another"
    assert generation_prompts(*arguments, Sample(prompt=QUESTION), datasets, evaluation=True) == ["</think>"] * 2
    # A text that is answered with a text never meets the template.
    datasets[1].custom_generate_function_path = None
    with loopback_server(lambda number, request: (200, stopped(request, "mild"))) as server:
        args = host_args(server.port, checkpoint, eval_datasets=datasets)
        asyncio.run(generate(args, Sample(prompt="The weather"), LIMITS, evaluation=True))
