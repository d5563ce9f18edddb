# SPDX-License-Identifier: Apache-2.0
"""The tables of the study, from the scores and results that its runs left."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from te_rollout import Rollout
from torch import Tensor

REFERENCES = ("the engine's samples", "transformers, float32", "local")


def print_tables(folder: Path, results: list[dict[str, Any]]) -> None:
    """Markdown on standard output; the newest result of a run counts."""
    newest = {(row["kind"], row["name"]): row for row in results}
    rollout = Rollout(**torch.load(folder / "rollout.pt"))
    scores = {
        path.stem.removeprefix("scores "): torch.cat(torch.load(path)).double() for path in folder.glob("scores *.pt")
    }
    print(f"\n{len(rollout.tokens)} samples, {sum(rollout.response_lengths)} response tokens, model {folder.name}")
    for reference in REFERENCES:
        against = torch.cat(rollout.behavior).double() if reference == REFERENCES[0] else scores.get(reference)
        if against is not None:
            print(f"\n| against {reference} | k3 | mean difference | largest | ratio beyond 2 | equal bits |")
            print("|---|---|---|---|---|---|")
            for name in sorted(scores):
                if name != reference:
                    print(f"| {name} | {_mismatch(scores[name] - against)} |")
    _print_steps([row for (kind, _), row in newest.items() if kind == "step" and "error" not in row])
    for kind in ("alone", "refuse"):
        for row in newest.values():
            if row["kind"] == kind and "error" not in row:
                shown = {key: value for key, value in row.items() if key not in ("kind", "name", "seconds")}
                print(f"\n{kind}: {row['name']}: {shown}")
    for row in newest.values():
        if "error" in row:
            print(f"\nfailed: {row['kind']} {row['name']}: {row['error']}")


def _mismatch(difference: Tensor) -> str:
    k3 = (difference.exp() - 1.0 - difference).mean()
    beyond = (difference.abs() > 0.6931472).double().mean()
    equal = (difference == 0).double().mean()
    return f"{k3:.2e} | {difference.abs().mean():.2e} | {difference.abs().max():.2e} | {beyond:.1e} | {equal:.4f}"


def _print_steps(rows: list[dict[str, Any]]) -> None:
    """The gradients of a row are relative to those of the hook's first run in the same row."""
    if not rows:
        return
    names = ("step", "correction", "loss: hook, whole loss", "gradient norm: hook, whole loss")
    names += ("gradients: hook again, whole loss", "largest difference of metrics")
    print(f"\n| {' | '.join(names)} |")
    print("|---|---|---|---|---|---|")
    for row in rows:
        for correction, found in row["steps"].items():
            print(
                f"| {row['name']} | {correction} | {found['hook']['loss']:.9g}, {found['whole loss']['loss']:.9g} | "
                f"{found['gradient norm']:.7g}, {found['gradient norm, whole loss']:.7g} | "
                f"{found['gradients, hook again']:.1e}, {found['gradients, whole loss']:.1e} | "
                f"{found['metrics']:.1e} of {found['num_metrics']} |"
            )
    print("\n| step | against | correction | loss, absolute | gradient norm | norms of the parameters |")
    print("|---|---|---|---|---|---|")
    by_name = {row["name"]: row["steps"] for row in rows}
    for name, steps in by_name.items():
        plain = re.split(", [CTD]P ", name)[0]
        for other in dict.fromkeys((plain, "local")):
            if other == name or other not in by_name:
                continue
            for correction, found in steps.items():
                reference = by_name[other][correction]
                comparison = f"{abs(found['hook']['loss'] - reference['hook']['loss']):.1e} | "
                comparison += f"{_relative(found['gradient norm'], reference['gradient norm']):.1e} | "
                comparison += _norms(found["parameter norms"], reference["parameter norms"])
                print(f"| {name} | {other} | {correction} | {comparison} |")


def _relative(value: float, reference: float) -> float:
    return abs(value - reference) / abs(reference)


def _norms(values: list[float], reference: list[float]) -> str:
    # Transformer Engine and the local layers name and order their parameters in different ways.
    a, b = (torch.tensor(sorted(norms), dtype=torch.float64) for norms in (values, reference))
    return f"{(a - b).norm() / b.norm():.1e}"
