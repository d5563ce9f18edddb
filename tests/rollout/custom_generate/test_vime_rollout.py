# SPDX-License-Identifier: Apache-2.0
"""The custom generate function in vime: ids to vLLM's endpoint, and its ids, log-probs, versions, and experts back.

The answers are after a response that vLLM 0.32.0 gave; vime's modules are stand-ins, after its code.
"""

import asyncio
import base64
import copy
import io
import json
import sys
import types
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_tokenizers import TURN_END, encode, encode_bytewise, render

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from generate_runs import CONTEXT, LIMITS, QUESTION, REPLAYED, TOOL_RESULT, WITH_ENVIRONMENT, experts
from host_samples import SlimeSample, loopback_server
from sglang_answers import END, TOKENIZER
from tokens.sample import Status
from transformers import AutoTokenizer

from mis_ext.rollout.custom_generate.endpoints import ask_json
from mis_ext.rollout.custom_generate.function import generate
from mis_ext.rollout.custom_generate.host import LogProbDefinitionWarning
from mis_ext.rollout.generation import CountMismatch, LogProbError, RolloutError

RECORDED = Path(__file__).resolve().parents[2] / "data" / "rollout_responses" / "vllm" / "processed"
GENUINE = json.loads((RECORDED / "generate_stop_token.json").read_text())["response"]


class VimeSample(SlimeSample):
    """vime's class has slime's method; only its module tells."""


VimeSample.__module__ = "vime.utils.types"


@pytest.fixture(autouse=True)
def vime(monkeypatch):
    """vime's modules, as far as they are called; the flag of an abort."""
    names = ("utils.http_utils", "utils.processing_utils", "rollout.vllm_rollout")
    client, loader, rollout = modules = [types.ModuleType(f"vime.{name}") for name in names]
    for module in modules:
        monkeypatch.setitem(sys.modules, module.__name__, module)
    state = types.SimpleNamespace(aborted=False, posted=[])

    async def post(url, payload, max_retries=60, headers=None, timeout=None):
        state.posted.append(headers)
        return await ask_json(url, payload, max_attempts=1, headers=headers)

    client.post = post
    loader.load_tokenizer = lambda path, **options: AutoTokenizer.from_pretrained(path)
    rollout.GenerateState = lambda args: state
    return state


def answer(request, ids, *, reason="stop", version="7", start=0, rows=False, kept=False):
    """The genuine response with other tokens; where the model ended with its own end token vLLM names no match."""
    response, prompt = copy.deepcopy(GENUINE), request["token_ids"]
    (choice,) = response["choices"]
    count = len(ids)
    content = [
        {"token_id": token, "logprob": -0.1 - 0.01 * (number + len(prompt)), "rank": 1, "top_logprobs": []}
        for number, token in enumerate(ids)
    ]
    choice |= {"token_ids": ids, "finish_reason": reason, "stop_reason": None, "logprobs": {"content": content}}
    choice["weight_versions"] = [{"version": version, "start": 0, "end": count}] if count else None
    choice["sampling_mask"] = [[token, token + 1] for token in ids] if kept else None
    fed = [*prompt, *ids][:-1]
    found = [experts(int(version), place, token) for place, token in enumerate(fed)][start:]
    file = io.BytesIO()
    np.save(file, np.array(found, np.uint8))
    choice["routed_experts"] = base64.b64encode(file.getvalue()).decode() if rows else None
    response["prompt_token_ids"] = None
    response["usage"] = {"prompt_tokens": len(prompt), "completion_tokens": count, "total_tokens": len(prompt) + count}
    return response


def ended(request, text, **how):
    return answer(request, [*encode_bytewise(TOKENIZER, text), END], **how)


def cut(request, text, **how):
    return answer(request, encode_bytewise(TOKENIZER, text), reason="length", **how)


def aborted(request, text, **how):
    return answer(request, encode_bytewise(TOKENIZER, text), reason="abort", **how)


def run(script, tokenizer_folder, sample, *, params=LIMITS, settings=None, **others):
    scripts = iter(script)
    with loopback_server(lambda number, request: (200, next(scripts)(request))) as server:
        address = {"vllm_router_ip": "127.0.0.1", "vllm_router_port": server.port}
        others = {"rollout_max_context_len": CONTEXT} | others
        args = types.SimpleNamespace(
            **address, hf_checkpoint=str(tokenizer_folder), on_policy_tokens=settings, **others
        )
        assert asyncio.run(generate(args, sample, params)) is sample
    assert not list(scripts)
    return server


def test_one_turn_gives_the_ids_log_probs_and_version_as_they_came(tokenizer_folder, vime) -> None:
    sample = VimeSample(prompt="The weather", index=3, session_id="s 1")
    server = run([lambda r: ended(r, "mild")], tokenizer_folder, sample, router_policy="consistent_hash")
    prompt_ids = encode(TOKENIZER, "The weather")
    asked = {"temperature": 0.7, "top_p": 1.0, "skip_special_tokens": False, "max_tokens": 32, "logprobs": 1}
    assert server.requests == [
        {
            "path": "/inference/v1/generate",
            "model": str(tokenizer_folder),
            "token_ids": prompt_ids,
            "sampling_params": asked,
        }
    ]
    assert vime.posted == [{"x-session-id": "s 1"}]
    assert sample.tokens == [*prompt_ids, *encode_bytewise(TOKENIZER, "mild"), END]
    assert sample.rollout_log_probs == [-0.1 - 0.01 * (number + len(prompt_ids)) for number in range(5)]
    assert sample.loss_mask == [1] * 5
    assert sample.response == f"mild{TURN_END}"
    assert sample.weight_versions == ["7"]
    assert sample.status is Status.COMPLETED


def test_later_turns_hold_the_earlier_ones_and_one_end_of_each(tokenizer_folder, environment) -> None:
    environment(TOOL_RESULT, None)
    sample = VimeSample(prompt=QUESTION)
    server = run(
        [lambda r: ended(r, "Let me look"), lambda r: cut(r, "It says rain")],
        tokenizer_folder,
        sample,
        settings=WITH_ENVIRONMENT,
        params=LIMITS | {"stop": ["###"]},
    )
    first, second = (request["token_ids"] for request in server.requests)
    assert second[: len(first)] == first == render(TOKENIZER, QUESTION)
    messages = [*QUESTION, {"role": "assistant", "content": "Let me look"}, *TOOL_RESULT]
    assert TOKENIZER.decode(second) == TOKENIZER.decode(render(TOKENIZER, messages))
    assert server.requests[0]["sampling_params"]["include_stop_str_in_output"] is True
    assert sample.status is Status.TRUNCATED


def no_log_probs(choice):
    choice["logprobs"] = None


def one_without(choice):
    del choice["logprobs"]["content"][1]["logprob"]


def too_few(choice):
    choice["logprobs"]["content"].pop()


def of_another_token(choice):
    choice["logprobs"]["content"][1]["token_id"] += 1


@pytest.mark.parametrize("mistake", [no_log_probs, one_without, too_few, of_another_token])
def test_log_probs_that_are_missing_are_an_error_and_not_0(mistake, tokenizer_folder) -> None:
    def wrong(request):
        response = ended(request, "mild")
        mistake(response["choices"][0])
        return response

    sample = VimeSample(prompt="The weather", index=3)
    with pytest.raises(RolloutError, match="sample 3, turn 0") as raised:
        run([wrong], tokenizer_folder, sample)
    if mistake is no_log_probs:
        assert isinstance(raised.value, LogProbError)
    if mistake is too_few:
        assert isinstance(raised.value, CountMismatch)
    assert sample.rollout_log_probs in (None, [])


def test_a_version_beside_the_choices_is_read_too(tokenizer_folder) -> None:
    def patched(request):
        response = ended(request, "mild")
        response["choices"][0]["weight_versions"] = None
        return response | {"weight_version": "12"}

    sample = VimeSample(prompt="The weather")
    run([patched], tokenizer_folder, sample, mis_staleness=True)
    assert sample.weight_versions == ["12"]
    assert sample.teacher_log_probs == [12.0] * 5


def test_an_aborted_sample_goes_on_and_keeps_versions_and_experts(tokenizer_folder) -> None:
    sample = VimeSample(prompt="The weather")
    common = REPLAYED | {"partial_rollout": True, "mis_staleness": True}
    run([lambda r: aborted(r, "mil", rows=True)], tokenizer_folder, sample, **common)
    assert sample.status is Status.ABORTED
    assert sample.response_length == 3
    first = len(sample.tokens) - 1
    server = run([lambda r: ended(r, "d", version="8", rows=True, start=first)], tokenizer_folder, sample, **common)
    assert server.requests[0]["sampling_params"]["routed_experts_prompt_start"] == first
    assert sample.status is Status.COMPLETED
    assert sample.response == f"mild{TURN_END}"
    assert sample.teacher_log_probs == [7.0] * 3 + [8.0] * 2
    fed = sample.tokens[:-1]
    truth = [experts(7 if place < first else 8, place, token) for place, token in enumerate(fed)]
    assert torch.equal(sample.rollout_routed_experts, torch.tensor(truth, dtype=torch.int32))


def test_an_abort_before_the_first_token_leaves_the_sample(tokenizer_folder) -> None:
    sample = VimeSample(prompt="The weather")
    run([lambda r: aborted(r, "")], tokenizer_folder, sample, partial_rollout=True)
    assert sample.status is Status.ABORTED
    assert sample.response_length == 0


@pytest.mark.parametrize("kept", [True, False])
def test_kept_tokens_of_top_p_go_to_the_sample_and_where_there_are_none_a_warning_comes(kept, tokenizer_folder) -> None:
    sample = VimeSample(prompt="The weather")
    params = LIMITS | {"top_p": 0.75 if kept else 0.76}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", LogProbDefinitionWarning)
        run([lambda r: ended(r, "mild", kept=kept)], tokenizer_folder, sample, params=params)
    told = [each for each in caught if each.category is LogProbDefinitionWarning]
    meta = sample.appended[-1]["meta_info"]
    if kept:
        assert not told
        assert meta["top_p_token_offsets"] == [0, 2, 4, 6, 8, 10]
        assert meta["top_p_token_ids"][::2] == sample.tokens[-5:]
    else:
        assert "renormalize" in str(told[0].message)
        assert "top_p_token_ids" not in meta


@pytest.mark.parametrize("key", [{"canary": "warn"}, {"cache_by_version": True}])
def test_what_only_sglang_answers_is_refused(key, tokenizer_folder) -> None:
    with pytest.raises(ValueError, match=f"on_policy_tokens.{next(iter(key))} needs an SGLang"):
        run([], tokenizer_folder, VimeSample(prompt="The weather"), settings=key)
