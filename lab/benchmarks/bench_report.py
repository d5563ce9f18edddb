# SPDX-License-Identifier: Apache-2.0
"""What ``mis-ext report`` costs: by default 100 million tokens, all presets.

    python lab/benchmarks/bench_report.py [--tokens 100000000] [--files 25] [--config yaml/mis.yaml] [--smoke]

Writes dumps as slime does (``format_version`` 2, with advantages, rewards, prompts and masks), runs the command as a
process of its own, and prints a line of a Markdown table: wall and CPU seconds, CPU seconds that other processes took
meanwhile (on Linux: a machine that is not idle has fewer cores to give), and the most memory that was resident.
The log-ratios have heavy tails (a Student's t with 4 degrees of freedom) and a k3 of about 1e-3. The page cache may
hold the files, as after a run that has just dumped them.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

PACKAGES = ("mis_ext", "torch", "matplotlib", "rich")
GROUP, PROMPT, VOCABULARY = 8, 64, 150_000
SCALE, DEGREES = 0.03, 4.0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--length", type=int, default=1000, help="mean tokens of a response; half to one and a half")
    parser.add_argument("--files", type=int, default=25, help="one per step")
    parser.add_argument("--folder", type=Path, help="where to write the dumps, by default a temporary folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--config", action="append", default=[], help="as of the report; without it all presets")
    parser.add_argument("--smoke", action="store_true", help="a hundred thousand tokens: does it run?")
    options = parser.parse_args()
    tokens, files = (100_000, 2) if options.smoke else (options.tokens, options.files)
    print(f"hardware: {platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f} before")
    print(f"versions: Python {platform.python_version()}, {', '.join(_versions())}\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        dumps, written = Path(folder, "dumps"), 0
        dumps.mkdir()
        for number in range(files):
            generator = torch.Generator().manual_seed(options.seed + number)
            written += _write(dumps / f"{number}.pt", number, tokens // files, options.length, generator)
        size = sum(path.stat().st_size for path in dumps.iterdir())
        before, busy, start = resource.getrusage(resource.RUSAGE_CHILDREN), _busy_seconds(), time.perf_counter()
        command = [sys.executable, "-m", "mis_ext", "report", str(dumps), "--out", str(Path(folder, "out"))]
        command += [part for config in options.config for part in ("--config", config)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        busy = _busy_seconds() - busy
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print("| tokens | mean length | files | GB | s | CPU s | of others | million tokens / s | GB resident at most |")
    print("|---|---|---|---|---|---|---|---|---|")
    print(
        f"| {written:,} | {options.length:,} | {files} | {size / 1e9:.2f} | {seconds:.1f} | {cpu:.1f} | "
        f"{busy - cpu:.1f} | {written / seconds / 1e6:.2f} | {after.ru_maxrss * 1024 / 1e9:.2f} |"
    )
    print(f"\nload {os.getloadavg()[0]:.1f} after")


def _busy_seconds() -> float:
    """CPU seconds of all processes since the machine started; NaN where nobody says."""
    path = Path("/proc/stat")
    if not path.exists():
        return math.nan
    user, nice, system, _idle, _waiting, *interrupts = map(int, path.read_text().splitlines()[0].split()[1:9])
    return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")


def _write(path: Path, step: int, tokens: int, length: int, generator: torch.Generator) -> int:
    samples, written = [], 0
    while written < tokens:
        group = len(samples) // GROUP
        count = int(torch.randint(length // 2, 3 * length // 2 + 1, (), generator=generator))
        # About half of the tokens of a language model are certain.
        behavior = -3.0 * torch.rand(count, generator=generator) ** 4
        heavy = torch.randn(count, generator=generator) / _chi(count, generator)
        reward = float(torch.rand((), generator=generator) < 0.5)
        prompt = torch.full((PROMPT,), group, dtype=torch.int64)
        answer = torch.randint(VOCABULARY, (count,), generator=generator)
        samples.append(
            {
                "sample_index": len(samples),
                "tokens": torch.cat([prompt, answer]),
                "response_lengths": count,
                "loss_masks": torch.ones(count, dtype=torch.int32),
                "log_probs": (behavior + SCALE * heavy).clamp_max(0.0),
                "rollout_log_probs": behavior,
                "rewards": reward,
                "advantages": torch.full((count,), reward - 0.5),
            }
        )
        written += count
    torch.save({"format_version": 2, "rollout_id": step, "samples": samples}, path)
    return written


def _chi(count: int, generator: torch.Generator) -> torch.Tensor:
    squares = torch.randn(int(DEGREES), count, generator=generator).square().sum(0)
    return (squares / DEGREES).sqrt()


def _versions() -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} none"


if __name__ == "__main__":
    main()
