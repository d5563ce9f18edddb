# SPDX-License-Identifier: Apache-2.0
"""What is left of the mismatch of an 8-bit cache, once the trainer rounds keys and values as the cache does.

    python lab/benchmarks/simulated_cache.py                      # an untrained model of two layers
    python lab/benchmarks/simulated_cache.py --model FOLDER       # any checkpoint that examples/train_grpo.py takes

Megatron-Core scores what transformers generated with a paged cache. transformers has no cache of 8 bits: its keys and
values are rounded to 8 bits and back where the cache is written, so every read finds them so.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import sys
import warnings
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

with warnings.catch_warnings():
    # Megatron-Core reports at import what is not installed.
    warnings.simplefilter("ignore")
    from grpo.distributed import Ranks
    from grpo.pretrained import load_pretrained
    from megatron.core import parallel_state
    from onpolicy.demonstration import WORKLOADS, Experiment, Setting, Workload
    from onpolicy.pieces import ALL, Piece, Pieces

from mis_ext.onpolicy.kv_cache import DTYPES

ALIGNED: dict[str, Pieces] = {"nothing": frozenset(), "everything": ALL - {Piece.CACHE}}


def rollout(
    workload: Workload, device: torch.device, *, dtype: torch.dtype, aligned: str, cache: str | None, simulated: bool
) -> dict[str, Any]:
    """Of one rollout of the first weights."""
    pieces = ALIGNED[aligned] | ({Piece.CACHE} if simulated else set())
    setting = Setting(engine="transformers", dtype=dtype, pieces=pieces, cache=cache)
    with Experiment(setting, workload, device) as experiment:
        (step,) = experiment.steps(0)
    report = step.report
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "aligned": aligned,
        "cache": cache or "as the model",
        "the trainer": "rounds too" if simulated else "does not round",
        "tokens that differ": f"{report.num_nonzero} of {report.num_active_tokens}",
        "k3": f"{step.k3:.1e}",
        "mean difference": f"{report.mean_abs_diff:.1e}",
        "largest": f"{report.max_abs_diff:.1e}",
    }


def main() -> None:
    """Print a row for each setting as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a pretrained one; by default an untrained one")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    options = parser.parse_args()
    workload = WORKLOADS["cpu"]
    prompts = (workload.prompts * options.prompts)[: options.prompts]
    workload = dataclasses.replace(workload, prompts=prompts, max_new_tokens=options.tokens, max_batch_tokens=512)
    if options.model is not None:
        workload = workload.pretrained(load_pretrained(options.model))
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "megatron-core", "transformers"))
    print(f"{options.model or 'untrained'}, {platform.machine()}, {torch.get_num_threads()} threads, {versions}\n")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device = Ranks.start(context_parallel_size=1, seed=0).device
    is_first = True
    for dtype in options.dtypes:
        for aligned in ALIGNED:
            for cache, simulated in [(None, False), *((cache, on) for cache in DTYPES for on in (False, True))]:
                row = rollout(
                    workload, device, dtype=getattr(torch, dtype), aligned=aligned, cache=cache, simulated=simulated
                )
                if is_first:
                    print(f"| {' | '.join(row)} |\n{'|---' * len(row)}|")
                    is_first = False
                print(f"| {' | '.join(row.values())} |", flush=True)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
