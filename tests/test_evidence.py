"""The evidence harness: its decoder, its training of many runs at once, and its statistics."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from evidence import ensemble, mismatch, mixture, policy
from evidence.engines import ControlledEngine, Engines, EngineSpec
from evidence.ensemble import Training
from evidence.enumerable import Enumerated
from evidence.group import Group, Method
from evidence.outcomes import Condition, Difference, pareto_k
from evidence.policy import Shape
from evidence.results import Results
from evidence.studies import STUDIES
from evidence.task import PROMPT_LENGTH, Problems, grade

import mis_ext.rollout

CPU = torch.device("cpu")
SHAPE = Shape(hidden_size=32, ffn_size=48, num_heads=4, head_dim=8)
EXPERTS = dataclasses.replace(SHAPE, num_experts=4, experts_per_token=2, expert_ffn_size=24)
NONE = Method(name="none")
BAND = {"rs_lower_bound": 0.9995, "rs_upper_bound": 1.0005}
GATE = Method(
    name="gate",
    keys={"use_tis": True, "tis_level": "none", "use_rs": True, "rs_level": "geometric"} | BAND,
)
TINY = Group(
    name="tiny",
    engine=EngineSpec(dtype="bfloat16", cache="fp8_e5m2"),
    methods=(NONE, GATE, Method(name="gate, random", like="gate")),
    seeds=(1, 2),
    num_steps=3,
    response_length=10,
    num_prompts=4,
    warmup_steps=2,
    eval_interval=2,
    dump_steps=(1,),
    shape=SHAPE,
)


def training_of(group: Group) -> Training:
    engine = group.engine.create(group.shape, batch=0, length=0, device=CPU)
    return Training(group, engine, CPU)


def uneven(weights: policy.Weights) -> policy.Weights:
    """Larger matrices, for distributions that are far from uniform."""
    return {name: weight * 5 if weight.dim() == 3 else weight for name, weight in weights.items()}


def rows_of(training: Training) -> list[dict[str, Any]]:
    rows = []
    while training.num_steps_done < training.group.num_steps:
        rows += training.step(lambda name, arrays: None)
    return rows


def test_the_decoder_is_that_of_transformers() -> None:
    from evidence.sglang_engine import hf_config
    from transformers import Qwen3ForCausalLM

    weights = policy.new_weights(SHAPE, [3, 4], CPU)
    ids = torch.randint(0, 32, (2, 3, 12))
    for run in range(2):
        model = Qwen3ForCausalLM(hf_config(SHAPE)).eval()
        model.load_state_dict({name: weight[run] for name, weight in weights.items()})
        expected = model(ids[run]).logits
        torch.testing.assert_close(policy.forward(SHAPE, weights, ids).logits[run], expected, rtol=1e-4, atol=1e-5)


def test_the_mixture_of_experts_is_that_of_transformers(tmp_path: Path) -> None:
    from evidence.sglang_engine import hf_config
    from safetensors.torch import save_file
    from transformers import Qwen3MoeForCausalLM

    weights = uneven(policy.new_weights(EXPERTS, [3, 4], CPU))
    ids = torch.randint(0, 32, (2, 3, 12))
    output = policy.forward(EXPERTS, weights, ids)
    for run in range(2):
        hf_config(EXPERTS).save_pretrained(tmp_path)
        of_run = {name: weight[run].contiguous() for name, weight in weights.items()}
        save_file(of_run, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model = Qwen3MoeForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
        chosen: list[torch.Tensor] = []
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda module, inputs, result, chosen=chosen: chosen.append(result[2]))
        torch.testing.assert_close(output.logits[run], model(ids[run]).logits, rtol=1e-4, atol=1e-5)
        assert torch.equal(output.experts[run].flatten(0, 1), torch.stack(chosen, 1))


def test_every_expert_is_rounded_and_the_router_is_not() -> None:
    weights = policy.new_weights(EXPERTS, [3, 4], CPU)
    rounded = EngineSpec(weights="fp8_e4m3").rounded(weights)
    kept = {name for name, weight in rounded.items() if torch.equal(weight, weights[name])}
    assert kept == {name for name in weights if "norm" in name or name.endswith("mlp.gate.weight")}


def test_replayed_experts_are_used_with_the_probabilities_of_the_router() -> None:
    weights = uneven(policy.new_weights(EXPERTS, [3, 4], CPU))
    ids = torch.randint(0, 32, (2, 3, 12))
    own = policy.forward(EXPERTS, weights, ids)
    same = policy.forward(EXPERTS, weights, ids, replayed_RBSNK=own.experts)
    assert torch.equal(same.logits, own.logits)
    # The last experts are turned into others: only later tokens may see it.
    others = own.experts.clone()
    others[:, :, 7] = (own.experts[:, :, 7] + 1) % 4
    replayed = policy.forward(EXPERTS, weights, ids, replayed_RBSNK=others)
    assert torch.equal(replayed.logits[:, :, :7], own.logits[:, :, :7])
    assert (replayed.logits[:, :, 7:] - own.logits[:, :, 7:]).abs().amax((0, 1, 3)).min() > 0
    assert mixture.differ(own.experts, others)[:, :, :7].sum() == 0
    assert not mixture.differ(own.experts, own.experts.flip(-1)).any()


def test_replay_removes_what_flipped_experts_add_to_the_mismatch() -> None:
    weights = uneven(policy.new_weights(EXPERTS, [3], CPU))
    prompts = torch.randint(0, 20, (1, 64, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
    engine = EngineSpec().create(EXPERTS, batch=0, length=0, device=CPU)
    sampled = engine.sample(weights, prompts, 16, temperature=1.0, draw_seeds=[1])
    ids = torch.cat([prompts, sampled.ids], -1)
    own = policy.score(EXPERTS, weights, ids, PROMPT_LENGTH, temperature=1.0)
    replayed = policy.score(EXPERTS, weights, ids, PROMPT_LENGTH, temperature=1.0, replayed=sampled.experts)
    flips = mixture.differ(own.experts, sampled.experts)[..., PROMPT_LENGTH - 1 :]
    assert 5 < flips.sum() < flips.numel() / 5
    before, after = ((scores.logprobs - sampled.logprobs).abs() for scores in (own, replayed))
    assert before[flips].mean() > 2 * before[~flips].mean()
    assert after[flips].mean() < before[flips].mean() / 2


def test_the_trainer_scores_and_learns_with_the_experts_of_the_engine() -> None:
    group = dataclasses.replace(TINY, methods=(NONE,), engine=EngineSpec(), shape=EXPERTS, dump_steps=(0,))
    k3, entropy = {}, {}
    for replays in (False, True):
        kept: dict[str, Any] = {}
        training = training_of(dataclasses.replace(group, replays_routing=replays))
        rows = training.step(lambda name, arrays, kept=kept: kept.update(arrays))
        counted = (kept["flips"] & kept["mask"]).sum((1, 2)) / kept["mask"].sum((1, 2))
        assert [row["routing_flips"] for row in rows] == pytest.approx(counted.tolist(), rel=1e-3)
        assert 0 < counted.mean() < 0.5
        k3[replays] = [row["k3"] for row in rows]
        entropy[replays] = [row["entropy"] for row in training.step(lambda name, arrays: None)]
    assert k3[True] != k3[False]
    assert k3[True] == pytest.approx(k3[False], rel=0.5)
    assert entropy[True] == pytest.approx(entropy[False], rel=0.1)


def test_routing_cannot_be_replayed_without_experts() -> None:
    with pytest.raises(ValueError, match="replays_routing"):
        rows_of(training_of(dataclasses.replace(TINY, replays_routing=True)))


def test_the_sampler_reports_the_log_probs_of_the_policy() -> None:
    weights = {name: weight * 3 for name, weight in policy.new_weights(SHAPE, [3, 4], CPU).items()}
    prompts = torch.randint(0, 20, (2, 5, PROMPT_LENGTH))
    engine = EngineSpec(dtype="float32").create(SHAPE, batch=0, length=0, device=CPU)
    ids, logprobs, *_ = engine.sample(weights, prompts, 9, temperature=0.7, draw_seeds=[1, 1])
    scored = policy.score(SHAPE, weights, torch.cat([prompts, ids], -1), PROMPT_LENGTH, temperature=0.7).logprobs
    torch.testing.assert_close(logprobs, scored, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [EngineSpec(cache="fp8_e5m2"), EngineSpec(weights="fp8_e4m3"), EngineSpec(noise=0.1)])
def test_a_dialled_engine_differs_and_its_error_belongs_to_the_state(spec: EngineSpec) -> None:
    weights = {name: weight * 3 for name, weight in policy.new_weights(SHAPE, [3], CPU).items()}
    prompts = torch.randint(0, 20, (1, 1, PROMPT_LENGTH)).expand(1, 64, -1)
    engine = spec.create(SHAPE, batch=0, length=0, device=CPU)
    ids, logprobs, *_ = engine.sample(weights, prompts, 2, temperature=1.0, draw_seeds=[1])
    scored = policy.score(SHAPE, weights, torch.cat([prompts, ids], -1), PROMPT_LENGTH, temperature=1.0).logprobs
    assert (logprobs - scored).abs().max() > 1e-4
    by_token: dict[int, float] = {}
    for token, logprob in zip(ids[0, :, 0].tolist(), logprobs[0, :, 0].tolist(), strict=True):
        assert by_token.setdefault(token, logprob) == logprob


@pytest.mark.parametrize(("kind", "limit"), [("fp8_blocks", 0.2), ("int8_blocks", 0.1)])
def test_8_bit_products_are_those_of_the_quantised_numbers(kind: str, limit: float) -> None:
    shape = Shape(num_layers=1)
    weights = uneven(policy.new_weights(shape, [3, 4], CPU))
    engine = EngineSpec(dtype="float32", weights=kind).create(shape, batch=0, length=0, device=CPU)
    held, project = engine._prepared(weights)
    name = "model.layers.0.mlp.down_proj.weight"
    numbers, scale = (engine._quantizer.quantize(weights)[key] for key in (name, f"{name}_scale_inv"))
    inputs = torch.randn(2, 5, 128)
    found = project["project"](inputs, held[name])
    largest = {"fp8_blocks": 448, "int8_blocks": 127}[kind]
    for run in range(2):
        for row in range(5):
            expected = torch.zeros(64, dtype=torch.float64)
            for part in range(2):
                columns = slice(64 * part, 64 * part + 64)
                # In float32, where an integer may just be missed.
                own = inputs[run, row, columns]
                factor = own.abs().max() / largest
                rounded = (own / factor).to(numbers.dtype).double()
                product = numbers[run, :, columns].double() @ rounded
                expected += product * factor.double() * float(scale[run, 0, part])
            torch.testing.assert_close(found[run, row].double(), expected, rtol=1e-4, atol=1e-4)
    exact = torch.bmm(inputs, weights[name].mT)
    assert 0.005 < (found - exact).norm() / exact.norm() < limit
    assert torch.equal(held["lm_head.weight"], weights["lm_head.weight"])


def test_experts_are_not_quantised_in_blocks() -> None:
    with pytest.raises(ValueError, match="for dense decoders, this one has 4 experts"):
        EngineSpec(weights="fp8_blocks").create(EXPERTS, batch=0, length=0, device=CPU)


def test_sampling_follows_the_reported_probabilities() -> None:
    weights = {name: weight * 3 for name, weight in policy.new_weights(SHAPE, [3], CPU).items()}
    prompts = torch.randint(0, 20, (1, 1, PROMPT_LENGTH)).expand(1, 4000, -1)
    ids, logprobs, *_ = (
        EngineSpec()
        .create(SHAPE, batch=0, length=0, device=CPU)
        .sample(weights, prompts, 1, temperature=1.0, draw_seeds=[1])
    )
    for token in ids.unique():
        chosen = ids[0, :, 0] == token
        probability = float(logprobs[0, chosen].exp().mean())
        spread = math.sqrt(probability * (1 - probability) / 4000)
        assert abs(float(chosen.float().mean()) - probability) < 5 * spread + 1e-3


def test_runs_of_a_group_do_not_see_each_other() -> None:
    together = rows_of(training_of(TINY))
    alone = rows_of(training_of(dataclasses.replace(TINY, methods=(NONE,), seeds=(2,))))
    found = [row for row in together if row["method"] == "none" and row["seed"] == 2]
    for row, expected in zip(found, alone, strict=True):
        numbers = [name for name, value in expected.items() if isinstance(value, float)]
        assert [row[name] for name in numbers] == pytest.approx([expected[name] for name in numbers], rel=1e-3)


def test_a_correction_reaches_the_weights_and_none_does_not() -> None:
    rows = rows_of(training_of(dataclasses.replace(TINY, methods=(NONE, Method(name="also none"), GATE))))
    last = {row["method"]: row for row in rows if row["step"] == 2 and row["seed"] == 1}
    assert last["none"]["kept_tokens"] == 1
    assert 0 < last["gate"]["kept_sequences"] < 1
    assert last["none"]["own_reward"] == last["also none"]["own_reward"]
    assert last["none"]["entropy"] != last["gate"]["entropy"]


def test_the_control_rejects_as_much_as_its_model_but_others() -> None:
    training = training_of(TINY)
    kept: dict[str, Any] = {}
    rows = training.step(lambda name, arrays: kept.update({name: arrays}))
    by_method = {(row["method"], row["seed"]): row for row in rows}
    for seed in TINY.seeds:
        model, control = by_method["gate", seed], by_method["gate, random", seed]
        assert control["kept_sequences"] == model["kept_sequences"] < 1
        assert control["grad_norm"] != model["grad_norm"]


def test_stale_weights_are_those_of_earlier_steps() -> None:
    group = dataclasses.replace(TINY, methods=(NONE,), engine=EngineSpec(dtype="float32"), learning_rate=0.02)
    fresh, stale = (rows_of(training_of(dataclasses.replace(group, staleness=k))) for k in (0, 2))
    assert [row["k3"] for row in fresh if row["seed"] == 1] == pytest.approx([0, 0, 0], abs=1e-6)
    first, second, third = [row["k3"] for row in stale if row["seed"] == 1]
    assert first == pytest.approx(0, abs=1e-6)
    assert 1e-5 < second < third


def test_an_interrupted_group_goes_on_where_it_was(tmp_path: Path) -> None:
    results, expected = Results(tmp_path), Results(tmp_path / "whole")
    for where, stops in ((results, (1, 2, 3)), (expected, (3,))):
        for stop in stops:
            training = training_of(TINY)
            rows = where.resume(TINY, training)
            with where.saving(TINY, training, rows) as keep:
                while training.num_steps_done < stop:
                    rows += training.step(keep)
            assert where.is_done(TINY) == (stop == 3)
    assert results.rows(TINY) == expected.rows(TINY)
    assert not list(tmp_path.glob("*.state.pt"))
    with pytest.raises(ValueError, match="results of other settings than tiny"):
        results.is_done(dataclasses.replace(TINY, learning_rate=0.5))
    found, whole = results.log_probs(TINY), expected.log_probs(TINY)
    assert list(found) == list(whole) == ["step1"]
    assert all(np.array_equal(found["step1"][name], whole["step1"][name]) for name in ("behavior", "log_ratio", "mask"))
    assert found["step1"]["mask"].shape == (2, 32, 10)


def peaked_policy() -> tuple[policy.Weights, torch.Tensor]:
    return uneven(policy.new_weights(SHAPE, [3], CPU)), torch.randint(0, 20, (1, 200, PROMPT_LENGTH))


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_kept_tokens_are_those_of_mis_ext_and_what_is_sampled_follows_them(top_p: float) -> None:
    weights, prompts = peaked_policy()
    engine = EngineSpec(dtype="float32").create(SHAPE, batch=0, length=0, device=CPU)
    sampled = engine.sample(weights, prompts, 6, temperature=0.7, draw_seeds=[1], top_p=top_p)
    ids = torch.cat([prompts, sampled.ids], -1)
    truncation = mis_ext.rollout.Truncation(top_p=top_p, keeps_next=True)
    logits = policy.forward(SHAPE, weights, ids[..., :-1]).logits[..., PROMPT_LENGTH - 1 :, :].flatten(0, 2)
    for kept, behavior, distribution in (
        (None, sampled.logprobs, mis_ext.rollout.Distribution(temperature=0.7)),
        (
            sampled.kept,
            sampled.logprobs - sampled.log_mass,
            mis_ext.rollout.Distribution(temperature=0.7, truncation=truncation),
        ),
    ):
        expected, outside = mis_ext.rollout.trainer_log_probs(logits, sampled.ids.flatten(), distribution)
        scored = policy.score(SHAPE, weights, ids, PROMPT_LENGTH, temperature=0.7, kept=kept).logprobs
        torch.testing.assert_close(scored.flatten(), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(behavior.flatten(), expected, rtol=1e-4, atol=1e-5)
        assert not outside.any()
    assert sampled.kept.sum(-1).float().mean() < SHAPE.vocab_size - 5


def test_only_the_scoring_with_the_mask_has_no_mismatch_and_the_right_log_probs() -> None:
    group = dataclasses.replace(TINY, methods=(NONE,), engine=EngineSpec(dtype="float32"), top_p=0.8)
    rows = {
        scoring: training_of(dataclasses.replace(group, scoring=scoring)).step(lambda name, arrays: None)
        for scoring in ("reported", "sampled", "kept")
    }
    k3, entropy, norm = (
        {name: [row[number] for row in of] for name, of in rows.items()} for number in ("k3", "entropy", "grad_norm")
    )
    assert max(k3["reported"] + k3["kept"]) < 1e-8
    # The ratio is the mass of the kept tokens, 0.8 or a little more.
    assert k3["sampled"] == pytest.approx([math.log(1 / 0.83) - 1 + 0.83] * 2, rel=0.5)
    assert entropy["reported"] == entropy["sampled"]
    assert entropy["kept"] == pytest.approx([value + math.log(0.83) for value in entropy["reported"]], abs=0.05)
    assert norm["reported"] == norm["sampled"] != norm["kept"]


def test_the_loss_has_the_ratio_1_at_first_whatever_the_engine_chose() -> None:
    group = dataclasses.replace(TINY, methods=(NONE,), engine=EngineSpec(), top_p=0.7, scoring="kept", shape=EXPERTS)
    training = training_of(dataclasses.replace(group, replays_routing=True))
    trainer = training._trainer
    rollout, _ = ensemble._sample(training.group, training._engine, trainer.weights, training._problems, 0, CPU)
    assert rollout.choices.kept is not None
    assert rollout.choices.experts is not None
    proximal, _ = ensemble._score(trainer, rollout)
    inputs = rollout.ids, proximal, rollout.advantage, torch.ones_like(proximal), rollout.mask, rollout.mask
    loss_R = ensemble._loss(trainer, *inputs, rollout.choices)
    # The ratio 1 leaves the advantages. That of other choices does not.
    torch.testing.assert_close(loss_R, -rollout.advantage.sum(1), rtol=0, atol=1e-3)
    for choices in (
        ensemble.Choices(rollout.choices.experts, None),
        ensemble.Choices(rollout.choices.experts.flip(0).roll(1, 1), rollout.choices.kept),
    ):
        assert ((ensemble._loss(trainer, *inputs, choices) - loss_R).abs() > 1e-3).all()


def test_scoring_needs_top_p() -> None:
    with pytest.raises(ValueError, match="scoring kept needs top_p below 1"):
        rows_of(training_of(dataclasses.replace(TINY, scoring="kept")))


def test_runs_are_equal_until_they_branch() -> None:
    group = dataclasses.replace(TINY, engine=EngineSpec(dtype="float32"), learning_rate=0.02, staleness=1)
    rows = rows_of(training_of(dataclasses.replace(group, methods=(NONE, GATE), branch_step=2)))
    of = {(row["method"], row["seed"], row["step"]): row for row in rows}
    for seed in TINY.seeds:
        for step, kept in ((0, 1.0), (1, 1.0), (2, of["gate", seed, 2]["kept_sequences"])):
            none, gate = of["none", seed, step], of["gate", seed, step]
            assert gate["kept_sequences"] == kept
            assert (none["entropy"], none["reward"]) == (gate["entropy"], gate["reward"])
            assert (none["k3"] > 1e-5) == (step == 2)
        assert of["gate", seed, 2]["kept_sequences"] < 1
        assert of["gate", seed, 2]["grad_norm"] != of["none", seed, 2]["grad_norm"]


def test_a_group_that_fails_does_not_stop_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "examples" / "evidence.py"
    specification = importlib.util.spec_from_file_location("evidence_command", path)
    command = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(command)
    broken = dataclasses.replace(TINY, name="broken", replays_routing=True)
    short = dataclasses.replace(TINY, methods=(NONE,), num_steps=1)
    results = Results(tmp_path)
    with Engines(CPU) as engines:
        assert command.run_all((broken, short), results, engines, False) == ["broken"]
    assert (results.is_done(broken), results.is_done(short)) == (False, True)
    assert "replays_routing: this engine does not tell" in capsys.readouterr().err
    assert 0 < results.sampling_seconds(short) < 60


def test_grading() -> None:
    problems = Problems.draw(50, 20, torch.Generator().manual_seed(0))
    solved = problems.solve()
    assert grade(problems.prompts_BP, solved, problems.mask_BL).tolist() == [1.0] * 50
    broken = solved.clone()
    broken[:, 3] = 11
    share = grade(problems.prompts_BP, broken, problems.mask_BL)
    torch.testing.assert_close(share, 1 - 2 / problems.mask_BL.sum(-1))


def test_differences_are_judged_by_their_intervals() -> None:
    difference = Difference.of_pairs([0.1, 0.2, 0.3, 0.2])
    assert difference == pytest.approx((0.2, 0.2 - 0.1299, 0.2 + 0.1299, 4), abs=1e-3)
    assert difference.verdict(0.02) == "better"
    assert Difference.of_pairs([-0.2, -0.21, -0.19]).verdict(0.02) == "worse"
    assert Difference.of_pairs([0.001, -0.001, 0.002]).verdict(0.02) == "no difference"
    assert Difference.of_pairs([0.3, -0.3, 0.1]).verdict(0.02) == "not resolved"
    assert Difference.of_pairs([0.3]).verdict(0.02) == "not resolved"


def test_conditions_pair_seeds_and_see_a_fall() -> None:
    rewards = {"none": {1: [0.5] * 40, 2: [0.9] * 40}, "better": {1: [0.6] * 40, 2: [1.0] * 20 + [0.7] * 20}}
    rows = [
        {"method": method, "seed": seed, "step": step, "reward": reward}
        for method, seeds in rewards.items()
        for seed, curve in seeds.items()
        for step, reward in enumerate(curve)
    ]
    condition = Condition.of_rows("c", rows)
    assert condition.base == "none"
    assert condition.difference("better", "none", "reward").mean == pytest.approx((0.1 - 0.05) / 2)
    assert condition.difference("better", "none", "reward", slice(0, 10)).mean == pytest.approx(0.1)
    assert (condition.fell("none"), condition.fell("better")) == (0, 0.5)


def test_settings_are_compared_with_the_uncorrected_runs_of_another_by_seed() -> None:
    def condition(name: str, rewards: dict[str, dict[int, list[float]]]) -> Condition:
        return Condition.of_rows(
            name,
            [
                {"method": method, "seed": seed, "step": step, "reward": reward}
                for method, seeds in rewards.items()
                for seed, curve in seeds.items()
                for step, reward in enumerate(curve)
            ],
        )

    reference = condition("whole", {"none": {1: [0.5] * 40, 2: [0.9] * 40}, "other": {1: [0.0] * 40, 2: [0.0] * 40}})
    part = condition("part", {"tis": {1: [0.4] * 30 + [0.7] * 10, 2: [0.8] * 40, 3: [0.0] * 40}})
    assert part.difference_to("tis", reference, "reward", slice(0, 30)).mean == pytest.approx(-0.1)
    last = part.difference_to("tis", reference, "reward", None)
    assert (last.mean, last.num_pairs) == (pytest.approx(0.05), 2)


def test_an_engine_is_kept_for_the_next_group_and_closed_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    monkeypatch.setattr(ControlledEngine, "close", lambda engine: closed.append(engine))
    settings = EngineSpec(settings={"a": 1})
    with Engines(CPU) as engines:
        first = engines.get(settings, SHAPE, batch=1, length=1)
        assert engines.get(EngineSpec(settings={"a": 1}), SHAPE, batch=1, length=1) is first
        for spec, batch in ((EngineSpec(settings={"a": 2}), 1), (EngineSpec(settings={"a": 2}), 2)):
            before = len(closed)
            assert engines.get(spec, SHAPE, batch=batch, length=1) is not first
            assert len(closed) == before + 1
    assert len(closed) == 3


@pytest.mark.parametrize("shape", [0.1, 0.5, 0.9])
def test_the_tail_index_is_found(shape: float) -> None:
    uniform = (np.arange(200_000) + 0.5) / 200_000
    assert pareto_k(uniform**-shape) == pytest.approx(shape, abs=0.12)
    assert math.isnan(pareto_k(np.ones(1000)))


def test_tokens_with_flipped_experts_are_told_from_the_others() -> None:
    d = np.array([[[0.01, -0.75, 0.02, 5.0]]], dtype=np.float16)
    flips, mask = np.array([[[0, 1, 0, 1]]], dtype=bool), np.array([[[1, 1, 1, 0]]], dtype=bool)
    streams = mismatch.Streams(behavior=np.zeros_like(d), log_ratio=d, mask=mask, flips=flips)
    row = mismatch._flips({"engine": {"step7": [streams]}})[-2]
    # One of three tokens; k3 = e^-0.75 - 1 + 0.75 there, and the ratio e^0.75.
    assert row == "| engine | 7 | 3.3e-01 | 1.00 | 2.2e-01 | 1.0e+00 | 2.117 | 1.3e-04 | 0.0e+00 | 1.020 |"
    assert not mismatch._flips({"dense": {"step7": [dataclasses.replace(streams, flips=None)]}})


def test_the_gaussian_law_is_that_of_simulated_ratios() -> None:
    rng = np.random.default_rng(0)
    k3, length = 3e-3, 100
    d = rng.normal(-k3, math.sqrt(2 * k3), (4000, length))
    sums = d.cumsum(1)
    for band in mismatch.BANDS:
        assert mismatch._share(sums, length, band) == pytest.approx(mismatch._law(k3, length, band), abs=0.03)


def test_exact_weights_have_no_bias_and_the_spread_is_that_of_draws() -> None:
    exact = Method(name="exact", keys={"use_tis": True, "tis_level": "sequence", "tis_mode": "unbounded"})
    problem = Enumerated(0.3, seed=1)
    assert problem.bias_and_spread(exact)[0] < 1e-5
    assert Enumerated(0.0, seed=1).bias_and_spread(NONE)[0] < 1e-9
    bias, spread = problem.bias_and_spread(NONE)
    assert bias > 0.1

    probability = problem._behavior.sum(1).exp()
    drawn = probability.multinomial(4000, replacement=True, generator=torch.Generator().manual_seed(0))
    softmax = problem._logits.detach().softmax(-1)
    gradients = torch.zeros(len(drawn), *softmax.shape, dtype=torch.float64)
    per_token = torch.nn.functional.one_hot(problem._responses, 2) - softmax[problem._nodes]
    rows = torch.arange(len(drawn))[:, None]
    gradients[rows, problem._nodes[drawn]] = per_token[drawn] * problem._reward[drawn, None, None]
    length = problem._true_gradient.norm()
    assert float(gradients.var(0).sum().sqrt() / length) == pytest.approx(spread, rel=0.05)
    assert float((gradients.mean(0) - problem._true_gradient).norm() / length) == pytest.approx(
        math.hypot(bias, spread / math.sqrt(len(drawn))), rel=0.15
    )


def test_a_call_of_one_response_normalises_sequence_weights_away() -> None:
    problem = Enumerated(0.4, seed=1)
    sequence = Method(name="sequence", keys={"use_tis": True, "tis_level": "sequence", "tis_mode": "unbounded"})
    uncorrected = problem.rollout_error(NONE, None)
    assert problem.rollout_error(sequence, 1) == pytest.approx(uncorrected)
    assert problem.rollout_error(sequence, 256) != pytest.approx(uncorrected, rel=0.01)
    bias, spread = problem.bias_and_spread(NONE)
    assert uncorrected == pytest.approx(math.hypot(bias, spread / 16), rel=0.05)


def test_every_study_has_unique_groups_and_controls_with_models() -> None:
    groups = [group for study in STUDIES.values() for group in study.groups]
    assert len({group.name for group in groups}) == len(groups)
    for group in groups:
        names = {method.name for method in group.methods}
        assert all(method.like is None or method.like in names for method in group.methods)
        assert not group.methods[0].keys


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
