# SPDX-License-Identifier: Apache-2.0
"""Show that a Megatron-Core trainer and an inference engine can be bitwise equal, and the effect of each piece.

It compares the log-prob of every sampled token: with nothing aligned, with everything aligned over several optimizer
steps, and with one piece omitted at a time, where the recorder names the module that causes the difference. The exit
code is 1 if a result that should be exact is not, or if a forgotten weight sync is not detected.
"""

import argparse
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from grpo.distributed import Ranks
from grpo.pretrained import load_pretrained
from grpo.sglang_engine import INSTALL_HINT
from onpolicy.demonstration import (
    PIECES,
    WORKLOADS,
    EngineName,
    Experiment,
    Setting,
    Step,
    Workload,
    pieces_of,
    training_seconds,
)
from onpolicy.pieces import ALL, NONE, TRAINER_PIECES
from onpolicy.report import ResultsFile, plot, print_tables
from rich.console import Console
from rich.progress import Progress

from mis_ext.onpolicy import kv_cache

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
COMPARED = ("nothing", "all", "stale", "ablation")


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--engines", nargs="+", choices=PIECES, default=["transformers"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=DTYPES, help="both by default; on a GPU with --engines sglang bfloat16"
    )
    parser.add_argument("--size", choices=WORKLOADS, default="gpu" if on_gpu else "cpu")
    parser.add_argument(
        "--model",
        type=Path,
        help="a pretrained Llama, Qwen2 or Qwen3: a folder in Hugging Face's format, or a GGUF file; --size then "
        "gives the number of prompts and tokens. None: a random model",
    )
    parser.add_argument(
        "--cache",
        choices=kv_cache.DTYPES,
        help="8-bit format of the engine's keys and values; the trainer rounds in the same way. None: the dtype of "
        "the model",
    )
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps with everything aligned")
    parser.add_argument("--timing-repeats", type=int, default=3, help="repetitions of the cost measurement; 0: none")
    parser.add_argument(
        "--compare",
        nargs="+",
        choices=COMPARED,
        default=COMPARED,
        help="nothing aligned, all aligned, all with a weight sync forgotten, all but one piece",
    )
    parser.add_argument("--output-dir", type=Path, default=Path("runs/true_on_policy"))
    args = parser.parse_args()
    if args.dtypes is None:
        args.dtypes = ["bfloat16"] if on_gpu and "sglang" in args.engines else [*DTYPES]
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, got {args.steps}")
    if {"sglang", "sglang-deterministic"} & {*args.engines} and find_spec("sglang") is None:
        parser.error(INSTALL_HINT)
    if "sglang-deterministic" in args.engines and not on_gpu:
        parser.error("--engines sglang-deterministic: SGLang has that mode on a GPU only")
    if args.cache and "megatron" in args.engines:
        parser.error(f"--cache {args.cache}: --engines megatron has no cache of 8 bits")
    if "sglang" in args.engines and on_gpu and "float32" in args.dtypes and "nothing" in args.compare:
        parser.error("SGLang's RMSNorm has no float32 on CUDA: with float32, do not omit pieces in --compare")
    return args


def main() -> int:
    """Run the experiment, and return the exit code."""
    args = parse_args()
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    ranks = Ranks.start(context_parallel_size=1, seed=0)
    workload, console = WORKLOADS[args.size], Console()
    if args.model is not None:
        workload = workload.pretrained(load_pretrained(args.model))
    if not console.is_terminal:
        console.width = 140
    results = ResultsFile(args.output_dir / "results.jsonl")
    try:
        with Progress(console=console, transient=True) as progress:
            cells = [(engine, dtype) for engine in args.engines for dtype in args.dtypes]
            left_out = {engine: len(pieces_of(engine, args.cache)) for engine in args.engines}
            several = len({*args.compare} - {"ablation"})
            total = sum(several + left_out[engine] * ("ablation" in args.compare) for engine, _ in cells)
            total += len(args.dtypes) * (2 + len(TRAINER_PIECES)) * bool(args.timing_repeats)
            task = progress.add_task("comparing", total=total)
            for engine, dtype in cells:
                for _ in compare(engine, dtype, args, workload, ranks.device, results):
                    progress.advance(task)
            for dtype in args.dtypes if args.timing_repeats else ():
                for _ in measure_costs(dtype, args, workload, ranks.device, results):
                    progress.advance(task)
    finally:
        # An interrupted run shows its results so far.
        if results.rows:
            print_tables(results.rows, console)
            plot(results.rows, args.output_dir / "differences.png")
            console.print(f"results {args.output_dir / 'results.jsonl'}\nplot    {args.output_dir / 'differences.png'}")
    failures = [row for row in results.rows if is_failure(row)]
    for row in failures:
        console.print(f"[red]not as it should be:[/red] {row}")
    return 1 if failures else 0


def compare(engine: EngineName, dtype: str, args, workload: Workload, device: torch.device, results: ResultsFile):
    """Run with nothing aligned, everything, everything with a forgotten sync, and with one piece omitted at a time."""
    everything = Setting(engine=engine, dtype=DTYPES[dtype], pieces=ALL, cache=args.cache)

    def experiment(pieces):
        return Experiment(replace(everything, pieces=pieces), workload, device)

    cell = {"engine": engine, "dtype": dtype} | ({"cache": args.cache} if args.cache else {})
    for aligned, pieces in (("nothing", NONE), ("all", ALL)):
        if aligned not in args.compare:
            continue
        with experiment(pieces) as running:
            for number, step in enumerate(running.steps(args.steps)):
                results.add(kind="step", **cell, aligned=aligned, step=number, **row_of(step))
        yield
    if "stale" in args.compare:
        with experiment(ALL) as running:
            *_, last = running.steps(1, forgotten_sync=1)
            results.add(kind="stale", **cell, **row_of(last), hint=last.report.hint)
        yield
    for piece in sorted(pieces_of(engine, args.cache)) if "ablation" in args.compare else ():
        with experiment(ALL - {piece}) as running:
            (step,) = running.steps(0)
            results.add(kind="ablation", **cell, left_out=piece.value, **row_of(step), culprit=running.culprit())
        yield


def measure_costs(dtype: str, args, workload: Workload, device: torch.device, results: ResultsFile):
    """Measure forward and backward of the trainer with nothing, one of its pieces, and everything aligned."""
    seconds_of = partial(
        training_seconds, workload=workload, dtype=DTYPES[dtype], device=device, repeats=args.timing_repeats
    )
    off = None
    for aligned, pieces in (("nothing", NONE), *((piece.value, {piece}) for piece in TRAINER_PIECES), ("all", ALL)):
        seconds = seconds_of(frozenset(pieces))
        off = off or seconds
        results.add(kind="cost", dtype=dtype, aligned=aligned, seconds=seconds, ratio=seconds / off)
        yield


def is_failure(row: Mapping[str, Any]) -> bool:
    """Return True if a row has a wrong result. With nothing aligned, some machines are equal anyway."""
    if row["kind"] == "stale":
        return row["verdict"] != "DIFFERENT" or "stale weights" not in (row["hint"] or "")
    return row["kind"] == "step" and row["aligned"] == "all" and row["verdict"] != "EXACT"


def row_of(step: Step) -> dict[str, object]:
    """The numbers of a step for tables and plot."""
    report = step.report
    return {
        "verdict": report.verdict.value,
        "tokens": report.num_active_tokens,
        "nonzero": report.num_nonzero,
        "mean": report.mean_abs_diff,
        "max": report.max_abs_diff,
        "max_ulp": report.max_ulp,
        "k3": step.k3,
        "generate_seconds": step.generate_seconds,
    }


if __name__ == "__main__":
    sys.exit(main())
