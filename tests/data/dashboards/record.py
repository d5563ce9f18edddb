# SPDX-License-Identifier: Apache-2.0
"""Records ``numbers.json`` anew: what wandb, TensorBoard and MLflow give back of what docs/reference/metrics.md writes.

None of them is part of the environment of the tests. In one with ``wandb``, ``tensorboard`` and ``mlflow``, from the
repository's root:

    python tests/data/dashboards/record.py

Each line is taken out of the table of the page and executed. wandb runs offline, and its file is read; TensorBoard's is
read by its own accumulator; MLflow has an SQLite store.
"""

from __future__ import annotations

import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FILE = HERE / "numbers.json"
PAGE = HERE.parents[2] / "docs" / "reference" / "metrics.md"
NAMES = ("wandb", "TensorBoard", "MLflow")
BLOCK = 32768

sys.path += [str(HERE.parents[2]), str(HERE.parents[1] / "support")]

import dashboard_cases as cases  # noqa: E402

import mis_ext  # noqa: E402

Series = dict[str, list[tuple[int, float]]]


def line_of(name: str) -> str:
    """The line of code of a dashboard, as the page shows it."""
    (line,) = re.findall(rf"^\| {name} \| `(.*?)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    return str(line)


def write(name: str, **more: Any) -> None:
    """Execute the line of a dashboard for each step."""
    for step, calls in enumerate(cases.steps()):
        exec(line_of(name), more | {"numbers": mis_ext.scalars(*calls), "step": step})


def of_wandb(folder: Path) -> Series:
    """Through a run that is not synchronised."""
    os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    import wandb
    from wandb.proto import wandb_internal_pb2

    run = wandb.init(project="mis_ext", dir=str(folder))
    write("wandb", wandb=wandb)
    run.finish()
    found: Series = {}
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    for data in wandb_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        row = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
        for name in cases.EXPECTED:
            if name in row:
                found.setdefault(name, []).append((row["_step"], row[name]))
    return found


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log of LevelDB's format: blocks, each record in one or more pieces with a head of 7 bytes."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        # Whole, or the last piece.
        if kind in (1, 4):
            yield record
            record = b""


def of_tensorboard(folder: Path) -> Series:
    """Through the writer of torch."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        write("TensorBoard", writer=writer)
    found = EventAccumulator(str(folder))
    found.Reload()
    return {name: [(each.step, each.value) for each in found.Scalars(name)] for name in found.Tags()["scalars"]}


def of_mlflow(folder: Path) -> Series:
    """Through a store of SQLite."""
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{folder}/mlflow.db")
    mlflow.set_experiment("mis_ext")
    with mlflow.start_run() as run:
        write("MLflow", mlflow=mlflow)
    client = mlflow.MlflowClient()
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run_metrics(client, run)}
    return {name: sorted((each.step, each.value) for each in rows) for name, rows in history.items()}


def run_metrics(client: Any, run: Any) -> list[str]:
    """The names that a run has."""
    return [*client.get_run(run.info.run_id).data.metrics]


def main() -> None:
    """Write what each of them gave back."""
    found = {}
    for name, through in zip(NAMES, (of_wandb, of_tensorboard, of_mlflow), strict=True):
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            series = through(Path(folder))
        found[name] = {"version": version(name.lower()), "line": line_of(name), "series": series}
    FILE.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
