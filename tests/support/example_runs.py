# SPDX-License-Identifier: Apache-2.0
"""The example's program on ranks that share their imports, which take longer than a short run."""

import importlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from process_ranks import run_processes

import mis_ext

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(EXAMPLES))

from grpo.report import read_metrics  # noqa: E402

CORRECTION = ["--use-tis", "--custom-tis-function-path", "mis_ext.compute_mis_weights_with_cp"]
CORRECTION += ["--custom-config-path", str(ROOT / "yaml" / "mis.yaml")]
SMALL_RUN = [
    *["--num-layers", "2", "--hidden-size", "32", "--rollout-max-response-len", "12"],
    *["--rollout-batch-size", "4", "--n-samples-per-prompt", "8", "--micro-batch-size", "4", "--warmup-steps", "2"],
    *CORRECTION,
]
WHOLE_LOSS = ["--loss-type", "custom_loss", "--custom-loss-function-path", "mis_ext.policy_loss"]


def on_ranks(work: Callable[..., None], *args: Any, world_size: int = 2) -> None:
    """Call it on ranks with the environment of torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
    environment = os.environ | address | {"WORLD_SIZE": str(world_size)}
    # Less than the 900 s that .ci/run gives a whole run.
    run_processes(_as_rank, environment, work, *args, world_size=world_size, seconds=840)


def _as_rank(rank: int, environment: dict[str, str], work: Callable[..., None], *args: Any) -> None:
    os.environ |= environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    work(*args)


def run_program(*arguments: str) -> None:
    sys.argv = ["train_grpo.py", *arguments]
    importlib.import_module("train_grpo").main()


def train(output_dir: Path, *flags: str, world_size: int = 2) -> list[dict[str, float]]:
    """The rows of a run of the program."""
    on_ranks(run_program, "--output-dir", str(output_dir), *flags, world_size=world_size)
    return read_metrics(output_dir / "metrics.jsonl")


def prepare_and_stop(args: object, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Run with its data; in the second step one rank gets Ctrl-C."""
    mis_ext.prepare_rollout(args, rollout_id, rollout_data)
    if rollout_id == 1 and os.environ["RANK"] == "1":
        signal.raise_signal(signal.SIGINT)


def leave_a_run(folder: Path) -> None:
    """The output of a run of two steps."""
    left = {"metrics.jsonl": '{"step": 0}\n{"step": 1}\n', "metrics.png": "plot", "checkpoint.pt": "weights"}
    for name, content in left.items():
        (folder / name).write_text(content)


def content(folder: Path) -> dict[str, str]:
    """The files of a run, as :func:`leave_a_run` left them or not."""
    return {str(path): path.read_text() for path in folder.rglob("*") if path.is_file()}


def learned(rows: list[dict[str, float]]) -> list[dict[str, float]]:
    """Remove values that depend on the clock."""
    return [{name: value for name, value in row.items() if not name.startswith("perf/")} for row in rows]


def with_all_metrics(folder: Path) -> list[str]:
    """Flags of another correction, with a gate that reports every metric."""
    keys = {"use_tis": True, "use_rs": True, "rs_level": "geometric", "rs_lower_bound": 0.99, "rs_upper_bound": 1.01}
    config = folder / "all_metrics.yaml"
    config.write_text(yaml.safe_dump(keys | {"mis_metrics": "all", "mis_max_reject_fraction": 1.0}))
    return ["--custom-config-path", str(config)]
