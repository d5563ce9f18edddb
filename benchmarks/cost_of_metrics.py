"""What the user pays per micro-batch: the hook, and the host's reduction of the metrics that it returns.

    python benchmarks/cost_of_metrics.py [--device cuda] [--samples 64] [--length 2048]

The reduction is that of slime and Miles: for each name a loop over samples (product with the mask, sum, clamped
denominator, quotient, sum of samples), then one tensor of all values, which reads each of them. Prints a Markdown
table: medians of repeated runs, all contenders interleaved in one process. The reference example is
``host_baseline.py``, which returns all of its metrics.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import host_baseline
import torch
import yaml

import mis_ext

YAML = Path(__file__).parents[1] / "yaml" / "gated_mis.yaml"
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
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    names: dict[str, int] = {}
    for run in range(CALL_RUNS + WARM_UP):
        for name, call in calls.items():
            hook, metrics = _timed(call, device)
            reduction, _ = _timed(lambda metrics=metrics: _host_reduction(metrics, batch["loss_masks"]), device)
            names[name] = len(metrics)
            if run >= WARM_UP:
                seconds[name].append((hook, reduction))

    print(f"{options.samples} samples of {options.length} response tokens on average, {MASKED_SHARE:.0%} masked,")
    print(f"yaml/gated_mis.yaml, median of {CALL_RUNS} calls in ms\n")
    print("| | names | hook | host reduction | sum | reference / this |")
    print("|---|---|---|---|---|---|")
    medians = {
        name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in seconds.items()
    }
    reference = sum(medians["reference example"])
    for name, (hook, reduction) in medians.items():
        total = hook + reduction
        cells = (name, names[name], *(f"{x * 1e3:.2f}" for x in (hook, reduction, total)), f"{reference / total:.1f}")
        print(f"| {' | '.join(map(str, cells))} |")


def _contenders(batch: dict[str, object]) -> dict[str, Callable[[], dict[str, torch.Tensor]]]:
    keys = yaml.safe_load(YAML.read_text(encoding="utf-8"))
    host = argparse.Namespace(use_tis=True, **{key: value for key, value in keys.items() if key != "use_tis"})
    calls = {"reference example": lambda: host_baseline.compute_mis_weights_with_cp(host, **batch)[2]}
    for choice, value in CHOICES.items():
        args = argparse.Namespace(**keys | {"mis_metrics": value})
        calls[f"mis_metrics: {choice}"] = lambda args=args: mis_ext.compute_mis_weights_with_cp(args, **batch)[2]
    return calls


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
    """One tensor of the hosts' sums of per-sample means, one per name."""
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


def _timed(function: Callable[[], object], device: torch.device) -> tuple[float, object]:
    _synchronize(device)
    start = time.perf_counter()
    result = function()
    _synchronize(device)
    return time.perf_counter() - start, result


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


if __name__ == "__main__":
    main()
