"""Studies of a pretrained model on a CPU: every arm trains, an interrupted run goes on, experts are replayed."""

# The imports after the skip need packages that only the example's environment has.

from __future__ import annotations

import dataclasses
import gc
import importlib.util
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensor

MISSING = [
    name for name in ("megatron", "transformers", "matplotlib", "rich") if importlib.util.find_spec(name) is None
]
if MISSING:
    pytest.skip(f"{', '.join(MISSING)} not installed (requirements/example.txt)", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

with warnings.catch_warnings():
    # Megatron-Core reports at import what is not installed.
    warnings.simplefilter("ignore")
    from evidence.engines import EngineSpec
    from evidence.group import Method
    from evidence.pretrained import rate, report, routing, studies
    from evidence.pretrained import training as training_module
    from evidence.pretrained.aligned import AlignedTrainer
    from evidence.pretrained.group import PretrainedGroup, runs_of
    from evidence.pretrained.samplers import SGLangSampler, TransformersSampler, ended
    from evidence.pretrained.training import PretrainedTraining
    from evidence.pretrained.workplace import Workplace
    from evidence.results import Results
    from evidence.study import NONE, TOKEN_TIS, Study
    from grpo import questions
    from grpo.trainer import Trainer
    from tiny_checkpoint import write_tiny_checkpoint
    from transformers import LlamaForCausalLM

    from mis_ext.onpolicy import RoutedExperts

# Megatron-Core warns of its own choices.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:full scope is deprecated"),
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "num_steps": 2,
    "num_prompts": 2,
    "response_length": 4,
    "num_evaluated": 4,
    "micro_batch_size": 8,
    "max_prompt": 96,
    "learning_rate": 1e-3,
}
GROUP = PretrainedGroup(name="tiny", engine=EngineSpec(), methods=(NONE,), seeds=(1,), **TINY)
MIXTURE = dataclasses.replace(GROUP, experts=4, expert_noise=0.3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def workplace(model: Path, tmp_path: Path) -> Iterator[Workplace]:
    place = Workplace(CPU, model, tmp_path)
    yield place
    place.close()


@pytest.fixture
def graded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards that differ from answer to answer, so that there is something to learn."""
    monkeypatch.setitem(
        questions._TASKS, "arithmetic", lambda rng: (f"{rng.randrange(100)} x 7?", lambda answer: len({*answer}) / 9)
    )


def steps(training: PretrainedTraining, count: int) -> list[dict[str, Any]]:
    rows = [row for _ in range(count) for row in training.step(lambda name, arrays: None)]
    return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]


@pytest.mark.whole_run
def test_a_run_that_was_interrupted_goes_on_as_if_it_had_not_been(workplace: Workplace) -> None:
    group = dataclasses.replace(GROUP, staleness=1, num_prompts=8, samples_per_prompt=32, response_length=2)
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


@pytest.mark.whole_run
@pytest.mark.parametrize(
    "method",
    [
        *(studies.AGAIN, studies.BYPASS, TOKEN_TIS, studies.token_tis(1.5), studies.TOKEN_MASK, studies.FOLLOWING_GATE),
        studies.SLOWED,
    ],
    ids=lambda method: method.name,
)
@pytest.mark.usefixtures("graded")
def test_every_arm_trains(workplace: Workplace, method: Method) -> None:
    group = dataclasses.replace(GROUP, methods=(method,), samples_per_prompt=32)
    rows = steps(PretrainedTraining(group, workplace), 2)
    assert all(np.isfinite([value for value in row.values() if isinstance(value, float)]).all() for row in rows)
    assert max(row["grad_norm"] for row in rows) > 0
    if method is studies.FOLLOWING_GATE:
        assert rows[-1]["kept_sequences"] < 1


@pytest.mark.whole_run
@pytest.mark.usefixtures("graded")
def test_in_fp16_the_gradient_is_that_of_float32_and_one_that_overflows_is_left_out(workplace: Workplace) -> None:
    norms = {}
    for dtype in ("float32", "float16"):
        group = dataclasses.replace(GROUP, dtype=dtype, engine=EngineSpec(dtype=dtype), samples_per_prompt=32)
        training = PretrainedTraining(group, workplace)
        norms[dtype] = steps(training, 1)[0]["grad_norm"]
        assert {weight.dtype for weight in training._trainer.weights().values()} == {getattr(torch, dtype)}
    assert norms["float16"] == pytest.approx(norms["float32"], rel=0.05)
    before = {name: weight.clone() for name, weight in training._trainer.weights().items()}
    (optimizer,) = training._trainer._optimizer.chained_optimizers
    optimizer.grad_scaler._scale.fill_(2.0**40)
    row = steps(training, 1)[0]
    assert np.isnan(row["grad_norm"])
    after = training._trainer.weights()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.whole_run
def test_a_run_learns_from_stale_samples_and_its_mismatch_grows_with_age(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sevens(rng: Random) -> tuple[str, Any]:
        return f"What is {rng.randrange(100)} x 7?", lambda answer: answer.count("7") / 6

    monkeypatch.setitem(questions._TASKS, "arithmetic", sevens)
    size = {"num_steps": 26, "num_prompts": 8, "response_length": 6, "num_evaluated": 32, "micro_batch_size": 64}
    group = dataclasses.replace(GROUP, **size, methods=(TOKEN_TIS,), staleness=1, ages=(1, 4), eval_interval=25)
    rows = steps(PretrainedTraining(group, workplace), 26)
    assert rows[0]["own_reward"] < 0.2
    assert rows[-1]["own_reward"] > 0.4
    assert rows[-1]["reward"] > 0.4
    # The engine of the tests is exact: what there is comes from age.
    assert rows[0]["k3"] < 1e-8
    assert 1e-4 < rows[20]["k3"] < rows[20]["k3_age_1"] < rows[20]["k3_age_4"]


@pytest.mark.whole_run
def test_the_learning_rate_follows_k3_also_after_an_interruption(
    workplace: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    follows = [1.0] * 10 + [8.0] * 40
    own = training_module.numbers.mismatch
    taken: list[float] = []

    def mismatch(*log_probs: Any) -> dict[str, float]:
        return own(*log_probs) | {"k3": follows[len(taken)]}

    def training() -> PretrainedTraining:
        group = dataclasses.replace(GROUP, methods=(studies.SLOWED,), eval_interval=100)
        run = PretrainedTraining(group, workplace)
        monkeypatch.setattr(run._trainer, "train", lambda *_: taken.append(_rate_of(run)) or {"grad_norm": 0.0})
        return run

    monkeypatch.setattr(training_module.numbers, "mismatch", mismatch)
    first = training()
    rows = steps(first, 12)
    second = training()
    second.restore(first.state())
    rows += steps(second, 30)
    shares = [rate / GROUP.learning_rate for rate in taken]
    assert shares == pytest.approx([row["learning_rate"] / GROUP.learning_rate for row in rows], rel=1e-3)
    # The mean of the last five steps: 1, then 12/5, 19/5, 26/5, 33/5, 8.
    assert shares == pytest.approx([1.0] * 10 + [5 / 12, 5 / 19, 5 / 26, 5 / 33] + [1 / 8] * 28)


def _rate_of(run: PretrainedTraining) -> float:
    (rate,) = {group["lr"] for group in run._trainer._optimizer.param_groups}
    return rate


def test_a_learning_rate_never_rises_and_has_a_lowest_share() -> None:
    assert rate.share([1.0] * 10 + [0.5] * 9) == 1.0
    assert rate.share([0.0] * 12) == 1.0
    assert rate.share([1.0] * 10 + [1e6] * 9) == rate.LOWEST
    assert rate.share([0.5, 1.5] * 5 + [2.0] * 9) == 0.5


def test_the_trainer_rounds_as_the_cache_of_its_engine(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    size = {"num_prompts": 8, "response_length": 12, "dtype": "float32", "engine": EngineSpec(dtype="float32")}
    exact = dataclasses.replace(GROUP, **size)
    # transformers has no cache of 8 bits: the engine is exact, so what differs is what the trainer rounds.
    monkeypatch.setattr(workplace, "engine", lambda _, _own=workplace.engine: _own(exact))
    k3 = {}
    for simulated in ("", "kv", "qkv"):
        group = dataclasses.replace(
            exact, engine=EngineSpec(dtype="float32", cache="fp8_e5m2"), simulated_cache=simulated
        )
        k3[simulated] = steps(PretrainedTraining(group, workplace), 1)[0]["k3"]
    assert k3[""] < 1e-9 < k3["kv"] < k3["qkv"]
    with pytest.raises(ValueError, match="tiny: simulated_cache='kv', and the engine's cache is not rounded"):
        dataclasses.replace(GROUP, simulated_cache="kv")


def test_an_aligned_trainer_gives_an_answer_the_same_bits_in_any_batch(workplace: Workplace) -> None:
    run = PretrainedTraining(GROUP, workplace)
    run._history.append(run._trainer.weights())
    data, _ = run._rollout(0)
    start = workplace.start(GROUP)
    scored = {}
    for trainer_type in (AlignedTrainer, Trainer):
        for size in (16, 3, 1):
            args = training_module._arguments(dataclasses.replace(GROUP, micro_batch_size=size))
            trainer = trainer_type(args, start.shape, workplace.ranks(), start.weights)
            scored[trainer_type, size] = torch.cat(trainer.score(trainer.micro_batches(data)))
    aligned = scored[AlignedTrainer, 16]
    assert all(torch.equal(scored[AlignedTrainer, size], aligned) for size in (3, 1))
    assert 0 < (aligned - scored[Trainer, 16]).abs().max() < 0.1


@pytest.mark.parametrize(
    ("change", "named"),
    [({"engine": EngineSpec()}, "kind='controlled'"), ({"experts": 4}, "experts=4")],
)
def test_what_cannot_be_aligned_is_refused(change: dict[str, Any], named: str) -> None:
    aligned = dataclasses.replace(GROUP, engine=EngineSpec(kind="sglang"), is_aligned=True)
    with pytest.raises(ValueError, match=named):
        dataclasses.replace(aligned, **change)


@pytest.mark.usefixtures("graded")
def test_weights_are_rounded_for_every_pass_and_the_optimizer_keeps_its_own(workplace: Workplace) -> None:
    group = dataclasses.replace(GROUP, dtype="float16", rounded_to="bfloat16", samples_per_prompt=32)
    run = PretrainedTraining(dataclasses.replace(group, learning_rate=1e-5, updates=2), workplace)
    copies = [copy for group in run._trainer._optimizer.param_groups for copy in group["params"]]
    before = [copy.clone() for copy in copies]
    loaded = []
    load = run._engine.load
    run._engine.load = lambda weights: (loaded.append(weights), load(weights))[1]  # type: ignore[method-assign]
    assert max(row["grad_norm"] for row in steps(run, 2)) > 0
    loaded.append(run._trainer.weights())
    for weights in loaded:
        assert all(torch.equal(weight, weight.bfloat16().half()) for weight in weights.values())
    assert any(not torch.equal(loaded[0][name], loaded[-1][name]) for name in loaded[0])
    # Rounded, most of them would stay where they were.
    moved = [(copy != old).float().mean() for copy, old in zip(copies, before, strict=True)]
    assert sum(moved) / len(moved) > 0.8


@pytest.mark.usefixtures("graded")
def test_dithered_weights_begin_as_they_were_and_see_all_of_an_update_on_average(workplace: Workplace) -> None:
    group = dataclasses.replace(GROUP, samples_per_prompt=32, learning_rate=1e-5)
    seen = {}
    for is_dithered in (False, True):
        run = PretrainedTraining(dataclasses.replace(group, is_dithered=is_dithered), workplace)
        copies = [copy for group in run._trainer._optimizer.param_groups for copy in group["params"]]
        before = [copy.clone() for copy in copies]
        weights = sorted(float(weight.detach().double().sum()) for weight in run._trainer._model.parameters())
        assert sorted(float(copy.bfloat16().double().sum()) for copy in copies) == weights
        assert steps(run, 1)[0]["grad_norm"] > 0
        updates = [(copy - old).double() for copy, old in zip(copies, before, strict=True)]
        rounded = [(copy.bfloat16().double() - old.bfloat16()) for copy, old in zip(copies, before, strict=True)]
        along = sum(float((ours * update.sign()).sum()) for ours, update in zip(rounded, updates, strict=True))
        seen[is_dithered] = along / sum(float(update.abs().sum()) for update in updates)
    assert seen[False] < 0.3
    assert seen[True] == pytest.approx(1.0, abs=0.1)


def test_weights_of_other_dtypes_than_bfloat16_are_not_dithered() -> None:
    with pytest.raises(ValueError, match="tiny: is_dithered is for dtype 'bfloat16', got 'float16'"):
        dataclasses.replace(GROUP, dtype="float16", is_dithered=True)


def test_weights_of_other_dtypes_than_float16_are_not_rounded_again() -> None:
    with pytest.raises(ValueError, match="tiny: rounded_to='bfloat16' is for dtype 'float16', got 'bfloat16'"):
        dataclasses.replace(GROUP, rounded_to="bfloat16")


def test_only_the_sampling_differs_between_the_two_uncorrected_arms(workplace: Workplace) -> None:
    asked: dict[str, list[Any]] = {}
    rewards = {}
    for method in (NONE, studies.AGAIN):
        training = PretrainedTraining(dataclasses.replace(GROUP, methods=(method,), num_prompts=8), workplace)
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


def test_the_sampler_reports_the_log_probs_of_transformers_and_stops_at_the_end(model: Path) -> None:
    policy = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
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
    sampler._quantizer, sampler._spec = None, EngineSpec(kind="sglang", weights="fp8_e4m3")
    weights = {"norm.weight": torch.rand(64) + 0.5, "up_proj.weight": torch.randn(32, 64)}
    found = sampler._prepared(weights)
    assert torch.equal(found["norm.weight"], weights["norm.weight"])
    error = (found["up_proj.weight"] - weights["up_proj.weight"]).abs()
    assert 0 < error.max() <= weights["up_proj.weight"].abs().max() / 16
    sampler._spec = EngineSpec(kind="sglang")
    assert all(torch.equal(weight, weights[name]) for name, weight in sampler._prepared(weights).items())


def test_answers_are_cut_behind_their_first_end() -> None:
    answers = ended(torch.tensor([[3, 1, 1], [1, 2, 2], [2, 2, 2]]), torch.tensor([[-1.0, -2, -3]] * 3), 1)
    assert answers.ids == [[3, 1], [1], [2, 2, 2]]
    assert answers.logprobs == [[-1.0, -2.0], [-1.0], [-1.0, -2.0, -3.0]]


@pytest.mark.whole_run
def test_a_trained_checkpoint_is_made_once_and_shared(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    group = dataclasses.replace(GROUP, trained_steps=2, num_prompts=8, samples_per_prompt=32, response_length=2)
    first = PretrainedTraining(group, workplace)._trainer.weights()
    (file,) = workplace.scratch.glob("first_weights_*.safetensors")
    made = file.stat().st_mtime_ns
    other = PretrainedTraining(dataclasses.replace(group, seeds=(2,), staleness=1), workplace)._trainer.weights()
    assert file.stat().st_mtime_ns == made
    untrained = workplace.pretrained.weights
    assert all(torch.equal(first[name], other[name]) for name in first)
    assert not all(torch.equal(first[name], untrained[name].to(first[name].dtype)) for name in first)


@pytest.mark.whole_run
def test_a_study_of_the_first_rollout_keeps_all_of_it_and_says_nothing_of_training(
    workplace: Workplace, tmp_path: Path
) -> None:
    size = TINY | {"num_steps": 1, "num_prompts": 16, "num_evaluated": 1}
    group = PretrainedGroup(
        name="atlas", engine=EngineSpec(), methods=(NONE,), seeds=(1,), num_dumped=100, dump_steps=(0,), **size
    )
    study = Study(name="atlas", question="How far?", groups=runs_of([group]))
    results, training = Results(tmp_path / "results"), PretrainedTraining(study.groups[0], workplace)
    rows: list[dict[str, Any]] = []
    with results.saving(study.groups[0], training, rows) as keep:
        rows += training.step(keep)
    # A new look at the folder.
    results = Results(tmp_path / "results")
    assert results.log_probs(study.groups[0])["step0"]["mask"].shape == (1, 100, 4)
    report.report([study], results, tmp_path / "pages")
    page = (tmp_path / "pages" / "atlas.md").read_text()
    for words in ("How far?", "## The mismatch", "Floor", "Failed", "all seeds", "against none"):
        assert (words in page) == (words in ("How far?", "## The mismatch")), words


@pytest.mark.whole_run
def test_a_run_that_was_stopped_is_on_the_page_and_in_no_comparison(workplace: Workplace, tmp_path: Path) -> None:
    group = dataclasses.replace(GROUP, num_steps=3, seeds=(1, 2), dtype="float32")
    study = Study(name="stopped", question="How far?", groups=runs_of([group]))
    whole, stopped = study.groups
    # The one that is stopped comes first: then no run has finished.
    for each, num_steps, missing in ((stopped, 2, 2), (whole, 3, 1)):
        training = PretrainedTraining(each, workplace)
        rows: list[dict[str, Any]] = []
        with Results(tmp_path / "results").saving(each, training, rows) as keep:
            for _ in range(num_steps):
                rows += training.step(keep)
        report.report([study], Results(tmp_path / "results"), tmp_path / "pages")
        page = (tmp_path / "pages" / "stopped.md").read_text()
        compared, _, left = page.partition("## Stopped before their last step")
        assert f"| {stopped.name} | 2 of 3 | " in left
        assert f"**{missing} of 2 runs are missing.**" in compared
        assert ("| none | 1 |" in compared) == (each is whole)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, model: Path, tmp_path: Path) -> Any:
    """Calls evidence.py with the first study made tiny: all of its runs, two steps each, transformers as engine."""
    spec = importlib.util.spec_from_file_location(
        "evidence_program", Path(__file__).parents[1] / "examples/evidence.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    name = "pretrained_floor"
    study = module.STUDIES[name]
    groups = tuple(
        dataclasses.replace(group, **TINY, engine=EngineSpec(), ages=(1,), dump_steps=(0,)) for group in study.groups
    )
    monkeypatch.setitem(module.STUDIES, name, dataclasses.replace(study, groups=groups))

    def call(command: str, *flags: str) -> None:
        options = ["--results", str(tmp_path / "results"), *flags]
        monkeypatch.setattr(sys, "argv", ["evidence.py", command, name, *options])
        module.main()

    call.module, call.groups, call.run = module, groups, ["--model", str(model), "--device", "cpu"]  # type: ignore[attr-defined]
    return call


@pytest.mark.whole_run
@pytest.mark.slow
def test_a_whole_study_runs_is_interrupted_goes_on_and_has_a_page(program: Any, tmp_path: Path, monkeypatch) -> None:
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
    monkeypatch.setattr(training_module, "STEPS_BETWEEN_AGES", 1)
    with pytest.raises(KeyboardInterrupt):
        program("run", *program.run)
    assert [results.is_done(group) for group in program.groups] == [True] + [False] * (len(program.groups) - 1)
    state = tmp_path / "results" / f"{program.groups[1].name}.state.pt"
    assert state.exists()
    with pytest.raises(SystemExit):
        program("run", *program.run, "--only", "*-seed7-*")
    # A claim of another process.
    with Results(tmp_path / "results").claimed(program.groups[-1]) as is_ours:
        assert is_ours
        program("run", *program.run)
    assert not state.exists()
    assert [results.is_done(group) for group in program.groups] == [True] * (len(program.groups) - 1) + [False]
    program("report", "--output", str(tmp_path / "pages"))
    page = (tmp_path / "pages" / "pretrained_floor.md").read_text()
    assert "1 of 24 runs are missing" in page
    program("run", *program.run)
    # Every step of every run once, and the one that was interrupted again.
    assert seen == 2 * len(program.groups) + 1
    program("compact")
    program("report", "--output", str(tmp_path / "pages"))
    page = (tmp_path / "pages" / "pretrained_floor.md").read_text()
    for words in ("## Floor", "none, again", "k3 by age", "| pretrained_floor_lr1e-06 | 1 |", "missing"):
        assert (words in page) == (words != "missing"), words
    assert (tmp_path / "pages" / "pretrained_floor.png").read_bytes().startswith(b"\x89PNG")
    head = Results(tmp_path / "results").machine(program.groups[0])
    assert {"torch", "transformers", "megatron-core", "device"} <= head.keys()
    json.dumps(head)


@pytest.mark.whole_run
@pytest.mark.usefixtures("graded")
def test_a_mixture_trains_and_goes_on_and_measures_no_routing_that_its_engine_does_not_tell(
    workplace: Workplace,
) -> None:
    group = dataclasses.replace(MIXTURE, eval_interval=1)
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
    group = dataclasses.replace(MIXTURE, methods=(studies.REPLAY,), ages=(1,), **size)
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
        dataclasses.replace(GROUP, methods=(NONE, studies.REPLAY))
    with pytest.raises(ValueError, match="said by the methods"):
        dataclasses.replace(MIXTURE, replays_routing=True)
    with pytest.raises(ValueError, match="weights='fp8_blocks' is for dense models"):
        dataclasses.replace(MIXTURE, engine=EngineSpec(kind="sglang", weights="fp8_blocks"))
    training = PretrainedTraining(dataclasses.replace(MIXTURE, methods=(studies.REPLAY,)), workplace)
    with pytest.raises(ValueError, match="the engine did not tell the experts"):
        steps(training, 1)


@pytest.mark.whole_run
def test_a_page_tells_replayed_experts_from_the_routers_own(
    workplace: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = dataclasses.replace(MIXTURE, methods=(NONE, studies.REPLAY), dump_steps=(0,), num_evaluated=1)
    study = Study(name="moe", question="Experts?", groups=runs_of([group]))
    results = Results(tmp_path / "results")
    for each in study.groups:
        training = PretrainedTraining(each, workplace)
        with monkeypatch.context() as patch:
            tell_experts(training, patch)
            rows: list[dict[str, Any]] = []
            with results.saving(each, training, rows) as keep:
                rows += [row for _ in range(2) for row in training.step(keep)]
    report.report([study], Results(tmp_path / "results"), tmp_path / "pages")
    page = (tmp_path / "pages" / "moe.md").read_text()
    for words in ("| tiny | 0 |", "| tiny, experts replayed | 0 |", "4 experts in every layer", "noise of 0.3"):
        assert words in page
    flipped = page.partition("| flipped tokens |")[2].partition("![where]")[0]
    assert "| tiny |" in flipped
    assert "replayed" not in flipped
    assert "choose other experts than the engine's in some layer at " in page
    assert "k3 over all steps: none " in page


@pytest.mark.whole_run
@pytest.mark.parametrize("group", [GROUP, MIXTURE], ids=["dense", "mixture"])
def test_runs_one_after_the_other_hold_the_memory_of_one(workplace: Workplace, group: PretrainedGroup) -> None:
    held = []
    # Whether Python collects by itself in time is chance.
    gc.disable()
    try:
        for _ in range(3):
            training = PretrainedTraining(group, workplace)
            steps(training, 1)
            tensors = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
            # Those that torch.compile has left of other tests hold no memory.
            held.append(sum(tensor.numel() for tensor in tensors if not isinstance(tensor, FakeTensor)))
            del training
    finally:
        gc.enable()
    assert held[2] == pytest.approx(held[0], rel=0.05)
