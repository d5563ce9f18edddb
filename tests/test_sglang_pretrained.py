"""SGLang's model runner with answers in words: prompts of unequal length, an end token, tied embeddings, Llama."""

# The imports after the skip need packages that only the example's environment has.

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch

if importlib.util.find_spec("sglang") is None:
    pytest.skip("sglang not installed (examples/run_sglang.sh makes an environment)", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from evidence.engines import EngineSpec
from evidence.pretrained.samplers import Answers, SGLangSampler
from tiny_checkpoint import write_tiny_checkpoint
from transformers import LlamaForCausalLM

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.usefixtures("one_thread"),
    # SGLang and what it imports warn of each other.
    pytest.mark.filterwarnings("ignore"),
]
END = 4
PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13], [5, 6, 7]] * 8


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "not tied"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder, is_tied=request.param)
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def largest_difference(policy: LlamaForCausalLM, answers: Answers) -> float:
    """Of the engine's log-probs from those of transformers in float32."""
    found = 0.0
    for prompt, ids, logprobs in zip(PROMPTS, *answers, strict=True):
        with torch.no_grad():
            logits = policy(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / 0.8
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        found = max(found, float((expected - torch.tensor(logprobs)).abs().max()))
    return found


@pytest.mark.parametrize("weights", ["auto", "fp8_blocks"])
def test_answers_have_the_log_probs_of_the_weights_that_were_loaded(policy: LlamaForCausalLM, weights: str) -> None:
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
