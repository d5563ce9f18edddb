# SPDX-License-Identifier: Apache-2.0
"""The ranks that share sequences, and those that share the batch."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mis_ext.correction.collectives import Group, is_fault_tolerant


class Groups(NamedTuple):
    """The groups of this rank; a group of one rank is None. The data-parallel group excludes context parallelism."""

    cp_rank: int = 0
    cp_size: int = 1
    cp_group: Group | None = None
    dp_rank: int = 0
    dp_size: int = 1
    dp_group: Group | None = None

    @classmethod
    def of_process_groups(cls, *, cp_group: Group | None = None, dp_group: Group | None = None) -> Groups:
        """Create groups from process groups of torch, such as ``mesh.get_group("dp")``; None is a group of one."""
        cp_rank, cp_size = _place(cp_group)
        dp_rank, dp_size = _place(dp_group)
        return cls.of_places(cp_rank, cp_size, cp_group, dp_rank, dp_size, dp_group)

    @classmethod
    def of_places(
        cls, cp_rank: int, cp_size: int, cp_group: Group, dp_rank: int, dp_size: int, dp_group: Group
    ) -> Groups:
        """The groups from ranks, sizes and process groups of a framework; a group of one rank becomes None."""
        return cls(
            cp_rank=cp_rank,
            cp_size=cp_size,
            cp_group=cp_group if cp_size > 1 else None,
            dp_rank=dp_rank,
            dp_size=dp_size,
            dp_group=dp_group if dp_size > 1 else None,
        )

    @property
    def without_data_parallelism(self) -> Groups:
        """Return these groups without data parallelism: nothing is reduced over data-parallel ranks."""
        return self._replace(dp_rank=0, dp_size=1, dp_group=None)

    @property
    def started_together(self) -> tuple[Group, ...]:
        """The groups whose ranks make their first call together, so not Miles' groups that a replica can join later."""
        groups = (self.cp_group, self.dp_group)
        return tuple(group for group in groups if group is not None and not is_fault_tolerant(group))

    @property
    def is_alone(self) -> bool:
        """True if no other rank waits for this one."""
        return self.cp_group is None and self.dp_group is None

    @property
    def is_first_rank(self) -> bool:
        """True if this rank prints for all ranks."""
        return self.cp_rank == 0 and self.dp_rank == 0


ALONE = Groups()
"""The groups of a single process, which reduces over no other rank."""


def initialized_megatron() -> Any:
    """``megatron.core.parallel_state`` if the framework has imported and initialized it, else None."""
    megatron = sys.modules.get("megatron.core.parallel_state")
    return megatron if megatron is not None and megatron.model_parallel_is_initialized() else None


def device_of(*candidates: Any) -> torch.device:
    """Return the device of the first tensor among the candidates; without one, the device of the collectives."""
    for candidate in candidates:
        if isinstance(candidate, Tensor):
            return candidate.device
    uses_nccl = dist.is_available() and dist.is_initialized() and "nccl" in dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if uses_nccl else torch.device("cpu")


def _place(group: Group | None) -> tuple[int, int]:
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def find_groups(parallel_state: Any = None) -> Groups:
    """Miles' ``parallel_state`` when it is passed, else Megatron-Core's when it is initialized, else a single rank.

    In Miles' fault-tolerant mode the data-parallel group spans replicas.
    """
    if parallel_state is not None:
        cp, dp = parallel_state.cp, getattr(parallel_state, "effective_dp", None) or parallel_state.intra_dp
        return Groups.of_places(cp.rank, cp.size, cp.group, dp.rank, dp.size, dp.group)
    megatron = initialized_megatron()
    if megatron is None:
        return ALONE
    return Groups.of_places(
        megatron.get_context_parallel_rank(),
        megatron.get_context_parallel_world_size(),
        megatron.get_context_parallel_group(),
        megatron.get_data_parallel_rank(),
        megatron.get_data_parallel_world_size(),
        megatron.get_data_parallel_group(),
    )
