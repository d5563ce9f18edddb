# SPDX-License-Identifier: Apache-2.0
"""Process groups, devices, and agreement between ranks."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The ranks and the device of this process.

    Attributes:
        device: Device of its model.
        rank: Global rank.
        dp_rank: Data-parallel rank.
        dp_size: Their number.
        cp_rank: Context-parallel rank.
        cp_size: Their number.
        control_group: A gloo group of all processes, for Python objects.
    """

    device: torch.device
    rank: int
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    control_group: dist.ProcessGroup

    @classmethod
    def start(cls, *, context_parallel_size: int, seed: int) -> Ranks:
        """Initialize the process group of torchrun if necessary: NCCL with GPUs, else gloo."""
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        parallel_state.initialize_model_parallel(context_parallel_size=context_parallel_size)
        if device.type == "cuda":
            tensor_parallel.model_parallel_cuda_manual_seed(seed)
        return cls(
            device=device,
            rank=dist.get_rank(),
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=parallel_state.get_data_parallel_world_size(),
            cp_rank=parallel_state.get_context_parallel_rank(),
            cp_size=parallel_state.get_context_parallel_world_size(),
            control_group=dist.new_group(backend="gloo"),
        )

    def broadcast(self, value: Any) -> Any:
        """Return the value of rank 0 on every rank."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control_group)
        return box[0]


@dataclass
class StopRequest:
    """Turns the first Ctrl-C into a request to stop after the current step; a second one interrupts at once."""

    requested: bool = field(default=False, init=False)

    def install(self) -> None:
        """Handle SIGINT and SIGTERM from now on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
