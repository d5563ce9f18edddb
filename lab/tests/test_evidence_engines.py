# SPDX-License-Identifier: Apache-2.0
"""The evidence harness: its decoder, its mixture of experts, its engines and its sampler."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from evidence import mixture, policy
from evidence.engines import ControlledEngine, Engines, EngineSpec, to_int4, to_mantissa
from evidence.group import Method
from evidence.policy import Shape
from evidence.task import PROMPT_LENGTH
from evidence_runs import CPU, EXPERTS, SHAPE, TINY, rows_of, training_of, uneven

import mis_ext.rollout

pytestmark = pytest.mark.usefixtures("one_thread")


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
    prompts = torch.randint(0, 20, (1, 512, PROMPT_LENGTH), generator=torch.Generator().manual_seed(0))
    engine = EngineSpec().create(EXPERTS, batch=0, length=0, device=CPU)
    sampled = engine.sample(weights, prompts, 16, temperature=1.0, draw_seeds=[1])
    ids = torch.cat([prompts, sampled.ids], -1)
    own = policy.score(EXPERTS, weights, ids, PROMPT_LENGTH, temperature=1.0)
    replayed = policy.score(EXPERTS, weights, ids, PROMPT_LENGTH, temperature=1.0, replayed=sampled.experts)
    flips = mixture.differ(own.experts, sampled.experts)[..., PROMPT_LENGTH - 1 :]
    # 63 to 73 of 8,192 on three instruction sets.
    assert 30 < flips.sum() < flips.numel() / 50
    before, after = ((scores.logprobs - sampled.logprobs).abs() for scores in (own, replayed))
    assert before[flips].mean() > 2 * before[~flips].mean()
    assert after[flips].mean() < before[flips].mean() / 2


def test_routing_cannot_be_replayed_without_experts() -> None:
    with pytest.raises(ValueError, match="replays_routing"):
        rows_of(training_of(dataclasses.replace(TINY, replays_routing=True)))


@pytest.mark.parametrize("only", [{"bypasses": True}, {"stream": 1}, {"slows_down": True}, {"replays_routing": True}])
def test_what_only_a_pretrained_model_reads_is_refused(only) -> None:
    with pytest.raises(ValueError, match="tiny: other: more than keys is for a pretrained model"):
        training_of(dataclasses.replace(TINY, methods=(Method(name="other", **only),)))


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


def test_scoring_needs_top_p() -> None:
    with pytest.raises(ValueError, match="scoring kept needs top_p below 1"):
        rows_of(training_of(dataclasses.replace(TINY, scoring="kept")))


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


def test_weights_are_rounded_to_bits_of_mantissa_and_to_integers_in_blocks() -> None:
    assert to_mantissa(torch.tensor([1.0, 1.25, 1.26, 1.5, -1.9, 0.0, 3e-5]), bits=1).tolist() == pytest.approx(
        [1.0, 1.5, 1.5, 1.5, -2.0, 0.0, 2**-15 * 1.0], rel=1e-6
    )
    weight = torch.randn(1, 64, 128).bfloat16()
    assert torch.equal(to_mantissa(weight, bits=7), weight)
    coarse = to_int4(weight.float())
    assert (coarse - weight.float()).abs().max() <= weight.float().abs().max() / 14 * 1.001
    assert max(len(block.unique()) for block in coarse[0].unflatten(-1, (-1, 32)).flatten(0, 1)) <= 15
    weights = {"model.embed_tokens.weight": weight, "up_proj.weight": weight, "norm.weight": weight[0, :1]}
    for kind, changed in (("mantissa_3", 2), ("int4", 1), ("fp8_e4m3", 2)):
        rounded = EngineSpec(kind="sglang", weights=kind).rounded(weights)
        assert sum(not torch.equal(rounded[name], weights[name]) for name in weights) == changed, kind
    with pytest.raises(ValueError, match="expected auto, fp8_e4m3, mantissa_N, int4 or fp8_blocks"):
        EngineSpec(weights="int3").rounded(weights)
