# SPDX-License-Identifier: Apache-2.0
"""The attention of the runs on a CPU: with context parallelism it has the numbers of one rank."""

import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from process_ranks import joined, run_processes

pytest.importorskip("megatron.core")

from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig

from lab.hosts.host_cpu import layers
from lab.hosts.host_cpu.context_parallel import zigzag_places
from lab.hosts.host_cpu.layers import Experts, PackedAttention, token_dispatcher
from mis_ext.onpolicy import simulate_kv_cache

SIZE = 2
# The last is padding, as in the hosts.
LENGTHS = {False: (8, 20, 4, 12), True: (7, 20, 5, 12)}


def config(size: int) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, context_parallel_size=size)


def attend(size: int, places: torch.Tensor, *, is_contiguous: bool, rounds: bool) -> list[torch.Tensor]:
    """The output of the tokens at these places, and the gradients of their query, key and value."""
    lengths = LENGTHS[is_contiguous]
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (4, 4), "key": (2, 4), "value": (2, 4)}
    whole = [torch.randn(sum(lengths), *shape, generator=generator) for shape in shapes.values()]
    upstream = torch.randn(sum(lengths), 16, generator=generator)
    local = [each[places].requires_grad_() for each in whole]
    ends = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32)
    packed = PackedSeqParams(cu_seqlens_q=ends, cu_seqlens_kv=ends, qkv_format="thd")
    layer = torch.nn.Module()
    layer.core_attention = PackedAttention(config(size), is_contiguous=is_contiguous)
    if rounds:
        simulate_kv_cache(layer, "fp8_e5m2", queries=True)
    output = layer.core_attention(*local, None, packed_seq_params=packed)
    output.backward(upstream[places])
    return [output.detach(), *(each.grad for each in local)]


def compare(rank: int, folder: Path, is_contiguous: bool, rounds: bool) -> None:
    lengths = LENGTHS[is_contiguous]
    everything = torch.arange(sum(lengths))
    places = everything if is_contiguous else zigzag_places(lengths, SIZE)
    own = places.chunk(SIZE)[rank]
    expected = attend(1, everything, is_contiguous=is_contiguous, rounds=rounds)
    # Megatron-LM gathers into memory of the current GPU, under a name of before torch 2.13.
    torch.cuda.current_device = lambda: "cpu"
    warnings.simplefilter("ignore", FutureWarning)
    with joined(rank, SIZE, folder, seconds=60):
        parallel_state.initialize_model_parallel(context_parallel_size=SIZE)
        found = attend(SIZE, own, is_contiguous=is_contiguous, rounds=rounds)
    assert torch.equal(found[0], expected[0][own])
    for gradient, of_one_rank in zip(found[1:], expected[1:], strict=True):
        # Each rank's part of a sum over the queries is rounded by itself.
        torch.testing.assert_close(gradient, of_one_rank[own], rtol=1e-5, atol=1e-6)


@pytest.mark.whole_run
@pytest.mark.parametrize(
    ("is_contiguous", "rounds"),
    [(False, False), (True, False), (False, True)],
    ids=["zigzag", "contiguous", "zigzag, a simulated cache"],
)
def test_two_ranks_have_output_and_gradients_of_one(is_contiguous, rounds, tmp_path) -> None:
    run_processes(compare, tmp_path, is_contiguous, rounds, world_size=SIZE)


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
@pytest.mark.parametrize("size", [1, 2])
def test_gradients_of_experts_that_other_ranks_lack_are_not_summed(size) -> None:
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "expert_model_parallel_size": size}
    made = Experts(4 // size, TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, **experts))
    assert [each.allreduce for each in made.parameters()] == [size == 1] * (8 // size)


@pytest.mark.filterwarnings("ignore:full scope is deprecated")
def test_a_checkpoint_numbers_the_experts_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 8, "expert_model_parallel_size": SIZE}
    made = Experts(2, TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=4, **experts))
    monkeypatch.setattr(parallel_state, "get_expert_data_parallel_rank", lambda: 0)
    monkeypatch.setattr(layers, "make_sharded_tensor_for_checkpoint", lambda tensor, key, *_, **__: key)
    for rank in range(SIZE):
        monkeypatch.setattr(parallel_state, "get_expert_model_parallel_rank", lambda rank=rank: rank)
        assert made.sharded_state_dict("experts.") == {
            f"experts.{name}.weight{place}": f"experts.{name}.weight{2 * rank + place}"
            for name in ("linear_fc1", "linear_fc2")
            for place in range(2)
        }


def test_sizes_that_are_sent_to_other_ranks_are_numbers() -> None:
    moved = token_dispatcher.maybe_move_tensor_to_cpu
    assert isinstance(moved(torch.tensor([3, 1]), as_numpy=True), np.ndarray)
    assert isinstance(moved(torch.tensor([3, 1]), record_stream=True), torch.Tensor)
    assert moved(None, as_numpy=True) is None
