"""Where slime and Miles keep their groups."""

from __future__ import annotations

from typing import Any

from mis_ext.hosts.groups import Groups, initialized_megatron


def find_groups(parallel_state: Any = None) -> Groups:
    """Miles' ``parallel_state`` when it is passed, else Megatron-Core's when it is initialised, else a single rank.

    In Miles' fault-tolerant mode the data-parallel group spans replicas.
    """
    if parallel_state is not None:
        cp, dp = parallel_state.cp, getattr(parallel_state, "effective_dp", None) or parallel_state.intra_dp
        return Groups.of_places(cp.rank, cp.size, cp.group, dp.rank, dp.size, dp.group)
    megatron = initialized_megatron()
    if megatron is None:
        return Groups()
    return Groups.of_places(
        megatron.get_context_parallel_rank(),
        megatron.get_context_parallel_world_size(),
        megatron.get_context_parallel_group(),
        megatron.get_data_parallel_rank(),
        megatron.get_data_parallel_world_size(),
        megatron.get_data_parallel_group(),
    )
