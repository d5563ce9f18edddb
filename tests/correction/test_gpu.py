# SPDX-License-Identifier: Apache-2.0
"""On CUDA devices: the same bits on every run, and the judge's numbers over NCCL, or over gloo on a single device."""

import json
import math
import os
import traceback
from pathlib import Path

import pytest
import torch
from cases import args_of, random_samples
from parallel_worker import TOPOLOGIES, Worker, grid
from process_ranks import joined, run_processes
from reference import Samples

import mis_ext

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def on_cuda(samples: Samples) -> Samples:
    return Samples(*([x.cuda() for x in column] for column in (samples.train, samples.rollout, samples.masks)))


def on_cpu(output: tuple) -> tuple:
    loss, masks, metrics = output
    return loss.cpu(), [mask.cpu() for mask in masks], {name: values.cpu() for name, values in metrics.items()}


def call_hook_on_cuda(keys: dict, samples: Samples, pg_loss: torch.Tensor) -> tuple:
    lengths = [mask.numel() for mask in samples.masks]
    moved = on_cuda(samples)
    return mis_ext.compute_mis_weights_with_cp(
        args=args_of(keys),
        pg_loss=pg_loss.cuda(),
        train_log_probs=moved.train,
        rollout_log_probs=moved.rollout,
        loss_masks=moved.masks,
        total_lengths=[length + 3 for length in lengths],
        response_lengths=lengths,
    )


def test_two_runs_give_the_same_bits() -> None:
    samples = random_samples([5000, 1, 20000, 300], seed=7)
    pg_loss = torch.linspace(-1.0, 2.0, 25301)
    keys, _ = grid()[7]
    first, second = (on_cpu(call_hook_on_cuda(keys, samples, pg_loss)) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(x, y) for x, y in zip(first[1], second[1], strict=True))
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])


# Two data-parallel ranks are all that the judge's calls are made for.
ON_GPUS = TOPOLOGIES | {"CP 8": (8, 1), "CP 4 x DP 2": (4, 2)}
# Every level, gate, normalizer and veto.
SETTINGS = [(keys | {"mis_compile": False}, per_token_loss) for keys, per_token_loss in grid()[9::29]]
# Each compiles for some ten seconds, on every rank.
COMPILED = [(keys | {"mis_compile": True}, per_token_loss) for keys, per_token_loss in SETTINGS[::4]]
# All ranks are of this machine, which need not have a network; multicast over NVLink is one more way to hang.
ENVIRONMENT = {"NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", "NCCL_NVLS_ENABLE": "0"}
# A rank that waits for one that still compiles is not lost. One that does not come at all is found by ``run_processes``
# before NCCL would end its process without a word of where it stood.
PATIENCE = 600


class CudaWorker(Worker):
    """One rank of one topology, on its own device."""

    def hook(self, args, samples: Samples, totals: list[int], *, padded_lengths=None, **keywords):
        train, rollout = (
            [x.cuda() for x in self.local(column, totals, padded_lengths=padded_lengths)]
            for column in (samples.train, samples.rollout)
        )
        pg_loss = torch.linspace(-1.0, 2.0, sum(x.numel() for x in train))
        output = mis_ext.compute_mis_weights_with_cp(
            args=args,
            pg_loss=pg_loss.cuda(),
            train_log_probs=train,
            rollout_log_probs=rollout,
            loss_masks=[mask.cuda() for mask in samples.masks],
            total_lengths=totals,
            response_lengths=[mask.numel() for mask in samples.masks],
            **keywords,
        )
        return on_cpu(output), pg_loss


def work(rank: int, topology: str, backend: str, folder: str) -> None:
    """Compare one rank's part with the judge, and write down what differs."""
    world_size = math.prod(ON_GPUS[topology])
    torch.cuda.set_device(rank if backend == "nccl" else 0)
    os.environ |= ENVIRONMENT | {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    try:
        with joined(rank, world_size, folder, seconds=PATIENCE, backend=backend):
            worker = CudaWorker(*ON_GPUS[topology], seconds=PATIENCE)
            cases = SETTINGS + COMPILED
            failures = worker.compare_hook(cases, "plain") + worker.compare_hook(cases, "broken")
            failures += worker.compare_hook(SETTINGS[::3], "plain", max_seq_lens=True, qkv_format="bshd")
    except Exception:
        failures = [traceback.format_exc()]
        raise
    finally:
        (Path(folder) / f"{rank}.json").write_text(json.dumps(failures))


@pytest.mark.distributed
@pytest.mark.parametrize("topology", ON_GPUS)
def test_nccl_gives_the_results_of_one_rank(topology: str, tmp_path: Path) -> None:
    world_size = math.prod(ON_GPUS[topology])
    if torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} CUDA devices")
    compare(topology, "nccl", tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("topology", ["CP 2", "CP 2 x DP 2"])
def test_ranks_that_share_a_device_give_the_results_of_one_rank(topology: str, tmp_path: Path) -> None:
    # NCCL takes one rank per device.
    compare(topology, "gloo", tmp_path)


def compare(topology: str, backend: str, folder: Path) -> None:
    # A process that has asked for CUDA cannot be forked.
    run_processes(work, topology, backend, str(folder), world_size=math.prod(ON_GPUS[topology]), start_method="spawn")
    failures = [text for path in folder.glob("*.json") for text in json.loads(path.read_text())]
    assert not failures, f"{len(failures)} differences, the first:\n" + "\n".join(failures[:3])
