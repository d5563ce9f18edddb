# SPDX-License-Identifier: Apache-2.0
"""SGLang's model runner with responses in words: prompts of unequal length, an end token, tied embeddings, Llama."""

# The imports after the skip need packages that only the example's environment has.

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang not installed (examples/run_sglang.sh makes an environment)", allow_module_level=True)

with warnings.catch_warnings():
    # Megatron-Core reports at import what is not installed.
    warnings.simplefilter("ignore")
    from evidence.engines import EngineSpec
    from evidence.pretrained.group import PretrainedGroup
    from evidence.pretrained.samplers import Responses, SGLangSampler, Unrounded
    from evidence.pretrained.training import PretrainedTraining
    from evidence.pretrained.workplace import Workplace
    from evidence.study import NONE
    from grpo import questions
    from tiny_checkpoint import write_tiny_checkpoint
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    # SGLang and what it imports warn of each other.
    pytest.mark.filterwarnings("ignore"),
]
END = 4
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [5, 6, 7]] * 8


@pytest.fixture(
    scope="module",
    params=[(True, LlamaConfig), (False, LlamaConfig), (True, Qwen2Config)],
    ids=["tied", "not tied", "tied, with biases"],
)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    folder = tmp_path_factory.mktemp("model")
    is_tied, family = request.param
    write_tiny_checkpoint(folder, is_tied=is_tied, family=family)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def largest_difference(policy: PreTrainedModel, responses: Responses) -> float:
    """Of the engine's log-probs from those of transformers in float32."""
    found = 0.0
    for prompt, ids, logprobs in zip(PROMPTS, responses.ids, responses.logprobs, strict=True):
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.8
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        found = max(found, float((expected - torch.tensor(logprobs)).abs().max()))
    return found


def test_a_coarse_cache_is_an_exact_one_for_an_evaluation(policy: PreTrainedModel) -> None:
    engine = SGLangSampler(
        EngineSpec(kind="sglang", dtype="float32", cache="bfloat16"),
        policy.config,
        batch=32,
        length=16,
        device=torch.device("cpu"),
        evaluates=True,
    )
    settings = {"num_tokens": 9, "temperature": 0.8, "end_token": END, "seed": 1}
    try:
        engine.load(policy.state_dict())
        coarse = engine.sample(PROMPTS, **settings)
        exact = Unrounded(engine).sample(PROMPTS, **settings)
        again = engine.sample(PROMPTS, **settings)
    finally:
        engine.close()
    assert largest_difference(policy, exact) < 1e-4 < largest_difference(policy, coarse)
    assert again == coarse


def test_responses_that_have_ended_leave_the_batch_and_the_others_go_on_as_they_were(
    policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SGLangSampler(
        EngineSpec(kind="sglang", dtype="float32"), policy.config, batch=32, length=60, device=torch.device("cpu")
    )
    sizes: list[int] = []
    own_forward = engine._runner._forward
    monkeypatch.setattr(engine._runner, "_forward", lambda batch: sizes.append(len(batch.reqs)) or own_forward(batch))
    settings = {"num_tokens": 48, "temperature": 0.8, "end_token": END, "seed": 1}
    try:
        engine.load(policy.state_dict())
        responses = engine.sample(PROMPTS, **settings)
        assert responses == engine.sample(PROMPTS, **settings)
    finally:
        engine.close()
    once = sizes[: len(sizes) // 2]
    # A look every eight forwards. Who stays has not ended by then.
    still = [sum(len(ids) > start for ids in responses.ids) for start in range(8, len(once), 8)]
    assert once == [32] * 8 + [count for count in still for _ in range(8)][: len(once) - 8]
    assert len({*once}) > 2
    assert largest_difference(policy, responses) < 1e-4


@pytest.mark.parametrize("weights", ["auto", "fp8_blocks"])
def test_responses_have_the_log_probs_of_the_weights_that_were_loaded(policy: PreTrainedModel, weights: str) -> None:
    engine = SGLangSampler(
        EngineSpec(kind="sglang", weights=weights), policy.config, batch=32, length=16, device=torch.device("cpu")
    )
    try:
        for seed in (1, 2):
            with torch.no_grad():
                # Other weights than those that the engine began with, and than the last ones.
                for weight in policy.parameters():
                    weight.add_(torch.randn_like(weight) * 0.02).copy_(weight.bfloat16())
            engine.load(policy.state_dict())
            settings = {"num_tokens": 9, "temperature": 0.8, "end_token": END}
            responses = engine.sample(PROMPTS, **settings, seed=seed)
            assert responses == engine.sample(PROMPTS, **settings, seed=seed)
            assert responses != engine.sample(PROMPTS, **settings, seed=seed + 10)
            # In bfloat16, or with 8 bits; random weights would differ by 1 and more.
            assert 0 < largest_difference(policy, responses) < (0.05 if weights == "auto" else 0.3)
            assert len({len(ids) for ids in responses.ids}) > 2
            assert all(END not in ids[:-1] and (len(ids) == 9 or ids[-1] == END) for ids in responses.ids)
    finally:
        engine.close()


def test_the_trainers_weights_reach_the_engine_with_their_biases_in_both_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32: what the engine says of its tokens is what the trainer says, before and after it has learned."""
    monkeypatch.setitem(
        questions._TASKS,
        "arithmetic",
        lambda rng: (f"{rng.randrange(100)} x 7?", lambda response: len({*response}) / 9),
    )
    write_tiny_checkpoint(tmp_path, family=Qwen2Config)
    size = {"num_steps": 3, "num_prompts": 4, "response_length": 8, "num_evaluated": 32, "max_tokens": 200}
    engine = EngineSpec(kind="sglang", dtype="float32")
    group = PretrainedGroup(
        name="qwen2",
        engine=engine,
        methods=(NONE,),
        seeds=(1,),
        dtype="float32",
        learning_rate=1e-3,
        eval_interval=1,
        evaluates_in_engine=True,
        **size,
    )
    coarse = dataclasses.replace(group, name="coarse", engine=dataclasses.replace(engine, weights="mantissa_4"))
    place = Workplace(torch.device("cpu"), tmp_path, tmp_path)
    try:
        training = PretrainedTraining(group, place)
        rows = [row for _ in range(3) for row in training.step(lambda name, arrays: None)]
        started = place._engine
        (rounded,) = PretrainedTraining(coarse, place).step(lambda name, arrays: None)
        # The same engine, which got rounded weights for the rollout and others for the evaluation.
        assert place._engine is started
    finally:
        place.close()
    assert all(row["grad_norm"] > 0 for row in rows)
    assert all(row["k3"] < 1e-8 for row in rows), [row["k3"] for row in rows]
    assert rounded["k3"] > 1e-5
    assert rounded["own_reward"] > 0


def test_a_run_that_has_ended_holds_nothing(tmp_path: Path) -> None:
    """In a process that has not imported SGLang before."""
    write_tiny_checkpoint(tmp_path)
    folder = Path(__file__).parents[1] / "studies"
    subprocess.run([sys.executable, "-c", HOLDING, str(tmp_path)], check=True, cwd=folder)


HOLDING = """
import gc, importlib.util, sys
from pathlib import Path
import torch
from evidence.engines import EngineSpec
from evidence.pretrained.group import PretrainedGroup, runs_of
from evidence.pretrained.training import PretrainedTraining
from evidence.results import Results
from evidence.study import NONE
spec = importlib.util.spec_from_file_location("program", "evidence.py")
program = importlib.util.module_from_spec(spec)
spec.loader.exec_module(program)
size = {"num_steps": 1, "num_prompts": 4, "response_length": 4, "num_evaluated": 4, "micro_batch_size": 8}
group = PretrainedGroup(name="tiny", engine=EngineSpec(kind="sglang"), methods=(NONE,), seeds=(1,), **size)
folder = Path(sys.argv[1])
with program.Places(torch.device("cpu"), folder, folder) as places:
    assert not program.run_all(runs_of([group]), Results(folder / "results"), places, program.Stop(1000.0))
    gc.collect()
    held = [thing for thing in gc.get_objects() if type(thing) is PretrainedTraining]
    assert not held, held
"""
