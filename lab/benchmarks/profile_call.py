# SPDX-License-Identifier: Apache-2.0
"""Where the time of a fused call goes: device time by kernel, and the host's work that grows with the samples.

    python lab/benchmarks/profile_call.py [64x8192 256x1024 ...]

Samples of equal length, ``yaml/gated_mis.yaml``. Device times are means over calls on the same inputs, which may lie
in the L2 cache; host times are medians of calls that nothing waits for. On a CPU only the host's part is printed.
"""

import argparse
import statistics
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.profiler import ProfilerActivity, profile

import mis_ext

CALLS = 50
KEYS = yaml.safe_load((Path(__file__).parents[2] / "yaml" / "gated_mis.yaml").read_text())


def main() -> None:
    """Profile and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["64x8192", "256x1024"], metavar="SxL")
    warnings.simplefilter("ignore", mis_ext.MismatchWarning)
    for shape in parser.parse_args().shapes:
        samples, length = map(int, shape.split("x"))
        print(f"\n{shape}, microseconds per call\n")
        batch = _batch(samples, length, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        for name, microseconds in (*_device_times(batch), *_host_times(batch)):
            print(f"{microseconds:9.2f}  {name}")


def _batch(samples: int, length: int, device: torch.device) -> dict[str, Any]:
    def log_probs() -> list[torch.Tensor]:
        return [-torch.rand(length, device=device) for _ in range(samples)]

    return {
        "pg_loss": torch.randn(samples * length, device=device, requires_grad=True),
        "train_log_probs": log_probs(),
        "rollout_log_probs": log_probs(),
        "loss_masks": [torch.ones(length, dtype=torch.int32, device=device) for _ in range(samples)],
        "total_lengths": [length + 5] * samples,
        "response_lengths": [length] * samples,
    }


def _device_times(batch: dict[str, Any]) -> list[tuple[str, float]]:
    if not batch["pg_loss"].is_cuda:
        return []
    args = Namespace(**KEYS, mis_guard="warn", mis_max_reject_fraction=1.0)

    def call() -> None:
        mis_ext.compute_mis_weights_with_cp(args, **batch)

    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda event: -event.device_time_total)
    return [(f"device: {e.key[:70]}", e.device_time_total / CALLS) for e in events if e.device_time_total > 0]


def _host_times(batch: dict[str, Any]) -> list[tuple[str, float]]:
    streams = [batch["train_log_probs"], batch["rollout_log_probs"], batch["loss_masks"]]
    lengths, packed = batch["response_lengths"], batch["pg_loss"].detach()
    return [
        ("host: concatenate three streams", _median(lambda: [torch.cat(stream) for stream in streams])),
        ("host: compare their lengths", _median(lambda: [tuple(map(torch.Tensor.numel, s)) for s in streams])),
        ("host: cut the mask into samples", _median(lambda: torch.unsafe_split_with_sizes(packed, lengths))),
    ]


def _median(work: Callable[[], object]) -> float:
    times = []
    for turn in range(2 * CALLS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
        if torch.cuda.is_available() and turn % 20 == 0:
            torch.cuda.synchronize()
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
