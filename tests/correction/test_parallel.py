# SPDX-License-Identifier: Apache-2.0
"""Real gloo processes: context and data parallelism give the numbers of one rank, with few and small collectives.

Every topology is started once. Its workers run all sections over their part of the data, compare with the judge on the
whole data, and write down what differs; each test then reads its section.
"""

import functools
import json
import os
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist
from parallel_worker import SECONDS, TOPOLOGIES, Worker
from process_ranks import joined, run_processes

pytestmark = pytest.mark.distributed

# A topology takes half a minute of two cores: the others are long runs. Tests whose
# ranks are threads always have four context-parallel ranks, and interpreted kernels.
BOTH = "CP 2 x DP 2"
SECTIONS = {
    "thd": "packed samples give the results of one rank for every setting",
    "bshd": "padded samples give the results of one rank",
    "contiguous": "the pipeline on contiguous and zigzag chunks gives the results of one rank",
    "collectives": "at most three small collectives that do not depend on the data",
    "wrapped groups": "fault-tolerant wrappers around the groups work",
    "missing log-probs": "they do not hang or change anything where the mismatch is only measured",
    "one ULP": "one token that differs by it is seen by every rank",
    "megatron": "groups come from Megatron-Core when the host passes none",
}
HAS_MEGATRON = find_spec("megatron") is not None and find_spec("megatron.core") is not None


def work(rank: int, topology: str, folder: str) -> None:
    """All sections of a topology."""
    cp_size, dp_size = TOPOLOGIES[topology]
    world_size = cp_size * dp_size
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    out: dict[str, list[str]] = {}
    report = Path(folder) / f"rank{rank}.json"
    with joined(rank, world_size, folder, seconds=SECONDS):
        worker = Worker(cp_size, dp_size)
        for section in [section for section in SECTIONS if is_possible(section)]:
            if section == "megatron":
                from megatron.core import parallel_state

                parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
            try:
                out[section] = getattr(worker, f"run_{section.lower().replace(' ', '_').replace('-', '_')}")()
            except Exception:
                out[section] = [f"rank {rank}: {traceback.format_exc()[-2500:]}"]
                raise
            finally:
                report.write_text(json.dumps(out))
        if HAS_MEGATRON:
            parallel_state.destroy_model_parallel()
        dist.barrier()


def run_topology(topology: str, folder: Path) -> tuple[dict[str, list[str]], str]:
    """Failures by section, and the exception of a rank; a section that no rank got to is missing."""
    cp_size, dp_size = TOPOLOGIES[topology]
    crash = ""
    try:
        run_processes(work, topology, str(folder), world_size=cp_size * dp_size)
    except Exception as error:
        crash = str(error)
    sections: dict[str, list[str]] = {}
    for report in sorted(folder.glob("rank*.json")):
        for section, failures in json.loads(report.read_text()).items():
            sections.setdefault(section, []).extend(failures)
    return sections, crash


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> Callable[[str], tuple[dict[str, list[str]], str]]:
    """Runs a topology when the first of its tests asks."""
    return functools.cache(lambda topology: run_topology(topology, tmp_path_factory.mktemp("gloo")))


def is_possible(section: str) -> bool:
    return section != "megatron" or HAS_MEGATRON


LONG = (pytest.mark.whole_run, pytest.mark.long_run)


@pytest.mark.parametrize("topology", [pytest.param(name, marks=() if name == BOTH else LONG) for name in TOPOLOGIES])
@pytest.mark.parametrize("section", SECTIONS)
def test_the_ranks_of_a_topology_give_what_the_section_says(outcomes, topology, section):
    if not is_possible(section):
        pytest.skip("needs megatron-core")
    sections, crash = outcomes(topology)
    assert section in sections, f"not reached: {crash}"
    failures = sections[section]
    assert not failures, f"{SECTIONS[section]}: {len(failures)} differences, the first:\n" + "\n".join(failures[:3])
    assert not crash, f"in another section, or after all: {crash}"
