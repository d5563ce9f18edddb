# SPDX-License-Identifier: Apache-2.0
"""The cost of a correction per micro-batch: mis_ext eager and compiled, and the loop that users run today.

    python lab/benchmarks/bench_correction.py [--device cuda] [--shapes 8x2048 64x8192] [--metrics all] [--json FILE]
    torchrun --standalone --nproc-per-node 2 lab/benchmarks/bench_correction.py --cp 2

Markdown tables go to stdout, progress to stderr. All contenders get the same inputs in the same run, and each must
first equal the judges of the tests (float64, smaller inputs of the same shape); a wrong one ends the run.

- ``eager``, ``compiled``: the hook of mis_ext as the frameworks call it, with ``mis_compile: false`` or ``true``; with
  lengths it has seen (*same*: what it caches per layout is there) and with lengths that no call has had before (*new*,
  as in training). Verified against ``tests/support/reference.py``; on the full inputs two runs give the same bits, and
  compiled equals eager.
- ``baseline``: ``host_baseline.py``, a loop over samples. Verified against ``tests/support/host_loop.py``. It emits all
  of its metrics whatever ``--metrics`` says, and normalizes over valid tokens of the rank instead of over kept ones of
  all: what is timed is each side's own reading of the configuration.

Times are those of the slowest rank, from the call until its device is idle (*host*: until the call returns); all ranks
start together and idle. *Device* adds up kernels and copies, collectives apart behind a plus. *Launches* are kernels,
*copies* are copies and fills; on a CPU, which has neither, ATen operations, and under *host syncs* those that read a
value (also of tensors that are on the host beside a GPU too). *Extra* memory and *GB/s* count as
``measuring.measure_footprint`` says; *copy* is a copy on the device that reads and writes as many bytes in all.
"""

from __future__ import annotations

import argparse
import json
import secrets
import statistics
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import host_baseline
import measuring
import reporting
import torch
import torch.distributed as dist
import verifying
import yaml
from workload import GATED_MIS, Shape, Workload, World, settings

import mis_ext

YAML_FOLDER = Path(__file__).parents[2] / "yaml"
SHAPES = ["8x2048", "64x2048", "256x1024", "64x8192", "16x32768", "4096x64", "1x1000000"]
CONFIGS = ["metrics only", "gated MIS", "sequence MIS + norm", "token gates"]
CONTENDERS = ["eager", "compiled", "baseline"]


@dataclass(frozen=True)
class Entry:
    """One line of a table before it is measured."""

    contender: str
    layout: str
    call: measuring.Call
    next_item: measuring.NextItem


def main(arguments: list[str] | None = None) -> None:
    """Verify, measure and print."""
    options = _parse(arguments)
    warnings.simplefilter("ignore", mis_ext.MismatchWarning)
    world = World.join(options.device, options.cp)
    (seed,) = world.maximum([options.seed if options.seed is not None else secrets.randbelow(2**31)])
    bench = Benchmark(options, world, int(seed))
    try:
        bench.run()
    except verifying.Unequal as error:
        raise SystemExit(f"not timed, because a result is wrong (seed {int(seed)}): {error}") from error
    if options.json and world.rank == 0:
        Path(options.json).write_text(json.dumps({"header": bench.header, "rows": bench.rows}, indent=1))
    if world.size > 1 and arguments is None:
        dist.destroy_process_group()


class Benchmark:
    """One run."""

    def __init__(self, options: argparse.Namespace, world: World, seed: int) -> None:
        self.options, self.world, self.seed = options, world, seed
        self.header = reporting.header(world, seed)
        self.rows: list[dict[str, Any]] = []

    def run(self) -> None:
        """All shapes, one table each."""
        for line in self.header.values():
            self.say(line)
        for text in self.options.shapes:
            shape = Shape.parse(text)
            self.progress(f"{shape}: inputs")
            workload = Workload(shape, world=self.world, seed=self.seed)
            rows = [row for config in self.options.configs for row in self.measure_config(config, workload)]
            self.rows += rows
            num_sets, tokens = len(workload.sets), workload.num_local_tokens
            self.say(f"\n### {shape}: {tokens:,} tokens on this rank, {num_sets} input sets in turn\n")
            self.say(reporting.table(reporting.COLUMNS, [reporting.cells(row) for row in rows]))

    def measure_config(self, config: str, workload: Workload) -> list[dict[str, Any]]:
        """Verify all contenders first, then measure them one after the other."""
        keys = _keys(config, self.options.metrics)
        shape = workload.shape
        judged = verifying.Judged(shape, keys, world=self.world, seed=self.seed)
        names = self.options.contenders
        entries = [entry for name in names for entry in self._verified(name, config, keys, judged, workload)]
        rows = []
        for entry in entries:
            self.progress(f"{shape}, {config}: {entry.contender}, {entry.layout} layout")
            rows.append({"shape": str(shape), "configuration": config} | self.measure(entry, workload))
        baseline = next((row["median_s"] for row in rows if row["contender"] == "baseline"), None)
        for row in rows:
            row["speedup"] = baseline / row["median_s"] if baseline else None
        return rows

    def measure(self, entry: Entry, workload: Workload) -> dict[str, Any]:
        """Everything about one contender, one property after the other."""
        world, on_gpu = self.world, self.world.device.type == "cuda"
        call, next_item = entry.call, entry.next_item
        footprint = measuring.warm_up(call, next_item, world=world)
        times = measuring.time_calls(
            call, next_item, world=world, repeats=self.options.repeats, budget=self.options.budget
        )
        row: dict[str, Any] = {
            "contender": entry.contender,
            "layout": entry.layout,
            "median_s": times.median,
            "min_s": min(times.total),
            "max_s": max(times.total),
            "host_s": statistics.median(times.host),
            "repeats": len(times.total),
            "bytes_moved": footprint.moved,
        }
        if on_gpu:
            (median,) = world.maximum([times.median])
            work = measuring.profile_device(call, next_item, world=world, seconds_per_call=median)
            row |= {"device_s": work.seconds, "collective_s": work.collective_seconds}
            row |= {"launches": work.kernels, "copies": work.copies, "host_syncs": work.synchronizations}
            row["extra_bytes_per_token"] = (footprint.extra or 0) / workload.num_local_tokens
        if entry.contender != "baseline" and on_gpu:
            row["never_waits"] = measuring.never_waits(call, next_item(), world)
        if (not on_gpu or world.size > 1) and entry.contender != "compiled":
            counted = measuring.count_dispatched(call, next_item(), world)
            row |= {"collectives": counted.collectives, "collective_bytes": counted.collective_bytes}
            row |= {} if on_gpu else {"operations": counted.operations, "host_syncs": counted.reads}
        copy_seconds = measuring.copy_seconds(footprint.moved, world=world, num_buffers=len(workload.sets))
        busy = row.get("device_s") or times.median
        row |= {"bandwidth": footprint.moved / busy, "copy_bandwidth": footprint.moved / copy_seconds}
        return row | {"time_over_copy": busy / copy_seconds}

    def _verified(
        self, name: str, config: str, keys: dict[str, Any], judged: verifying.Judged, workload: Workload
    ) -> list[Entry]:
        """The lines of a contender, once it has passed."""
        self.progress(f"{workload.shape}, {config}: verify {name}")
        if name == "baseline":
            args = settings(keys)
            judged.check_baseline(host_baseline.compute_mis_weights_with_cp, args)
            return [Entry(name, "any", _hook_call(host_baseline, args), workload.same_layout)]
        args = settings(keys | {"mis_compile": name == "compiled"})
        call = _hook_call(mis_ext, args)
        judged.check_package(mis_ext.compute_mis_weights_with_cp, args, name=f"{config}, {name}")
        item = workload.same_layout()
        first, again = call(item), call(item)
        verifying.check_same(f"{config}, {name}, two runs of {workload.shape}", again, first, rtol=0.0, atol=0.0)
        if name == "compiled":
            eager = _hook_call(mis_ext, settings(keys | {"mis_compile": False}))(item)
            what, tolerance = f"{config}, compiled and eager on {workload.shape}", verifying.RTOL
            verifying.check_same(what, first, eager, rtol=tolerance, atol=verifying.ATOL)
        layouts = {"same": workload.same_layout, "new": workload.new_layout}
        return [Entry(name, layout, call, items) for layout, items in layouts.items()]

    def say(self, line: str) -> None:
        """Print once, whatever the number of ranks."""
        if self.world.rank == 0:
            print(line, flush=True)

    def progress(self, line: str) -> None:
        """The same on stderr."""
        if self.world.rank == 0:
            print(line, file=sys.stderr, flush=True)


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="SxL", help="samples x mean response tokens")
    parser.add_argument("--configs", nargs="+", default=CONFIGS, choices=CONFIGS)
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, choices=CONTENDERS)
    parser.add_argument("--metrics", choices=["core", "all"], default="core", help="what mis_ext emits")
    parser.add_argument("--repeats", type=int, default=200, help="timed calls per line at most")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds of timed calls per line; at least 5 calls")
    parser.add_argument("--cp", type=int, default=1, help="context-parallel ranks; the others are data-parallel")
    parser.add_argument("--seed", type=int, help="of the inputs; random by default")
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")
    return parser.parse_args(arguments)


def _keys(config: str, metrics: str) -> dict[str, Any]:
    """The flat keys of a configuration."""
    quiet = {"mis_metrics": metrics, "mis_guard": "warn"}
    if config == "metrics only":
        return {"use_tis": False} | quiet
    if config == "gated MIS":
        return GATED_MIS | quiet
    file = {"sequence MIS + norm": "sequence_mis", "token gates": "icepop"}[config]
    keys: dict[str, Any] = yaml.safe_load((YAML_FOLDER / f"{file}.yaml").read_text())
    if config == "sequence MIS + norm":
        keys["tis_batch_normalize"] = True
    # The watch over rejected shares ends with its first warning; here it never warns, and goes on.
    return keys | quiet | {"mis_max_reject_fraction": 1.0}


def _hook_call(module: Any, args: argparse.Namespace) -> measuring.Call:
    return lambda item: module.compute_mis_weights_with_cp(args, **item)


if __name__ == "__main__":
    main()
