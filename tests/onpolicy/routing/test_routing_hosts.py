# SPDX-License-Identifier: Apache-2.0
"""The rows of our routing layouts against the code with which slime and Miles cut theirs, from a checkout."""

import argparse
import importlib.util
import os
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from mis_ext.onpolicy.routing.experts import RoutedExperts
from mis_ext.onpolicy.routing.routing_layout import RoutingLayout

pytest.importorskip("megatron.core")

NUM_EXPERTS, LAYERS, TOPK = 16, 3, 2
PARALLEL = [(cp, tp) for cp in (1, 2, 4) for tp in (1, 2)]


def checkout(name, folder):
    found = Path(os.environ.get(name) or Path(__file__).resolve().parents[3] / ".checkouts" / folder)
    if not (found / "README.md").exists():
        pytest.skip(f"no checkout: set {name}, or run lab/hosts/{folder}_cpu.sh once")
    return found


def load(path, name, patch):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    patch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def slime_rows(patch):
    """Only the ranks stand in; what cuts the rows is slime's own."""
    utils = load(checkout("SLIME_DIR", "slime") / "slime/backends/megatron_utils/cp_utils.py", "slime_cp_utils", patch)

    def cut(samples, *, ranks, multiplier, is_stream):
        for group, short in (("context", "cp"), ("tensor_model", "tp")):
            patch.setattr(utils.mpu, f"get_{group}_parallel_rank", lambda short=short: ranks[f"{short}_rank"])
            patch.setattr(utils.mpu, f"get_{group}_parallel_world_size", lambda short=short: ranks[f"{short}_size"])
        return utils.prepare_routed_experts_for_routing_replay(
            [sample.experts_TLK[:-1] for sample in samples],
            [torch.zeros(sample.num_tokens) for sample in samples],
            num_experts=NUM_EXPERTS,
            data_pad_size_multiplier=multiplier,
            sequence_parallel=ranks["tp_size"] > 1,
            allgather_cp=is_stream,
        )

    return cut


def miles_rows(patch):
    """Only the ranks and the iterator over micro-batches stand in."""
    folder = checkout("MILES_DIR", "miles") / "miles/backends/training_utils"
    parallel = ModuleType("miles_cut.parallel")
    package = ModuleType("miles_cut")
    package.__path__ = []
    patch.setitem(sys.modules, "miles_cut", package)
    patch.setitem(sys.modules, "miles_cut.parallel", parallel)
    parallel.get_parallel_state = lambda: None
    utils = load(folder / "cp_utils.py", "miles_cut.cp_utils", patch)
    replay = load(folder / "replay_data.py", "miles_cut.replay_data", patch)

    def cut(samples, *, ranks, multiplier, is_stream):
        state = SimpleNamespace(
            cp=SimpleNamespace(rank=ranks["cp_rank"], size=ranks["cp_size"]),
            tp=SimpleNamespace(rank=ranks["tp_rank"], size=ranks["tp_size"]),
        )
        for module in (utils, replay):
            patch.setattr(module, "get_parallel_state", lambda: state)
        batch = {
            "experts": [sample.experts_TLK[:-1] for sample in samples],
            "tokens": [torch.zeros(sample.num_tokens) for sample in samples],
            "max_seq_lens": None,
        }
        kept = []
        replay.fill_replay_data(
            args=argparse.Namespace(
                qkv_format="thd",
                allgather_cp=is_stream,
                data_pad_size_multiplier=multiplier,
                sequence_parallel=ranks["tp_size"] > 1,
            ),
            models=None,
            data_iterator=[SimpleNamespace(reset=lambda: None, get_next=lambda keys: batch)],
            num_microbatches=[1],
            rollout_data={"experts": batch["experts"]},
            data_key="experts",
            replay_list=[],
            register_replay_list_func=lambda replays, rows, models: kept.append(rows),
        )
        return kept[0]

    return cut


@pytest.mark.parametrize("is_stream", [False, True], ids=["zigzag", "allgather_cp"])
@pytest.mark.parametrize("rows_of", [slime_rows, miles_rows])
def test_every_row_is_the_one_that_the_host_cuts(rows_of, is_stream, monkeypatch) -> None:
    cut = rows_of(monkeypatch)
    rng, generator = random.Random(7), torch.Generator().manual_seed(7)
    compared = 0
    for cp_size, tp_size in PARALLEL * 16:
        lengths = [rng.randint(2, 60) for _ in range(rng.randint(1, 5))]
        samples = []
        for length in lengths:
            scores = torch.rand(length - 1, LAYERS, NUM_EXPERTS, generator=generator)
            rows = scores.topk(TOPK).indices.int()
            samples.append(RoutedExperts.from_rows(rows, num_tokens=length, num_experts=NUM_EXPERTS))
        multiplier = rng.choice([1, 4, 32])
        for cp_rank in range(cp_size):
            for tp_rank in range(tp_size):
                ranks = {"cp_rank": cp_rank, "cp_size": cp_size, "tp_rank": tp_rank, "tp_size": tp_size}
                expected = cut(samples, ranks=ranks, multiplier=multiplier, is_stream=is_stream)
                layout = RoutingLayout.packed(
                    lengths,
                    **ranks,
                    num_local_tokens=len(expected) * tp_size,
                    partition="stream" if is_stream else "zigzag",
                )
                mine = layout.local(samples).experts_TLK
                # What pads the host's rows is replayed there, and left to the router here: it has no loss.
                is_replayed = mine[:, 0, 0] >= 0
                assert torch.equal(mine[is_replayed], expected[is_replayed])
                assert len(mine) == len(expected)
                compared += int(is_replayed.sum())
    assert compared > 5_000, compared
