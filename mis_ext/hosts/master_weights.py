# SPDX-License-Identifier: Apache-2.0
"""Master weights of a trainer in bf16, dithered: then small updates reach the weights that it computes with.

An optimizer of Megatron-Core updates a copy of the weights in float32, the master weights. Trainer and engine compute
with what is rounded from it. At the start of RL each master weight is a number of bf16, in the middle of all that is
rounded to it, and must go half of the way to the next number before anything changes. At a learning rate of 1e-6 that
takes hundreds of steps (lab/evidence/README.md#dithered-master-weights).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mis_ext.hosts.runs import read_argument

STEP_FLAG = "--custom-megatron-before-train-step-hook-path"
CHUNK = 1 << 18
"""Numbers that are drawn at once: every rank draws all of those of which it needs some."""

_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def dithered(weight: Tensor, share: Tensor) -> Tensor:
    """Return, for each weight, a number of float32 that is rounded to it in bf16.

    With shares drawn evenly all of an update is seen on average, however small: as many weights move as it is a part of
    the way to the next number. That is dither as in Wannamaker, Lipshitz, Vanderkooy and Wright, "A Theory of
    Nonsubtractive Dither" (IEEE Transactions on Signal Processing, 2000).

    Args:
        weight: Numbers of bf16, in any dtype and shape.
        share: In [0, 1], of the same shape: where the result lies among all that is rounded to the weight.
    """
    number = weight.bfloat16()
    middle = number.float()
    below, above = (
        middle.lerp(number.nextafter(torch.full_like(number, side)).float(), 0.5) for side in (-torch.inf, torch.inf)
    )
    # Beyond the largest number is no other; what is rounded to it reaches as far as on its other side.
    below, above = (
        half.where(half.isfinite(), middle + (middle - other)) for half, other in ((below, above), (above, below))
    )
    # Not a tie itself, which may be rounded to the neighbour.
    drawn = below.lerp(above, share.clamp(0.001, 0.999))
    # Zero reaches less than the smallest number to either side: every update is seen, and its sign stays.
    return drawn.where(middle.isfinite() & (middle != 0), middle)


@torch.no_grad()
def dither_master_weights(optimizer: Any, *, seed: int) -> int | None:
    """Dither this rank's master weights in place; the weights that the model computes with stay as they are.

    Call it once, after the checkpoint is loaded and before the first optimizer step. Master weights that are not
    rounded, as of a run that is resumed with its optimizer, are kept: they are already among all numbers of float32.

    If ranks of ``torch.distributed`` have met, call it on all of them: they agree that each of them can, and nothing
    else. What a weight gets depends on ``seed`` and on its place in its parameter. So ranks that share a parameter give
    it the same, however a distributed optimizer cuts it: norms under tensor parallelism, tied embeddings under pipeline
    parallelism.

    Args:
        optimizer: Megatron-Core's, distributed or not, or a chain of them.
        seed: The same on all ranks.

    Returns:
        How many weights are dithered on this rank, 0 where nothing trains; None if they are kept.

    Raises:
        ValueError: The optimizer has no weights in bf16.
        NotImplementedError: It keeps its master weights elsewhere (``--use-precision-aware-optimizer``, Megatron FSDP,
            an optimizer that is not Megatron-Core's), or the model's weights are no plain tensors, as with fp8.
        RuntimeError: Another rank raises one of these.
    """
    parts = _agreed_parts(optimizer)
    if not all(torch.equal(part.master, part.weight.float()) for part in parts):
        return None
    for part in parts:
        _dither(part, seed)
    return sum(part.master.numel() for part in parts)


class _Part(NamedTuple):
    """What this rank updates of a parameter, flat: of the model, in float32, and where it lies in the parameter."""

    weight: Tensor
    master: Tensor
    start: int
    size: int


def _agreed_parts(optimizer: Any) -> list[_Part]:
    """The parts of this rank, after one ``all_reduce`` on the default group: an error of one rank is an error of all.

    Whatever it is, as fp8 on the ranks that have such weights: the others would dither, and wait in the first step.
    """
    parts, error = [], None
    try:
        parts = [*_parts(optimizer)]
    except Exception as found:
        error = found
    if dist.is_available() and dist.is_initialized():
        # "cpu:gloo,cuda:nccl", or of one kind of device only.
        backends = dist.get_backend_config()
        device = "cpu" if "cpu:" in backends else backends.partition(":")[0]
        last = torch.tensor(-1 if error is None else dist.get_rank(), device=device)
        dist.all_reduce(last, dist.ReduceOp.MAX)
        if error is None and (rank := int(last)) >= 0:
            raise RuntimeError(
                f"dither_master_weights: rank {rank} cannot dither its master weights, its error says why; so no rank "
                "goes on"
            )
    if error is not None:
        raise error
    return parts


def _parts(optimizer: Any) -> Iterator[_Part]:
    if hasattr(optimizer, "chained_optimizers"):
        for each in optimizer.chained_optimizers:
            yield from _parts(each)
        return
    config: Any = getattr(optimizer, "config", None)
    if config is not None and not config.bf16:
        raise ValueError(
            f"dither_master_weights: needs an optimizer of weights in bf16 (--bf16), got bf16={config.bf16}, "
            f"fp16={config.fp16}"
        )
    if getattr(optimizer, "is_stub_optimizer", False):
        # Nothing that it would update trains on this rank: a frozen stage, or a rank with experts alone.
        return
    is_distributed = hasattr(optimizer, "shard_fp32_from_float16_groups")
    if not is_distributed and not hasattr(optimizer, "fp32_from_float16_groups"):
        raise NotImplementedError(
            f"dither_master_weights: {type(optimizer).__name__} keeps no master weights that Megatron-Core's own loop "
            "updates: it is that of Megatron FSDP, or of another library"
        )
    prefixes = ("model_", "shard_") if is_distributed else ("", "")
    weights, masters = (
        [each for group in getattr(optimizer, name) for each in group]
        for name in (f"{prefixes[0]}float16_groups", f"{prefixes[1]}fp32_from_float16_groups")
    )
    for weight, master in zip(weights, masters, strict=True):
        # With the second, what is updated is a copy of them.
        if master is None or config.optimizer_cpu_offload:
            raise NotImplementedError(
                "dither_master_weights: Megatron-Core keeps no master weights of its own with "
                "--use-precision-aware-optimizer or --optimizer-cpu-offload"
            )
        plain = weight.detach()
        if type(plain) is not Tensor or plain.dtype != torch.bfloat16:
            raise NotImplementedError(
                f"dither_master_weights: weights must be tensors in bf16, got {type(plain).__name__} in {plain.dtype}"
            )
        start = optimizer._get_model_param_range_map(weight)["param"].start if is_distributed else 0
        ours = plain.flatten()[start : start + master.numel()]
        yield _Part(weight=ours, master=master.view(-1), start=start, size=plain.numel())


def _dither(part: _Part, seed: int) -> None:
    generator = torch.Generator(part.master.device)
    stop = part.start + part.master.numel()
    for first in range(part.start // CHUNK * CHUNK, stop, CHUNK):
        generator.manual_seed(Random(f"{seed} {part.size} {first}").getrandbits(63))
        share = torch.rand(CHUNK, generator=generator, device=part.master.device)
        low, high = max(part.start, first), min(stop, first + CHUNK)
        ours = part.master[low - part.start : high - part.start]
        ours.copy_(dithered(ours, share[low - first : high - first]))


def dither_weights(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """Let small updates reach weights in bf16: see :func:`mis_ext.dither_master_weights`.

    For ``--custom-megatron-before-train-step-hook-path mis_ext.dither_weights``. Both hosts call it on every training
    rank of Megatron before each optimizer step. It works before the first one of a process, and rank 0 says what it
    did. The hosts take one such hook: your own can call this one. Miles' FSDP backend does not call it.

    Args:
        args: The host's arguments, of which it reads ``seed`` and ``rank``.
        rollout_id: Not used, as the next two.
        step_id: Within the rollout.
        model: The chunks of this rank.
        optimizer: Whose master weights are dithered.
        opt_param_scheduler: Not used.

    Raises:
        ValueError: The optimizer has no weights in bf16.
        NotImplementedError: Its master weights cannot be dithered, as with ``--use-precision-aware-optimizer``.
        RuntimeError: Those of another rank cannot.
    """
    if optimizer in _seen:
        return
    num_weights = dither_master_weights(optimizer, seed=read_argument(args, "seed"))
    _seen.add(optimizer)
    if read_argument(args, "rank") in (None, 0):
        done = "stay as they are, those of a resumed run" if num_weights is None else f"{num_weights:,} are dithered"
        print(f"mis_ext: master weights of rank 0: {done}", flush=True)


def refuse_dithering(args: Any, path: str) -> None:
    """Refuse at the start what `dither_weights` would refuse before the first step."""
    if not read_argument(args, "bf16"):
        raise ValueError(f"{STEP_FLAG} {path} is for weights in bf16: give --bf16, or leave the hook out")
    for other in ("--use-precision-aware-optimizer", "--use-megatron-fsdp"):
        if read_argument(args, other.removeprefix("--").replace("-", "_")):
            raise ValueError(f"{STEP_FLAG} {path} cannot reach the master weights of {other}: leave one of both out")
