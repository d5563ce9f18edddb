# SPDX-License-Identifier: Apache-2.0
"""The runs as a table, and as a record."""

import json
import math
import os
import platform
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from .cases import CHECK, CLOSE_IN_BFLOAT16, SAME, Host
from .comparison import GRAD_NORM, Result, off, partners

ERROR_LENGTH = 120
COLUMNS = (
    "run",
    "gradient norm, step 1",
    "step 2",
    "loss, step 1",
    "`train/mis_*`",
    "scoring pass",
    "s a step",
    "s in all",
)
OF_LAYOUTS = (
    "layout",
    "run",
    "gradient norm, step 1",
    "off",
    "step 2",
    "loss, step 1",
    "`train/mis_*`",
    "at most off",
    "s in all",
)


BY_HAND = ("layout", "run", "gradient norm, step 1", "by hand, float64", "off")


def table(results: Iterable[Result]) -> str:
    """Markdown: one row per run that trained, then one per run on two ranks, then one per run that was refused."""
    results = list(results)
    trained = [result for result in results if result.case.refusal is None and not result.case.layout]
    lines = [_row(COLUMNS), _row(["---"] * len(COLUMNS)), *(_row(_trained(result)) for result in trained)]
    lines *= bool(trained)
    parallel = [result for result in results if result.case.layout]
    if parallel:
        of_one_rank = {result.case.name: partner for result, partner in partners(results)}
        lines += ["", _row(OF_LAYOUTS), _row(["---"] * len(OF_LAYOUTS))]
        lines += [_row(_in_layout(result, of_one_rank.get(result.case.name))) for result in parallel]
    by_hand = [result for result in results if result.by_hand is not None]
    if by_hand:
        lines += ["", _row(BY_HAND), _row(["---"] * len(BY_HAND))]
        lines += [_row(_by_hand(result)) for result in by_hand]
    refused = [result for result in results if result.case.refusal is not None]
    if refused:
        lines += ["", _row(("refused", "before the model is built", "s", "the error")), _row(["---"] * 4)]
        lines += [_row(_refused(result)) for result in refused]
    return "\n".join(lines) + "\n"


def _trained(result: Result) -> Sequence[str]:
    perf = result.logged.perf
    # The first rollout has what happens once.
    step_time = f"{perf[-1]['perf/train_time'] / result.case.steps_per_rollout:.2f}" if perf else "none"
    return (
        result.case.title,
        *_norms(result),
        _loss(result),
        str(result.num_own_metrics),
        "yes" if any("perf/log_probs_time" in rollout for rollout in perf) else "no",
        step_time,
        f"{result.seconds:.0f}",
    )


def _in_layout(result: Result, one_rank: Result | None) -> Sequence[str]:
    norm, second = _norms(result)
    difference = {} if one_rank is None else off(result, one_rank)
    of_metrics = [value for name, value in difference.items() if name != GRAD_NORM]
    return (
        result.case.layout,
        result.case.title,
        norm,
        f"{difference[GRAD_NORM]:.1e}" if difference else "not compared",
        second,
        _loss(result),
        str(result.num_own_metrics),
        f"{max(of_metrics):.1e}" if of_metrics else "none",
        f"{result.seconds:.0f}",
    )


def _by_hand(result: Result) -> Sequence[str]:
    expected = result.by_hand or math.nan
    norm, off_by = result.first_grad_norm, abs(result.first_grad_norm - expected) / expected
    return result.case.layout, result.case.title, f"{norm:.15g}", f"{expected:.15g}", f"{off_by:.1e}"


def _norms(result: Result) -> Sequence[str]:
    """Values of two steps."""
    norms = [f"{step.get(GRAD_NORM, math.nan):.15g}" for step in result.logged.steps[:2]]
    return norms + ["none"] * (2 - len(norms))


def _loss(result: Result) -> str:
    steps = result.logged.steps
    return f"{steps[0]['train/loss']:.9g}" if steps else "none"


def _refused(result: Result) -> Sequence[str]:
    before = "no" if result.logged.built_the_model or CHECK[0] not in result.case.flags else "yes"
    return result.case.title, before, f"{result.seconds:.0f}", f"`{_error(result)}`"


def _error(result: Result) -> str:
    """The line of the log that has the refusal."""
    lines = [line for line in result.logged.text.splitlines() if str(result.case.refusal) in line]
    # Ray puts the worker in front, and shows the error several times.
    found = next((line for line in reversed(lines) if "rror: " in line), "none")
    error = found.split(") ", 1)[-1] if found.startswith("(") else found
    return error if len(error) <= ERROR_LENGTH else error[: ERROR_LENGTH - 4] + " ..."


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def machine(packages: Iterable[str]) -> dict[str, Any]:
    """Hardware and versions."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].split(":", 1)[1].strip() if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "versions": {"python": platform.python_version()} | {name: metadata.version(name) for name in packages},
    }


def record(results: Sequence[Result], *, about: dict[str, Any]) -> dict[str, Any]:
    """All values that the framework logged, of each run, with commits, command, date, hardware and versions."""
    runs = {
        result.case.name: {
            "title": result.case.title,
            "flags": " ".join(result.case.flags),
            "config": result.case.config,
            "return_code": result.return_code,
            "seconds": round(result.seconds, 1),
            "steps": result.logged.steps,
            "perf": result.logged.perf,
        }
        | ({} if result.case.refusal is None else {"error": _error(result)})
        | ({} if not result.case.layout else _layout(result))
        | ({} if result.by_hand is None else {"by_hand": result.by_hand})
        for result in results
    }
    return about | {"runs": runs}


def _layout(result: Result) -> dict[str, Any]:
    case = result.case
    dtype = "float32" if case.is_float32 else "bfloat16"
    return {"layout": case.layout, "dtype": dtype, "compared_with": case.partner or None}


def page(results: Sequence[Result], *, host: Host, about: dict[str, Any], verdict: str, part: str = "") -> str:
    """The record for people."""
    commits = "\n".join(f"| {name} | `{commit}` |" for name, commit in about["commits"].items())
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    stand_ins = "\n".join(f"| {name} | {what} |" for name, what in host.stand_ins.items())
    return f"""# {host.title} on a CPU{": " * bool(part)}{part}

Written by `{about["command"]}` on {about["date"]}. All values that {host.title} logged are in
the `.json` of the same name.

{verdict}

{table(results)}
*Scoring pass* is the framework's separate forward pass over the rollout. *s a step* is the time of a step of the last
rollout, with that pass.
{_explained(results)}
| checkout | commit |
|---|---|
{commits}

{versions}. {about["cpu"]}, {about["cores"]} cores, {about["memory_gib"]} GiB.

| not as on a GPU | instead |
|---|---|
{stand_ins}
"""


def _explained(results: Sequence[Result]) -> str:
    """The meaning of the columns for the runs in a layout."""
    if not any(result.case.layout for result in results):
        return ""
    return f"""
The runs in a layout are in float32 unless their title has bfloat16. *Off* is the relative difference from the same run
on one rank in the first step: of the gradient norm, and of the metric `train/mis_*` that differs most. The limit is
{SAME:g} in float32 and {CLOSE_IN_BFLOAT16:g} in bfloat16. DP 2 is compared with micro-batches of twice the
tokens, because our metrics are those of a call on all ranks, and the framework averages over calls.
*By hand* is the first gradient that a run should have, computed from definitions, one sample after the other
(by_hand.py).
"""


def write(
    folder: Path, results: Sequence[Result], *, host: Host, about: dict[str, Any], verdict: str, part: str = ""
) -> None:
    """Write ``HOST_cpu.md`` and ``HOST_cpu.json``, or those of a part."""
    name = f"{host.name}_cpu{'_' * bool(part)}{part}"
    folder.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps(record(results, about=about), indent=1) + "\n"
    (folder / f"{name}.json").write_text(numbers, encoding="utf-8")
    text = page(results, host=host, about=about, verdict=verdict, part=part)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
