# SPDX-License-Identifier: Apache-2.0
"""Records the files in ``dumps.tar.xz`` anew: what the saving code of slime and Miles writes, run here on a CPU.

The hosts' code is not part of this repository. With a clone of each, and httpx installed, from the repository's root:

    python tests/data/host_dumps/record.py --slime ~/slime --miles ~/miles

Every folder is the output of one host at one revision (``REVISIONS``, and ``revisions.json`` in the archive). Their
samples are made up here, and the same for all: the numbers are those of ``samples()``. One log-prob, at ``DIFFERENT``,
is one float32 number away from the trainer's.

| folder | what wrote it | ranks |
|---|---|---|
| ``slime`` | ``save_debug_train_data``, ``save_debug_rollout_data`` | data parallel 2, context parallel 2 |
| ``slime_before`` | ``save_debug_train_data`` before ``format_version`` 2 | data parallel 2 |
| ``miles`` | ``save_debug_train_data``, ``save_debug_rollout_data`` | pipeline, tensor, context, data: 2 each |
| ``miles_bshd`` | the same with padded sequences | context parallel 2 |
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
ARCHIVE = HERE / "dumps.tar.xz"
REVISIONS = {
    "slime": "624b824a898ab0ec1fcb4d373004c7f3852bf515",
    "slime_before": "d38dc29c9d72c88d221e12c320fc6aa41982e5a2",
    "miles": "31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
    "miles_bshd": "31f1ca961a94cb860cec3b2dea34ec332bfa8f76",
}
ROLLOUT_ID = 7
LENGTHS = [(3, 9), (5, 2), (4, 1), (2, 13)]
"""Prompt and response."""
DIFFERENT = (3, 8)
"""Sample and position."""
# Which samples each data-parallel rank trains.
PARTITIONS = [[1, 3], [2, 0]]
MAX_SEQ_LEN = 16


def samples() -> list[dict[str, Any]]:
    """Of each sample the ids, the mask and both log-probs, as lists; a float of Python holds a float32 exactly."""
    generator = torch.Generator().manual_seed(0)
    out = []
    for index, (prompt, response) in enumerate(LENGTHS):
        log_probs = -0.01 - 3.0 * torch.rand(response, generator=generator)
        rollout = log_probs.clone()
        if index == DIFFERENT[0]:
            rollout[DIFFERENT[1]] = torch.nextafter(rollout[DIFFERENT[1]], torch.tensor(0.0))
        out.append(
            {
                "tokens": torch.randint(5, 1000, (prompt + response,), generator=generator).tolist(),
                "mask": [int(index != 0 or position % 3 != 1) for position in range(response)],
                "log_probs": log_probs.tolist(),
                "rollout_log_probs": rollout.tolist(),
                "weight_versions": ["4"] if index else ["4", "5"],
            }
        )
    return out


def host_samples(kind: type) -> list[Any]:
    """The samples as the host's own objects, as its rollout leaves them."""
    return [
        kind(
            index=index,
            group_index=index // 2,
            prompt="a question",
            response="an answer",
            tokens=sample["tokens"],
            response_length=len(sample["mask"]),
            loss_mask=sample["mask"],
            rollout_log_probs=sample["rollout_log_probs"],
            weight_versions=sample["weight_versions"],
            reward=float(index % 2),
            status=kind.Status.COMPLETED,
        )
        for index, sample in enumerate(samples())
    ]


def shard(indices: list[int]) -> dict[str, Any]:
    """What a trainer rank of slime has of its samples, before context parallelism cuts them."""
    chosen = [samples()[index] for index in indices]
    return {
        "partition": indices,
        "tokens": [sample["tokens"] for sample in chosen],
        "response_lengths": [len(sample["mask"]) for sample in chosen],
        "rewards": [float(index % 2) for index in indices],
        "truncated": [0 for _ in indices],
        "loss_masks": [sample["mask"] for sample in chosen],
        "sample_indices": indices,
        "rollout_ids": indices,
        "rollout_mask_sums": [sum(sample["mask"]) for sample in chosen],
        "rollout_log_probs": [sample["rollout_log_probs"] for sample in chosen],
        "raw_reward": [float(index % 2) for index in range(len(LENGTHS))],
        "total_lengths": [len(sample["tokens"]) for sample in chosen],
        "global_batch_sizes": [len(LENGTHS)],
        "num_microbatches": [1],
        "micro_batch_indices": [[0, 1]],
    }


def trained(indices: list[int]) -> list[torch.Tensor]:
    """The trainer's log-probs of whole responses."""
    return [torch.tensor(samples()[index]["log_probs"]) for index in indices]


def slime_rank(rank: int, store: str, folder: str) -> None:
    """One of four ranks of slime's trainer, with Megatron-Core's groups."""
    import torch.distributed as dist
    from megatron.core import mpu
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp
    from slime.observability.rollout_data_utils import tensorize_rollout_data_for_training
    from slime.observability.train_data_utils import save_debug_train_data

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    mpu.initialize_model_parallel(context_parallel_size=2)
    data = shard(PARTITIONS[mpu.get_data_parallel_rank()])
    tensorize_rollout_data_for_training(data)
    data["log_probs"] = trained(data["partition"])
    for key in ("log_probs", "rollout_log_probs"):
        data[key] = [
            slice_log_prob_with_cp(*each)
            for each in zip(data[key], data["total_lengths"], data["response_lengths"], strict=True)
        ]
    args = Namespace(save_debug_train_data=f"{folder}/train_data/{{rollout_id}}.pt")
    save_debug_train_data(args, rollout_id=ROLLOUT_ID, rollout_data=data)
    dist.barrier()
    dist.destroy_process_group()


def slime(folder: Path) -> None:
    """The present slime."""
    import torch.multiprocessing as mp
    from megatron.core import mpu  # noqa: F401
    from slime.backends.megatron_utils import cp_utils  # noqa: F401
    from slime.observability.rollout_data_utils import save_debug_rollout_data
    from slime.utils.types import Sample

    # Forked, so that Megatron-Core is imported once.
    mp.start_processes(slime_rank, args=(f"{folder}.store", str(folder)), nprocs=4, start_method="fork")
    template = f"{folder}/rollout_data/{{rollout_id}}.pt"
    save_debug_rollout_data(template, host_samples(Sample), rollout_id=ROLLOUT_ID, evaluation=False)


def slime_before(folder: Path) -> None:
    """slime as it was until August 2026."""
    from slime.utils.train_dump_utils import save_debug_train_data

    args = Namespace(save_debug_train_data=f"{folder}/train_data/{{rollout_id}}_{{rank}}.pt")
    for rank, indices in enumerate(PARTITIONS):
        data = shard(indices) | {"log_probs": trained(indices)}
        del data["partition"]
        for key, dtype in {"tokens": torch.long, "loss_masks": torch.int, "rollout_log_probs": torch.float32}.items():
            data[key] = [torch.tensor(values, dtype=dtype) for values in data[key]]
        torch.distributed.get_rank = lambda rank=rank: rank
        save_debug_train_data(args, rollout_id=ROLLOUT_ID, rollout_data=data)


def miles(folder: Path, *, qkv_format: str = "thd", sizes: tuple[int, int, int, int] = (2, 2, 2, 2)) -> None:
    """The present Miles; sizes of pipeline, data, context and tensor parallelism."""
    from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp
    from miles.backends.training_utils.parallel import ParallelState, set_parallel_state
    from miles.ray.rollout.debug_data import save_debug_rollout_data
    from miles.utils.ft_utils.process_group_utils import GroupInfo
    from miles.utils.train_dump_utils import save_debug_train_data
    from miles.utils.types import Sample

    args = Namespace(
        save_debug_train_data=f"{folder}/train_data/{{rollout_id}}_{{rank}}.pt",
        save_debug_rollout_data=f"{folder}/rollout_data/{{rollout_id}}.pt",
        save_debug_trajectory_data=None,
        qkv_format=qkv_format,
    )
    save_debug_rollout_data(args, host_samples(Sample), ROLLOUT_ID, evaluation=False)
    pp, dp, cp, tp = sizes
    for rank in range(pp * dp * cp * tp):
        tp_rank, cp_rank, dp_rank, pp_rank = rank % tp, rank // tp % cp, rank // tp // cp % dp, rank // tp // cp // dp
        groups = {"tp": (tp_rank, tp), "cp": (cp_rank, cp), "intra_dp": (dp_rank, dp), "pp": (pp_rank, pp)}
        others = dict.fromkeys(("intra_dp_cp", "ep", "etp", "indep_dp"), (0, 1))
        set_parallel_state(
            ParallelState(**{name: GroupInfo(*place, group=None) for name, place in (groups | others).items()})
        )
        indices = PARTITIONS[dp_rank] if dp == 2 else list(range(len(LENGTHS)))
        data = shard(indices) | {"weight_versions": [samples()[index]["weight_versions"] for index in indices]}
        del data["partition"]
        data["tokens"] = [torch.tensor(values, dtype=torch.long) for values in data["tokens"]]
        data["loss_masks"] = [torch.tensor(values, dtype=torch.int) for values in data["loss_masks"]]
        if qkv_format == "bshd":
            data["max_seq_lens"] = [MAX_SEQ_LEN for _ in indices]
        if pp_rank == pp - 1:
            data["log_probs"] = trained(indices)
        for key in data.keys() & {"log_probs", "rollout_log_probs"}:
            data[key] = [
                torch.as_tensor(
                    slice_log_prob_with_cp(
                        values,
                        data["total_lengths"][place],
                        data["response_lengths"][place],
                        qkv_format,
                        MAX_SEQ_LEN if qkv_format == "bshd" else None,
                    ),
                    dtype=torch.float32,
                )
                for place, values in enumerate(data[key])
            ]
        torch.distributed.get_rank = lambda rank=rank: rank
        save_debug_train_data(args, rollout_id=ROLLOUT_ID, rollout_data=data)


def miles_bshd(folder: Path) -> None:
    """Miles with padded sequences."""
    miles(folder, qkv_format="bshd", sizes=(1, 1, 2, 1))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--slime", type=Path, required=True)
    parser.add_argument("--miles", type=Path, required=True)
    clones = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        for name, revision in REVISIONS.items():
            host = name.partition("_")[0]
            source, out = root / f"{name}-source", root / "dumps" / name
            source.mkdir()
            out.mkdir(parents=True)
            archive = subprocess.run(
                ["git", "-C", str(clones[host]), "archive", revision, host], check=True, capture_output=True
            ).stdout
            subprocess.run(["tar", "x", "-C", str(source)], input=archive, check=True)
            environment = os.environ | {"PYTHONPATH": f"{source}:{os.environ.get('PYTHONPATH', '')}"}
            # A process each, because two revisions of slime have the same name.
            subprocess.run([sys.executable, __file__, "--one", name, str(out)], env=environment, check=True)
        (root / "dumps" / "revisions.json").write_text(json.dumps(REVISIONS, indent=2))
        with tarfile.open(ARCHIVE, "w:xz") as archive_file:
            for path in sorted((root / "dumps").rglob("*")):
                if path.is_file() and path.suffix in (".pt", ".json"):
                    archive_file.add(path, path.relative_to(root / "dumps"), filter=_anonymous)


def _anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = info.mtime = 0
    info.uname = info.gname = ""
    return info


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        globals()[sys.argv[2]](Path(sys.argv[3]))
    else:
        main()
