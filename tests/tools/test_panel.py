# SPDX-License-Identifier: Apache-2.0
"""`mis-ext panel`: dashboards of metrics that there are, with the alert lines of the page on watching a run."""

import ast
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from commands import json_of

import mis_ext

WATCH = Path(__file__).parents[2] / "docs" / "guide" / "watch.md"


class Line(NamedTuple):
    """Of a chart: where an alert begins, and what is shown beside the metric."""

    limit: float | None
    beside: str


def grafana(*arguments: str) -> dict[str, Line]:
    """By the metric that a chart shows."""
    code, dashboard = json_of("panel", "grafana", *arguments)
    assert code == 0
    found = {}
    for panel in dashboard["panels"]:
        shown, *beside = (target["expr"] for target in panel["targets"])
        name = re.fullmatch(r'(\$\{prefix\}\w+)\{run_name=~"\$run"\}', shown)[1]
        assert all(shown in each for each in beside)
        first, *rest = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert first["value"] is None
        found[name] = Line(*([each["value"] for each in rest] or [None]), "".join(beside).replace(shown, "METRIC"))
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    assert {*re.findall(r"\$\{?([a-z]+)", str(dashboard))} == {*variables}
    assert next(iter(found)) in variables["run"]["query"]
    return found


def wandb(*arguments: str) -> dict[str, tuple[str, float | None]]:
    """What the script is given: by the name of a metric its title and limit."""
    code, found = json_of("panel", "wandb", *arguments)
    assert code == 0
    (charts,) = (
        node.value
        for node in ast.parse(found["script"]).body
        if isinstance(node, ast.Assign) and node.targets[0].id == "CHARTS"
    )
    return ast.literal_eval(charts)


def test_both_show_the_three_numbers_of_the_page_as_slime_and_miles_log_them() -> None:
    table = WATCH.read_text(encoding="utf-8").split("\n\n")[2]
    of_ours = [f"train/{name}" for name in re.findall(r"^\| `(mis_\w+)` \|", table, re.MULTILINE)]
    assert len(of_ours) == 2
    names = [*of_ours, "train/grad_norm"]
    assert [*wandb()] == names
    assert [*grafana()] == [f"${{prefix}}{name.replace('/', '_')}" for name in names]


def test_every_metric_of_ours_is_one_that_the_hook_logs() -> None:
    known = {*mis_ext.preset("mis").metric_names}
    shown = re.findall(r"mis_\w+", " ".join((*wandb(), *grafana())))
    assert len(shown) == 4
    assert [name for name in shown if name not in known] == []


def test_the_lines_are_where_the_page_says() -> None:
    page = WATCH.read_text(encoding="utf-8")
    assert "| bf16 on both sides, SmolLM2-135M | 0.002 | 0.01 |" in page
    assert "passes five times that of the run's first ten" in page
    assert "it passes three times its usual value" in page
    k3, lost, norm = grafana().values()
    assert k3 == (0.01, "5 * avg_over_time(METRIC[1h] @ start() offset -1h)")
    assert lost == (0.0, "")
    assert norm == (None, "3 * quantile_over_time(0.5, METRIC[$__range])")
    assert [limit for _, limit in wandb().values()] == [0.01, 0.0, None]


def test_another_framework_and_another_model_have_their_own() -> None:
    arguments = ("--limit", "0.07", "--prefix", "rollout_corr/", "--gradient-norm", "actor/grad_norm")
    found = wandb(*arguments)
    assert [*found] == [
        "rollout_corr/mis_k3_kl",
        "rollout_corr/mis_nonfinite_token_fraction",
        "actor/grad_norm",
    ]
    assert found["rollout_corr/mis_k3_kl"] == ("k3: act above 0.07", 0.07)
    assert grafana(*arguments)["${prefix}rollout_corr_mis_k3_kl"].limit == 0.07


def test_the_script_draws_a_limit_as_a_line_of_its_own() -> None:
    pytest.importorskip("wandb_workspaces", reason="needs wandb-workspaces, which no other test does")
    script: dict[str, Any] = {"__name__": "panel"}
    exec(json_of("panel", "wandb")[1]["script"], script)
    workspace = script["workspace"]("me", "rl")
    assert (workspace.entity, workspace.project, workspace.name) == ("me", "rl", "mis_ext")
    (section,) = workspace.sections
    assert [(each.y, each.custom_expressions) for each in section.panels] == [
        (["train/mis_k3_kl"], ["0 * ${train/mis_k3_kl} + 0.01"]),
        (["train/mis_nonfinite_token_fraction"], ["0 * ${train/mis_nonfinite_token_fraction} + 0"]),
        (["train/grad_norm"], []),
    ]


def is_within(given: Any, read: Any) -> bool:
    """All that is given was read, whatever has a default beside it."""
    if isinstance(given, dict):
        return all(key in read and is_within(value, read[key]) for key, value in given.items())
    if isinstance(given, list):
        return len(given) == len(read) and all(map(is_within, given, read))
    return given == read


def test_grafana_reads_the_dashboard_whole() -> None:
    """By the models that are made of its schema."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="needs grafana-foundation-sdk")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder

    dashboard = json_of("panel", "grafana")[1]
    read = json.loads(JSONEncoder().encode(models.Dashboard.from_json(dashboard)))
    assert is_within(dashboard, read)
