# SPDX-License-Identifier: Apache-2.0
"""The cost per micro-batch for a user: the hook, and the framework's reduction of the metrics that it returns.

    python lab/benchmarks/cost_of_metrics.py [--device cuda] [--samples 64] [--length 2048]
    OMP_NUM_THREADS=1 python lab/benchmarks/cost_of_metrics.py --samples 8 --length 512

The reduction is that of slime and Miles: for each name a loop over samples (product with the mask, sum, clamped
denominator, quotient, sum of samples), then one tensor of all values, which reads each of them. Prints a Markdown
table: medians of repeated runs, all contenders interleaved in one process, and medians of the ratios within a run. On a
CPU with one thread the times are those of the thread, so that other work on the machine does not count. The reference
example is ``host_baseline.py``, which returns all of its metrics. *New lengths*: those of the samples were never seen,
as in training; *first call*: the guards look at the data.
"""

import argparse
import functools
import itertools
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import host_baseline
import torch
from workload import GATED_MIS

import mis_ext

IMPORT_RUNS, CALL_RUNS, WARM_UP = 9, 15, 3
CHOICES = {"all": "all", "core": "core", "one name": ["mis_k3_kl"], "none": []}
MASKED_SHARE = 0.1


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--length", type=int, default=2048, help="mean response tokens; lengths are log-normal")
    options = parser.parse_args()
    device = torch.device(options.device)
    imports = [_import_seconds() for _ in range(IMPORT_RUNS)]
    print(f"python {platform.python_version()}, torch {torch.__version__}, {_device_name(device)}")
    print(f"import mis_ext and its hook after torch: {statistics.median(imports) * 1e3:.0f} ms\n")

    batch = _make_batch(device, samples=options.samples, mean_length=options.length)
    calls = _contenders(batch)
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names: dict[str, int] = {}
    for run in range(CALL_RUNS + WARM_UP):
        for name, call in calls.items():
            work = call()
            hook, metrics = _timed(work, device, clock)
            reduction, _ = _timed(lambda metrics=metrics: _host_reduction(metrics, batch["loss_masks"]), device, clock)
            names[name] = len(metrics)
            # The next contender's memory need not be other than its own of the last round.
            del metrics
            if run >= WARM_UP:
                seconds[name].append((hook, reduction))

    print(f"{options.samples} samples of {options.length} response tokens on average, {MASKED_SHARE:.0%} masked,")
    print(f"a geometric gate, a veto, self-normalized weights; median of {CALL_RUNS} calls in ms")
    print(f"of {'the thread' if clock is time.thread_time else 'the clock'}\n")
    print("| | names | hook | reference / hook | host reduction | sum | reference / sum |")
    print("|---|---|---|---|---|---|---|")
    medians = {
        name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in seconds.items()
    }
    reference = seconds["reference example"]
    for name, (hook, reduction) in medians.items():
        pairs = [*zip(reference, seconds[name], strict=True)]
        of_hook = statistics.median(theirs[0] / ours[0] for theirs, ours in pairs)
        of_sum = statistics.median(sum(theirs) / sum(ours) for theirs, ours in pairs)
        times = [f"{x * 1e3:.2f}" for x in (hook, reduction, hook + reduction)]
        cells = (name, names[name], times[0], f"{of_hook:.2f}", *times[1:], f"{of_sum:.1f}")
        print(f"| {' | '.join(map(str, cells))} |")


def _contenders(batch: dict[str, object]) -> dict[str, Callable[[], Callable[[], dict[str, torch.Tensor]]]]:
    """Functions that make a call, by name; making it is not timed."""
    keys = {key: value for key, value in GATED_MIS.items() if not key.startswith("mis_")}

    def of_example() -> Callable[[], dict[str, torch.Tensor]]:
        host = argparse.Namespace(**{"use_tis": True} | keys)
        return lambda: host_baseline.compute_mis_weights_with_cp(host, **batch)[2]

    def of_hook(args: argparse.Namespace, given: dict[str, object]) -> Callable[[], dict[str, torch.Tensor]]:
        return lambda: mis_ext.compute_mis_weights_with_cp(args, **given)[2]

    args = {choice: argparse.Namespace(**keys | {"mis_metrics": value}) for choice, value in CHOICES.items()}
    calls = {f"mis_metrics: {choice}": functools.partial(of_hook, each, batch) for choice, each in args.items()}
    turns = itertools.count(1)
    return {
        "reference example": of_example,
        "mis_metrics: all, new lengths": lambda: of_hook(args["all"], _relaid(batch, next(turns))),
        "mis_metrics: all, first call": lambda: of_hook(argparse.Namespace(**vars(args["all"])), batch),
        **calls,
    }


def _relaid(batch: dict[str, Any], turn: int) -> dict[str, Any]:
    """The same tokens, of samples with other lengths: the longest gives ``turn`` of its own to its neighbor."""
    lengths = [*batch["response_lengths"]]
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    lengths[longest] -= turn
    lengths[longest - 1] += turn
    columns = ("train_log_probs", "rollout_log_probs", "loss_masks")
    relaid = {name: [*torch.cat(batch[name]).split(lengths)] for name in columns}
    return batch | relaid | {"response_lengths": lengths, "total_lengths": [length + 100 for length in lengths]}


def _import_seconds() -> float:
    code = (
        "import torch, time; start = time.perf_counter(); import mis_ext; mis_ext.compute_mis_weights_with_cp; "
        "print(time.perf_counter() - start)"
    )
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def _make_batch(device: torch.device, *, samples: int, mean_length: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    lengths = [int(x) for x in (torch.randn(samples, generator=generator) * 0.5).exp() * mean_length * 0.88]
    train = [-torch.rand(n, generator=generator) * 3 for n in lengths]
    rollout = [x + 0.02 * torch.randn(len(x), generator=generator) for x in train]
    masks = [(torch.rand(n, generator=generator) > MASKED_SHARE).int() for n in lengths]
    return {
        "pg_loss": torch.randn(sum(lengths), generator=generator).to(device),
        "train_log_probs": [x.to(device) for x in train],
        "rollout_log_probs": [x.to(device) for x in rollout],
        "loss_masks": [x.to(device) for x in masks],
        "total_lengths": [n + 100 for n in lengths],
        "response_lengths": lengths,
    }


def _host_reduction(metrics: dict[str, torch.Tensor], loss_masks: list[torch.Tensor]) -> torch.Tensor:
    """One tensor of the frameworks' sums of per-sample means, one per name."""
    lengths = [len(mask) for mask in loss_masks]
    denominators = [mask.sum() for mask in loss_masks]
    values = [
        sum(
            (x * mask).sum() / torch.clamp_min(count, 1)
            for x, mask, count in zip(column.split(lengths), loss_masks, denominators, strict=True)
        )
        for column in metrics.values()
    ]
    return torch.tensor([len(loss_masks), *values], device=loss_masks[0].device)


def _timed(function: Callable[[], Any], device: torch.device, clock: Callable[[], float]) -> tuple[float, Any]:
    _synchronize(device)
    start = clock()
    result = function()
    _synchronize(device)
    return clock() - start, result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
