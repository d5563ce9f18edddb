# SPDX-License-Identifier: Apache-2.0
"""``mis-ext panel``: the three numbers that are worth an alert, with its lines, for a dashboard to import."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from mis_ext.tools.cli.command import Result

RISE, USUAL = 5.0, 3.0
"""So many times its start is worth an alert of k3, and so many times its usual value one of the gradient norm."""


class Chart(NamedTuple):
    """A number of ``docs/guide/watch.md``, by the name under which the framework logs it.

    ``limit`` is where an alert begins; None where only the run itself can tell. So many ``times`` what is ``usual`` is
    one too: PromQL with ``METRIC`` in it, and how that is called.
    """

    name: str
    title: str
    text: str
    limit: float | None
    times: float = 0.0
    usual: tuple[str, str] | None = None


def charts(*, prefix: str, gradient_norm: str, limit: float) -> tuple[Chart, ...]:
    """The three, with what the rows of the metrics say of two of them."""
    from mis_ext.correction.config import CorrectionConfig

    rows = {row.name: row for row in CorrectionConfig().available_rows}
    k3, lost = rows["k3_kl"], rows["nonfinite_token_fraction"]
    first_hour = ("avg_over_time(METRIC[1h] @ start() offset -1h)", "its first hour here")
    median = ("quantile_over_time(0.5, METRIC[$__range])", "its median")
    usual = f"gradient norm: act above {USUAL:g} times its usual"
    return (
        Chart(f"{prefix}mis_{k3.name}", f"k3: act above {limit:g}", k3.text, limit, RISE, first_hour),
        Chart(f"{prefix}mis_{lost.name}", "tokens without a log-prob: act above 0", lost.text, 0.0),
        Chart(gradient_norm, usual, "while the reward still holds", None, USUAL, median),
    )


def grafana(found: Sequence[Chart]) -> dict[str, Any]:
    """A dashboard to import, for Prometheus, with the names and the label ``run_name`` that Miles gives it."""
    source = {"type": "prometheus", "uid": "${source}"}
    names = [f"${{prefix}}{each.name.replace('/', '_')}" for each in found]
    runs = {"type": "query", "datasource": source, "query": f"label_values({names[0]}, run_name)", "refresh": 2}
    runs |= {"includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}}
    panels = []
    for place, (each, name) in enumerate(zip(found, names, strict=True)):
        metric = f'{name}{{run_name=~"$run"}}'
        targets = [{"refId": "A", "expr": metric, "legendFormat": "{{run_name}}"}]
        if each.usual is not None:
            usual, called = each.usual
            expression = f"{each.times:g} * {usual.replace('METRIC', metric)}"
            targets.append({"refId": "B", "expr": expression, "legendFormat": f"{each.times:g} times {called}"})
        steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
        steps += [] if each.limit is None else [{"color": "red", "value": each.limit}]
        shown = {"thresholds": {"mode": "absolute", "steps": steps}, "custom": {"thresholdsStyle": {"mode": "line"}}}
        panels.append(
            {
                **{"id": place + 1, "type": "timeseries", "title": each.title, "description": each.text},
                **{"datasource": source, "gridPos": {"h": 9, "w": 8, "x": 8 * place, "y": 0}},
                **{"targets": targets, "fieldConfig": {"defaults": shown, "overrides": []}},
            }
        )
    variables = [
        {"name": "source", "type": "datasource", "query": "prometheus"},
        {"name": "prefix", "type": "textbox", "query": "miles_metric_"},
        {"name": "run", **runs},
    ]
    view = {"title": "mis_ext", "schemaVersion": 39, "time": {"from": "now-24h", "to": "now"}, "refresh": "1m"}
    return {**view, "annotations": {"list": []}, "templating": {"list": variables}, "panels": panels}


def wandb(found: Sequence[Chart]) -> str:
    """A script that saves a view in a project of Weights & Biases."""
    rows = "".join(f"    {each.name!r}: ({each.title!r}, {each.limit!r}),\n" for each in found)
    return files(__package__).joinpath("wandb_panel.py.in").read_text("utf-8").replace("@charts@", f"{{\n{rows}}}")


def add_command(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add ``mis-ext panel``."""
    parser = subparsers.add_parser(
        "panel",
        help="the three numbers to watch with their alert lines, for Grafana or Weights & Biases",
        description="Prints a dashboard with the numbers that are worth an alert: mis-ext panel grafana > panel.json "
        "to import, or mis-ext panel wandb > panel.py, a script that adds a view to a project.",
    )
    parser.add_argument("dashboard", choices=("grafana", "wandb"))
    parser.add_argument(
        "--limit", type=float, default=0.01, metavar="K3", help="the alert line of k3; default %(default)g, for bf16"
    )
    parser.add_argument("--prefix", default="train/", help="before mis_* in your log; default %(default)s")
    parser.add_argument(
        "--gradient-norm", default="train/grad_norm", metavar="NAME", help="as your log has it; default %(default)s"
    )
    parser.set_defaults(run=run, shown_with=())


def run(parsed: argparse.Namespace) -> Result:
    """The dashboard."""
    if not 0.0 < parsed.limit < float("inf"):
        raise ValueError(f"--limit must be in (0, inf), got {parsed.limit:g}")
    found = charts(prefix=parsed.prefix, gradient_norm=parsed.gradient_norm, limit=parsed.limit)
    if parsed.dashboard == "grafana":
        dashboard = grafana(found)
        return Result(dashboard, lambda: print(json.dumps(dashboard, indent=1)))
    script = wandb(found)
    return Result({"script": script}, lambda: print(script, end=""))
