# SPDX-License-Identifier: Apache-2.0
"""The SGLang rollout engine, against a teacher-forced float32 transformers model."""

# The imports after the skip need packages that only the SGLang environment has.
# ruff: noqa: E402

import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed (requirements/sglang-cpu.txt)", allow_module_level=True)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

import psutil
from grpo import sglang_engine
from grpo.block_quantization import BlockQuantizer
from grpo.sglang_engine import SGLangEngine
from tiny_shape import TINY
from transformers import Qwen2Config, Qwen3Config
from transformers.models.auto import AutoModelForCausalLM

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

EOS = 3
PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13, 14]] * 8
SHAPE = TINY | {"eos_token_id": EOS}
QWEN3 = Qwen3Config(**SHAPE, head_dim=16)
TIED_QWEN2 = Qwen2Config(**SHAPE | {"tie_word_embeddings": True})

# bf16 keeps 8 bits: logits of a few units are off by about 1e-2, twice that after division by 0.7 and the softmax.
BF16_TOLERANCE = 0.1
# float32 against float32 agrees to about 1e-6, so a larger difference is bf16's.
FLOAT32_TOLERANCE = 1e-4

TORCHRUN_ENVIRONMENT = {
    # A rendezvous that nobody serves and a rank that is not the first: joining it would hang.
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "9",
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def make_model(config, seed):
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


@torch.no_grad()
def teacher_forced(model, prompt, completion, temperature):
    """Log-probs of the completion's tokens."""
    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]


def largest_difference(model, prompts, completions, temperature):
    return max(
        (teacher_forced(model, prompt, completion, temperature) - torch.tensor(completion.log_probs)).abs().max().item()
        for prompt, completion in zip(prompts, completions, strict=True)
    )


def session_members(leader):
    """Process ids of a session, except zombies."""
    members = []
    for process in psutil.process_iter(["pid", "status"]):
        try:
            if os.getsid(process.pid) == leader and process.info["status"] != psutil.STATUS_ZOMBIE:
                members.append(process.pid)
        except ProcessLookupError:
            pass
    return members


def wait_for_the_end_of(leader, seconds=30.0):
    """A killed process takes a moment to leave; one that was not killed stays."""
    deadline = time.monotonic() + seconds
    while session_members(leader) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session_members(leader) == []


@pytest.fixture(scope="module")
def policy():
    return make_model(QWEN3, seed=1)


@pytest.fixture(scope="module")
def other_policy():
    return make_model(QWEN3, seed=2)


@pytest.fixture(scope="module")
def running_engine(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in TORCHRUN_ENVIRONMENT.items():
            patch.setenv(name, value)
        engine = SGLangEngine(
            hf_config=QWEN3,
            seed=0,
            workdir=tmp_path_factory.mktemp("engine"),
            settings={"max_running_requests": 128},
        )
    yield engine
    engine.close()


@pytest.fixture
def engine(running_engine, policy):
    running_engine.update_weights(policy.state_dict(), version=7)
    return running_engine


def test_generating_before_the_first_update_is_refused(running_engine):
    with pytest.raises(RuntimeError, match="call update_weights first"):
        running_engine.generate(PROMPTS, max_new_tokens=4, temperature=1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_of_the_sampling_distribution_and_differ_by_bf16_rounding(engine, policy, temperature):
    completions = engine.generate(PROMPTS, max_new_tokens=32, temperature=temperature)
    difference = largest_difference(policy, PROMPTS, completions, temperature)
    print("DIFF", temperature, difference, largest_difference(policy, PROMPTS, completions, 1.0))
    assert FLOAT32_TOLERANCE < difference < BF16_TOLERANCE
    if temperature != 1:
        assert largest_difference(policy, PROMPTS, completions, 1.0) > 2 * BF16_TOLERANCE


@torch.no_grad()
def test_top_p_samples_from_the_nucleus_and_warns_that_the_log_probs_are_of_the_whole_distribution(engine, policy):
    prompt, top_p = PROMPTS[0], 0.5
    with pytest.warns(UserWarning, match="not renormalized"):
        completions = engine.generate([prompt] * 256, max_new_tokens=1, temperature=1.0, top_p=top_p)
    probabilities, ids = policy(torch.tensor([prompt])).logits[0, -1].softmax(-1).sort(descending=True)
    # The nucleus ends with the token that reaches top_p; bf16 may move that border a little.
    nucleus = ids[probabilities.cumsum(0) - probabilities < top_p + 0.05].tolist()
    assert len(nucleus) < len(ids)
    assert {completion.token_ids[0] for completion in completions} <= {*nucleus}
    assert largest_difference(policy, [prompt] * 256, completions, 1.0) < BF16_TOLERANCE < -math.log(top_p + 0.05)


@pytest.mark.parametrize("prompt_length", [1, 255])
def test_a_response_may_fill_the_model_to_its_last_position(engine, policy, prompt_length):
    room = QWEN3.max_position_embeddings - prompt_length
    prompts = [[5 + draw] * prompt_length for draw in range(8)]
    completions = engine.generate(prompts, max_new_tokens=room, temperature=1.0)
    assert all(len(c.token_ids) == room or c.token_ids[-1] == EOS for c in completions)
    assert prompt_length == 1 or any(len(c.token_ids) == room for c in completions)
    assert largest_difference(policy, prompts, completions, 1.0) < BF16_TOLERANCE


def test_an_update_moves_the_engine_to_the_new_model_and_leaves_no_weights_on_disk(engine, policy, other_policy):
    engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0)
    engine.update_weights(other_policy.state_dict(), version=8)
    completions = engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0)
    assert {completion.weight_version for completion in completions} == {8}
    assert largest_difference(other_policy, PROMPTS, completions, 1.0) < BF16_TOLERANCE
    assert largest_difference(policy, PROMPTS, completions, 1.0) > 1
    assert not [*engine._workdir.rglob("*.safetensors")]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight .* is missing"),
        (lambda s: s.update({"model.layers.2.mlp.up_proj.weight": torch.zeros(1)}), "has no model.layers.2"),
        (lambda s: s.update({"model.norm.weight": torch.ones(32)}), r"shape \[32\], the engine's model has \[64\]"),
        (lambda s: s.update({"model.norm.weight": torch.full((64,), torch.nan)}), "not finite"),
    ],
)
def test_a_state_dict_of_another_architecture_is_refused_and_changes_nothing(engine, policy, change, message):
    state_dict = policy.state_dict()
    change(state_dict)
    with pytest.raises(ValueError, match=message):
        engine.update_weights(state_dict, version=8)
    completions = engine.generate(PROMPTS, max_new_tokens=8, temperature=1.0)
    assert {completion.weight_version for completion in completions} == {7}
    assert largest_difference(policy, PROMPTS, completions, 1.0) < BF16_TOLERANCE


def test_a_tensor_that_sglang_skips_without_a_word_is_detected(engine, policy, other_policy, monkeypatch):
    stale = "model.layers.1.self_attn.v_proj.weight"
    pack = sglang_engine.save
    monkeypatch.setattr(sglang_engine, "save", lambda tensors: pack({n: t for n, t in tensors.items() if n != stale}))
    with pytest.raises(RuntimeError, match=r"values of .* differ, first at"):
        engine.update_weights(other_policy.state_dict(), version=8)
    with pytest.raises(RuntimeError, match="call update_weights first"):
        engine.generate(PROMPTS, max_new_tokens=8, temperature=1.0)
    monkeypatch.undo()
    engine.update_weights(policy.state_dict(), version=9)
    completions = engine.generate(PROMPTS, max_new_tokens=8, temperature=1.0)
    assert largest_difference(policy, PROMPTS, completions, 1.0) < BF16_TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompts": [[5], []], "max_new_tokens": 4, "temperature": 1.0}, "request 1: a prompt of 0 tokens"),
        ({"prompts": [[5] * 253], "max_new_tokens": 4, "temperature": 1.0}, "between 1 and 252 .max_position.*=256"),
        ({"prompts": [[5, 50]], "max_new_tokens": 4, "temperature": 1.0}, "from 5 to 50, vocab_size=50"),
    ],
)
def test_a_request_out_of_range_is_an_error_and_the_engine_stays_usable(engine, arguments, message):
    with pytest.raises(ValueError, match=message):
        engine.generate(**arguments)
    assert len(engine.generate(PROMPTS, max_new_tokens=4, temperature=1.0)) == len(PROMPTS)


RESPONSE = {
    "output_ids": [4, 5],
    "output_token_logprobs": [(-1.0, 4), (-2.0, 5)],
    "meta": {"finish_reason": {"type": "length"}, "prompt_tokens": 3, "weight_version": "7"},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_token_logprobs": [(-1.0, 4)]}, "1 log-probs for 2 tokens"),
        ({"output_token_logprobs": [(-1.0, 4), (-2.0, 6)]}, "position 1: the log-prob is of token 6"),
        ({"output_ids": [4, 5, 6]}, "3 tokens, between 1 and 2"),
        ({"meta": {**RESPONSE["meta"], "finish_reason": {"type": "abort", "message": "oom"}}}, "'abort' .*: oom"),
        ({"meta": {**RESPONSE["meta"], "weight_version": "6"}}, "made by weights '6', current is 7"),
    ],
)
def test_a_response_that_contradicts_its_request_is_an_error_with_both_values(change, message):
    limits = {"prompt_length": 3, "max_new_tokens": 2, "version": 7}
    assert sglang_engine._checked_completion(11, RESPONSE, **limits).log_probs == [-1.0, -2.0]
    with pytest.raises(RuntimeError, match=f"request 11: .*{message}"):
        sglang_engine._checked_completion(11, {**RESPONSE, **change}, **limits)


# The last test with the module's engine, which it ends.
def test_a_dead_scheduler_is_an_error_with_the_log_and_leaves_no_process(engine):
    leader = engine._worker.process.pid
    members = session_members(leader)
    assert len(members) >= 3
    worker = psutil.Process(leader)
    scheduler = next(p for p in worker.children() if "scheduler" in p.name() or "scheduler" in " ".join(p.cmdline()))
    scheduler.kill()
    with pytest.raises(RuntimeError, match=r"ended during 'generate' .*sglang\.log"):
        engine.generate(PROMPTS, max_new_tokens=128, temperature=1.0)
    wait_for_the_end_of(leader)
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(PROMPTS, max_new_tokens=4, temperature=1.0)
    engine.close()


TRAINER = """
import sys, time
from pathlib import Path
from test_sglang_engine import PROMPTS, TIED_QWEN2, SGLangEngine, largest_difference, make_model
if __name__ == "__main__":
    engine = SGLangEngine(hf_config=TIED_QWEN2, seed=0, workdir=Path(sys.argv[1]))
    policy = make_model(TIED_QWEN2, seed=1)
    engine.update_weights(policy.state_dict(), version=1)
    completions = engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0)
    print(engine._worker.process.pid, largest_difference(policy, PROMPTS, completions, 1.0), flush=True)
    time.sleep(600)
"""


def test_tied_embeddings_work_and_a_killed_trainer_leaves_no_process(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    trainer = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "engine")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
    )
    with trainer:
        leader, difference = trainer.stdout.readline().split()
        assert len(session_members(int(leader))) >= 3
        trainer.send_signal(signal.SIGKILL)
    assert FLOAT32_TOLERANCE < float(difference) < BF16_TOLERANCE
    wait_for_the_end_of(int(leader))


@torch.no_grad()
def test_fp8_weights_are_quantized_anew_at_every_update(tmp_path):
    config = Qwen3Config(**SHAPE, head_dim=32, tie_word_embeddings=False)
    quantizer = BlockQuantizer.create("fp8", {n: tuple(t.shape) for n, t in make_model(config, 1).state_dict().items()})
    engine = SGLangEngine(hf_config=config, seed=0, workdir=tmp_path, settings={"quantization": "fp8"})
    try:
        assert engine.settings["quantization"] == "fp8"
        assert engine.settings["weight_block_size"] == quantizer.block_size == 64
        for version, seed in enumerate((1, 2)):
            model = make_model(config, seed)
            engine.update_weights(model.state_dict(), version=version)
            completions = engine.generate(PROMPTS, max_new_tokens=16, temperature=1.0)
            plain = largest_difference(model, PROMPTS, completions, 1.0)
            model.load_state_dict(quantizer.dequantize(quantizer.quantize(model.state_dict())))
            # What is left is the rounding of the inputs.
            assert FLOAT32_TOLERANCE < largest_difference(model, PROMPTS, completions, 1.0) < plain
            assert plain > BF16_TOLERANCE
    finally:
        engine.close()
