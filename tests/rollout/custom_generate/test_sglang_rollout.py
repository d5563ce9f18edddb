# SPDX-License-Identifier: Apache-2.0
"""The custom generate function against SGLang's real HTTP server on a CPU."""

# The imports after the skip need packages that only the SGLang environment has.

import asyncio
import copy
import importlib.util
import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed (requirements/sglang-cpu.txt)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("the server is started without the kernels that a GPU needs", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))

from tiny_shape import TINY
from tiny_tokenizers import english_tokenizer, render
from tokens.sample import Sample, Status, host_args
from transformers import Qwen3Config, Qwen3MoeConfig
from transformers.models.auto import AutoModelForCausalLM

from mis_ext.rollout import StaleWeightsWarning, compare_weights
from mis_ext.rollout.custom_generate import function
from mis_ext.rollout.custom_generate.function import generate
from mis_ext.rollout.readers.server_sent_events import join_stream
from mis_ext.rollout.readers.servers import read_sglang_generate

# Megatron-Core, which the other examples need, tells at import which optional kernels are missing.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tokens.server import call_server, sglang_server

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

TOKENIZER = english_tokenizer()
END = TOKENIZER.eos_token_id
CONTEXT = 2048
TEMPERATURE = 0.7
SAMPLING = {
    "temperature": TEMPERATURE,
    "top_p": 0.9,
    "max_new_tokens": 24,
    "no_stop_trim": True,
    "skip_special_tokens": False,
}
# Long enough to be aborted while it runs.
NUM_LONG = 1600
LONG = {**SAMPLING, "max_new_tokens": NUM_LONG, "ignore_eos": True}
# float32 against float32 agrees to about 1e-6; another temperature is off by about 1.
TOLERANCE = 1e-4
QUESTIONS = [[{"role": "user", "content": f"What is the weather in Paris on day {day}?"}] for day in range(12)]


async def step(sample, text):
    """Answers twice."""
    turns = sample.metadata.setdefault("turns", [])
    turns.append(text)
    return [{"role": "tool", "content": "rain"}] if len(turns) < 3 else None


ENVIRONMENT = {"on_policy_tokens": {"environment": f"{__name__}.step"}, "rollout_max_context_len": CONTEXT}


def drawn(kind, **more):
    shape = TINY | {"vocab_size": len(TOKENIZER), "max_position_embeddings": CONTEXT, "eos_token_id": END}
    config = kind(**shape, head_dim=16, **more)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        # So that turns end.
        model.lm_head.weight[END] *= 4
    return model


def saved(model, checkpoint):
    model.save_pretrained(checkpoint)
    (checkpoint / "generation_config.json").unlink(missing_ok=True)
    TOKENIZER.save_pretrained(checkpoint)
    return checkpoint


@pytest.fixture(scope="module")
def model():
    return drawn(Qwen3Config, architectures=["Qwen3ForCausalLM"])


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    """One for all tests of this file: to start it takes most of their time."""
    checkpoint, shim = saved(model, tmp_path_factory.mktemp("checkpoint")), tmp_path_factory.mktemp("shim")
    # SGLang compares weights on CUDA alone, and moves nothing else to it here: that move is left out.
    (shim / "sitecustomize.py").write_text("import torch\ntorch.Tensor.cuda = lambda self, *a, **k: self\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(shim))
        with sglang_server(checkpoint, weight_version="7") as port:
            yield host_args(port, checkpoint)


@pytest.fixture
def responses(monkeypatch):
    """What the server answers, in the order in which it does."""
    came = []
    send = function.post_json

    async def record(url, request, **options):
        response = await send(url, request, **options)
        came.append((request["input_ids"], response))
        return response

    monkeypatch.setattr(function, "post_json", record)
    return came


def with_options(args, **options):
    return type(args)(**vars(args) | options)


def run(args, samples, params=SAMPLING):
    async def all_of_them():
        await asyncio.gather(*(generate(args, sample, params) for sample in samples))

    asyncio.run(all_of_them())


def run_and_abort(args, sample, params=LONG):
    """Abort as soon as tokens are there."""

    async def abort_when_it_runs():
        task = asyncio.create_task(generate(args, sample, params))
        await asyncio.sleep(0.5)
        while not task.done():
            await asyncio.to_thread(call_server, args.sglang_router_port, "/abort_request", {"abort_all": True})
            await asyncio.sleep(0.1)
        await task

    asyncio.run(abort_when_it_runs())


@torch.no_grad()
def teacher_forced(model, sample):
    """Log-probs of the response's tokens at the temperature, without the cut of top-p, which SGLang leaves out too."""
    first = len(sample.tokens) - sample.response_length
    logits = model(torch.tensor([sample.tokens])).logits[0, first - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(sample.tokens[first:])[:, None])[:, 0]


def largest_difference(model, samples):
    differences = []
    for sample in samples:
        difference = (teacher_forced(model, sample) - torch.tensor(sample.rollout_log_probs)).abs()
        differences.append(difference[torch.tensor(sample.loss_mask) == 1].max().item())
    return max(differences)


def test_conversations_hold_what_the_server_sampled_bit_for_bit(server, model, responses):
    samples = [Sample(prompt=question, index=index) for index, question in enumerate(QUESTIONS)]
    run(with_options(server, **ENVIRONMENT), samples)
    assert {sample.status for sample in samples} == {Status.COMPLETED, Status.TRUNCATED}
    assert max(len(sample.metadata["turns"]) for sample in samples if sample.status is Status.COMPLETED) == 3
    for sample in samples:
        prompt = render(TOKENIZER, sample.prompt)
        assert sample.tokens[: len(prompt)] == prompt
        mine = sorted(
            (pair for pair in responses if pair[0] == sample.tokens[: len(pair[0])]), key=lambda pair: len(pair[0])
        )
        expected = [0.0] * len(sample.tokens)
        for prompt_ids, response in mine:
            rows = response["meta_info"]["output_token_logprobs"]
            span = slice(len(prompt_ids), len(prompt_ids) + len(rows))
            assert sample.tokens[span] == response["output_ids"] == [row[1] for row in rows]
            expected[span] = [row[0] for row in rows]
        assert sample.rollout_log_probs == expected[len(prompt) :]
        assert sample.loss_mask == [int(log_prob != 0) for log_prob in sample.rollout_log_probs]
        assert sample.weight_versions == ["7"] * len(mine)
        assert TOKENIZER.decode(sample.tokens[len(prompt) :]) == sample.response
        assert sample.metadata["on_policy_tokens"]["boundaries/contiguous"] == len(mine) - 1
        last = mine[-1][1]["meta_info"]["finish_reason"]
        assert (sample.status, last["type"]) in {(Status.COMPLETED, "stop"), (Status.TRUNCATED, "length")}
    assert sum(len(sample.metadata["on_policy_tokens"]) > 0 for sample in samples) == len(samples)
    assert largest_difference(model, samples) < TOLERANCE


def test_a_partial_rollout_is_one_sequence_of_two_weight_versions(server, model):
    args = with_options(server, partial_rollout=True)
    sample = Sample(prompt=QUESTIONS[1])
    run_and_abort(args, sample)
    before = sample.response_length
    assert sample.status is Status.ABORTED
    assert 0 < before < NUM_LONG
    call_server(args.sglang_router_port, "/update_weight_version", {"new_version": "8", "abort_all_requests": False})
    try:
        run(args, [sample], LONG)
    finally:
        call_server(
            args.sglang_router_port, "/update_weight_version", {"new_version": "7", "abort_all_requests": False}
        )
    assert sample.status is Status.TRUNCATED
    assert sample.response_length == NUM_LONG
    assert sample.weight_versions == ["7", "8"]
    assert sample.loss_mask == [1] * NUM_LONG
    assert largest_difference(model, [sample]) < TOLERANCE


def test_a_cache_key_keeps_old_keys_and_values_from_new_weights_and_a_canary_sees_them(
    server, model, responses, tmp_path
):
    """The host does not flush the cache, as Miles does not where a pause leaves requests in place."""
    new = copy.deepcopy(model)
    torch.manual_seed(2)
    with torch.no_grad():
        for weight in new.parameters():
            weight += 0.05 * torch.randn_like(weight)
    new.save_pretrained(tmp_path)
    keyed = with_options(server, on_policy_tokens={"cache_by_version": True, "canary": "warn"})
    update = {"flush_cache": False, "abort_all_requests": False}

    def sampled(args):
        sample = Sample(prompt=QUESTIONS[2])
        run(args, [sample])
        return sample, responses[-1][1]["meta_info"]["cached_tokens"], sample.metadata["on_policy_tokens"]

    port = server.sglang_router_port
    call_server(port, "/flush_cache", {})
    # Within a version the prefix is shared.
    plain, in_key = [sampled(server) for _ in range(2)], [sampled(keyed) for _ in range(2)]
    assert [cached > 0 for _, cached, _ in plain] == [cached > 0 for _, cached, _ in in_key] == [False, True]
    assert largest_difference(model, [sample for sample, *_ in (*plain, *in_key)]) < TOLERANCE
    assert all(counts["canary_first"] == 1 for *_, counts in in_key)
    try:
        call_server(port, "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "8", **update})
        (old, cached_old, _), (fresh, cached_fresh, counts) = sampled(server), sampled(keyed)
        assert cached_old > 0 == cached_fresh
        assert largest_difference(new, [old]) > 100 * TOLERANCE
        assert largest_difference(new, [fresh]) < TOLERANCE
        assert counts["canary_arrived"] == 1
        # A name without weights.
        call_server(port, "/update_weight_version", {"new_version": "9", **update})
        with pytest.warns(StaleWeightsWarning, match="the weights of version 9 are those of version 8"):
            *_, counts = sampled(keyed)
        assert counts["canary_old"] == 1
    finally:
        body = {"model_path": server.hf_checkpoint, "weight_version": "7", "flush_cache": True}
        call_server(port, "/update_weights_from_disk", body)


def streamed(port, **changes):
    """A request, and the answer to it whole and streamed: greedy, so that both are the same."""
    parameters = {"max_new_tokens": 24, "temperature": 0, "ignore_eos": True}
    request = {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": parameters, **changes}
    whole = json.loads(call_server(port, "/generate", request))
    return request, whole, call_server(port, "/generate", {**request, "stream": True}).splitlines()


def test_a_stream_gives_what_the_whole_answer_gives(server):
    request, whole, lines = streamed(server.sglang_router_port, top_logprobs_num=2)
    joined = join_stream(lines)
    mine, expected = (read_sglang_generate(request, response) for response in (joined, whole))
    # The second answer finds the prompt in the cache, which rounds otherwise.
    assert mine.log_probs == pytest.approx(expected.log_probs, abs=1e-5)
    assert replace(mine, log_probs=[], request_id="") == replace(expected, log_probs=[], request_id="")
    assert len(joined["meta_info"]["output_top_logprobs"]) == 24
    # An event that is lost is never silent: another one has it.
    first = next(number for number, line in enumerate(lines) if line.startswith(b"data: {"))
    assert join_stream([*lines[:first], *lines[first + 1 :]]) == joined


@torch.no_grad()
def own_experts(model, sample):
    """What the routers of transformers choose for the tokens that were fed, in ascending order."""
    layers = model(torch.tensor([sample.tokens[:-1]]), output_router_logits=True).router_logits
    return torch.stack([each.topk(2).indices for each in layers], 1).sort(-1).values


def test_the_experts_of_conversations_are_those_of_the_model(tmp_path):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
    model = drawn(Qwen3MoeConfig, architectures=["Qwen3MoeForCausalLM"], **experts)
    flags = {"use_rollout_routing_replay": True, "num_layers": 2, "moe_router_topk": 2, "num_experts": 8}
    with sglang_server(saved(model, tmp_path), weight_version="7", returns_experts=True) as port:
        args = host_args(port, tmp_path, **flags)
        turns = [Sample(prompt=question, index=index) for index, question in enumerate(QUESTIONS)]
        run(with_options(args, **ENVIRONMENT), turns)
        partial = with_options(args, partial_rollout=True)
        continued = Sample(prompt=QUESTIONS[0], index=len(turns))
        run_and_abort(partial, continued)
        before = len(continued.rollout_routed_experts)
        run(partial, [continued], LONG)
    assert max(sample.metadata["on_policy_tokens"]["generations"] for sample in turns) == 3
    assert (continued.status, before < NUM_LONG) == (Status.TRUNCATED, True)
    for sample in (*turns, continued):
        rows = torch.from_numpy(sample.rollout_routed_experts).sort(-1).values
        assert torch.equal(rows.long(), own_experts(model, sample))


def test_tensors_that_did_not_arrive_are_named_with_their_difference(server, model, tmp_path):
    """A sync that skipped one tensor, one that scaled one, one that was right, and a checkpoint without one."""
    trained, scaled = copy.deepcopy(model), copy.deepcopy(model)
    skipped = "model.layers.1.mlp.down_proj.weight"
    with torch.no_grad():
        for each in (*trained.parameters(), *scaled.parameters()):
            each += 0.01
        largest = scaled.model.layers[0].self_attn.k_proj.weight.abs().max().item()
        scaled.model.layers[0].self_attn.k_proj.weight *= 2.0
    partly = copy.deepcopy(trained)
    partly.get_parameter(skipped).data.copy_(model.get_parameter(skipped))
    folders = {"trained": trained, "partly": partly, "scaled": scaled}
    folders = {name: saved(each, tmp_path / name) for name, each in folders.items()}
    without = {name: values for name, values in trained.state_dict().items() if name != "model.norm.weight"}
    folders["without"] = tmp_path / "without"
    trained.save_pretrained(folders["without"], state_dict=without)
    port = server.sglang_router_port
    url = f"http://127.0.0.1:{port}"

    def compared(synced, trainer="trained"):
        call_server(port, "/update_weights_from_disk", {"model_path": str(folders[synced])})
        return compare_weights(url, folders[trainer])

    try:
        assert compared("trained") == []
        (found,) = compared("partly")
        assert found.name == skipped
        assert found.max_abs_diff == pytest.approx(0.01, rel=1e-3)
        (found,) = compared("scaled")
        # The engine joins q, k, and v.
        assert found.name == "model.layers.0.self_attn.qkv_proj.weight"
        assert found.max_abs_diff == pytest.approx(largest, rel=1e-5)
        with pytest.raises(ConnectionError, match="update_weights_from_disk refused"):
            compare_weights(url, tmp_path / "absent")
        assert compared("trained", trainer="trained") == []
        assert [each.name for each in compared("trained", trainer="without")] == ["model.norm.weight"]
    finally:
        call_server(port, "/update_weights_from_disk", {"model_path": server.hf_checkpoint, "weight_version": "7"})
