# SPDX-License-Identifier: Apache-2.0
"""What a simulated cache of 8 bits takes off the mismatch, as `lab/benchmarks/simulated_cache.py` measures it."""

import warnings

import pytest
import torch
import torch.distributed as dist


@pytest.mark.whole_run
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
def test_without_alignment_a_part_of_the_mismatch_goes() -> None:
    pytest.importorskip("megatron.core")
    pytest.importorskip("transformers")
    with warnings.catch_warnings():
        # Megatron-Core reports at import what is not installed.
        warnings.simplefilter("ignore")
        from grpo.distributed import Ranks
        from megatron.core import parallel_state
        from onpolicy.demonstration import WORKLOADS
        from simulated_cache import rollout
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = Ranks.start(context_parallel_size=1, seed=0).device
    rows = [
        rollout(
            WORKLOADS["short"], device, dtype=torch.float32, aligned="nothing", cache="fp8_e5m2", simulated=simulated
        )
        for simulated in (False, True)
    ]
    before, after = (float(row["k3"]) for row in rows)
    assert before > 1e-3 > 1e-6 > after
    assert [row["the trainer"] for row in rows] == ["does not round", "rounds too"]
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
