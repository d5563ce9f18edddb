# SPDX-License-Identifier: Apache-2.0
"""Real gloo processes: context and data parallelism give the numbers of one rank, with few and small collectives."""

from functools import partial
from importlib.util import find_spec

from parallel_worker import TOPOLOGIES, Worker
from process_ranks import on_processes

# Tests whose ranks are threads have four context-parallel ranks, and those of devices the other topologies.
BOTH = TOPOLOGIES["CP 2 x DP 2"]


def compare(rank: int, *, section: str) -> None:
    """A section of `parallel_worker.py`, on this rank's part of the data."""
    failures = getattr(Worker(*BOTH), f"run_{section}")()
    assert not failures, f"{len(failures)} differences, the first:\n" + "\n".join(failures[:3])


def groups_of_megatron(rank: int) -> None:
    """They come from Megatron-Core when the host passes none."""
    if find_spec("megatron") is None:
        return
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(context_parallel_size=BOTH[0])
    compare(rank, section="megatron")
    parallel_state.destroy_model_parallel()


SECTIONS = ("thd", "bshd", "contiguous", "collectives", "wrapped_groups")
CHECKS = {section: partial(compare, section=section) for section in SECTIONS} | {"megatron": groups_of_megatron}

test_on_four_processes = on_processes(CHECKS, world_size=4, seconds=240)
