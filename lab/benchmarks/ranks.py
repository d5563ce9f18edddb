# SPDX-License-Identifier: Apache-2.0
"""What ranks exchange, at sizes that no machine here has: counted on one of them, and timed by this machine's hops.

    python lab/benchmarks/ranks.py [--layouts 8x4 8x32 8x128] [--samples 16] [--length 2048] [--device cuda]
    python lab/benchmarks/ranks.py --hop-us 12      # NCCL's, of another machine

A layout is CP x DP: the ranks that have a part of the loss. With PP stages there are PP times as many, and those of the
last one call.
*Counted*: the package's own calls run on rank 0 of torch's fake process group, in which the others send what this one
sends. Collectives, bytes that a rank sends and gets, and the bytes of the metrics are seen below Python. A micro-batch
is ``--samples`` responses of ``--length`` tokens in the mean, over all context-parallel ranks.
*Measured*: a hop, the least time of 500 all-gathers of 64 bytes between two processes of this machine, by gloo, or by
NCCL with ``--device cuda`` and two GPUs.
*Computed*: a ring of W ranks takes W - 1 hops, a tree the logarithm of W. Bandwidth is left out: messages are small.
"""

import argparse
import math
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import reporting
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import yaml
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workload import Shape, World, draw, hook_item, settings

import mis_ext

YAML = Path(__file__).parents[2] / "yaml"
COLUMNS = ["CP x DP", "call", "collectives", "KB sent", "KB received", "metrics, KB", "ring, ms", "tree, ms"]
HOP_BYTES, HOPS = 64, 500
CALLS = {
    "hook, 9 metrics": ("mis", "core"),
    "hook, all metrics": ("mis", "all"),
    "hook, gates on sequences, normalised": ("gated_mis", "core"),
    "hook, gates on tokens": ("icepop", "core"),
}


class Exchanged(TorchDispatchMode):
    """Of each collective the ranks that take part, and the bytes that this one sends and gets."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int, int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            sizes = [sum(leaf.nbytes for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)) for arg in args]
            sizes = [size for size in sizes if size]
            self.rows.append((max(sizes) // min(sizes), min(sizes), max(sizes)))
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_world(cp_size: int, dp_size: int) -> Iterator[World]:
    """Rank 0 of so many, of which each sends what this one sends."""
    dist.init_process_group("fake", rank=0, world_size=cp_size * dp_size, store=FakeStore())
    os.environ["WORLD_SIZE"] = str(cp_size * dp_size)
    try:
        yield World.join("cpu", cp_size)
    finally:
        del os.environ["WORLD_SIZE"]
        dist.destroy_process_group()


def counted(world: World, shape: Shape) -> Iterator[tuple[str, list[tuple[int, int, int]], dict[str, Tensor]]]:
    """Of each call its name, its collectives as `Exchanged` has them, and its metrics."""
    item = hook_item(draw(shape, seed=0), world)
    for name, (file, metrics) in CALLS.items():
        keys = yaml.safe_load((YAML / f"{file}.yaml").read_text()) | {"mis_metrics": metrics, "mis_guard": "warn"}
        call = partial(mis_ext.compute_mis_weights_with_cp, args=settings(keys), **item)
        # The first call may run guards.
        call()
        with Exchanged() as exchanged:
            *_, values = call()
        yield name, exchanged.rows, values


def hop(rank: int, folder: str, device_type: str) -> None:
    """One of two processes, of which the first writes down the least time of a small all-gather."""
    on_gpu = device_type == "cuda"
    device = torch.device(device_type, rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    row = torch.zeros(HOP_BYTES, dtype=torch.uint8, device=device)
    rows = row.new_empty(2 * HOP_BYTES)
    times = []
    for _ in range(HOPS):
        start = time.perf_counter()
        dist.all_gather_into_tensor(rows, row)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "hop").write_text(repr(min(times)))
    dist.destroy_process_group()


def hop_seconds(device_type: str) -> float:
    """Measured on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(hop, (folder, device_type), nprocs=2)
        return float(Path(folder, "hop").read_text())


def main() -> None:
    """Count, measure, compute, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", default=["8x4", "8x32", "8x128"], metavar="CPxDP")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="on which the hop is measured")
    parser.add_argument("--hop-us", type=float, help="microseconds, instead of a measurement")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    seconds = options.hop_us * 1e-6 if options.hop_us else hop_seconds(options.device)
    shape = Shape(options.samples, options.length)
    header = reporting.header(World(torch.device("cpu")), 0)
    print(f"{header['versions']}; a micro-batch of {shape}\n\na hop: {seconds * 1e6:.0f} microseconds\n")
    rows = []
    for layout in options.layouts:
        cp_size, dp_size = map(int, layout.split("x"))
        with fake_world(cp_size, dp_size) as world:
            found = [*counted(world, shape)]
        rows += [[layout, name, *_cells(collectives, metrics, seconds)] for name, collectives, metrics in found]
    print(reporting.table(COLUMNS, rows))


def _cells(collectives: list[tuple[int, int, int]], metrics: dict[str, Tensor], seconds: float) -> list[str]:
    ring = sum(size - 1 for size, *_ in collectives) * seconds
    tree = sum(math.ceil(math.log2(size)) for size, *_ in collectives) * seconds
    sent, received = (sum(row[place] for row in collectives) / 1e3 for place in (1, 2))
    kept = {value.untyped_storage().data_ptr(): value.untyped_storage().nbytes() for value in metrics.values()}
    numbers = (sent, received, sum(kept.values()) / 1e3, ring * 1e3, tree * 1e3)
    return [str(len(collectives)), *(f"{number:,.2f}" for number in numbers)]


if __name__ == "__main__":
    main()
