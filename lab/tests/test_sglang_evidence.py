# SPDX-License-Identifier: Apache-2.0
"""SGLang's model runner of the evidence harness, against the harness's own decoder."""

import importlib.util
from collections.abc import Iterator

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed (requirements/sglang-cpu.txt)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("these are the settings for a CPU", allow_module_level=True)

from evidence import mixture, policy
from evidence.engines import EngineSpec
from evidence.policy import Shape
from evidence.sglang_engine import SGLangEngine

pytestmark = [pytest.mark.sglang, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

CPU = torch.device("cpu")
EXPERTS = Shape(hidden_size=32, num_heads=4, head_dim=8, num_experts=4, experts_per_token=2, expert_ffn_size=64)
BATCH, NUM_PROMPT, NUM_TOKENS = 6, 5, 12


@pytest.fixture(scope="module")
def engine() -> Iterator[SGLangEngine]:
    spec = EngineSpec(kind="sglang", dtype="float32")
    created = spec.create(EXPERTS, batch=BATCH, length=NUM_PROMPT + NUM_TOKENS, device=CPU)
    yield created
    created.close()


def weights_of(*seeds: int, shape: Shape = EXPERTS) -> policy.Weights:
    """Matrices five times the usual, for distributions that are far from uniform."""
    weights = policy.new_weights(shape, list(seeds), CPU)
    return {name: weight * 5 if weight.dim() == 3 else weight for name, weight in weights.items()}


def k3(proximal: torch.Tensor, behavior: torch.Tensor) -> float:
    d = (proximal - behavior).double()
    return float((d.exp() - 1 - d).mean())


# Before the others, whose engine stays until the end of the module: a process has one at a time.
@pytest.mark.parametrize("kind", ["fp8_blocks", "int8_blocks"])
def test_quantised_weights_are_taken_again_and_again_and_multiplied_in_8_bits(kind: str) -> None:
    dense = Shape()
    spec = EngineSpec(kind="sglang", weights=kind)
    engine = spec.create(dense, batch=16, length=NUM_PROMPT + 20, device=CPU)
    try:
        weights = weights_of(3, 4, shape=dense)
        prompts = torch.randint(0, 20, (2, 16, NUM_PROMPT))
        sampled = engine.sample(weights, prompts, 20, temperature=0.7, draw_seeds=[1, 1], top_p=0.8)
        held = dict(engine._runner._runner.model.named_parameters())
        assert held["model.layers.0.self_attn.qkv_proj.weight"].dtype.itemsize == 1
        assert held["model.layers.0.self_attn.qkv_proj.weight_scale_inv"].shape == (4, 1)
        ids = torch.cat([prompts, sampled.ids], -1)
        plain = policy.score(dense, weights, ids, NUM_PROMPT, temperature=0.7).logprobs
        controlled = EngineSpec(weights=kind, dtype="float32").create(dense, batch=0, length=0, device=CPU)
        prepared, project = controlled._prepared(weights)
        logits = policy.forward(dense, prepared, ids[..., :-1], **project).logits[..., NUM_PROMPT - 1 :, :] / 0.7
        same = logits.log_softmax(-1).gather(-1, sampled.ids[..., None])[..., 0]
        # What is left is the bf16 of everything else, which moves some numbers to the next of 8 bits.
        assert 1.5 * k3(same, sampled.logprobs) < k3(plain, sampled.logprobs)
        # Every sampled token was kept, and the kept ones have the mass that is asked for.
        assert sampled.kept.gather(-1, sampled.ids[..., None]).all()
        assert 0.8 <= sampled.log_mass.exp().min() < 0.85
        scored = (
            logits.masked_fill(~sampled.kept, -torch.inf).log_softmax(-1).gather(-1, sampled.ids[..., None])[..., 0]
        )
        assert k3(scored, sampled.logprobs - sampled.log_mass) < 2 * k3(same, sampled.logprobs) + 1e-4
        if kind == "int8_blocks":
            # The reason why load() writes these itself.
            engine._runner._writes_rows = False
            first = {name: weight[0] for name, weight in weights.items()}
            with pytest.raises(AttributeError, match="weight_loader"):
                engine._runner.load(engine._quantizer.quantize(first))
    finally:
        engine.close()


def test_a_mixture_of_experts_has_the_log_probs_and_the_experts_of_the_policy(engine: SGLangEngine) -> None:
    weights = weights_of(3, 4)
    prompts = torch.randint(0, 20, (2, BATCH, NUM_PROMPT))
    sampled = engine.sample(weights, prompts, NUM_TOKENS, temperature=0.7, draw_seeds=[1, 1])
    ids = torch.cat([prompts, sampled.ids], -1)
    scores = policy.score(EXPERTS, weights, ids, NUM_PROMPT, temperature=0.7)
    torch.testing.assert_close(sampled.logprobs, scores.logprobs, rtol=1e-4, atol=1e-5)
    assert sampled.experts.shape == (2, BATCH, NUM_PROMPT + NUM_TOKENS - 1, 2, 2)
    assert not mixture.differ(sampled.experts, scores.experts).any()
    replayed = policy.score(EXPERTS, weights, ids, NUM_PROMPT, temperature=0.7, replayed=sampled.experts)
    torch.testing.assert_close(replayed.logprobs, scores.logprobs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("projection", ["gate_proj", "up_proj", "down_proj"])
def test_an_expert_that_the_engine_does_not_hold_is_found(engine: SGLangEngine, projection: str) -> None:
    weights = {name: weight[0] for name, weight in weights_of(3).items()}
    name = f"model.layers.1.mlp.experts.2.{projection}.weight"
    runner = engine._runner
    runner.load(weights)
    whole = dict(runner._runner.model.named_parameters())
    held = whole[f"model.layers.1.mlp.experts.{'w2' if projection == 'down_proj' else 'w13'}_weight"]
    # An engine that loses one number of one expert.
    load_weights = runner._runner.model.load_weights

    def lossy(pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        load_weights(pairs)
        held.data[2, 64 if projection == "up_proj" else 0, 1] += 1

    runner._runner.model.load_weights = lossy
    try:
        runner.load(weights)
        with pytest.raises(RuntimeError, match=f"were loaded: {name}$"):
            runner.generate(torch.zeros(BATCH, NUM_PROMPT, dtype=torch.int64), num_tokens=1)
    finally:
        del runner._runner.model.load_weights


def test_an_unknown_expert_is_refused(engine: SGLangEngine) -> None:
    weights = {name: weight[0] for name, weight in weights_of(3).items()}
    weights["model.layers.0.mlp.experts.4.up_proj.weight"] = torch.zeros(64, 32)
    with pytest.raises(ValueError, match=r"experts\.4\.up_proj\.weight is unknown"):
        engine._runner.load(weights)
