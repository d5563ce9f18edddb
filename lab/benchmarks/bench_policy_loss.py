# SPDX-License-Identifier: Apache-2.0
"""The cost of the full policy loss after the log-probs: mis_ext.policy_loss, and a loop over samples per name.

    python lab/benchmarks/bench_policy_loss.py [--device cuda] [--shape 64x2048] [--metrics all] [--json FILE]

Prints Markdown. From the lists of log-probs and entropies to the loss, the gradient of each of them, and all metrics of
host and hook, as the tensor that the hosts make of them. All contenders get the same inputs in one run. First every
contender's loss, gradients and shared metrics are compared with the loop's; a wrong one ends the run.

- ``loop, reference hook``: ``host_policy_loss.py`` with ``host_baseline.py``: what users run today.
- ``loop, mis_ext hook``: the same with ``mis_ext.compute_mis_weights_with_cp``.
- the others: ``mis_ext.policy_loss`` in its modes and options, with lengths that it has seen (*same*) and with lengths
  that no call has had before (*new*, as in training).

Times are from the call until the device is idle, medians. *Launches* and *waits* are of one call of the profiler, on a
CPU ATen operations and reads of a value. *Inside* is what mis_ext itself does: from packed log-probs and entropies, as
its own scoring makes them, to the loss, the coefficient of each token and the metrics on the host. It leaves out
autograd's way through the lists, 128 tensors, and the hosts' own tensor of the metrics, which copies numbers to the
device. The coefficients are there when the call returns; the backward pass multiplies them by its incoming gradient.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

# So that it runs where mis_ext is not installed.
sys.path.insert(0, str(Path(__file__).parents[2]))

import host_baseline
import host_policy_loss
import measuring
import reporting
import torch
from torch import Tensor
from workload import GATED_MIS, Responses, Shape, World, draw

import mis_ext
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.megatron import Host, Unscored, batch_loss
from mis_ext.hosts.packing import pack
from mis_ext.hosts.session import current_run
from mis_ext.hosts.slime_miles.policy_loss import on_host
from mis_ext.loss.policy import MILES_METRICS
from mis_ext.scoring import Scores

NUM_SETS = 4
LEAVES = ("current", "entropy")
COLUMNS = [
    "contender",
    "layout",
    "median ms",
    "min",
    "max",
    "host ms",
    "inside ms",
    "device ms",
    "launches + copies",
    "waits",
    "waits inside",
    "loop / this",
]

Call = Callable[[dict[str, Any]], Any]


def host_args(keys: dict[str, Any], **more: Any) -> argparse.Namespace:
    """The frameworks' arguments: PPO with entropy and a k3 penalty, and a correction."""
    settings = {
        "advantage_estimator": "grpo",
        "calculate_per_token_loss": False,
        "entropy_coef": 0.01,
        "eps_clip": 0.02,
        "eps_clip_high": 0.03,
        "get_mismatch_metrics": False,
        "kl_loss_coef": 0.01,
        "kl_loss_type": "k3",
        "qkv_format": "thd",
        "use_kl_loss": True,
        "use_rollout_logprobs": False,
    }
    return argparse.Namespace(**settings | keys | more)


def read_scores(unscored: Unscored) -> Scores:
    """In place of the log-probs of the logits: those of the item."""
    _, batch, logits, layout, _ = unscored
    if "scores" in batch:
        return batch["scores"]
    return Scores(*(pack(name, batch[name], layout.local_lengths, device=logits.device) for name in LEAVES))


def ours(args: argparse.Namespace, item: dict[str, Any], *, metrics: frozenset[str] = frozenset()) -> tuple:
    """The loss of mis_ext with the item's log-probs."""
    found = batch_loss(current_run(args, whole_loss=True), Host(Groups(), read_scores, metrics), item, item["logits"])
    return found.loss, on_host(found.metrics)


def run(loss_of: Call, item: dict[str, Any]) -> tuple:
    """Loss, gradients, and the metrics as the frameworks' wrapper joins them."""
    loss, metrics = loss_of(item)
    gradients = torch.autograd.grad(loss, [*item["current"], *item["entropy"]], materialize_grads=True)
    return loss, gradients, metrics, torch.tensor([0, *metrics.values()], device=loss.device)


def run_inside(loss_of: Call, item: dict[str, Any]) -> tuple:
    """Loss, coefficients and metrics from packed log-probs and entropies."""
    loss, metrics = loss_of(item | {"scores": item["packed"]})
    return loss, metrics


class Inputs:
    """Micro-batches of one shape: the same lengths over and over, or never the same twice."""

    def __init__(self, shape: Shape, *, device: torch.device, seed: int) -> None:
        self.shape, self.device = shape, device
        self._responses = draw(shape, seed=seed).to(device)
        self._generator = torch.Generator().manual_seed(seed + 1)
        self._items = [self._item(self._responses) for _ in range(NUM_SETS)]
        self._turn = 0

    def same(self) -> dict[str, Any]:
        """The next set."""
        self._turn += 1
        return self._items[self._turn % NUM_SETS]

    def new(self) -> dict[str, Any]:
        """A set whose lengths no call has seen."""
        self._turn += 1
        order = torch.randperm(self.shape.samples, generator=self._generator).tolist()
        lengths = [self._responses.response_lengths[index] for index in order]
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[longest] -= self._turn % lengths[longest]
        return self._item(self._responses.relaid(lengths))

    def _item(self, responses: Responses) -> dict[str, Any]:
        def noise(scale: float) -> Tensor:
            values = torch.randn(len(responses.train), generator=self._generator)
            return (values * scale).to(self.device)

        current = responses.train + noise(0.03)
        columns = {
            "current": current,
            "entropy": noise(1.0).abs(),
            "log_probs": responses.train,
            "rollout_log_probs": responses.rollout,
            "ref_log_probs": current + noise(0.1),
            "advantages": noise(1.0),
            "loss_masks": responses.mask,
        }
        item: dict[str, Any] = {name: [*map(Tensor.clone, responses.split(x))] for name, x in columns.items()}
        for name in LEAVES:
            item[name] = [sample.requires_grad_() for sample in item[name]]
        item["packed"] = Scores(*(columns[name].clone().requires_grad_() for name in LEAVES))
        lengths = {"total_lengths": responses.total_lengths, "response_lengths": responses.response_lengths}
        sums = torch.stack([mask.sum() for mask in item["loss_masks"]]).float()
        return {**item, **lengths, "rollout_mask_sums": sums, "logits": torch.zeros(1, 1, 2, device=self.device)}


def contenders(keys: dict[str, Any]) -> dict[str, Call]:
    """The measured functions, by name."""
    args = host_args(keys)
    args_of = partial(host_args, keys)
    return {
        "loop, reference hook": lambda item: host_policy_loss.policy_loss(
            args, item, host_baseline.compute_mis_weights_with_cp
        ),
        "loop, mis_ext hook": lambda item: host_policy_loss.policy_loss(
            args, item, mis_ext.compute_mis_weights_with_cp
        ),
        "baseline": partial(ours, args_of()),
        "baseline, metrics of Miles": partial(ours, args_of(), metrics=MILES_METRICS),
        "bypass": partial(ours, args_of(mis_loss_mode="bypass")),
        "reinforce": partial(ours, args_of(mis_loss_mode="reinforce")),
        "gspo": partial(ours, args_of(advantage_estimator="gspo")),
        "cispo": partial(ours, args_of(advantage_estimator="cispo", eps_clip=1.0)),
        "no correction": partial(ours, host_args({})),
    }


def check(calls: dict[str, Call], inputs: Inputs) -> None:
    """The loop and ours agree; and ours agrees with itself."""
    for item in (inputs.same(), inputs.new()):
        loop = run(calls["loop, mis_ext hook"], item)
        _check_equal("baseline", run(calls["baseline"], item), loop)
        for name, call in calls.items():
            first, again = run(call, item), run(call, item)
            same = all(torch.equal(a, b) for a, b in zip(first[1], again[1], strict=True))
            if not (same and torch.equal(first[3].nan_to_num(), again[3].nan_to_num())):
                raise SystemExit(f"not timed: two runs of {name} differ")


def _check_equal(name: str, mine: tuple, loop: tuple) -> None:
    if [*loop[2]] != [*mine[2]]:
        raise SystemExit(f"not timed: other names: {[*loop[2]]} and {[*mine[2]]}")
    for what, found, wanted in (
        ("loss", mine[0], loop[0]),
        ("metrics", mine[3], loop[3]),
        *((f"gradient of {i}", *pair) for i, pair in enumerate(zip(mine[1], loop[1], strict=True))),
    ):
        # Sums of 10^5 numbers in another order.
        atol = float(1e-5 * wanted.abs().max())
        torch.testing.assert_close(
            found, wanted, rtol=1e-4, atol=atol, msg=lambda m, what=what: f"not timed: {what} of {name}: {m}"
        )


def measure(name: str, call: Call, next_item: Call, *, world: World, options: argparse.Namespace) -> dict[str, Any]:
    """Everything about one contender."""
    # The loops have no inside: they take lists.
    whole, inside = partial(run, call), partial(run if name.startswith("loop") else run_inside, call)
    for _ in range(measuring.WARM_UP_CALLS):
        whole(next_item())
        inside(next_item())
    times = measuring.time_calls(whole, next_item, world=world, repeats=options.repeats, budget=options.budget)
    within = measuring.time_calls(inside, next_item, world=world, repeats=options.repeats, budget=options.budget)
    row: dict[str, Any] = {
        "median_s": times.median,
        "min_s": min(times.total),
        "max_s": max(times.total),
        "host_s": statistics.median(times.host),
        "inside_s": within.median,
    }
    if world.device.type != "cuda":
        counted = [measuring.count_dispatched(each, next_item(), world) for each in (whole, inside)]
        return row | {
            "launches": counted[0].operations,
            "waits": counted[0].reads,
            "waits_inside": counted[1].reads,
        }
    work, within_work = (
        measuring.profile_device(each, next_item, world=world, seconds_per_call=times.median)
        for each in (whole, inside)
    )
    return row | {
        "device_s": work.seconds,
        "launches": work.kernels,
        "copies": work.copies,
        "waits": work.synchronizations,
        "waits_inside": within_work.synchronizations,
    }


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""

    def number(key: str, scale: float = 1.0, digits: int = 3) -> str:
        return f"{row[key] * scale:,.{digits}f}" if key in row else "-"

    times = [number(key, 1e3) for key in ("median_s", "min_s", "max_s", "host_s", "inside_s", "device_s")]
    launches = f"{number('launches', digits=0)} + {number('copies', digits=0)}"
    counts = [launches, number("waits", digits=0), number("waits_inside", digits=0)]
    return [row["contender"], row["layout"], *times, *counts, number("speedup", digits=1)]


def main(arguments: list[str] | None = None) -> None:
    """Check, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default=None, metavar="SxL", help="64x2048, on a CPU 8x256")
    parser.add_argument("--metrics", choices=["core", "all"], default="all", help="what the hook of mis_ext emits")
    parser.add_argument("--repeats", type=int, default=200, help="timed calls per line at most")
    parser.add_argument("--budget", type=float, default=0.5, help="seconds of timed calls per line; at least 5 calls")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write all numbers there")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    world = World.join(options.device, 1)
    shape = Shape.parse(options.shape or ("64x2048" if options.device == "cuda" else "8x256"))
    keys = GATED_MIS | {"mis_metrics": options.metrics}
    calls, inputs = contenders(keys), Inputs(shape, device=world.device, seed=options.seed)
    header = reporting.header(world, options.seed)
    for line in header.values():
        print(line)
    print(
        f"\n{shape}, {sum(inputs.same()['response_lengths']):,} tokens, hook metrics: {options.metrics}\n", flush=True
    )
    check(calls, inputs)
    rows: list[dict[str, Any]] = []
    for name, call in calls.items():
        layouts = {"same": lambda: inputs.same()} | ({} if name.startswith("loop") else {"new": lambda: inputs.new()})
        for layout, next_item in layouts.items():
            print(f"{name}, {layout}", file=sys.stderr, flush=True)
            found = measure(name, call, next_item, world=world, options=options)
            rows.append({"contender": name, "layout": layout} | found)
    for row in rows:
        row["speedup"] = rows[0]["median_s"] / row["median_s"]
    print(reporting.table(COLUMNS, [cells(row) for row in rows]))
    if options.json:
        Path(options.json).write_text(json.dumps({"header": header, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
