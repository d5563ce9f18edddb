# SPDX-License-Identifier: Apache-2.0
"""Dithered master weights: rounded they are what they were, all of an update is seen on average, and ranks agree."""

from __future__ import annotations

import argparse
import copy
import functools
import importlib.util
import sys
import types
from collections.abc import Mapping
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_optimizer import BF16, SHAPES, Quantized, model_of_ranks, optimizer_of, sharded_state, step
from process_ranks import run_checks

from mis_ext import check_setup, dither_master_weights, dither_weights
from mis_ext.hosts.master_weights import CHUNK, _dither, _Part, dithered

HOOK_PATH = "custom_megatron_before_train_step_hook_path"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_drawn_is_rounded_to_the_weight(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = torch.arange(-0x8000, 0x8000).to(torch.int16)
    # All of bf16 but NaN: also the largest, which has a finite neighbour on one side only, both zeros, and infinity.
    weight = bits[~bits.view(BF16).isnan()].view(BF16)
    assert len(weight) == 2 * (0x7F80 + 1)
    for share in (torch.zeros(len(weight)), torch.ones(len(weight)), torch.rand(len(weight), generator=generator)):
        found = dithered(weight.float(), share)
        assert found.dtype == torch.float32
        assert torch.equal(found.bfloat16().view(torch.int16), weight.view(torch.int16))


def test_the_largest_number_is_dithered_on_both_sides() -> None:
    largest, share = torch.tensor(torch.finfo(BF16).max), torch.linspace(0, 1, 5)
    for weight in (largest, -largest):
        found = dithered(weight.expand(5), share).double() - weight.double()
        # Its neighbour below is 2^120 away: rounded to it is what is less than half as far, on either side.
        assert found[2] == 0
        assert torch.allclose(found[[0, 1, 3, 4]] / 2.0**119, torch.tensor([-1, -0.5, 0.5, 1]).double(), atol=0.01)


def test_of_an_update_however_small_all_is_seen_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(1_000_000, generator=generator) * 0.02).bfloat16()
    master = dithered(weight, torch.rand(len(weight), generator=generator))
    for update in (1e-6, -1e-5):
        assert float((weight.float() + update).bfloat16().sub(weight).double().mean()) / update < 0.4
        seen = (master + update).bfloat16().double() - weight
        assert float(seen.mean()) == pytest.approx(update, rel=0.1)


# Megatron-Core warns of its own choices.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore:full scope is deprecated",
    "ignore:WARNING. there is no optimizer on RANK",
    "ignore:.* is experimental:UserWarning",
)
MEGATRON = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core not installed (requirements/example.txt)"
)


def whole_masters(seed: int) -> dict[torch.Size, torch.Tensor]:
    """Of an optimizer that is not distributed, by shape."""
    with optimizer_of(is_distributed=False) as (optimizer, _):
        assert dither_master_weights(optimizer, seed=seed) == 700 * 600 + 600 + 601 * 3
        (own,) = optimizer.chained_optimizers
        pairs = zip(own.float16_groups, own.fp32_from_float16_groups, strict=True)
        masters = {weight.shape: master for groups in pairs for weight, master in zip(*groups, strict=True)}
        for weight in (weight for group in own.float16_groups for weight in group):
            assert torch.equal(masters[weight.shape].bfloat16(), weight)
            assert not torch.equal(masters[weight.shape], weight.float())
    return masters


def joined_masters(size: int, shapes: Mapping[str, tuple[int, ...]]) -> dict[torch.Size, torch.Tensor]:
    """Of the parts that ``size`` ranks of a distributed optimizer have, flat, by the shape of the whole."""
    parts: dict[torch.Size, dict[int, torch.Tensor]] = {}
    for rank in range(size):
        with optimizer_of(rank=rank, size=size, is_distributed=True, shapes=shapes) as (optimizer, _):
            dither_master_weights(optimizer, seed=7)
            (own,) = optimizer.chained_optimizers
            groups = zip(own.model_float16_groups, own.shard_fp32_from_float16_groups, strict=True)
            for weight, master in (pair for group in groups for pair in zip(*group, strict=True)):
                start = own._get_model_param_range_map(weight)["param"].start
                parts.setdefault(weight.shape, {})[start] = master
    return {shape: torch.cat([found[start] for start in sorted(found)]) for shape, found in parts.items()}


@MEGATRON
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_every_layout_of_a_distributed_optimizer_has_the_same_master_weights(size: int) -> None:
    whole, joined = whole_masters(7), joined_masters(size, SHAPES)
    assert joined.keys() == whole.keys()
    assert all(torch.equal(joined[shape], whole[shape].flatten()) for shape in whole)


@MEGATRON
def test_a_parameter_draws_the_same_whatever_its_rank_has_beside_it() -> None:
    """As norms under tensor parallelism, and tied embeddings in the first and the last stage of a pipeline."""
    head = torch.Size(SHAPES["head"])
    first = joined_masters(3, SHAPES)[head]
    last = joined_masters(2, {"head": SHAPES["head"], "norm": (64,), "other": (9, 5)})[head]
    assert torch.equal(first, last)


def shares(master: torch.Tensor) -> torch.Tensor:
    """Where it lies among all that is rounded to its weight: from -1/2 to 1/2."""
    weight = master.bfloat16()
    spacing = weight.nextafter(torch.full_like(weight, torch.inf)).float() - weight.float()
    return ((master - weight.float()) / spacing).flatten()


@MEGATRON
def test_another_seed_draws_others_and_places_are_drawn_apart() -> None:
    matrix, head = torch.Size([700, 600]), torch.Size([601, 3])
    one, other = (whole_masters(seed) for seed in (1, 2))
    first, second = shares(one[matrix]), shares(other[matrix])
    for share in (first, second):
        assert abs(float(share.mean())) < 0.01
        assert float(share.std()) == pytest.approx(12**-0.5, rel=0.03)
    for left, right in [(first, second)] + [(first[:-far], first[far:]) for far in (1, 600, CHUNK)]:
        assert abs(float(torch.corrcoef(torch.stack([left, right]))[0, 1])) < 0.02
    small = shares(one[head])
    assert abs(float(torch.corrcoef(torch.stack([small, first[: len(small)]]))[0, 1])) < 0.2


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    (own,) = optimizer.chained_optimizers
    prefix = "shard_" if hasattr(own, "shard_fp32_from_float16_groups") else ""
    return [master for group in getattr(own, f"{prefix}fp32_from_float16_groups") for master in group]


@MEGATRON
def test_the_hook_of_the_hosts_dithers_before_the_first_step_of_a_process_alone(capsys: pytest.CaptureFixture) -> None:
    with optimizer_of(is_distributed=True) as (optimizer, model):
        before = {name: weight.clone() for name, weight in model.named_parameters()}
        dither_weights(argparse.Namespace(seed=3, rank=0), 0, 0, [model], optimizer, None)
        assert capsys.readouterr().out == "mis_ext: master weights of rank 0: 422,403 are dithered\n"
        assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
        # As if optimizer steps had ended on numbers of bf16.
        for master in masters_of(optimizer):
            master.copy_(master.bfloat16())
        dither_weights(argparse.Namespace(seed=3, rank=0), 0, 1, [model], optimizer, None)
        assert all(torch.equal(master, master.bfloat16().float()) for master in masters_of(optimizer))
        assert capsys.readouterr().out == ""
    with optimizer_of(is_distributed=True) as (optimizer, model):
        dither_weights(argparse.Namespace(seed=3, rank=1), 0, 0, [model], optimizer, None)
        assert capsys.readouterr().out == ""
        assert not torch.equal(masters_of(optimizer)[0], masters_of(optimizer)[0].bfloat16().float())


LAYOUTS = {
    "TP 2": {"tensor_model_parallel_size": 2},
    "PP 2": {"pipeline_model_parallel_size": 2},
    "EP 2": {"expert_model_parallel_size": 2},
}


def is_shared(layout: dict[str, int], name: str, parameter: torch.Tensor) -> bool:
    """Whether two ranks have this parameter: norms and routers, tied embeddings, all but experts."""
    if "pipeline_model_parallel_size" in layout:
        return name.startswith(("output_layer", "embedding.word"))
    if "expert_model_parallel_size" in layout:
        return bool(getattr(parameter, "allreduce", True))
    return not getattr(parameter, "tensor_model_parallel", False)


def check_layout(layout: dict[str, int], folder: Path, rank: int) -> None:
    """A part is that of the whole parameter, what ranks share is the same on both, and a resumed run goes on."""
    from megatron.core import dist_checkpointing

    with model_of_ranks(**layout) as (optimizer, model):
        before = weights_of(model)
        assert dither_master_weights(optimizer, seed=5)
        for own in optimizer.chained_optimizers:
            groups = zip(own.model_float16_groups, own.shard_fp32_from_float16_groups, strict=True)
            for weight, master in (pair for group in groups for pair in zip(*group, strict=True)):
                part, whole = own._get_model_param_range_map(weight)["param"], weight.detach().float().flatten()
                _dither(_Part(weight=whole, master=whole, start=0, size=whole.numel()), 5)
                assert torch.equal(master, whole[part.start : part.end])
        assert all(torch.equal(each, before[name]) for name, each in model.named_parameters())
        step(optimizer, model, number=1)
        after = weights_of(model)
        # Some weights reach the next number of bf16, most do not.
        assert (
            0.01 < float(torch.cat([(after[name] != before[name]).flatten() for name in before]).float().mean()) < 0.5
        )
        shared = [after[name] for name, each in model.named_parameters() if is_shared(layout, name, each)]
        dist_checkpointing.save(sharded_state(optimizer, model), folder)
        saved = parts_of(optimizer)
        step(optimizer, model, number=2)
        uninterrupted = weights_of(model)
    ranks: list[list[torch.Tensor]] = [[], []]
    dist.all_gather_object(ranks, shared)
    assert len(ranks[0]) == len(ranks[1]) > 0
    assert all(torch.equal(*pair) for pair in zip(*ranks, strict=True))
    with model_of_ranks(**layout) as (optimizer, model), redirect_stdout(StringIO()) as out:
        # Without Transformer Engine's Adam, states begin with a step, and only then can be loaded.
        step(optimizer, model, number=3)
        loaded = dist_checkpointing.load(sharded_state(optimizer, model, is_loading=True), folder)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        dither_weights(argparse.Namespace(seed=6, rank=rank), 1, 0, [model], optimizer, None)
        found = parts_of(optimizer)
        assert all(torch.equal(each, after[name]) for name, each in model.named_parameters())
        # Megatron-Core 0.16 gives all parameters one counter of steps when it loads torch's AdamW.
        for state in (state for own in optimizer.chained_optimizers for state in own.optimizer.state.values()):
            state["step"] = state["step"].clone()
        step(optimizer, model, number=2)
        assert all(torch.equal(each, uninterrupted[name]) for name, each in model.named_parameters())
    assert all(torch.equal(*pair) for pair in zip(found, saved, strict=True))
    assert ("stay as they are, those of a resumed run" in out.getvalue()) == (rank == 0)


def parts_of(optimizer: Any) -> list[torch.Tensor]:
    """The master weights of this rank."""
    groups = [group for own in optimizer.chained_optimizers for group in own.shard_fp32_from_float16_groups]
    return [master.clone() for group in groups for master in group]


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.detach().clone() for name, each in model.named_parameters()}


@MEGATRON
@pytest.mark.whole_run
@pytest.mark.distributed
def test_real_ranks_share_what_they_draw_and_a_resumed_run_goes_on(tmp_path) -> None:
    checks = {}
    for name, layout in LAYOUTS.items():
        (tmp_path / name).mkdir()
        checks[name] = functools.partial(check_layout, layout, tmp_path / name)
    assert run_checks(checks, folder=tmp_path, world_size=2, seconds=200) == [dict.fromkeys(checks, "")] * 2


@MEGATRON
def test_the_master_weights_of_a_resumed_run_are_kept(capsys: pytest.CaptureFixture) -> None:
    with optimizer_of(is_distributed=False) as (optimizer, _):
        dither_master_weights(optimizer, seed=3)
        state = copy.deepcopy(optimizer.state_dict())
    with optimizer_of(is_distributed=False) as (optimizer, model):
        optimizer.load_state_dict(state)
        saved = [master.clone() for master in masters_of(optimizer)]
        dither_weights(argparse.Namespace(seed=4, rank=0), 5, 0, [model], optimizer, None)
        assert all(torch.equal(master, was) for master, was in zip(masters_of(optimizer), saved, strict=True))
        assert not torch.equal(saved[0], saved[0].bfloat16().float())
    assert "rank 0: stay as they are, those of a resumed run" in capsys.readouterr().out


@MEGATRON
@pytest.mark.parametrize("is_distributed", [False, True])
def test_a_rank_on_which_nothing_or_only_experts_train_has_no_weights_to_dither(is_distributed, capsys) -> None:
    """There Megatron-Core has a stub in place of an optimizer; an error would leave the other ranks waiting."""
    with optimizer_of(is_distributed=is_distributed, frozen=SHAPES) as (optimizer, model):
        assert [each.is_stub_optimizer for each in optimizer.chained_optimizers] == [True]
        assert dither_master_weights(optimizer, seed=1) == 0
        dither_weights(argparse.Namespace(seed=1, rank=0), 0, 0, [model], optimizer, None)
        assert capsys.readouterr().out == "mis_ext: master weights of rank 0: 0 are dithered\n"
    with optimizer_of(is_distributed=is_distributed, frozen=("norm", "head"), experts=("matrix",)) as (optimizer, _):
        assert [each.is_stub_optimizer for each in optimizer.chained_optimizers] == [True, False]
        assert dither_master_weights(optimizer, seed=1) == 700 * 600


@MEGATRON
def test_an_empty_chain_and_a_chain_of_chains_are_gone_through() -> None:
    with optimizer_of(is_distributed=True) as (optimizer, _):
        from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer, ProcessGroupCollection

        weight = torch.nn.Parameter(torch.ones(5, 3, dtype=BF16))
        config, groups = optimizer.config, ProcessGroupCollection.use_mpu_process_groups()
        layers = LayerWiseDistributedOptimizer([torch.optim.AdamW([weight])], config, groups)
        assert dither_master_weights(type(optimizer)([]), seed=1) == 0
        # As later versions chain an optimizer of whole layers, itself a chain, with distributed ones.
        chain = type(optimizer)([layers, optimizer])
        assert dither_master_weights(chain, seed=1) == 5 * 3 + 700 * 600 + 600 + 601 * 3
        assert torch.equal(masters_of(layers)[0].bfloat16(), weight)
        assert not torch.equal(masters_of(layers)[0], weight.float())


@MEGATRON
def test_other_optimizers_are_named() -> None:
    with optimizer_of(is_distributed=True) as (optimizer, _):
        (own,) = optimizer.chained_optimizers
        chunks = [types.SimpleNamespace(ddp_config=types.SimpleNamespace(use_megatron_fsdp=True))]
        other = type(own)(own.optimizer, own.config, None, None, chunks, None, None, None, 0, 0)
        with pytest.raises(NotImplementedError, match="DistributedOptimizer keeps no master weights"):
            dither_master_weights(other, seed=0)
    with pytest.raises(NotImplementedError, match="AdamW keeps no master weights"):
        dither_master_weights(torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, dtype=BF16))]), seed=0)


@MEGATRON
def test_other_weights_and_other_optimizers_are_refused() -> None:
    for settings in ({"bf16": False, "fp16": True, "params_dtype": torch.float16}, {"bf16": False}):
        settings = {"params_dtype": torch.float32} | settings
        with (
            optimizer_of(is_distributed=False, **settings) as (optimizer, _),
            pytest.raises(ValueError, match="needs an optimizer of weights in bf16"),
        ):
            dither_master_weights(optimizer, seed=0)
    with optimizer_of(is_distributed=True) as (optimizer, _):
        # What Megatron-Core leaves there with a precision-aware optimizer, which needs Transformer Engine.
        (own,) = optimizer.chained_optimizers
        own.shard_fp32_from_float16_groups[0][0] = None
        with pytest.raises(NotImplementedError, match="--use-precision-aware-optimizer"):
            dither_master_weights(optimizer, seed=0)
    with optimizer_of(is_distributed=True) as (optimizer, _):
        # A GPU's are copied to the CPU, updated there, and written back: what is dithered here would be lost.
        optimizer.config.optimizer_cpu_offload = True
        with pytest.raises(NotImplementedError, match="--optimizer-cpu-offload"):
            dither_master_weights(optimizer, seed=0)
    with optimizer_of(is_distributed=False) as (optimizer, _):
        # As those of 8 bits, which say that they are of bf16.
        (own,) = optimizer.chained_optimizers
        own.float16_groups[0][0] = own.float16_groups[0][0].detach().as_subclass(Quantized)
        with pytest.raises(NotImplementedError, match=r"must be tensors in bf16, got Quantized in torch\.bfloat16"):
            dither_master_weights(optimizer, seed=0)


DITHER = {HOOK_PATH: "mis_ext.dither_weights"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (DITHER | {"bf16": False, "fp16": True}, "is for weights in bf16: give --bf16"),
        (DITHER | {"use_precision_aware_optimizer": True}, "cannot reach the master weights of --use-precision-aware"),
        (DITHER | {"use_megatron_fsdp": True}, "cannot reach the master weights of --use-megatron-fsdp"),
        (DITHER, ""),
        ({"fp16": True, "bf16": False, HOOK_PATH: "os.path.join"}, ""),
        ({"fp16": True, "bf16": False, HOOK_PATH: "mis_ext.hosts.master_weights.dither_weights"}, "--bf16"),
        ({"fp16": True, "bf16": False, HOOK_PATH: "mine.wrapped"}, "mine.wrapped is for weights in bf16: give --bf16"),
        ({"fp16": True, "bf16": False, HOOK_PATH: "mine.renamed"}, "mine.renamed is for weights in bf16: give --bf16"),
    ],
)
def test_the_check_at_start_refuses_what_the_hook_would_refuse(keys, message, monkeypatch) -> None:
    mine = types.ModuleType("mine")
    mine.renamed, mine.wrapped = dither_weights, functools.wraps(dither_weights)(lambda *given: dither_weights(*given))
    monkeypatch.setitem(sys.modules, "mine", mine)
    keys = {"use_tis": True, "custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp", "bf16": True} | keys
    if not message:
        check_setup(argparse.Namespace(rank=1, **keys))
        return
    with pytest.raises(ValueError, match=message):
        check_setup(argparse.Namespace(rank=1, **keys))
