# SPDX-License-Identifier: Apache-2.0
"""A trainer that rounds keys and values as its engine's cache: equal bits with that engine, and what is refused."""

import dataclasses
import sys
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mis_ext.onpolicy import simulate_kv_cache
from mis_ext.onpolicy.kv_cache import DTYPES


class Core(nn.Module):
    """What it was given."""

    def forward(self, query, key, value, attention_mask, **options):
        self.given = query, key, value
        return query + key + value


class Layer(nn.Module):
    def __init__(self, **config) -> None:
        super().__init__()
        self.core_attention, self.config = Core(), Namespace(**config)

    def forward(self, query, key, value):
        return self.core_attention(query, key, value, None, attn_mask_type=None)


def model(**config) -> nn.ModuleDict:
    return nn.ModuleDict({"decoder": nn.ModuleList([Layer(**config), Layer(**config)]), "mtp": Layer(**config)})


def streams() -> list[torch.Tensor]:
    return [torch.randn(5, 2, 4, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]


@pytest.mark.parametrize("num_positional", range(4))
@pytest.mark.parametrize("queries", [False, True])
def test_streams_may_be_passed_by_name(queries, num_positional) -> None:
    found, given = model(), streams()
    rounded = [values.to(DTYPES["fp8_e5m2"]).to(values.dtype) for values in given]
    named = dict(list(zip(("query", "key", "value"), given, strict=True))[num_positional:])
    core = found["decoder"][0].core_attention
    with simulate_kv_cache(found, "fp8_e5m2", queries=queries):
        core(*given[:num_positional], **named, attention_mask=None)
    expected = [rounded[0] if queries else given[0], *rounded[1:]]
    assert all(torch.equal(*pair) for pair in zip(core.given, expected, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries", [False, True])
def test_values_are_rounded_and_the_gradient_is_not(dtype, queries) -> None:
    found, given = model(), streams()
    own = [values.detach().clone() for values in given]
    rounded = [values.to(DTYPES[dtype]).to(values.dtype) for values in own]
    with simulate_kv_cache(found, dtype, queries=queries):
        for layer in found["decoder"]:
            layer(*given).sum().backward()
            seen = layer.core_attention.given
            expected = [rounded[0] if queries else own[0], *rounded[1:]]
            assert all(torch.equal(*pair) for pair in zip(seen, expected, strict=True))
        found["mtp"](*given)
        assert all(torch.equal(*pair) for pair in zip(found["mtp"].core_attention.given, own, strict=True))
    assert not torch.equal(rounded[1], own[1])
    assert all(torch.equal(values.grad, torch.full_like(values, 2)) for values in given)
    found["decoder"][0](*given)
    assert all(torch.equal(*pair) for pair in zip(found["decoder"][0].core_attention.given, own, strict=True))


def test_what_cannot_be_simulated_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="dtype='fp4': must be fp8_e4m3 or fp8_e5m2"):
        simulate_kv_cache(model(), "fp4")
    with pytest.raises(ValueError, match="no layer has a core_attention"):
        simulate_kv_cache(nn.Linear(2, 2), "fp8_e4m3")
    with pytest.raises(ValueError, match=r"decoder.0: the cache of multi-latent attention \(MLA\) holds latents"):
        simulate_kv_cache(model(multi_latent_attention=True), "fp8_e4m3")
    found = model()
    cache = simulate_kv_cache([found], "fp8_e4m3")
    with pytest.raises(ValueError, match=r"decoder.0: the model already simulates a cache: remove that first"):
        simulate_kv_cache(found, "fp8_e5m2")
    cache.close()
    simulate_kv_cache(found, "fp8_e5m2").close()


@pytest.fixture(scope="module")
def device():
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    with warnings.catch_warnings():
        # Megatron-Core reports at import what is not installed.
        warnings.simplefilter("ignore")
        from grpo.distributed import Ranks
        from megatron.core import parallel_state
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks.start(context_parallel_size=1, seed=0).device
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.whole_run
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize(
    ("cache", "dtype", "num_steps"), [("fp8_e4m3", torch.bfloat16, 0), ("fp8_e5m2", torch.float32, 1)]
)
def test_an_aligned_engine_with_a_cache_of_8_bits_agrees_bit_for_bit(device, cache, dtype, num_steps) -> None:
    from onpolicy.demonstration import WORKLOADS, Experiment, Setting
    from onpolicy.pieces import ALL, Piece

    # Of two prompts the longer one takes two passes.
    workload = dataclasses.replace(WORKLOADS["short"], prompts=WORKLOADS["short"].prompts[::3], max_new_tokens=4)

    def reports(pieces, num_steps):
        setting = Setting(engine="transformers", dtype=dtype, pieces=pieces, cache=cache)
        with Experiment(setting, workload, device) as experiment:
            return [step.report for step in experiment.steps(num_steps)]

    assert [report.verdict for report in reports(ALL, num_steps)] == ["EXACT"] * (num_steps + 1)
    if num_steps == 0:
        (without,) = reports(ALL - {Piece.CACHE}, 0)
        assert without.mean_abs_diff > 0.01
