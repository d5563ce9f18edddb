# SPDX-License-Identifier: Apache-2.0
"""Write the input of `mis-ext report` and `mis-ext audit` from a hook of slime and of the example.

    bash examples/run.sh --rollout-data-postprocess-path dump_rollout.save
    mis-ext report runs/rollouts

It writes a file per rank and rollout into the folder of the variable ROLLOUT_DUMP_DIR, in the format of slime's
--save-debug-train-data before August 2026. It does not change the data.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist

KEYS = (
    "tokens",
    "log_probs",
    "rollout_log_probs",
    "loss_masks",
    "response_lengths",
    "total_lengths",
    "max_seq_lens",
    "sample_indices",
    "advantages",
    "rewards",
    "weight_versions",
    "train_weight_version",
)


def save(args: object, rollout_id: int, rollout_data: dict) -> None:
    """Write this rank's samples; with context parallelism, its part of each sample."""
    from megatron.core import parallel_state

    rank = dist.get_rank() if dist.is_initialized() else 0
    content = {
        "rollout_id": rollout_id,
        "rank": rank,
        "rollout_data": {key: rollout_data[key] for key in KEYS if rollout_data.get(key) is not None},
        "cp_rank": parallel_state.get_context_parallel_rank(),
        "cp_size": parallel_state.get_context_parallel_world_size(),
        "qkv_format": getattr(args, "qkv_format", "thd"),
    }
    folder = Path(os.environ.get("ROLLOUT_DUMP_DIR", "runs/rollouts"))
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / f"{rollout_id}_{rank}.pt")
