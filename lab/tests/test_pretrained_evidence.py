# SPDX-License-Identifier: Apache-2.0
"""Studies of a pretrained model on a CPU: every arm trains, an interrupted run goes on, experts are replayed."""

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import sys
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pretrained_runs
import pytest
import torch
from pretrained_runs import CPU, MARKS, steps
from torch._subclasses import FakeTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = MARKS

from evidence.engines import EngineSpec  # noqa: E402
from evidence.group import Method  # noqa: E402
from evidence.pretrained import compact, rate, routing  # noqa: E402
from evidence.pretrained import training as training_module  # noqa: E402
from evidence.pretrained.group import runs_of  # noqa: E402
from evidence.pretrained.samplers import SGLangSampler, TransformersSampler, ended  # noqa: E402
from evidence.pretrained.training import PretrainedTraining  # noqa: E402
from evidence.pretrained.workplace import Workplace  # noqa: E402
from evidence.results import Results  # noqa: E402
from evidence.study import NONE, TOKEN_TIS  # noqa: E402
from grpo import questions  # noqa: E402
from grpo.engine import Completion  # noqa: E402
from grpo.rollout import grade_groups  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

from mis_ext.onpolicy import RoutedExperts  # noqa: E402

AGAIN = Method(name="none, again", stream=1)
BYPASS = Method(name="bypass", bypasses=True)
SLOWED = Method(name="none, slower as k3 grows", slows_down=True)
MASK = {"use_tis": True, "tis_mode": "mask", "tis_lower_bound": 0.5, "tis_upper_bound": 2.0}
TOKEN_MASK = Method(name="token_mask", keys=MASK)
REPLAY = Method(name="replay", replays_routing=True)

# A CPU without instructions for bfloat16 multiplies float32 ten times as fast. In bfloat16 train a whole study and a
# mixture, and engines sample for what needs a mismatch.
FLOAT32 = {"dtype": "float32", "engine": EngineSpec(dtype="float32")}
GROUP = dataclasses.replace(pretrained_runs.GROUP, **FLOAT32)
MIXTURE = dataclasses.replace(pretrained_runs.MIXTURE, **FLOAT32)


@pytest.mark.usefixtures("graded")
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(workplace: Workplace) -> None:
    group = dataclasses.replace(GROUP, staleness=1)
    whole, first = PretrainedTraining(group, workplace), PretrainedTraining(group, workplace)
    expected = steps(whole, 4)
    assert any(row["grad_norm"] > 0 for row in expected[:2])
    steps(first, 2)
    second = PretrainedTraining(group, workplace)
    second.restore(first.state())
    assert steps(second, 2) == expected[2:]


def test_stale_weights_are_those_of_so_many_updates_ago(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    training = PretrainedTraining(dataclasses.replace(GROUP, staleness=2), workplace)
    own, loaded = training._trainer.weights, []

    def weights() -> dict[str, torch.Tensor]:
        """With the number of updates added to a weight."""
        found = own()
        return found | {"model.norm.weight": found["model.norm.weight"] + training.num_steps_done}

    load = training._engine.load
    monkeypatch.setattr(training._trainer, "weights", weights)
    monkeypatch.setattr(training._engine, "load", lambda weights: (loaded.append(weights), load(weights)))
    steps(training, 5)
    assert [round(float(weights["model.norm.weight"].float().mean())) for weights in loaded] == [1, 1, 1, 2, 3]


@pytest.mark.parametrize(
    "method",
    [BYPASS, TOKEN_MASK, SLOWED],
    ids=lambda method: method.name,
)
@pytest.mark.usefixtures("graded")
def test_every_arm_trains(workplace: Workplace, method: Method) -> None:
    group = dataclasses.replace(GROUP, engine=EngineSpec(), methods=(method,), samples_per_prompt=16)
    rows = steps(PretrainedTraining(group, workplace), 2)
    assert all(np.isfinite([value for value in row.values() if isinstance(value, float)]).all() for row in rows)
    assert max(row["grad_norm"] for row in rows) > 0


def test_a_run_learns_from_stale_samples_and_its_mismatch_grows_with_age(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sevens(rng: Random) -> tuple[str, Any]:
        return f"What is {rng.randrange(100)} x 7?", lambda answer: answer.count("7") / 6

    monkeypatch.setitem(questions._TASKS, "arithmetic", sevens)
    size = {"num_steps": 11, "num_prompts": 4, "response_length": 6, "num_evaluated": 32, "micro_batch_size": 32}
    stale = {"methods": (TOKEN_TIS,), "staleness": 1, "ages": (1, 4), "eval_interval": 10, "learning_rate": 4e-3}
    with sdpa_kernel(SDPBackend.MATH):
        rows = steps(PretrainedTraining(dataclasses.replace(GROUP, **size, **stale), workplace), 11)
    assert rows[0]["own_reward"] < 0.2 < 0.4 < min(rows[-1]["own_reward"], rows[-1]["reward"])
    # So the engine is exact. Fused attention of AVX2 rounds a row alone otherwise where its keys fill no vector of 8.
    assert rows[0]["k3"] < 1e-8 < 1e-4 < rows[10]["k3"] < rows[10]["k3_age_1"] < rows[10]["k3_age_4"]


def test_the_learning_rate_follows_k3_also_after_an_interruption(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows = [1.0] * 10 + [8.0] * 8
    own = training_module.numbers.mismatch
    taken: list[float] = []

    def mismatch(*log_probs: Any) -> dict[str, float]:
        return own(*log_probs) | {"k3": follows[len(taken)]}

    def training() -> PretrainedTraining:
        size = {"num_prompts": 1, "samples_per_prompt": 2, "response_length": 1}
        group = dataclasses.replace(GROUP, methods=(SLOWED,), eval_interval=100, **size)
        run = PretrainedTraining(group, workplace)
        monkeypatch.setattr(run._trainer, "train", lambda *_: taken.append(_rate_of(run)) or {"grad_norm": 0.0})
        return run

    monkeypatch.setattr(training_module.numbers, "mismatch", mismatch)
    first = training()
    rows = steps(first, 12)
    second = training()
    second.restore(first.state())
    rows += steps(second, 6)
    shares = [rate / GROUP.learning_rate for rate in taken]
    assert shares == pytest.approx([row["learning_rate"] / GROUP.learning_rate for row in rows], rel=1e-3)
    # The mean of the last five steps: 1, then 12/5, 19/5, 26/5, 33/5, 8.
    assert shares == pytest.approx([1.0] * 10 + [5 / 12, 5 / 19, 5 / 26, 5 / 33] + [1 / 8] * 4)


def _rate_of(run: PretrainedTraining) -> float:
    (rate,) = {group["lr"] for group in run._trainer._optimizer.param_groups}
    return rate


def test_a_learning_rate_never_rises_and_has_a_lowest_share() -> None:
    assert rate.share([1.0] * 10 + [0.5] * 9) == 1.0
    assert rate.share([0.0] * 12) == 1.0
    assert rate.share([1.0] * 10 + [1e6] * 9) == rate.LOWEST
    assert rate.share([0.5, 1.5] * 5 + [2.0] * 9) == 0.5


def test_only_the_sampling_differs_between_the_two_uncorrected_arms(workplace: Workplace) -> None:
    asked: dict[str, list[Any]] = {}
    rewards = {}
    for method in (NONE, AGAIN):
        training = PretrainedTraining(dataclasses.replace(GROUP, methods=(method,)), workplace)
        sample = training._engine.sample
        training._engine.sample = (  # type: ignore[method-assign]
            lambda prompts, _name=method.name, _sample=sample, **options: (
                asked.setdefault(_name, []).append((prompts, options["seed"])),
                _sample(prompts, **options),
            )[1]
        )
        rewards[method.name] = steps(training, 1)[0]["entropy"]
        del training._engine.sample
    (prompts, seed), (others, other_seed) = (asked[name][0] for name in ("none", "none, again"))
    assert prompts == others
    assert seed != other_seed
    assert rewards["none"] != rewards["none, again"]


def test_the_sampler_reports_the_log_probs_of_transformers_and_stops_at_the_end(tiny_model: Path) -> None:
    policy = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    sampler = TransformersSampler(policy.config, dtype=torch.float32, device=CPU)
    sampler.load(policy.state_dict())
    prompts = [[5, 6, 7], [8], [9, 10, 11, 12, 13]] * 20
    # A digit, which these answers have often.
    answers = sampler.sample(prompts, num_tokens=9, temperature=0.7, end_token=4, seed=3)
    assert answers == sampler.sample(prompts, num_tokens=9, temperature=0.7, end_token=4, seed=3)
    assert len({len(ids) for ids in answers.ids}) > 2
    for prompt, ids, logprobs in zip(prompts, answers.ids, answers.logprobs, strict=True):
        assert 4 not in ids[:-1]
        assert len(ids) == 9 or ids[-1] == 4
        logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].detach() / 0.7
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-5, rtol=0)


def test_weights_in_e4m3_are_rounded_before_the_engine_gets_them() -> None:
    sampler = object.__new__(SGLangSampler)
    sampler._quantizer, sampler.spec = None, EngineSpec(kind="sglang", weights="fp8_e4m3")
    weights = {"norm.weight": torch.rand(64) + 0.5, "up_proj.weight": torch.randn(32, 64)}
    found = sampler._prepared(weights)
    assert torch.equal(found["norm.weight"], weights["norm.weight"])
    error = (found["up_proj.weight"] - weights["up_proj.weight"]).abs()
    assert 0 < error.max() <= weights["up_proj.weight"].abs().max() / 16
    sampler.spec = EngineSpec(kind="sglang")
    assert all(torch.equal(weight, weights[name]) for name, weight in sampler._prepared(weights).items())


def test_answers_are_cut_behind_their_first_end() -> None:
    answers = ended(torch.tensor([[3, 1, 1], [1, 2, 2], [2, 2, 2]]), torch.tensor([[-1.0, -2, -3]] * 3), 1)
    assert answers.ids == [[3, 1], [1], [2, 2, 2]]
    assert answers.logprobs == [[-1.0, -2.0], [-1.0], [-1.0, -2.0, -3.0]]


@pytest.mark.usefixtures("graded")
def test_a_trained_checkpoint_is_made_once_and_shared(workplace: Workplace) -> None:
    group = dataclasses.replace(GROUP, trained_steps=2, response_length=2)
    first = PretrainedTraining(group, workplace)._trainer.weights()
    (file,) = workplace.scratch.glob("first_weights_*.safetensors")
    made = file.stat().st_mtime_ns
    other = PretrainedTraining(dataclasses.replace(group, seeds=(2,), staleness=1), workplace)._trainer.weights()
    assert file.stat().st_mtime_ns == made
    untrained = workplace.pretrained.weights
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert not all(torch.equal(first[name], untrained[name].to(first[name].dtype)) for name in first)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, tiny_model: Path, tmp_path: Path) -> Any:
    """Calls evidence.py with a study made tiny: two steps each, transformers as engine."""
    spec = importlib.util.spec_from_file_location(
        "evidence_program", Path(__file__).parents[1] / "studies" / "evidence.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    name = "collapse_ladder"
    groups = runs_of([dataclasses.replace(GROUP, methods=(NONE, TOKEN_TIS), seeds=(1, 2), dump_steps=(0,))])
    monkeypatch.setitem(module.STUDIES, name, dataclasses.replace(module.STUDIES[name], groups=groups))

    def call(command: str, *flags: str) -> None:
        options = ["--results", str(tmp_path / "results"), *flags]
        monkeypatch.setattr(sys, "argv", ["evidence.py", command, name, *options])
        module.main()

    call.module, call.groups, call.run = module, groups, ["--model", str(tiny_model), "--device", "cpu"]  # type: ignore[attr-defined]
    return call


@pytest.mark.slow
def test_a_whole_study_runs_is_interrupted_and_goes_on(program: Any, tmp_path: Path, monkeypatch) -> None:
    results = Results(tmp_path / "results")
    seen = 0
    whole_step = PretrainedTraining.step

    def step(training: PretrainedTraining, keep: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen == 4:
            raise KeyboardInterrupt
        return whole_step(training, keep)

    monkeypatch.setattr(PretrainedTraining, "step", step)
    with pytest.raises(KeyboardInterrupt):
        program("run", *program.run)
    assert [results.is_done(group) for group in program.groups] == [True, False, False, False]
    state = tmp_path / "results" / f"{program.groups[1].name}.state.pt"
    assert state.exists()
    with pytest.raises(SystemExit):
        program("run", *program.run, "--only", "*-seed7-*")
    program("run", *program.run)
    assert not state.exists()
    # Every step of every run once, and the one that was interrupted again.
    assert seen == 2 * len(program.groups) + 1
    program("compact")
    assert [path.name for path in (tmp_path / "results").glob("*.zip")] == ["collapse_ladder.zip"]
    assert all(Results(tmp_path / "results").is_done(group) for group in program.groups)
    head = Results(tmp_path / "results").machine(program.groups[0])
    assert {"torch", "transformers", "megatron-core", "device"} <= head.keys()
    json.dumps(head)


@pytest.mark.usefixtures("graded")
def test_a_mixture_trains_and_goes_on_and_measures_no_routing_that_its_engine_does_not_tell(
    workplace: Workplace,
) -> None:
    group = dataclasses.replace(pretrained_runs.MIXTURE, eval_interval=1)
    whole, first = PretrainedTraining(group, workplace), PretrainedTraining(group, workplace)
    expected = steps(whole, 3)
    assert all(row["grad_norm"] > 0 for row in expected)
    # The engine of the tests is exact, so both sides have the same weights.
    assert all(row["k3"] < 1e-4 and "routing_flips" not in row for row in expected)
    steps(first, 2)
    second = PretrainedTraining(group, workplace)
    second.restore(first.state())
    assert steps(second, 1) == expected[2:]
    before, after = workplace.start(group).weights, whole._trainer.weights()
    assert before.keys() == after.keys()
    for name in ("mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        name = f"model.layers.1.{name}"
        assert not torch.equal(before[name], after[name]), name


def tell_experts(training: PretrainedTraining, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Let the engine tell random experts, two different ones for each token and layer; they are added to this list."""
    told: list[torch.Tensor] = []
    sample, generator = training._engine.sample, torch.Generator().manual_seed(7)

    def sample_and_tell(prompts: list[list[int]], **options: Any) -> Any:
        answers = sample(prompts, **options)
        lengths = [len(prompt) + len(ids) - 1 for prompt, ids in zip(prompts, answers.ids, strict=True)]
        experts = [torch.rand(length, 2, 4, generator=generator).argsort(-1)[..., :2] for length in lengths]
        told.extend(experts)
        return answers._replace(experts=experts)

    monkeypatch.setattr(training._engine, "sample", sample_and_tell)
    return told


def test_the_engines_experts_are_replayed_in_scoring_and_in_training(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Prompts of many lengths.
    question = lambda rng: (f"{rng.randrange(10 ** rng.randrange(1, 6))} x 7?", lambda answer: 0.0)  # noqa: E731
    monkeypatch.setitem(questions._TASKS, "arithmetic", question)
    size = {"num_prompts": 8, "samples_per_prompt": 2, "micro_batch_size": 4, "num_evaluated": 1}
    group = dataclasses.replace(MIXTURE, methods=(REPLAY,), ages=(1,), **size)
    training = PretrainedTraining(group, workplace)
    told = tell_experts(training, monkeypatch)
    layouts: list[Any] = []
    make = training._trainer.micro_batches
    monkeypatch.setattr(training._trainer, "micro_batches", lambda data: (layouts.extend(made := make(data)), made)[1])
    with training._trainer.recorded_routing() as record:
        row = steps(training, 1)[0]
    assert not {"routing_flips", "routing_choices"} & row.keys()
    passes = record.micro_batches()
    assert len(layouts) * 2 == len(passes) == 8
    lengths = [len(experts) for experts in told]
    assert len(set(lengths)) > 2
    for number, experts_NLK in enumerate(passes):
        samples = told[number % 4 * 4 :][:4]
        by_position = experts_NLK.view(-1, 4, 2, 2)
        for index, experts_TLK in enumerate(samples):
            assert torch.equal(by_position[: len(experts_TLK), index].long(), experts_TLK), (number, index)
    # An old rollout is scored with its own experts, not with those of the last one.
    training._past.extend([training._past[0]] * 4)
    monkeypatch.setattr(training_module, "STEPS_BETWEEN_AGES", 1)
    assert "k3_age_1" in steps(training, 1)[0]


def test_flips_are_where_a_router_differs_at_the_position_that_predicts_a_token(workplace: Workplace) -> None:
    training = PretrainedTraining(MIXTURE, workplace)
    total, responses = [7, 5], [3, 2]
    experts = [torch.tensor([[0, 1], [2, 3]]).expand(length - 1, 2, 2).clone() for length in total]
    data = {
        "tokens": [torch.arange(length) for length in total],
        "total_lengths": total,
        "response_lengths": responses,
        "max_seq_lens": [7, 7],
        "rollout_routed_experts": [
            RoutedExperts.from_rows(rows, num_tokens=length, num_experts=4)
            for rows, length in zip(experts, total, strict=True)
        ],
    }
    batches = training._trainer.micro_batches(data)
    own = batches[0].routing.experts_TLK.clone()
    # The other order of the same experts is no difference.
    own[:, 0] = own[:, 0].flip(-1)
    assert routing.Flips.of([own], batches).shares() == {"routing_flips": 0.0, "routing_choices": 0.0}
    # Rows are position after position. The last token of the first prompt predicts the first token of its answer.
    own[3 * 2 + 0, 1, 0] = 0
    # The second answer: what predicts its last token, in both layers; a token of its prompt; the last token itself.
    own[3 * 2 + 1] = torch.tensor([[3, 2], [1, 0]])
    own[1 * 2 + 1] = torch.tensor([[3, 2], [1, 0]])
    own[4 * 2 + 1] = 0
    flips = routing.Flips.of([own], batches)
    assert [answer.tolist() for answer in flips.by_answer] == [[True, False, False], [False, True]]
    # Of 5 tokens with 4 choices: one choice, and all 4.
    assert flips.shares() == {"routing_flips": pytest.approx(2 / 5), "routing_choices": pytest.approx(5 / 20)}


def test_without_updates_rollouts_are_scored_and_weights_stay(workplace: Workplace) -> None:
    training = PretrainedTraining(dataclasses.replace(GROUP, updates=0), workplace)
    (row,) = steps(training, 1)
    assert {"k3", "reward"} <= row.keys()
    assert not {"grad_norm", "kept_tokens", "own_reward"} & row.keys()
    start = workplace.pretrained.weights
    assert all(torch.equal(weight, start[name]) for name, weight in training._trainer.weights().items())


def test_flips_are_counted_and_kept_where_the_engine_tells_its_experts(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = PretrainedTraining(dataclasses.replace(MIXTURE, dump_steps=(0,)), workplace)
    tell_experts(training, monkeypatch)
    kept: dict[str, Any] = {}
    (row,) = training.step(lambda name, arrays: kept.update(arrays))
    # Two layers have the same two experts of four by chance in one of 36 tokens.
    assert row["routing_flips"] > 0.8
    assert 0.3 < row["routing_choices"] < 0.7
    assert kept["flips"].sum() / kept["mask"].sum() == pytest.approx(row["routing_flips"], abs=1e-3)
    assert not (kept["flips"] & ~kept["mask"]).any()


def test_experts_that_are_not_there_cannot_be_replayed(workplace: Workplace) -> None:
    with pytest.raises(ValueError, match="a method replays routing, and the model has no experts"):
        dataclasses.replace(GROUP, methods=(NONE, REPLAY))
    with pytest.raises(ValueError, match="weights='fp8_blocks' is for dense models"):
        dataclasses.replace(MIXTURE, engine=EngineSpec(kind="sglang", weights="fp8_blocks"))
    training = PretrainedTraining(dataclasses.replace(MIXTURE, methods=(REPLAY,)), workplace)
    with pytest.raises(ValueError, match="the engine did not tell the experts"):
        steps(training, 1)


def test_runs_one_after_the_other_hold_the_memory_of_one(workplace: Workplace) -> None:
    held = []
    # Whether Python collects by itself in time is chance.
    gc.disable()
    try:
        for _ in range(3):
            training = PretrainedTraining(MIXTURE, workplace)
            steps(training, 1)
            tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
            # Those that torch.compile has left of other tests hold no memory.
            held.append(sum(tensor.numel() for tensor in tensors if not isinstance(tensor, FakeTensor)))
            del training
    finally:
        gc.enable()
    assert held[2] == pytest.approx(held[0], rel=0.05)


@pytest.mark.parametrize("per_token", [False, True])
def test_passes_of_so_many_tokens_train_as_passes_of_so_many_answers(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch, per_token: bool
) -> None:
    question = lambda rng: (f"{rng.randrange(10 ** rng.randrange(1, 6))} x 7?", lambda answer: len({*answer}) / 9)  # noqa: E731
    monkeypatch.setitem(questions._TASKS, "arithmetic", question)
    size = {
        "num_prompts": 4,
        "samples_per_prompt": 4,
        "micro_batch_size": 16,
        "engine": EngineSpec(),
        "methods": (TOKEN_TIS,),
    }
    plain = dataclasses.replace(GROUP, **size, response_length=12, per_token_loss=per_token)
    expected, found = (
        steps(PretrainedTraining(dataclasses.replace(plain, max_tokens=most), workplace), 2) for most in (0, 90)
    )
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        assert one["grad_norm"] > 0
        # The order of sums differs, and the last of four digits with it. Both engines are exact: k3 is rounding alone.
        compared = [name for name in one if name not in ("group", "method", "k3", "abs_diff", "above_2", "below_half")]
        assert [other[name] for name in compared] == pytest.approx([one[name] for name in compared], rel=2e-3), compared


def test_micro_batches_are_as_long_as_they_may_be() -> None:
    assert compact.cuts([3, 3, 3, 5, 5, 9, 20], 10) == [0, 3, 5, 6, 7]
    assert compact.cuts([7], 1) == [0, 1]


def test_advantages_are_divided_by_the_deviation_of_their_question_or_not() -> None:
    class Asked:
        def grade(self, ids: list[int]) -> float:
            return float(ids[0])

    answers = [Completion(token_ids=[worth], log_probs=[0.0], weight_version=0) for worth in (0, 0, 0, 1)]
    found = [
        [sample.advantage for sample in grade_groups([Asked()], answers, num_samples=4, divided=divided)[0]]
        for divided in (True, False)
    ]
    assert found[1] == [-0.25, -0.25, -0.25, 0.75]
    assert found[0] == pytest.approx([-0.5, -0.5, -0.5, 1.5], rel=1e-3)


def test_settings_that_do_not_fit_are_refused() -> None:
    engine = EngineSpec(kind="sglang")
    with pytest.raises(ValueError, match="max_tokens is for"):
        dataclasses.replace(pretrained_runs.GROUP, max_tokens=100, updates=2)
    for changed in (
        {"engine": dataclasses.replace(engine, cache="fp8_e4m3", cache_scale=4.0)},
        {"engine": dataclasses.replace(engine, weights="fp8_blocks")},
        {"engine": engine, "num_evaluated": 7},
        {"engine": engine, "dtype": "float32"},
    ):
        with pytest.raises(ValueError, match="evaluates_in_engine needs"):
            dataclasses.replace(pretrained_runs.GROUP, evaluates_in_engine=True, **{"num_evaluated": 16, **changed})
