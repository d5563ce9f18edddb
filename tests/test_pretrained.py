"""Checkpoints of Hugging Face in Megatron-Core's decoder, and questions with a verifiable answer."""

# The imports after the skip need packages that only the example's environment has.

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

MISSING = [name for name in ("megatron", "transformers") if importlib.util.find_spec(name) is None]
if MISSING:
    pytest.skip(f"{', '.join(MISSING)} not installed (requirements/example.txt)", allow_module_level=True)

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples"))

with warnings.catch_warnings():
    # Megatron-Core reports at import what is not installed.
    warnings.simplefilter("ignore")
    from grpo.conversion import export_weights, load_weights
    from grpo.cpu import megatron_device
    from grpo.model import ModelShape, build_model, transformer_config
    from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config

# Megatron-Core warns of its own choices.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:full scope is deprecated")

CPU = torch.device("cpu")
SMALL = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    "rms_norm_eps": 1e-5,
}
CONFIGS = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "llama, tied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SMALL, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=False),
}


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Megatron-Core's groups, of this process alone."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    file = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def random_model(config: PretrainedConfig) -> Any:
    """With weights that make far from uniform distributions, and biases and norms that are not neutral."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * (0.3 if parameter.dim() > 1 else 0.5) + (parameter.dim() < 2))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_megatron_computes_the_logits_of_transformers_and_gives_the_weights_back(name: str) -> None:
    config = CONFIGS[name]()
    model, shape = random_model(config), ModelShape.of(config)
    settings = transformer_config(shape, context_parallel_size=1, calculate_per_token_loss=False)
    token_BT = torch.randint(0, 40, (3, 21), generator=torch.Generator().manual_seed(1))
    position_BT = torch.arange(21).expand(3, 21)
    with megatron_device(CPU):
        ours = build_model(shape, settings, seed=0)
        load_weights(ours, model.state_dict(), shape)
        with torch.no_grad():
            logits = ours(token_BT, position_BT, None)
    expected = model(token_BT).logits.detach()
    # Both in float32; logits are of the size of 10.
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-4)
    assert expected.std() > 1
    exported = export_weights(ours, shape)
    assert exported.keys() == model.state_dict().keys()
    for key, weight in model.state_dict().items():
        assert torch.equal(exported[key], weight), key


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(**SMALL | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}), "rope"),
        (LlamaConfig(**SMALL, mlp_bias=True), "mlp_bias is True"),
        (Qwen3Config(**SMALL, attention_bias=True), "attention_bias is True"),
        (Qwen2Config(**SMALL, hidden_act="gelu"), "hidden_act is 'gelu'"),
    ],
)
def test_a_model_that_would_be_computed_otherwise_is_refused(config: PretrainedConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelShape.of(config)


def test_another_architecture_is_refused_with_those_that_are_known() -> None:
    from transformers import GPT2Config

    with pytest.raises(ValueError, match=r"model_type 'gpt2': expected one of llama, qwen2, qwen3"):
        ModelShape.of(GPT2Config())
