# SPDX-License-Identifier: Apache-2.0
"""Output of the benchmark: a header and Markdown tables."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from workload import World

COLUMNS = [
    "configuration",
    "contender",
    "layout",
    "median ms",
    "min",
    "max",
    "host ms",
    "device ms",
    "launches + copies",
    "host syncs",
    "sync debug",
    "extra B/token",
    "collectives",
    "KB sent",
    "GB/s",
    "copy GB/s",
    "time / copy",
    "faster than baseline",
]


def header(world: World, seed: int) -> dict[str, str]:
    """Hardware, versions and command, a line each."""
    if world.device.type == "cuda":
        hardware = f"{world.size} x {torch.cuda.get_device_name(world.device)}, CUDA {torch.version.cuda}"
    else:
        hardware = f"{platform.machine()} CPU, {world.size} processes of {torch.get_num_threads()} threads"
    triton = importlib.import_module("triton").__version__ if find_spec("triton") else "none"
    return {
        "hardware": f"{hardware}; context parallel {world.cp_size}, data parallel {world.dp_size}",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, triton {triton}, "
        f"mis_ext {_revision()}",
        "command": f"`{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}`, seed {seed}",
    }


def _revision() -> str:
    """The revision of the source by git, if available; not for a copy inside of another checkout."""
    root = Path(__file__).resolve().parents[2]
    if shutil.which("git") is not None and _git("rev-parse", "--show-toplevel", cwd=root) == str(root):
        return _git("describe", "--always", "--dirty", cwd=root)
    found = [each.version for each in importlib.metadata.distributions(name="mis_ext")]
    return found[0] if found else "of unknown version"


def _git(*command: str, cwd: Path) -> str:
    return subprocess.run(["git", *command], capture_output=True, text=True, cwd=cwd).stdout.strip()


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table; what was not measured is a dash."""

    def number(key: str, scale: float = 1.0, digits: int = 3) -> str:
        return "-" if row.get(key) is None else f"{row[key] * scale:,.{digits}f}"

    launches = f"{number('launches', digits=0)} + {number('copies', digits=0)}"
    launches = f"{row['operations']} ops" if "operations" in row else launches
    waits = {True: "passes", False: "waits", None: "-"}[row.get("never_waits")]
    times = [number(key, 1e3) for key in ("median_s", "min_s", "max_s", "host_s", "device_s")]
    if row.get("collective_s"):
        times[-1] += f" + {number('collective_s', 1e3)}"
    counts = [launches, number("host_syncs", digits=0), waits, number("extra_bytes_per_token", digits=1)]
    collectives = [number("collectives", digits=0), number("collective_bytes", 1e-3, 1)]
    ratios = [number("bandwidth", 1e-9, 1), number("copy_bandwidth", 1e-9, 1), number("time_over_copy", digits=1)]
    names = [row["configuration"], row["contender"], row["layout"]]
    return [*names, *times, *counts, *collectives, *ratios, number("speedup", digits=1)]


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *rows))
