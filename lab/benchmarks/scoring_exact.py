# SPDX-License-Identifier: Apache-2.0
"""Parts C and D: errors against float64, and one function's log-probs beside another's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from scoring_hosts import Host
from scoring_measure import Row, guarded, say, table
from scoring_work import Logits
from torch import Tensor
from workload import World

from mis_ext.correction.triton import VARIABLE
from mis_ext.scoring import score_tokens

ROWS = 64
VOCABULARY = 4096
COMPARED_ROWS = 4096
TINY_CLIP, USUAL_CLIP = 1e-4, 0.2

Scored = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]
"""``(logits [T, V], token_T, with_entropy)`` to log-prob and entropy, as a host calls it."""


class Case(NamedTuple):
    """Logits, tokens, and what the logits are divided by."""

    logits: Tensor
    token_T: Tensor
    temperature: float = 1.0


def cases(vocabulary: int, device: torch.device, seed: int) -> dict[str, Case]:
    """Ordinary and extreme rows."""
    generator = torch.Generator().manual_seed(seed)

    def normal(columns: int = VOCABULARY) -> Tensor:
        return torch.randn(ROWS, columns, generator=generator)

    token_T = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    last_T = torch.full((ROWS,), VOCABULARY - 1)
    one_huge = normal()
    one_huge[torch.arange(ROWS), torch.arange(ROWS) * 7] = 1e4
    missing = normal().masked_fill(torch.rand(ROWS, VOCABULARY, generator=generator) < 0.5, -torch.inf)
    missing[torch.arange(ROWS), token_T] = 1.0
    drawn = {
        "normal, 4 wide": Case(4.0 * normal(), token_T),
        f"normal, vocabulary {vocabulary:,}": Case(2.0 * normal(vocabulary), token_T % vocabulary),
        "normal, 10,000 wide": Case(1e4 * normal(), token_T),
        "all equal": Case(torch.full((ROWS, VOCABULARY), 3.0), token_T),
        "one of 10,000": Case(one_huge, token_T),
        "half of -inf": Case(missing, token_T),
        "token in the last column": Case(4.0 * normal(), last_T),
        "temperature 0.7": Case(4.0 * normal(), token_T, 0.7),
        "temperature 1.3": Case(4.0 * normal(), token_T, 1.3),
    }
    return {name: Case(case[0].to(device), case[1].to(device), case[2]) for name, case in drawn.items()}


@contextmanager
def backend(name: str) -> Iterator[None]:
    """``MIS_EXT_BACKEND`` for a while."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        os.environ.pop(VARIABLE)
        if before is not None:
            os.environ[VARIABLE] = before


def _ours(which: str, logits: Tensor, token_T: Tensor, with_entropy: bool, temperature: float = 1.0) -> Any:
    entropy: Any = "gradient" if with_entropy else "none"
    return score_tokens(logits, token_T, temperature=temperature, entropy=entropy)


def _host(host: Host, logits: Tensor, token_T: Tensor, with_entropy: bool, temperature: float = 1.0) -> Any:
    # As the hosts do it, before their function.
    return host.scores(logits if temperature == 1.0 else logits.div(temperature), token_T, with_entropy)


def part(hosts: dict[str, Host], world: World, options: Any) -> Iterator[Row]:
    """Part C."""
    vocabulary = int(options.alone.split(":")[1])
    who: dict[str, Any] = {f"{host.name}'s function": partial(_host, host) for host in hosts.values()}
    who |= {f"mis_ext, {name}": partial(_ours, name) for name in ("eager", "triton")}
    for name, case in cases(vocabulary, world.device, options.seed).items():
        say(name)
        slopes = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(options.seed)).to(world.device)
        exact = _exact(case, *slopes.double())
        for title, scores in who.items():
            row: Row = {"case": name, "contender": title}
            chosen = title.removeprefix("mis_ext, ") if title.startswith("mis_ext") else None
            yield row | guarded(partial(_errors, case, scores, slopes, exact, chosen))


def _errors(case: Case, scores: Any, slopes: Tensor, exact: tuple[Tensor, ...], chosen: str | None) -> Row:
    logits = case.logits.clone().requires_grad_()
    with backend(chosen or os.environ.get(VARIABLE, "eager")):
        outputs = scores(logits, case.token_T, True, case.temperature)
        (gradient,) = torch.autograd.grad([*outputs], logits, [*slopes])
    row: Row = {}
    scale = float(exact[2].abs().max())
    for name, found, wanted, by in zip(
        ("log_prob", "entropy", "gradient"), (*outputs, gradient), exact, (1.0, 1.0, scale), strict=True
    ):
        error = (found.double() - wanted).abs()
        is_finite = found.isfinite() | ~wanted.isfinite()
        row[f"{name}_error"] = _max(error[found.isfinite() & wanted.isfinite()]) / by
        row[f"{name}_not_finite"] = int((~is_finite).sum())
    return row


def _max(x: Tensor) -> float:
    return float(x.max()) if x.numel() > 0 else 0.0


def _exact(case: Case, slope_T: Tensor, of_entropy_T: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-prob, entropy, gradient in float64."""
    x = case.logits.double() / case.temperature
    log_p = x - x.logsumexp(-1, keepdim=True)
    p = log_p.exp()
    # 0 log 0 is 0.
    log_p = torch.where(p > 0.0, log_p, 0.0)
    log_prob_T = (x - x.logsumexp(-1, keepdim=True)).gather(-1, case.token_T[:, None])[:, 0]
    entropy_T = -(p * log_p).sum(-1)
    is_token = torch.zeros_like(p).scatter_(-1, case.token_T[:, None], 1.0)
    of_log_prob = slope_T[:, None] * (is_token - p)
    of_entropy = -of_entropy_T[:, None] * p * (log_p + entropy_T[:, None])
    return log_prob_T, entropy_T, (of_log_prob + of_entropy) / case.temperature


def markdown(rows: list[Row]) -> str:
    """The table of part C."""

    def cell(row: Row, name: str) -> str:
        if "missing" in row:
            return "-"
        bad = row[f"{name}_not_finite"]
        return f"{row[f'{name}_error']:.1e}" + (f", {bad:,} not finite" if bad else "")

    names = ["logits", "who", "log-prob, nats", "entropy, nats", "gradient / largest"]
    return table(
        names,
        [
            [row["case"], row["contender"], *(cell(row, each) for each in ("log_prob", "entropy", "gradient"))]
            for row in rows
        ],
    )


def agreement(hosts: dict[str, Host], world: World, options: Any) -> Iterator[Row]:
    """Part D: old log-probs of a scoring pass, current ones of the loss, from the same logits."""
    columns = int(options.alone.split(":")[1])
    rows = COMPARED_ROWS if world.device.type == "cuda" else 256
    for dtype in (torch.float32, torch.bfloat16):
        logits = Logits(rows, columns, dtype=dtype, device=world.device, seed=options.seed)
        token_T = logits.tokens(rows, torch.Generator().manual_seed(options.seed))
        for old, current in _pairs(hosts):
            row: Row = {"logits": str(dtype).removeprefix("torch."), "old": old[0], "current": current[0]}
            yield row | guarded(partial(_compared, logits.first(rows)[0], token_T, old[1], current[1]))


def _pairs(hosts: dict[str, Host]) -> Iterator[tuple[tuple[str, Any], tuple[str, Any]]]:
    ours = ("mis_ext", partial(_ours, ""))
    yield ours, ours
    for host in hosts.values():
        theirs = (f"{host.name}'s function", partial(_host, host))
        yield theirs, theirs
        yield theirs, ours
        yield ours, theirs


def _compared(logits: Tensor, token_T: Tensor, old: Any, current: Any) -> Row:
    with torch.no_grad():
        # The hosts' forward-only pass asks for no entropy.
        old_T, _ = old(logits, token_T, False)
    current_T, _ = current(logits, token_T, True)
    old_T, current_T = old_T.detach().float(), current_T.detach().float()
    ulps = (_ordered(current_T) - _ordered(old_T)).abs()
    difference = current_T.double() - old_T.double()
    ratio = (current_T - old_T).exp()
    return {
        "rows": len(token_T),
        "equal_share": float((ulps == 0).double().mean()),
        "largest_ulps": int(ulps.max()),
        "mean_ulps": float(ulps.double().mean()),
        "largest_nats": float(difference.abs().max()),
        "mean_nats": float(difference.mean()),
        "k3": float((difference.expm1() - difference).mean()),
        "clipped": float(((ratio - 1.0).abs() > USUAL_CLIP).double().mean()),
        "clipped_tiny": float(((ratio - 1.0).abs() > TINY_CLIP).double().mean()),
    }


def _ordered(x: Tensor) -> Tensor:
    """float32 as integers in which neighbours differ by one."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def agreement_markdown(rows: list[Row]) -> str:
    """The table of part D."""
    names = ["logits", "old, from", "current, from", "equal", "largest ULPs", "mean", "largest nats", "mean"]
    names += ["k3", f"clipped at {USUAL_CLIP}", f"at {TINY_CLIP:g}"]
    lines = []
    for row in rows:
        said = [row["logits"], row["old"], row["current"]]
        if "missing" in row:
            lines.append([*said, f"missing: {row['missing']}", *["-"] * (len(names) - 4)])
            continue
        numbers = [f"{row['equal_share']:.1%}", f"{row['largest_ulps']:,}", f"{row['mean_ulps']:.2f}"]
        numbers += [f"{row[key]:.1e}" for key in ("largest_nats", "mean_nats", "k3")]
        lines.append([*said, *numbers, f"{row['clipped']:.1%}", f"{row['clipped_tiny']:.1%}"])
    return table(names, lines)
