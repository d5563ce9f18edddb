# SPDX-License-Identifier: Apache-2.0
"""Part B: only log-prob and entropy of tokens, forward and backward, compared with other projects."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import measuring
import torch
from scoring_hosts import Host
from scoring_measure import COLUMNS, GIB, Row, cells, cost, guarded, largest, largest_difference, say, table
from scoring_others import Absent, Way, ours, ways
from scoring_work import Logits
from torch import Tensor
from workload import World

from mis_ext.scoring import score_tokens

NAMES = ["logits", "who", "entropy", "tensor-parallel", "forward alone, ms"]
DIFFERENCES = ["log-prob differs, nats", "gradient"]
CHECKED_ROWS = 2048
HIDDEN = 2048
"""Width of the hidden states where the logits are never made."""


class Problem:
    """Rows that are all scored, and slopes of log-prob and entropy."""

    def __init__(self, rows: int, columns: int, *, dtype: torch.dtype, device: torch.device, seed: int) -> None:
        self.logits = Logits(rows, columns, dtype=dtype, device=device, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        self.token_T = self.logits.tokens(rows, generator)
        self.slope_T, self.of_entropy_T = (torch.randn(rows, generator=generator).to(device) for _ in range(2))
        self.rows = rows

    def leaf(self, rows: int) -> Tensor:
        """``[rows, V]``; no view for autograd, which would lose it where somebody writes over it in the forward."""
        return self.logits.buffer[:rows].detach().requires_grad_()

    def scored(self, way: Way, rows: int, *, with_entropy: bool) -> tuple[Tensor, Tensor | None, Tensor]:
        """Log-probs, entropy and the gradient of the logits."""
        logits = self.leaf(rows)
        log_prob_T, entropy_T = way.scores(logits, self.token_T[:rows])
        if with_entropy:
            outputs, slopes = [log_prob_T, entropy_T], [self.slope_T[:rows], self.of_entropy_T[:rows]]
        else:
            outputs, slopes = [log_prob_T], [self.slope_T[:rows].to(log_prob_T.dtype)]
        (gradient,) = torch.autograd.grad(outputs, logits, slopes)
        return log_prob_T.detach(), None if entropy_T is None else entropy_T.detach(), gradient.detach()


def part(hosts: dict[str, Host], world: World, options: Any) -> Iterator[Row]:
    """float32, then bfloat16; then the kernels that make no logits."""
    rows, columns = (int(each) for each in options.alone.split(":"))
    for dtype in (torch.float32, torch.bfloat16):
        problem = Problem(rows, columns, dtype=dtype, device=world.device, seed=options.seed)
        size = {"logits": f"{rows:,} x {columns:,} {str(dtype).removeprefix('torch.')}"}
        size["logits_bytes"] = problem.logits.buffer.nbytes
        for way in ways(hosts, options):
            if isinstance(way, Absent):
                yield size | {"contender": way.name, "missing": way.reason}
                continue
            say(size["logits"], way.name)
            known = {"contender": way.name, "entropy": way.with_entropy, "is_parallel": way.is_parallel}
            yield size | known | guarded(partial(_measured, problem, way, world, options))
        del problem
    yield from _without_logits(rows, columns, world, options)


def _measured(problem: Problem, way: Way, world: World, options: Any) -> Row:
    found = _differences(problem, way)

    def next_item() -> Any:
        if way.writes_over:
            problem.logits.fill()
        return {}

    def forward(_item: Any) -> None:
        with torch.no_grad():
            way.scores(problem.logits.buffer, problem.token_T)

    def both(_item: Any) -> None:
        problem.scored(way, problem.rows, with_entropy=way.with_entropy)

    limits = {"world": world, "repeats": options.repeats, "budget": options.budget}
    for _ in range(measuring.WARM_UP_CALLS):
        forward(next_item())
    found["forward_s"] = measuring.time_calls(forward, next_item, **limits).median
    found |= cost(both, next_item, **limits)
    next_item()
    return found


def _differences(problem: Problem, way: Way) -> Row:
    """From ``mis_ext`` on the first rows."""
    rows = min(problem.rows, CHECKED_ROWS)
    own = Way("mis_ext", ours("gradient" if way.with_entropy else "none"), way.with_entropy, True)
    log_prob_T, entropy_T, gradient = problem.scored(own, rows, with_entropy=way.with_entropy)
    theirs = problem.scored(way, rows, with_entropy=way.with_entropy)
    found: Row = {
        "log_prob_differs": float((theirs[0].float() - log_prob_T).abs().max()),
        "gradient_differs": largest_difference(theirs[2], gradient) / largest(gradient),
    }
    if entropy_T is not None and theirs[1] is not None:
        found["entropy_differs"] = float((theirs[1] - entropy_T).abs().max())
    if way.writes_over:
        problem.logits.fill()
    return found


def _without_logits(rows: int, columns: int, world: World, options: Any) -> Iterator[Row]:
    """Cut Cross-Entropy works from hidden states, so ours includes the matmuls before and after."""
    title = {"logits": f"{rows:,} x {columns:,} bfloat16, from hidden states of {HIDDEN:,}"}
    names = ("Cut Cross-Entropy, from hidden states", "products, mis_ext in place", "products, mis_ext with entropy")
    generator = torch.Generator(world.device).manual_seed(options.seed)

    def normal(*size: int, scale: float) -> Tensor:
        drawn = torch.randn(*size, generator=generator, device=world.device, dtype=torch.bfloat16)
        return (drawn * scale).requires_grad_()

    width = HIDDEN if world.device.type == "cuda" else 16
    hidden, weight = normal(rows, width, scale=1.0), normal(columns, width, scale=2.0 / math.sqrt(width))
    token_T = torch.randint(columns, (rows,), generator=generator, device=world.device)
    slope_T = torch.randn(rows, generator=generator, device=world.device)

    def cut(_item: Any) -> None:
        loss = importlib.import_module("cut_cross_entropy").linear_cross_entropy(
            hidden, weight, token_T, reduction="none"
        )
        torch.autograd.grad(-loss, [hidden, weight], slope_T.to(loss.dtype))

    def around(entropy: Any, _item: Any) -> None:
        scores = score_tokens(hidden @ weight.T, token_T, entropy=entropy, inplace=True)
        outputs = [each for each in scores if each is not None]
        torch.autograd.grad(outputs, [hidden, weight], [slope_T] * len(outputs))

    for name, call in zip(names, (cut, partial(around, "none"), partial(around, "gradient")), strict=True):
        say(name)
        known = {"contender": name, "entropy": name == names[2], "is_parallel": name != names[0], "logits_bytes": 0}
        if call is cut and world.device.type != "cuda":
            yield title | known | {"missing": "its kernels need a GPU"}
            continue
        limits = {"world": world, "repeats": options.repeats, "budget": options.budget}
        yield title | known | guarded(partial(cost, call, dict, **limits))


def line(row: Row) -> list[str]:
    """One line of the table."""
    yes = {True: "yes", False: "no", None: "-"}
    forward = f"{row['forward_s'] * 1e3:,.2f}" if "forward_s" in row else "-"
    names = [row["logits"], row["contender"], yes[row.get("entropy")], yes[row.get("is_parallel")], forward]
    keys = ("log_prob_differs", "gradient_differs")
    return [*names, *cells(row), *(f"{row[key]:.1e}" if key in row else "-" for key in keys)]


def markdown(rows: list[Row]) -> str:
    """The table."""
    sizes = {row["logits"]: row.get("logits_bytes", 0) / GIB for row in rows}
    said = "; ".join(f"{name}: {size:.2f} GiB" for name, size in sizes.items() if size)
    return f"Logits: {said}.\n\n" + table([*NAMES, *COLUMNS, *DIFFERENCES], [line(row) for row in rows])
