"""SGLang's model runner of the evidence harness, against the harness's own float32 decoder."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang is not installed (requirements/sglang-cpu.txt)", allow_module_level=True)
if torch.cuda.is_available():
    pytest.skip("these are the settings for a CPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

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


def weights_of(*seeds: int) -> policy.Weights:
    """Matrices five times the usual, for distributions that are far from uniform."""
    weights = policy.new_weights(EXPERTS, list(seeds), CPU)
    return {name: weight * 5 if weight.dim() == 3 else weight for name, weight in weights.items()}


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
