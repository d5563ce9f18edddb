# SPDX-License-Identifier: Apache-2.0
"""Part A: the full loss, from the logits to their gradient, in the frameworks' own ``loss_function``."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import scoring_hosts
import torch
from scoring_hosts import Host, host_args, in_process_of, without_rounding_to_bfloat16
from scoring_measure import COLUMNS, GIB, Row, cells, cost, guarded, largest, largest_difference, say, table
from scoring_work import Batches, Item
from torch import Tensor
from workload import GATED_MIS, Shape, World

import mis_ext

NAMES = ["host", "ranks", "shape", "vocabulary", "logits", "loss"]
DIFFERENCES = ["loss differs", "metrics", "gradient"]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-7}
"""Relative to the largest entry. Gradients in bfloat16 are sums of two rounded gradients."""
OF_HOOK = "mis_"
HOOK_TOLERANCE = 1e-4
"""Metrics of the hook are sums of powers of ratios, in another order."""


class Contender(NamedTuple):
    """One way to compute the loss: its arguments, its reference, and whether it is the framework's own."""

    name: str
    keys: dict[str, Any]
    same_as: str | None = None
    is_inplace: bool = False
    is_direct: bool = False


class Problem(NamedTuple):
    """A shape, a vocabulary, and a type of logits."""

    shape: Shape
    vocabulary: int
    dtype: torch.dtype

    @classmethod
    def parse(cls, text: str) -> Problem:
        """``8x2048:151936:float32``."""
        shape, vocabulary, dtype = text.split(":")
        return cls(Shape.parse(shape), int(vocabulary), getattr(torch, dtype))

    def __str__(self) -> str:
        return f"{self.shape}:{self.vocabulary}:{str(self.dtype).removeprefix('torch.')}"


OWN, OWN_WITH_HOOK = "its own loss, no correction", "its own loss, hook of mis_ext"


def contenders(host: Host, *, metrics: str) -> list[Contender]:
    """The compared losses, with the framework's own loss first."""
    keys = GATED_MIS | {"mis_metrics": metrics}
    hook = keys | {"custom_tis_function_path": "mis_ext.compute_mis_weights_with_cp"}
    whole = {"loss_type": "custom_loss", "custom_loss_function_path": "mis_ext.policy_loss"}
    fused = whole | {"mis_loss_scoring": "fused"}
    inplace = fused | {"mis_loss_inplace": True}
    example = host.example or "host_baseline.compute_mis_weights_with_cp"
    which = "its example" if host.example else "a loop like its example"
    return [
        Contender(OWN, {}),
        Contender(f"its own loss, {which}", keys | {"custom_tis_function_path": example}),
        Contender(OWN_WITH_HOOK, hook),
        Contender("its own loss, no correction, chunks of 1,024", {"log_probs_chunk_size": 1024}, OWN),
        Contender("policy_loss, the host's scoring", keys | whole | {"mis_loss_scoring": "host"}, OWN_WITH_HOOK),
        Contender("policy_loss, fused", keys | fused, OWN_WITH_HOOK),
        Contender("policy_loss, fused, in place", keys | inplace, OWN_WITH_HOOK, is_inplace=True),
        Contender("policy_loss, fused, in place, no correction", inplace, OWN, is_inplace=True),
        Contender(
            "policy_loss, fused, in place, called directly", keys | inplace, None, is_inplace=True, is_direct=True
        ),
        Contender(
            "the host's wrapper around no loss", whole | {"custom_loss_function_path": f"{__name__}.no_loss"}, None
        ),
    ]


def no_loss(_args: Any, _batch: Any, logits: Tensor, _reducer: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The rest is the framework's work around any loss: a few launches for every sample."""
    return logits.flatten()[:1].float().sum(), {}


def needs_float32(host: Host, args: argparse.Namespace, dtype: torch.dtype) -> bool:
    """Whether the model's output is made float32 first: the scoring of slime refuses other logits."""
    return host.name == "slime" and dtype != torch.float32 and getattr(args, "mis_loss_scoring", None) != "fused"


def run(host: Host, args: argparse.Namespace, item: Item, *, is_direct: bool = False) -> tuple[Tensor, Tensor, Any]:
    """Loss, gradient of the logits, and the framework's log."""
    batch = {name: value for name, value in item.items() if name != "logits"}
    logits = item["logits"]
    given = logits.float() if needs_float32(host, args, logits.dtype) else logits
    with in_process_of(host):
        loss, log = (mis_ext.policy_loss if is_direct else host.loss)(args, batch, given)
        (gradient,) = torch.autograd.grad(loss, logits)
    return loss.detach(), gradient.detach(), log


def among(options: Any, world: World) -> str:
    """The suffix of a problem's name with several ranks."""
    sizes = {"tp": options.tp, "cp": options.cp} | ({"dp": world.dp_size} if world.dp_size > 1 else {})
    return "".join(f":{name}{size}" for name, size in sizes.items()) if world.size > 1 else ""


def measured(host: Host, problem: Problem, batches: Batches, world: World, options: Any) -> Iterator[Row]:
    """Every contender on one problem: first all are compared, then all are timed."""
    every = contenders(host, metrics=options.metrics)
    arguments = {way.name: host_args(way.keys) for way in every}
    ways = [way for way in every if not options.losses or any(word in way.name for word in options.losses)]
    if not ways:
        raise SystemExit(f"--losses {' '.join(options.losses)}: there are {'; '.join(way.name for way in every)}")
    ranks = f"tensor {options.tp}, context {options.cp}" + (f", data {world.dp_size}" if world.dp_size > 1 else "")
    names = {
        "problem": f"{problem}{among(options, world)}",
        "ranks": ranks,
        "host": host.name,
        "shape": str(problem.shape),
        "vocabulary": problem.vocabulary,
    }
    names |= {"dtype": str(problem.dtype).removeprefix("torch."), "logits_bytes": batches.logits.buffer.nbytes}
    differences = {way.name: guarded(partial(_differences, host, way, arguments, batches)) for way in ways}
    for way in ways:
        before = ", logits made float32" if needs_float32(host, arguments[way.name], problem.dtype) else ""
        row: Row = names | {"contender": way.name + before}
        found = differences[way.name]
        is_wrong = _is_wrong(found, problem.dtype)
        if is_wrong:
            say(f"WRONG: {host.name}, {problem}, {way.name}: {found}")
            if not options.keep_going:
                raise SystemExit(f"not timed: {host.name}, {problem}, {way.name} differs: {found}")
        row |= found | {"is_wrong": is_wrong}
        if "missing" not in found:
            say(host.name, problem, way.name)
            call = partial(_timed, host, arguments[way.name], way.is_direct)
            next_item = batches.refilled if way.is_inplace else batches.new
            row |= guarded(partial(cost, call, next_item, world=world, repeats=options.repeats, budget=options.budget))
        if way.is_inplace:
            batches.logits.fill()
        yield row


def _timed(host: Host, args: argparse.Namespace, is_direct: bool, item: Item) -> None:
    run(host, args, item, is_direct=is_direct)


def _differences(host: Host, way: Contender, arguments: dict[str, argparse.Namespace], batches: Batches) -> Row:
    """The differences of loss, metrics and gradient from the framework's own, as shares of their largest entry."""
    item = batches.new()
    if way.same_as is None:
        run(host, arguments[way.name], item, is_direct=way.is_direct)
        if way.is_inplace:
            batches.logits.fill()
        return {}
    # A rounding to bfloat16 makes much of two slopes that differ by a bit.
    with without_rounding_to_bfloat16() if host.name == "miles" else nullcontext():
        loss, gradient, log = run(host, arguments[way.same_as], item)
        mine, my_gradient, my_log = run(host, arguments[way.name], item)
    scale = largest(gradient)
    found: Row = {"gradient_differs": largest_difference(my_gradient, gradient) / scale}
    if way.is_inplace and my_gradient.data_ptr() != item["logits"].data_ptr():
        raise AssertionError("the gradient is not where the logits were")
    del gradient, my_gradient
    if way.is_inplace:
        batches.logits.fill()
    own, theirs = (dict(zip(each["keys"], each["values"].tolist()[1:], strict=True)) for each in (my_log, log))
    # The loss is a difference of terms: it is judged by the largest of them.
    terms = [own[name] for name in ("pg_loss", "entropy_loss", "kl_loss") if name in own]
    factor = abs(float(loss)) / max(abs(theirs["loss"]), 1e-30)
    found["loss_differs"] = abs(float(mine - loss)) / max(max(map(abs, terms)) * factor, abs(float(loss)), 1e-30)
    of_host = [name for name in theirs if name in own and not name.startswith(OF_HOOK)]
    of_hook = [name for name in theirs if name in own and name.startswith(OF_HOOK)]
    found["metrics_differ"] = _largest_relative(own, theirs, of_host, floor=max(map(abs, terms)))
    found["metrics_of_hook_differ"] = _largest_relative(own, theirs, of_hook, floor=1.0)
    found["names_missing"] = sorted(theirs.keys() - own.keys())
    return found


def _largest_relative(a: dict[str, float], b: dict[str, float], names: list[str], *, floor: float) -> float:
    return max((abs(a[name] - b[name]) / max(abs(b[name]), floor) for name in names), default=0.0)


def _is_wrong(found: Row, dtype: torch.dtype) -> bool:
    if "gradient_differs" not in found:
        return False
    within = (
        found["loss_differs"] <= TOLERANCE[torch.float32]
        and found["metrics_differ"] <= TOLERANCE[torch.float32]
        and found["metrics_of_hook_differ"] <= HOOK_TOLERANCE
        and found["gradient_differs"] <= TOLERANCE[dtype]
    )
    # A difference that is NaN is none that is small.
    return not within


def line(row: Row) -> list[str]:
    """One line of the table."""
    names = [row["host"], row["ranks"], row["shape"]]
    names += [f"{row['vocabulary']:,}", f"{row['logits_bytes'] / GIB:.2f} GiB {row['dtype']}"]
    keys = ("loss_differs", "metrics_differ", "gradient_differs")
    return [*names, row["contender"], *cells(row), *(f"{row[key]:.1e}" if key in row else "-" for key in keys)]


def markdown(rows: list[Row]) -> str:
    """The table."""
    return table([*NAMES, *COLUMNS, *DIFFERENCES], [line(row) for row in rows])


def part(hosts: dict[str, Host], world: World, options: Any) -> Iterator[Row]:
    """All problems, each with one buffer of logits for all frameworks."""
    for text in options.problems:
        problem = Problem.parse(text)
        batches = Batches(
            problem.shape,
            problem.vocabulary,
            dtype=problem.dtype,
            world=world,
            seed=options.seed,
            part=scoring_hosts.vocabulary_part(),
        )
        for host in hosts.values():
            yield from measured(host, problem, batches, world, options)
        del batches
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
