# SPDX-License-Identifier: Apache-2.0
"""The cost of one call: time, launches, synchronizations, memory, collectives, bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from workload import Item, World

MIN_REPEATS = 5
# A call this slow is not warmed up or profiled more than once.
SLOW_SECONDS = 0.2
WARM_UP_CALLS, PROFILED_CALLS = 3, 5
ALLOCATION_GRANULE = 512
BLOCKING_COPIES = ("cudaMemcpy", "cudaMemcpy2D", "cuMemcpyDtoH_v2", "cuMemcpyHtoD_v2", "hipMemcpy")

Call = Callable[[Item], Any]
NextItem = Callable[[], Item]


@dataclass(frozen=True)
class Times:
    """Seconds of each call, the slowest rank of each: until the device is done, and until the call returns."""

    total: list[float]
    host: list[float]

    @property
    def median(self) -> float:
        """Median until the device is done."""
        return statistics.median(self.total)


def time_calls(call: Call, next_item: NextItem, *, world: World, repeats: int, budget: float) -> Times:
    """Time calls that start together on idle devices; as many as fit into the budget, but at least five."""
    start = time.perf_counter()
    first = _one_call(call, next_item(), world)
    # With the making of the inputs, so that the budget bounds the whole row.
    (each,) = world.maximum([time.perf_counter() - start])
    wanted = int(min(max(budget / each, MIN_REPEATS), max(repeats, MIN_REPEATS)))
    pairs = [first] + [_one_call(call, next_item(), world) for _ in range(wanted - 1)]
    total, host = zip(*pairs, strict=True)
    return Times(world.maximum(total), world.maximum(host))


def warm_up(call: Call, next_item: NextItem, *, world: World) -> Footprint:
    """Call a few times, a slow one once, and keep what the last call needed."""
    for _ in range(WARM_UP_CALLS):
        start = time.perf_counter()
        footprint = measure_footprint(call, next_item(), world)
        (seconds,) = world.maximum([time.perf_counter() - start])
        if seconds > SLOW_SECONDS:
            break
    return footprint


def _one_call(call: Call, item: Item, world: World) -> tuple[float, float]:
    world.barrier()
    start = time.perf_counter()
    out = call(item)
    returned = time.perf_counter()
    world.synchronize()
    done = time.perf_counter()
    del out
    return done - start, returned - start


class Footprint(NamedTuple):
    """Bytes of scratch memory (None if not counted), and of inputs and outputs."""

    extra: int | None
    moved: int


class DeviceWork(NamedTuple):
    """Per call on a GPU. Collectives are apart: their kernels also wait for the other ranks."""

    seconds: float
    collective_seconds: float
    kernels: float
    copies: float
    synchronizations: float


def profile_device(call: Call, next_item: NextItem, *, world: World, seconds_per_call: float) -> DeviceWork:
    """Count what the GPU was asked to do, and add up how long it took."""
    calls = 1 if seconds_per_call > SLOW_SECONDS else PROFILED_CALLS
    idle = _profiled(lambda: None, world)
    items = [next_item() for _ in range(calls)]
    busy = _profiled(lambda: [call(item) for item in items], world)
    # Starting and stopping the profiler synchronizes too.
    return DeviceWork(*((a - b) / calls for a, b in zip(busy, idle, strict=True)))


def _profiled(work: Callable[[], Any], world: World) -> DeviceWork:
    world.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        # Kept until the profiler has stopped: freeing is not part of a call.
        kept = work()
    del kept
    seconds = collective_seconds = 0.0
    kernels = copies = synchronizations = 0
    # The public list builds a tree of Python objects, which takes a minute for a call of 400,000 kernels.
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if event.device_type() == DeviceType.CPU:
            synchronizations += "Synchronize" in name or name in BLOCKING_COPIES
            continue
        if event.is_user_annotation():
            continue
        if name.startswith(("Memcpy", "Memset")):
            copies += 1
        else:
            kernels += 1
        if name.startswith(("nccl", "rccl")):
            collective_seconds += event.duration_ns() * 1e-9
        else:
            seconds += event.duration_ns() * 1e-9
    return DeviceWork(seconds, collective_seconds, kernels, copies, synchronizations)


class Dispatched(TorchDispatchMode):
    """Counts ATen operations, operations that read a value on the CPU, and collectives.

    ``reads`` are the operations that make the CPU wait if the tensors are on a GPU. On a CPU, operations that are
    always on the CPU, such as index arithmetic of a new layout, count too, because they cannot be distinguished.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.reads = self.collectives = self.collective_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            self.collectives += 1
            # Bytes that this rank sends: the smaller of an input and its gathered outputs.
            groups = ([leaf for leaf in tree_leaves(arg) if isinstance(leaf, Tensor)] for arg in args)
            self.collective_bytes += min((sum(x.nbytes for x in group) for group in groups if group), default=0)
        else:
            self.operations += 1
            self.reads += name in ("_local_scalar_dense", "nonzero", "masked_select") or _indexes_by_mask(name, args)
        return func(*args, **(kwargs or {}))


def _indexes_by_mask(name: str, args: Any) -> bool:
    indices = tree_leaves(args[1:]) if name in ("index", "index_put", "index_put_") else []
    return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in indices)


def count_dispatched(call: Call, item: Item, world: World) -> Dispatched:
    """Operations and collectives of one call, seen below Python."""
    world.barrier()
    with Dispatched() as counter:
        call(item)
    return counter


def never_waits(call: Call, item: Item, world: World) -> bool:
    """Whether a call passes under CUDA's synchronization debug mode "error"."""
    world.barrier()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call(item)
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return False
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def measure_footprint(call: Call, item: Item, world: World) -> Footprint:
    """Bytes that a call needs beyond its inputs and its outputs at the worst moment, and bytes it must move.

    The first is the allocator's peak during the call, minus what was allocated before it (inputs, and whatever the
    callee caches), minus the storages of what it returns, minus the storages that autograd keeps for the backward pass
    of the returned loss; storages that are inputs are not subtracted again, those both returned and kept are subtracted
    once. Sizes are rounded up to the 512 bytes that the allocator gives at least. Index tensors of a layout that the
    callee caches count only in the call that makes them.

    The second is every input read once and every output written once. A loss that is passed through is neither read nor
    written, masks that are passed through are only read.
    """
    inputs = _storages(item)
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.update(_storages(tensor))
        return tensor

    world.barrier()
    before = _allocated(world, peak=False)
    # The compiled pipeline takes no gradient, and hooks around it would make it compile again.
    with saved_tensors_hooks(pack, lambda tensor: tensor) if "pg_loss" in item else nullcontext():
        out = call(item)
    world.synchronize()
    extra = _allocated(world, peak=True) - before
    returned = _storages(out)
    for at, size in {**returned, **saved}.items():
        if at not in inputs:
            extra -= -(-size // ALLOCATION_GRANULE) * ALLOCATION_GRANULE
    written = sum(size for at, size in returned.items() if at not in inputs)
    passed_through = sum(size for at, size in _storages(item.get("pg_loss")).items() if at in returned)
    return Footprint(extra if world.device.type == "cuda" else None, sum(inputs.values()) - passed_through + written)


def _allocated(world: World, *, peak: bool) -> int:
    """Bytes allocated now, from where the peak is counted, or at that peak."""
    if world.device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(world.device)
    torch.cuda.reset_peak_memory_stats(world.device)
    return torch.cuda.memory_allocated(world.device)


def _storages(tree: Any) -> dict[int, int]:
    """Address and size of each storage."""
    storages = (leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def copy_seconds(num_bytes: int, *, world: World, num_buffers: int) -> float:
    """Time of copies on the device that read and write ``num_bytes`` together, over as many buffers as input sets."""
    half = max(num_bytes // 2, 1)
    sources = [torch.empty(half, dtype=torch.uint8, device=world.device) for _ in range(num_buffers)]
    targets = [torch.empty_like(source) for source in sources]
    pairs = list(zip(sources, targets, strict=True))

    def copy_all() -> None:
        for source, target in pairs:
            target.copy_(source)

    copy_all()
    if world.device.type == "cuda":
        return _profiled(copy_all, world).seconds / num_buffers
    runs = []
    for _ in range(MIN_REPEATS):
        start = time.perf_counter()
        copy_all()
        runs.append((time.perf_counter() - start) / num_buffers)
    return statistics.median(runs)
