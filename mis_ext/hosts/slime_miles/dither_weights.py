"""Dithered master weights in slime and Miles, before the first optimizer step."""

from __future__ import annotations

import weakref
from typing import Any

from mis_ext.hosts.master_weights import dither_master_weights
from mis_ext.hosts.runs import read_argument

FLAG = "--custom-megatron-before-train-step-hook-path"
_seen: weakref.WeakSet[Any] = weakref.WeakSet()


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
    """Refuse at the start what `dither_weights` would refuse before the first step.

    Args:
        args: The host's arguments.
        path: How they spell this function.

    Raises:
        ValueError: The weights are not in bf16, or Megatron-Core keeps no master weights of its own.
    """
    if not read_argument(args, "bf16"):
        raise ValueError(f"{FLAG} {path} is for weights in bf16: give --bf16, or leave the hook out")
    for other in ("--use-precision-aware-optimizer", "--use-megatron-fsdp"):
        if read_argument(args, other.removeprefix("--").replace("-", "_")):
            raise ValueError(f"{FLAG} {path} cannot reach the master weights of {other}: leave one of both out")
