"""The host's context- and data-parallel groups."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from mis_ext.collectives import Group


class Groups(NamedTuple):
    """This rank's place; a group of one rank is None."""

    cp_rank: int = 0
    cp_size: int = 1
    cp_group: Group | None = None
    dp_rank: int = 0
    dp_size: int = 1
    dp_group: Group | None = None


def find_groups(parallel_state: Any = None) -> Groups:
    """Miles' ``parallel_state`` when it is passed, else Megatron-Core's when it is initialised, else a single rank.

    The data-parallel group is the one without context parallelism; in Miles' fault-tolerant mode it spans replicas.
    """
    if parallel_state is not None:
        cp, dp = parallel_state.cp, getattr(parallel_state, "effective_dp", None) or parallel_state.intra_dp
        return _groups(cp.rank, cp.size, cp.group, dp.rank, dp.size, dp.group)
    megatron = initialized_megatron()
    if megatron is None:
        return Groups()
    return _groups(
        megatron.get_context_parallel_rank(),
        megatron.get_context_parallel_world_size(),
        megatron.get_context_parallel_group(),
        megatron.get_data_parallel_rank(),
        megatron.get_data_parallel_world_size(),
        megatron.get_data_parallel_group(),
    )


def initialized_megatron() -> Any:
    """``megatron.core.parallel_state`` if the host has imported and initialised it, else None."""
    megatron = sys.modules.get("megatron.core.parallel_state")
    return megatron if megatron is not None and megatron.model_parallel_is_initialized() else None


def _groups(cp_rank: int, cp_size: int, cp_group: Group, dp_rank: int, dp_size: int, dp_group: Group) -> Groups:
    return Groups(
        cp_rank=cp_rank,
        cp_size=cp_size,
        cp_group=cp_group if cp_size > 1 else None,
        dp_rank=dp_rank,
        dp_size=dp_size,
        dp_group=dp_group if dp_size > 1 else None,
    )
