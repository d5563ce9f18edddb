# SPDX-License-Identifier: Apache-2.0
"""SGLang's model runner with answers in words: prompts of unequal length, an end token, tied embeddings, Llama."""

# The imports after the skip need packages that only the example's environment has.

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang not installed (examples/run_sglang.sh makes an environment)", allow_module_level=True)

with warnings.catch_warnings():
    # Megatron-Core reports at import what is not installed.
    warnings.simplefilter("ignore")
    from evidence.engines import EngineSpec
    from evidence.group import Method
    from evidence.pretrained.group import PretrainedGroup
    from evidence.pretrained.samplers import Answers, SGLangSampler, Unrounded
    from evidence.pretrained.training import PretrainedTraining
    from evidence.pretrained.workplace import Workplace
    from evidence.study import NONE
    from grpo import questions
    from grpo.experts import upcycled
    from grpo.pretrained import Pretrained, load_pretrained
    from hf_routing import record_hf_routing
    from tiny_checkpoint import write_tiny_checkpoint
    from transformers import AutoModelForCausalLM, LlamaConfig, MixtralForCausalLM, PreTrainedModel, Qwen2Config

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


def largest_difference(policy: PreTrainedModel, answers: Answers) -> float:
    """Of the engine's log-probs from those of transformers in float32."""
    found = 0.0
    for prompt, ids, logprobs in zip(PROMPTS, answers.ids, answers.logprobs, strict=True):
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


def test_answers_that_have_ended_leave_the_batch_and_the_others_go_on_as_they_were(
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
        answers = engine.sample(PROMPTS, **settings)
        assert answers == engine.sample(PROMPTS, **settings)
    finally:
        engine.close()
    once = sizes[: len(sizes) // 2]
    # A look every eight forwards. Who stays has not ended by then.
    still = [sum(len(ids) > start for ids in answers.ids) for start in range(8, len(once), 8)]
    assert once == [32] * 8 + [count for count in still for _ in range(8)][: len(once) - 8]
    assert len({*once}) > 2
    assert largest_difference(policy, answers) < 1e-4


@pytest.fixture
def mixture(tmp_path: Path) -> Pretrained:
    """Of a width that SGLang's CPU leaves as it is."""
    write_tiny_checkpoint(tmp_path, ffn_size=64)
    return upcycled(load_pretrained(tmp_path), num_experts=16, noise=0.5)


def test_a_mixture_tells_for_each_prompt_and_answer_the_experts_of_its_own_tokens(mixture: Pretrained) -> None:
    policy = MixtralForCausalLM._from_config(mixture.config, dtype=torch.float32).eval()
    policy.load_state_dict(mixture.weights)
    engine = SGLangSampler(
        EngineSpec(kind="sglang", dtype="float32"), mixture.config, batch=32, length=16, device=torch.device("cpu")
    )
    try:
        engine.load(mixture.weights)
        answers = engine.sample(PROMPTS, num_tokens=9, temperature=0.8, end_token=END, seed=1)
        one = engine.sample(PROMPTS, num_tokens=1, temperature=0.8, end_token=END, seed=1)
    finally:
        engine.close()
    # Both in float32.
    assert largest_difference(policy, answers) < 1e-4
    assert len({len(ids) for ids in answers.ids}) > 2
    assert [len(experts) for experts in one.experts] == [len(prompt) for prompt in PROMPTS]
    for prompt, ids, experts_TLK in zip(PROMPTS, answers.ids, answers.experts, strict=True):
        with record_hf_routing(policy) as record, torch.no_grad():
            policy(torch.tensor([prompt + ids]))
        (expected,) = record.samples([len(prompt) + len(ids)])
        assert torch.equal(experts_TLK.sort(-1).values, expected.experts_TLK[:-1].sort(-1).values)
        assert experts_TLK.dtype == torch.int64
    # Tokens have other experts than their neighbours: a shift would be seen.
    tokens = torch.cat(answers.experts).sort(-1).values.flatten(1)
    assert len(tokens.unique(dim=0)) > 4


def test_the_experts_of_a_cuda_graph_are_those_of_each_of_its_replays(
    mixture: Pretrained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU: a decode that calls no hooks, and writes what it chose to the same tensors every time."""
    engine = SGLangSampler(
        EngineSpec(kind="sglang", dtype="float32"), mixture.config, batch=32, length=16, device=torch.device("cpu")
    )
    runner = engine._runner
    chosen, own_forward = runner._chosen, runner._runner.forward
    try:
        engine.load(mixture.weights)
        settings = {"num_tokens": 5, "temperature": 0.8, "end_token": END, "seed": 1}
        expected = engine.sample(PROMPTS, **settings)
        runner._chosen_in_graph = [torch.zeros_like(experts) for experts in chosen[-2:]]

        def forward(batch: Any) -> Any:
            num_before = len(chosen)
            result = own_forward(batch)
            if not batch.forward_mode.is_decode():
                return result
            for held, experts in zip(runner._chosen_in_graph, chosen[num_before:], strict=True):
                held.copy_(experts)
            del chosen[num_before:]
            return dataclasses.replace(result, can_run_graph=True)

        monkeypatch.setattr(runner._runner, "forward", forward)
        found = engine.sample(PROMPTS, **settings)
    finally:
        engine.close()
    assert runner.used_cuda_graphs
    assert found.ids == expected.ids
    assert all(torch.equal(*pair) for pair in zip(found.experts, expected.experts, strict=True))


def test_a_mixture_is_sampled_scored_and_trained_with_its_own_experts_or_with_the_engines(tmp_path: Path) -> None:
    write_tiny_checkpoint(tmp_path, ffn_size=64)
    size = {"num_steps": 1, "num_prompts": 4, "response_length": 8, "num_evaluated": 4, "micro_batch_size": 8}
    settings = {"disable_cuda_graph": True}
    mixture = {"experts": 32, "expert_noise": 0.5, "engine": EngineSpec(kind="sglang", settings=settings)}
    group = PretrainedGroup(name="moe", methods=(NONE,), seeds=(1,), dtype="float32", **size, **mixture)
    place = Workplace(torch.device("cpu"), tmp_path, tmp_path)
    rows = {}
    try:
        for method in (NONE, Method(name="replay", replays_routing=True)):
            training = PretrainedTraining(dataclasses.replace(group, methods=(method,)), place)
            (rows[method.name],) = training.step(lambda name, arrays: None)
    finally:
        place.close()
    own, replayed = rows["none"], rows["replay"]
    # The engine in bfloat16, the trainer in float32.
    assert 0 < own["routing_flips"] < 0.5
    assert 0 < own["routing_choices"] < own["routing_flips"]
    assert "routing_flips" not in replayed
    assert own["reward"] == replayed["reward"]
    assert 0 < replayed["k3"] < own["k3"] < 0.1


@pytest.mark.parametrize("is_aligned", [True, False])
def test_an_aligned_run_has_no_mismatch_at_any_step(
    tmp_path: Path, is_aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        questions._TASKS, "arithmetic", lambda rng: (f"{rng.randrange(100)} x 7?", lambda answer: len({*answer}) / 9)
    )
    write_tiny_checkpoint(tmp_path)
    size = {"num_steps": 3, "num_prompts": 4, "response_length": 8, "num_evaluated": 4, "micro_batch_size": 8}
    group = PretrainedGroup(
        name="aligned",
        engine=EngineSpec(kind="sglang"),
        methods=(NONE,),
        seeds=(1,),
        learning_rate=1e-3,
        temperature=0.9,
        is_aligned=is_aligned,
        **size,
    )
    place = Workplace(torch.device("cpu"), tmp_path, tmp_path)
    try:
        training = PretrainedTraining(group, place)
        trainer = training._trainer
        before = {name: weight.clone() for name, weight in trainer.weights().items()}
        rows = [row for _ in range(3) for row in training.step(lambda name, arrays: None)]
        assert any(not torch.equal(weight, before[name]) for name, weight in trainer.weights().items())
    finally:
        place.close()
    found = [(row["k3"], row["abs_diff"], row["ratio_max"]) for row in rows]
    assert all(each == (0.0, 0.0, 1.0) for each in found) if is_aligned else all(each > (0.0, 0.0) for each in found)


@pytest.mark.parametrize("weights", ["auto", "fp8_blocks"])
def test_answers_have_the_log_probs_of_the_weights_that_were_loaded(policy: PreTrainedModel, weights: str) -> None:
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
            answers = engine.sample(PROMPTS, **settings, seed=seed)
            assert answers == engine.sample(PROMPTS, **settings, seed=seed)
            assert answers != engine.sample(PROMPTS, **settings, seed=seed + 10)
            # In bfloat16, or with 8 bits; random weights would differ by 1 and more.
            assert 0 < largest_difference(policy, answers) < (0.05 if weights == "auto" else 0.3)
            assert len({len(ids) for ids in answers.ids}) > 2
            assert all(END not in ids[:-1] and (len(ids) == 9 or ids[-1] == END) for ids in answers.ids)
    finally:
        engine.close()


def test_the_trainers_weights_reach_the_engine_with_their_biases_in_both_directions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32: what the engine says of its tokens is what the trainer says, before and after it has learned."""
    monkeypatch.setitem(
        questions._TASKS, "arithmetic", lambda rng: (f"{rng.randrange(100)} x 7?", lambda answer: len({*answer}) / 9)
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
