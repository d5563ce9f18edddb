# SPDX-License-Identifier: Apache-2.0
"""The vLLM rollout engine: what it refuses, its process, and where vLLM is installed its numbers.

``python -m pytest tests/examples/test_vllm_engine.py`` in an environment of ``examples/run_vllm.sh``.
"""

# The imports after the skip need packages that not every environment has.
# ruff: noqa: E402

import importlib.util
import math
import os
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

pytest.importorskip("transformers")

from echo_worker import serve_echo
from grpo import vllm_engine
from grpo.engine_process import EngineProcess
from grpo.vllm_engine import VLLMEngine
from tiny_shape import TINY
from transformers import Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]] * 4
EOS = 3
CONFIG = Qwen3Config(**TINY | {"eos_token_id": EOS}, head_dim=32)


@pytest.fixture
def process(tmp_path):
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "MASTER_ADDR": "127.0.0.1"}
    process = EngineProcess("Echo", serve=serve_echo, log=tmp_path / "log", environment=environment)
    yield process
    process.close()


@pytest.mark.whole_run
def test_a_worker_answers_refuses_and_shuts_down(process, tmp_path) -> None:
    assert process.call("double", number=21) == 42
    with pytest.raises(ValueError, match="no such setting"):
        process.call("refuse")
    assert process.call("double", number=2) == 4
    process.close()
    assert process.process.returncode == 0
    assert "shut down" in (tmp_path / "log").read_text()
    with pytest.raises(RuntimeError, match="the Echo engine is closed"):
        process.call("double", number=1)


@pytest.mark.whole_run
def test_a_worker_that_dies_is_an_error_with_its_log(process) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)the Echo engine ended during 'die' \(exit code 7\).*the last words"):
        process.call("die")
    with pytest.raises(RuntimeError, match="is closed"):
        process.call("double", number=1)


def test_without_vllm_the_engine_says_how_to_get_it(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"run_vllm\.sh"):
        VLLMEngine(hf_config=CONFIG, seed=1, workdir=tmp_path)


RESPONSE = {"token_ids": [4, 5], "log_probs": [-1.0, -2.0], "finish_reason": "length"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"finish_reason": "abort"}, "finish reason 'abort'"),
        ({"token_ids": [4, 5, 6]}, "3 tokens, between 1 and 2"),
        ({"log_probs": [-1.0]}, "1 log-probs for 2 tokens"),
        ({"token_ids": [4, 50]}, "position 1: token 50, vocab_size=50"),
        ({"log_probs": [-1.0, math.nan]}, "position 1: log-prob nan"),
    ],
)
def test_a_response_that_contradicts_its_request_is_an_error(change, message) -> None:
    limits = {"max_new_tokens": 2, "vocab_size": 50, "version": 3}
    assert vllm_engine._checked_completion(11, RESPONSE, **limits).weight_version == 3
    with pytest.raises(RuntimeError, match=f"request 11: {message}"):
        vllm_engine._checked_completion(11, {**RESPONSE, **change}, **limits)


def make_model(seed):
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32).eval()


@torch.no_grad()
def largest_difference(model, completions, *, temperature, top_p=1.0):
    """From what transformers says of the tokens, renormalized over the share that may be drawn."""
    found = 0.0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        ids = torch.tensor(completion.token_ids)
        logits = model(torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1] / temperature
        sorted_probs, order = logits.softmax(-1).sort(descending=True)
        kept = (sorted_probs.cumsum(-1) - sorted_probs < top_p).gather(1, order.argsort())
        expected = logits.masked_fill(~kept, -torch.inf).log_softmax(-1).gather(1, ids[:, None])[:, 0]
        found = max(found, (expected - torch.tensor(completion.log_probs)).abs().max().item())
    return found


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    engine = VLLMEngine(hf_config=CONFIG, seed=1, workdir=tmp_path_factory.mktemp("vllm"), dtype=torch.float32)
    yield engine
    engine.close()


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_its_log_probs_are_those_of_the_weights_that_it_was_given(engine) -> None:
    with pytest.raises(RuntimeError, match="has no weights"):
        engine.generate(PROMPTS, max_new_tokens=4, temperature=1.0)
    models = [make_model(seed) for seed in (1, 2)]
    for version, model in enumerate(models):
        engine.update_weights(model.state_dict(), version=version)
        for temperature, top_p in ((1.0, 1.0), (0.7, 0.8)):
            completions = engine.generate(PROMPTS, max_new_tokens=16, temperature=temperature, top_p=top_p)
            assert {completion.weight_version for completion in completions} == {version}
            # float32 against float32; a temperature divides the difference of logits too.
            assert largest_difference(model, completions, temperature=temperature, top_p=top_p) < 1e-4
    # The same prompts again: what was cached of them belongs to the first weights.
    assert largest_difference(models[0], completions, temperature=0.7, top_p=0.8) > 0.1
    ended = [c for c in completions if len(c.token_ids) < 16]
    assert all(completion.token_ids[-1] == EOS for completion in ended)


@needs_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_cannot_be_meant_is_refused_and_the_engine_goes_on(engine) -> None:
    weights = make_model(1).state_dict()
    name = next(iter(weights))
    for change, message in (
        ({"other.weight": weights[name]}, "has no other.weight"),
        ({name: weights[name][1:]}, "has shape"),
        ({name: weights[name] / 0}, "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.update_weights({**weights, **change}, version=5)
    with pytest.raises(ValueError, match="is missing"):
        engine.update_weights({key: value for key, value in weights.items() if key != name}, version=5)
    engine.update_weights(weights, version=6)
    for arguments, message in (
        ({"temperature": 0.005}, "at least 0.01"),
        ({"temperature": 1.0, "top_p": 0.0}, "above 0 and at most 1"),
        ({"temperature": 1.0, "max_new_tokens": 300}, "max_position_embeddings=256"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate(PROMPTS, **{"max_new_tokens": 4, **arguments})
    with pytest.raises(ValueError, match="vocab_size=50"):
        engine.generate([[50]], max_new_tokens=4, temperature=1.0)
    assert engine.generate(PROMPTS[:1], max_new_tokens=4, temperature=1.0)[0].weight_version == 6
