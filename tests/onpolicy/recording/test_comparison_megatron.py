# SPDX-License-Identifier: Apache-2.0
"""The comparator on Megatron-Core and transformers, module by module."""

import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from comparison_recordings import TOKENS
from tiny_decoder import packed, padded
from torch import Tensor

from mis_ext.onpolicy.recording.compare import compare
from mis_ext.onpolicy.recording.recorder import record
from mis_ext.onpolicy.recording.recordings import Recording
from mis_ext.onpolicy.recording.rows import Rows

NEEDED = [name for name in ("megatron", "transformers") if importlib.util.find_spec(name) is None]
needs_megatron = pytest.mark.skipif(bool(NEEDED), reason=f"not installed: {NEEDED}")
LAYER, HF_LAYER = "decoder.layers.{i}", "model.layers.{i}"


@pytest.fixture(scope="module")
def megatron() -> Iterator[Any]:
    """A function that runs the example's GPTModel, right-padded, with its weights for transformers."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import torch.distributed as dist
        from grpo.conversion import export_weights
        from grpo.cpu import megatron_device
        from grpo.model import ModelShape, build_model, hf_config, transformer_config
        from megatron.core import parallel_state
        from transformers import Qwen3ForCausalLM
    shape = ModelShape(hidden_size=16, ffn_hidden_size=24, num_heads=4, num_kv_heads=2, head_dim=8)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallel_state.initialize_model_parallel()
            with megatron_device(torch.device("cpu")):
                config = transformer_config(shape, context_parallel_size=1, calculate_per_token_loss=False)
                model = build_model(shape, config, seed=0)
        hf = Qwen3ForCausalLM(hf_config(shape)).eval()
        hf.load_state_dict(export_weights(model, shape))

        def run(ids: Tensor, rows: Rows) -> Recording:
            position = torch.arange(ids.shape[1]).expand_as(ids)
            with megatron_device(torch.device("cpu")), record(model) as recorder, recorder.rows(rows):
                model(ids, position, None).sum().backward()
            return recorder.recording()

        yield run, model, hf
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def split_qkv(rows: Tensor) -> dict[str, Tensor]:
    """Megatron has the heads of each of 2 groups together: 2 queries, 1 key, 1 value of dimension 8."""
    query, key, value = rows.view(len(rows), 2, 4, 8).split([2, 1, 1], dim=2)
    names = [f"{HF_LAYER}.self_attn.{x}_proj" for x in "qkv"]
    return {name: part.flatten(1) for name, part in zip(names, (query, key, value), strict=True)}


def split_gate_up(rows: Tensor) -> dict[str, Tensor]:
    gate, up = rows.chunk(2, -1)
    return {f"{HF_LAYER}.mlp.gate_proj": gate, f"{HF_LAYER}.mlp.up_proj": up}


MEGATRON_TO_TRANSFORMERS = {
    "": "",
    "embedding.word_embeddings": "model.embed_tokens",
    f"{LAYER}": f"{HF_LAYER}",
    f"{LAYER}.input_layernorm": f"{HF_LAYER}.input_layernorm",
    f"{LAYER}.self_attention": f"{HF_LAYER}.self_attn",
    f"{LAYER}.self_attention.linear_qkv": split_qkv,
    f"{LAYER}.self_attention.q_layernorm": f"{HF_LAYER}.self_attn.q_norm",
    f"{LAYER}.self_attention.k_layernorm": f"{HF_LAYER}.self_attn.k_norm",
    f"{LAYER}.self_attention.linear_proj": f"{HF_LAYER}.self_attn.o_proj",
    f"{LAYER}.pre_mlp_layernorm": f"{HF_LAYER}.post_attention_layernorm",
    f"{LAYER}.mlp": f"{HF_LAYER}.mlp",
    f"{LAYER}.mlp.linear_fc1": split_gate_up,
    f"{LAYER}.mlp.linear_fc2": f"{HF_LAYER}.mlp.down_proj",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
ONE_SIDED = (
    *["embedding", "embedding.embedding_dropout", "decoder", "*.core_attention", "*.pre_cross_attn_layernorm"],
    *["*.cross_attention", "model", "*.act_fn", "*rotary*"],
)


@needs_megatron
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_megatron_and_transformers_are_compared_module_by_module(megatron) -> None:
    run, _, hf = megatron
    with torch.enable_grad():
        trainer = run(*padded())
    ids, rows = packed()
    with record(hf) as recorder, recorder.rows(rows):
        # Without a cache, positions that restart separate the sequences.
        hf(ids, position_ids=rows.position, use_cache=False)
    result = compare(trainer, recorder.recording(), names=MEGATRON_TO_TRANSFORMERS, allow=ONE_SIDED)
    assert result.problems == ()
    assert len(result.modules) == 4 + 2 * 14
    assert {module.num_rows for module in result.modules} == {len(TOKENS)}
    assert result.modules[0].name == "embedding.word_embeddings"
    assert result.modules[0].num_differing == 0
    assert result.modules[0].inputs_equal
    # float32 against float32 in another order of summation; logits are of size 1.
    assert max(module.max_abs for module in result.modules) < 1e-5
    # The kernels of a CPU without AVX2 add in the same order on both sides: then all is equal.
    assert result.verdict == ("DIFFERENT" if any(module.num_differing for module in result.modules) else "EXACT")
    # Every module that a mapped name could stand for is there, with inputs.
    assert all(module.compared_inputs for module in result.modules)
    # Some are of one side only: its mask is not by token, and engines hand tables of positions to other modules.
    uncompared = {module.name: {*module.uncompared_inputs} for module in result.modules if module.uncompared_inputs}
    for i in (0, 1):
        assert "attention_mask" in uncompared[f"decoder.layers.{i}.self_attention"]
    assert {name.rpartition(".")[2] for name in uncompared} == {"0", "1", "self_attention"}
