# SPDX-License-Identifier: Apache-2.0
"""The correction against another revision: times and numbers, in one run.

    git worktree add ../base 16a265ec
    python lab/benchmarks/bench_passes.py ../base [--device cpu] [--presets mis] [--repeats 3]

Each of three processes computes the same calls: the other revision, this one without graphs, this one with graphs. With
``--repeats`` they take turns as often, and the table has medians: a process can be twice as slow as another one. A call
has lengths that the call before did not have. On a GPU its time begins and ends when the GPU is idle, and the peak is
that of the allocator above what the process held before the calls. On a CPU it has one thread and no peak.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

PRESETS = ("mis", "geometric_mis")
SHAPES = {
    "cuda": ((8, 2048), (64, 2048), (256, 1024), (4096, 64)),
    "cpu": ((8, 512), (64, 2048), (256, 1024)),
}
CALLS, WARM_UP, BATCHES = 26, 6, 12


def measure(root: str, mode: str, out: str, presets: Sequence[str], device: str) -> None:
    """Write times, peaks, numbers of the last call, and how many graphs 50 calls of drawn lengths made."""
    sys.path.insert(0, root)
    warnings.simplefilter("ignore")
    import torch

    import mis_ext

    if device == "cpu":
        torch.set_num_threads(1)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None

    def call(lengths, config, seed):
        generator = torch.Generator().manual_seed(seed)
        behavior = -torch.empty(sum(lengths)).exponential_(1.0, generator=generator)
        proximal = behavior + 0.05 * torch.randn(len(behavior), generator=generator)
        mask = (torch.rand(len(behavior), generator=generator) > 0.1).float()
        streams = {"proximal_logprobs_T": proximal, "behavior_logprobs_T": behavior, "response_mask_R": mask}
        moved = {name: values.to(device) for name, values in streams.items()}
        wait()
        start = time.perf_counter()
        layout = mis_ext.PackedLayout.whole(lengths, device=device)
        found = mis_ext.compute_correction(**moved, layout=layout, config=config, token_metrics=True)
        weights, loss_mask = found.weights_T, found.loss_mask_R
        wait()
        return time.perf_counter() - start, weights, loss_mask, found

    rows, numbers = {}, {}
    for preset in presets:
        for metrics in ("core", "all"):
            config = mis_ext.preset(preset).replace(metrics=metrics)
            if mode != "base":
                config = config.replace(compile=mode == "graphs")
            for count, mean in SHAPES[device]:
                batches = []
                for seed in range(BATCHES):
                    drawn = torch.empty(count).log_normal_(0, 0.5, generator=torch.Generator().manual_seed(seed))
                    batches.append((drawn * mean * 0.88).clamp(16, mean * 4).long().tolist())
                first, *_ = call(batches[0], config, 0)
                if device == "cuda":
                    held = torch.cuda.memory_allocated()
                    torch.cuda.reset_peak_memory_stats()
                times = [call(batches[k % BATCHES], config, k % BATCHES)[0] for k in range(1, CALLS)]
                peak = (torch.cuda.max_memory_allocated() - held) / 2**20 if device == "cuda" else math.nan
                name = f"{preset}, {metrics}, {count} x {mean:,}"
                rows[name] = (1e3 * statistics.median(times[WARM_UP - 1 :]), first, peak)
                print(f"{mode}: {name}: {rows[name][0]:.2f} ms, first {first:.1f} s, {peak:.0f} MiB", flush=True)
                _, weights, loss_mask, last = call(batches[(CALLS - 1) % BATCHES], config, (CALLS - 1) % BATCHES)
                tokens = {key: values.cpu() for key, values in last.token_metrics.items()}
                numbers[name] = (weights.cpu(), loss_mask.cpu(), tokens)
    graphs = None
    if mode == "graphs" and "mis" in presets:
        from torch._dynamo.utils import counters

        draw, config = random.Random(0), mis_ext.preset("mis").replace(compile=True, metric_max=9.0)
        counters.clear()
        for seed in range(50):
            call([draw.choice([1, 2, 30, 64, 500, 3000]) for _ in range(draw.choice([1, 1, 2, 5, 33]))], config, seed)
        graphs = counters["stats"]["unique_graphs"]
    torch.save((rows, numbers, graphs), out)


def compare(paths: dict[str, list[Path]]) -> None:
    """Print the table, and every number that differs by more than the tolerance of a rewrite."""
    import torch

    base, eager, graphs = (_median([torch.load(path) for path in of_mode]) for of_mode in paths.values())
    print(
        "| preset, metrics, responses x mean tokens | base, ms | eager | graphs | graphs / base | first call, s "
        "| peak, MiB: base, eager, graphs |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, (before, _, peak) in base[0].items():
        with_graphs, first, peak_of_graphs = graphs[0][name]
        peaks = f"{peak:.0f}, {eager[0][name][2]:.0f}, {peak_of_graphs:.0f}"
        print(
            f"| {name} | {before:.2f} | {eager[0][name][0]:.1f} | {with_graphs:.2f} | {with_graphs / before:.1f} "
            f"| {first:.0f} | {peaks} |"
        )
    worst = 0.0
    for mode, found in (("eager", eager), ("graphs", graphs)):
        for name, (weights, loss_mask, tokens) in base[1].items():
            new_weights, new_mask, new_tokens = found[1][name]
            worst = max(worst, float(((weights - new_weights).abs() / weights.abs().clamp(min=1e-9)).max()))
            if not torch.equal(loss_mask, new_mask):
                print(f"{mode}, {name}: {int((loss_mask != new_mask).sum())} tokens of the mask differ")
            # A revision may have metrics that the other has not.
            for metric in tokens.keys() & new_tokens.keys():
                values, new = tokens[metric], new_tokens[metric]
                if not torch.allclose(values, new, rtol=1e-5, atol=1e-6, equal_nan=True):
                    print(f"{mode}, {name}: {metric} differs by {float((values - new).abs().max()):.1e}")
    print(f"largest relative difference of a weight: {worst:.1e}")
    if graphs[2] is not None:
        print(f"graphs of 50 calls of drawn lengths: {graphs[2]}")


def _median(runs: list[tuple[dict, dict, int | None]]) -> tuple[dict, dict, int | None]:
    """The median time of each row over the processes of a mode; the other numbers are those of the first process."""
    rows, *others = runs[0]
    times = {name: statistics.median(run[0][name][0] for run in runs) for name in rows}
    return ({name: (times[name], *row[1:]) for name, row in rows.items()}, *others)


def main() -> None:
    """Measure all three, each in its own process, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="checkout of the revision to compare with")
    parser.add_argument("--device", default="cuda", choices=SHAPES)
    parser.add_argument("--presets", nargs="+", default=PRESETS, choices=PRESETS)
    parser.add_argument("--repeats", type=int, default=1, help="processes of each kind")
    parser.add_argument("--measure", choices=["base", "eager", "graphs"], help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure is not None:
        measure(arguments.base, arguments.measure, arguments.out, arguments.presets, arguments.device)
        return
    here = Path(__file__).resolve().parents[2]
    with tempfile.TemporaryDirectory() as folder:
        paths: dict[str, list[Path]] = {"base": [], "eager": [], "graphs": []}
        for repeat in range(arguments.repeats):
            for mode, of_mode in paths.items():
                of_mode.append(Path(folder) / f"{mode}-{repeat}.pt")
                root = arguments.base if mode == "base" else str(here)
                command = [sys.executable, __file__, str(Path(root).resolve()), "--measure", mode]
                command += ["--out", str(of_mode[-1]), "--device", arguments.device]
                subprocess.run([*command, "--presets", *arguments.presets], check=True)
        compare(paths)


if __name__ == "__main__":
    main()
