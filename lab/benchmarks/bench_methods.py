# SPDX-License-Identifier: Apache-2.0
"""The cost of each preset, from packed log-probs and advantages to the coefficient and the loss of each token.

    python lab/benchmarks/bench_methods.py [--device cuda] [--shape 64x2048] [--presets ppo gspo] [--compiled]
        [--json FILE]

Prints Markdown. Each call has lengths that no call has had before, as in training. Times are from the call until the
device is idle, medians. *Launches* and *waits* are of one call of the profiler, on a CPU ATen operations and reads of a
value, which cannot be counted in compiled code; *of few* are the launches with an eighth of the samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

# So that it runs where mis_ext is not installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import measuring
import reporting
import torch
from rich.progress import track
from workload import Responses, Shape, World, draw

from mis_ext.correction.layout import PackedLayout
from mis_ext.methods.catalogue import METHODS, find_method
from mis_ext.methods.method import Method

COLUMNS = ["preset", "median ms", "min", "max", "host ms", "device ms", "launches", "of few", "waits"]


class Inputs:
    """Arguments of a method for one shape, never with the same lengths twice."""

    def __init__(self, shape: Shape, *, device: torch.device, seed: int) -> None:
        responses = draw(shape, seed=seed)
        self._lengths, self._device = responses.response_lengths, device
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._tensors = {name: values.to(device) for name, values in self._columns(responses).items()}

    def _columns(self, responses: Responses) -> dict[str, torch.Tensor]:
        def noise(scale: float) -> torch.Tensor:
            return torch.randn(len(responses.train), generator=self._generator) * scale

        return {
            "current_logprobs_T": responses.train + noise(0.03),
            "behavior_logprobs_T": responses.rollout,
            "proximal_logprobs_T": responses.train,
            "reference_logprobs_T": responses.train + noise(0.1),
            "advantages_T": noise(1.0),
            "state_values_T": noise(1.0),
            "response_mask_T": responses.mask.bool(),
        }

    def next(self) -> dict[str, Any]:
        """Most of the tokens, dealt out among the samples in another way."""
        order = torch.randperm(len(self._lengths), generator=self._generator).tolist()
        lengths = [self._lengths[index] for index in order]
        left, dropped = torch.randint(1, min(lengths), (2,), generator=self._generator).tolist()
        lengths[0], lengths[1] = lengths[0] - left, lengths[1] + max(left - dropped, 0)
        tensors = {name: values_T[: sum(lengths)] for name, values_T in self._tensors.items()}
        return tensors | {"layout": PackedLayout.whole(lengths, device=self._device)}


def call(method: Method, item: dict[str, Any]) -> Any:
    """The method itself, with its gradient path."""
    return method(**item)


def measure(
    method: Method, inputs: Inputs, few: Inputs, *, world: World, options: argparse.Namespace
) -> dict[str, float]:
    """Everything about one preset."""
    work = partial(call, method)
    for _ in range(measuring.WARM_UP_CALLS):
        work(inputs.next())
        work(few.next())
    times = measuring.time_calls(work, inputs.next, world=world, repeats=options.repeats, budget=options.budget)
    row = {
        "median_s": times.median,
        "min_s": min(times.total),
        "max_s": max(times.total),
        "host_s": statistics.median(times.host),
    }
    if world.device.type != "cuda":
        counted = [measuring.count_dispatched(work, each.next(), world) for each in (inputs, few)]
        return row | {
            "launches": counted[0].operations,
            "launches_few": counted[1].operations,
            "waits": counted[0].reads,
        }
    device, device_few = (
        measuring.profile_device(work, each.next, world=world, seconds_per_call=times.median) for each in (inputs, few)
    )
    return row | {
        "device_s": device.seconds,
        "launches": device.kernels,
        "launches_few": device_few.kernels,
        "waits": device.synchronizations,
    }


def cells(name: str, row: dict[str, float]) -> list[str]:
    """One line of the table."""
    times = [
        f"{row[key] * 1e3:.3f}" if key in row else "-" for key in ("median_s", "min_s", "max_s", "host_s", "device_s")
    ]
    counts = [f"{row[key]:.0f}" if key in row else "-" for key in ("launches", "launches_few", "waits")]
    return [name, *times, *counts]


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default=None, metavar="SxL", help="64x2048, on a CPU 8x256")
    parser.add_argument("--presets", nargs="+", default=[*METHODS], metavar="NAME")
    parser.add_argument("--repeats", type=int, default=200, help="timed calls per line at most")
    parser.add_argument("--budget", type=float, default=0.3, help="seconds of timed calls per line; at least 5 calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    world = World.join(options.device, 1)
    shape = Shape.parse(options.shape or ("64x2048" if options.device == "cuda" else "8x256"))
    inputs, few = (
        Inputs(each, device=world.device, seed=options.seed)
        for each in (shape, Shape(max(shape.samples // 8, 2), shape.mean_length))
    )
    header = reporting.header(world, options.seed)
    print("\n".join(header.values()), f"\n\n{shape}\n", flush=True)
    rows = {}
    for name in track(options.presets, description="presets"):
        rows[name] = measure(find_method(name).method, inputs, few, world=world, options=options)
    print(reporting.table(COLUMNS, [cells(name, row) for name, row in rows.items()]))
    if options.json:
        Path(options.json).write_text(json.dumps({"header": header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
