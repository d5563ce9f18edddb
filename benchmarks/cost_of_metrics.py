"""What importing the package costs, and what each choice of ``mis_metrics`` costs per micro-batch.

    python benchmarks/cost_of_metrics.py [--device cuda]

Prints a Markdown table: medians of repeated runs, all choices interleaved in one process.
"""

import argparse
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

import mis_ext

SAMPLES, MEAN_LENGTH, MASKED_SHARE = 64, 2048, 0.1
IMPORT_RUNS, CALL_RUNS = 9, 15
CHOICES = {"all": "all", "core": "core", "one name": ["mis_k3_kl"], "none": []}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    device = torch.device(parser.parse_args().device)
    imports = [_import_seconds() for _ in range(IMPORT_RUNS)]
    print(f"python {platform.python_version()}, torch {torch.__version__}, {_device_name(device)}")
    print(f"import mis_ext after torch: {statistics.median(imports) * 1e3:.0f} ms (median of {IMPORT_RUNS})\n")

    batch = _make_batch(device)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in CHOICES}
    settings = {name: _settings(choice) for name, choice in CHOICES.items()}
    for run in range(CALL_RUNS + 2):
        for name, args in settings.items():
            call, metrics = _timed(lambda args=args: mis_ext.compute_mis_weights_with_cp(args, **batch)[2], device)
            reduction, _ = _timed(lambda metrics=metrics: _host_reduction(metrics, batch["loss_masks"]), device)
            if run >= 2:
                seconds[name].append((call, reduction))

    print(f"{SAMPLES} samples of {MEAN_LENGTH} response tokens on average, {MASKED_SHARE:.0%} masked, yaml/mis.yaml,")
    print(f"median of {CALL_RUNS} calls in ms; the host's reduction is one loop over samples per name\n")
    print("| mis_metrics | names | call | host reduction | call + reduction, of `all` |")
    print("|---|---|---|---|---|")
    total_of_all = sum(statistics.median(column) for column in zip(*seconds["all"], strict=True))
    for name, runs in seconds.items():
        call, reduction = (statistics.median(column) for column in zip(*runs, strict=True))
        names = len(mis_ext.CorrectionConfig.from_mapping(vars(settings[name])).selected_metrics)
        share = (call + reduction) / total_of_all
        print(f"| {name} | {names} | {call * 1e3:.2f} | {reduction * 1e3:.2f} | {share:.2f} |")


def _import_seconds() -> float:
    code = "import torch, time; start = time.perf_counter(); import mis_ext; print(time.perf_counter() - start)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def _make_batch(device: torch.device) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    lengths = [int(x) for x in (torch.randn(SAMPLES, generator=generator) * 0.5).exp() * MEAN_LENGTH * 0.88]
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


def _settings(choice: object) -> argparse.Namespace:
    return argparse.Namespace(
        use_tis=True,
        use_rs=True,
        rs_level="geometric",
        rs_lower_bound=0.99,
        rs_upper_bound=1.01,
        rs_veto_threshold=1e-4,
        tis_batch_normalize=True,
        mis_metrics=choice,
    )


def _host_reduction(metrics: dict[str, torch.Tensor], loss_masks: list[torch.Tensor]) -> list[torch.Tensor]:
    """The hosts' sum of per-sample means, once per name."""
    lengths = [len(mask) for mask in loss_masks]
    return [
        sum(
            (x * mask).sum() / mask.sum().clamp_min(1)
            for x, mask in zip(values.split(lengths), loss_masks, strict=True)
        )
        for values in metrics.values()
    ]


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
