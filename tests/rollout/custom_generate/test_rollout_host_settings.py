# SPDX-License-Identifier: Apache-2.0
"""The custom generate function: hosts, settings, evaluation, other log-probs, and what a server may not answer."""

import asyncio
import copy
import socket
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from generate_runs import CONTEXT, LIMITS, QUESTION, TOOL_RESULT, WITH_ENVIRONMENT, run
from host_samples import loopback_server
from sglang_answers import TOKENIZER, stopped
from tiny_tokenizers import encode
from tokens.sample import Sample, Status, host_args
from transformers import AutoTokenizer

from mis_ext.rollout.custom_generate import host as own_host
from mis_ext.rollout.custom_generate.function import generate
from mis_ext.rollout.custom_generate.host import LogProbDefinitionWarning, _warn_once
from mis_ext.rollout.generation import AbortedRequest, CountMismatch, RolloutError

pytestmark = pytest.mark.usefixtures("short_pauses")


@pytest.mark.parametrize(("limits", "room"), [({}, 20), ({"eval_max_context_len": 24}, 24)])
def test_evaluation_has_a_limit_of_its_own_and_no_warning_about_training(tokenizer_folder, limits, room):
    _warn_once.cache_clear()
    num_known = len(encode(TOKENIZER, "The weather"))
    with loopback_server(lambda number, request: (200, stopped(request, "mild"))) as server:
        args = host_args(server.port, tokenizer_folder, rollout_max_context_len=20, **limits)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            asyncio.run(generate(args, Sample(prompt="The weather"), {**LIMITS, "top_p": 0.7}, evaluation=True))
    assert server.requests[0]["sampling_params"]["max_new_tokens"] == room - num_known


@pytest.mark.parametrize("host", ["slime", "miles"])
def test_a_hosts_sample_is_sent_with_the_hosts_own_client(tokenizer_folder, monkeypatch, host):
    calls = []

    async def post(url, payload, max_retries=60, **options):
        calls.append((url, max_retries, options))
        if len(calls) == 2:
            raise OSError("all connections are gone")
        return stopped(payload, "mild")

    def load_tokenizer(tokenizer_folder, chat_template_path=None, **options):
        loaded.append((chat_template_path, options))
        return AutoTokenizer.from_pretrained(tokenizer_folder)

    loaded = []
    # Whatever ran before.
    own_host.load_tokenizer.cache_clear()
    client, loader = (types.ModuleType(f"{host}.utils.{name}") for name in ("http_utils", "processing_utils"))
    client.post, loader.load_tokenizer = post, load_tokenizer
    for module in (types.ModuleType(host), types.ModuleType(f"{host}.utils"), client, loader):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    host_class = type("Sample", (Sample,), {"__module__": f"{host}.utils.types"})
    args = host_args(9, tokenizer_folder, on_policy_tokens={"max_attempts": 5}, router_policy="consistent_hashing")

    sample = asyncio.run(generate(args, host_class(prompt="The weather", session_id="abc"), LIMITS))
    assert sample.loss_mask == [1] * 5
    assert calls == [("http://127.0.0.1:9/generate", 5, {"headers": {"X-SMG-Routing-Key": "abc"}})]
    # The host's loader repairs what newer versions of transformers break.
    assert loaded == [(None, {"trust_remote_code": True})]
    with pytest.raises(ConnectionError, match="no response after 5 attempts: all connections are gone"):
        asyncio.run(generate(args, host_class(prompt="The weather"), LIMITS))
    assert calls[1][2] == {}
    assert (own_host.Settings().max_turns, own_host.Settings().max_attempts) == (16, 60)


@pytest.mark.parametrize(("policy", "key"), [("consistent_hashing", "abc"), ("round_robin", None), (None, None)])
def test_the_session_is_named_to_a_router_that_routes_by_it(tokenizer_folder, policy, key):
    sample = Sample(prompt="The weather", session_id="abc")
    server = run([lambda r: stopped(r, "mild")], tokenizer_folder, sample, sglang_router_policy=policy)
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
        ({"environment": "os.path.join"}, TypeError, "os.path.join must be an async function"),
        (
            {"environment": "absent.step"},
            ValueError,
            r"on_policy_tokens\.environment: absent\.step cannot be imported: No",
        ),
        ({"environment": "os.step"}, ValueError, r"on_policy_tokens\.environment: os\.step cannot be imported: module"),
        ({"canary": "on"}, ValueError, "on_policy_tokens.canary must be warn or stop, got 'on'"),
        ({"cache_by_version": 1}, TypeError, "on_policy_tokens.cache_by_version must be true or false, got 1"),
        ("an_environment.step", TypeError, "on_policy_tokens must be a mapping of environment, max_turns"),
    ],
)
def test_a_setting_that_is_unknown_or_out_of_range_is_named(tokenizer_folder, settings, error, message):
    with pytest.raises(error, match=message):
        run([], tokenizer_folder, Sample(prompt="The weather"), settings=settings)


@pytest.mark.parametrize(
    ("flags", "fields", "message"),
    [
        ({"use_rollout_indexer_replay": True}, {}, "does not support use_rollout_indexer_replay .got True"),
        ({"use_sampling_support_replay": True}, {}, "does not support use_sampling_support_replay .got True"),
        ({"lora_rank": 8}, {}, "does not support lora_rank .got 8"),
        ({}, {"multimodal_inputs": {"images": ["a"], "videos": None}}, "supports text only, but the sample has images"),
    ],
)
def test_what_would_be_lost_is_refused(tokenizer_folder, flags, fields, message):
    with pytest.raises(ValueError, match=message):
        run([], tokenizer_folder, Sample(prompt="The weather", **fields), **flags)


def test_log_probs_that_are_not_those_of_the_behavior_policy_are_said_once(tokenizer_folder):
    _warn_once.cache_clear()
    for params in ({**LIMITS, "top_p": 0.9}, {**LIMITS, "repetition_penalty": 1.1}):
        match = r"top_p=0.9 keeps\) is missing" if params["top_p"] < 1 else "cannot be made comparable"
        with pytest.warns(LogProbDefinitionWarning, match=match):
            run([lambda r: stopped(r, "mild")], tokenizer_folder, Sample(prompt="The weather"), params=params)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run([lambda r: stopped(r, "mild")], tokenizer_folder, Sample(prompt="The weather"), params=params)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        greedy = {**LIMITS, "temperature": 0.0, "top_p": 0.9}
        run([lambda r: stopped(r, "mild")], tokenizer_folder, Sample(prompt="The weather"), params=greedy)


TOP_P_REPLAY = {**LIMITS, "top_p": 0.9, "custom_params": {"return_top_p_token_ids": True}}


def test_log_probs_over_the_kept_tokens_are_those_of_the_behavior_policy_where_slimes_server_says_so(tokenizer_folder):
    def replayed(request):
        response = stopped(request, "mild")
        response["meta_info"]["top_p_token_ids"] = ""
        return response

    _warn_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([replayed], tokenizer_folder, Sample(prompt="The weather"), params=TOP_P_REPLAY)
    with pytest.warns(LogProbDefinitionWarning, match="only slime's SGLang supports it"):
        run([lambda r: stopped(r, "mild")], tokenizer_folder, Sample(prompt="The weather"), params=TOP_P_REPLAY)


def test_speculative_decoding_is_said_once(tokenizer_folder):
    _warn_once.cache_clear()
    flags = {"sglang_speculative_algorithm": "EAGLE"}
    with pytest.warns(LogProbDefinitionWarning, match="sglang_speculative_algorithm"):
        run([lambda r: stopped(r, "mild")], tokenizer_folder, Sample(prompt="The weather"), **flags)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run([lambda r: stopped(r, "mild")], tokenizer_folder, Sample(prompt="The weather"), **flags)


THINK = """
{%- for turn in messages %}{{- '<|im_start|>' + turn.role + '\\n' + turn.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' + ('' if thinking else '</think>') }}{%- endif %}"""


def test_the_options_of_the_template_are_the_samples_or_the_runs(tokenizer_folder, environment, tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text(THINK)

    def generation_prompts(*datasets, **options):
        """The prompt of each turn, its end only."""
        environment([{"role": "user", "content": "Thanks"}], None)
        others = {"apply_chat_template_kwargs": {"thinking": True}, "chat_template_path": str(template)}
        sample = Sample(prompt=QUESTION)
        sample.apply_chat_template_kwargs = options
        with loopback_server(lambda number, request: (200, stopped(request, "mild"))) as server:
            args = host_args(server.port, tokenizer_folder, on_policy_tokens=WITH_ENVIRONMENT, **others)
            args.rollout_max_context_len, args.eval_datasets = CONTEXT, datasets
            asyncio.run(generate(args, sample, LIMITS, evaluation=True))
        return [TOKENIZER.decode(r["input_ids"]).rpartition("assistant\n")[2] for r in server.requests]

    same = SimpleNamespace(name="same", apply_chat_template_kwargs={"thinking": True})
    other = SimpleNamespace(name="other", apply_chat_template_kwargs={"thinking": False})
    assert generation_prompts(same, SimpleNamespace(name="none")) == [""] * 2
    assert generation_prompts(other, thinking=False) == ["</think>"] * 2
    with pytest.raises(ValueError, match=r"evaluation dataset other .*'thinking': False.* are not those of the run"):
        generation_prompts(same, other)
    # A text that is answered with a text never meets the template.
    with loopback_server(lambda number, request: (200, stopped(request, "mild"))) as server:
        args = host_args(server.port, tokenizer_folder, eval_datasets=[other])
        asyncio.run(generate(args, Sample(prompt="The weather"), LIMITS, evaluation=True))


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
    with pytest.raises(ConnectionError, match=r"/generate: no response after 2 attempts: HTTP 503: warming up"):
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
        with pytest.raises(ConnectionError, match=rf"http://127\.0\.0\.1:{port}/generate: no response after 2"):
            asyncio.run(generate(args, Sample(prompt="The weather"), LIMITS))
