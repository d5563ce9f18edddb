# SPDX-License-Identifier: Apache-2.0
"""The report: one page and plots per study, made of everything that has run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from . import mismatch
from .ensemble import Row
from .floor import Floor
from .group import Group
from .outcomes import Condition, Curve, holm, last_quarter
from .pictures import save
from .results import Results
from .studies import Study

SMOOTHED_STEPS = 15


def report(studies: Iterable[Study], results: Results, output: Path, floor: Floor) -> None:
    """Write ``STUDY.md`` and plots of each study that has a finished group; the others are listed as missing."""
    output.mkdir(parents=True, exist_ok=True)
    for study in studies:
        done = [group for group in study.groups if results.is_done(group)]
        if not done:
            print(f"{study.name}: nothing has run")
            continue
        page = output / f"{study.name}.md"
        page.write_text("\n".join(_page(study, done, results, output, floor)) + "\n", encoding="utf-8")
        print(page)


def _page(study: Study, done: list[Group], results: Results, output: Path, floor: Floor) -> list[str]:
    rows: dict[str, list[Row]] = {}
    for group in done:
        rows.setdefault(group.condition, []).extend(results.rows(group))
    conditions = [Condition.of_rows(name, of_condition) for name, of_condition in rows.items()]
    lines = [f"# {study.question}", "", *_header(study, done, results)]
    for condition in conditions:
        if len(condition.curves) > 1:
            lines += ["", f"## {condition.name}", "", *_table(condition, study.margin, floor)]
    if study.reference in rows:
        lines += ["", *_across(conditions, study, floor)]
    if any(len(condition.curves) > 1 for condition in conditions):
        lines += [*_seconds(done, results), "", f"![rewards]({study.name}.png)"]
        _plot_rewards(conditions, output / f"{study.name}.png")
        if len(conditions) > 2 and len(conditions[0].curves) > 1:
            lines += ["", f"![by condition]({study.name}_by_condition.png)"]
            _plot_by_condition(conditions, output / f"{study.name}_by_condition.png")
    lines += mismatch.section(study.name, mismatch.of_groups(done, results), output)
    return lines


def _header(study: Study, done: list[Group], results: Results) -> list[str]:
    group, machine = done[0], results.machine(done[0])
    missing = len(study.groups) - len(done)
    return [
        f"`python lab/studies/evidence.py run {study.name}`, then `report`.",
        f"{', '.join(f'{name} {value}' for name, value in machine.items())}; engine {group.engine.kind}.",
        "",
        f"{group.num_steps} rollouts of {group.num_prompts} x {group.samples_per_prompt} responses of "
        f"{group.response_length} tokens, {group.updates} optimizer steps each, learning rate {group.learning_rate:g}.",
        *([f"Until step {group.branch_step} no engine is stale and no method corrects."] if group.branch_step else []),
        f"{group.shape.num_layers} layers of {group.shape.hidden_size}{_experts(done)}.",
        "Differences are paired by seed, with 95 % confidence intervals.",
        f"No difference: the interval lies within the margin, {study.margin:g} or the noise floor where that is wider.",
        "Better and worse: beyond the margin, with p < 0.05 after Holm's correction for all rows of the table.",
        "Fell: share of seeds that end more than 0.2 below their best ten steps, or whose own policy does so below its "
        "best evaluation.",
        *([f"{missing} of {len(study.groups)} groups have not run."] if missing else []),
    ]


def _experts(groups: list[Group]) -> str:
    shape = next((group.shape for group in groups if group.shape.num_experts), None)
    if shape is None:
        return ""
    return f", mixtures with {shape.experts_per_token} of {shape.num_experts} experts of {shape.expert_ffn_size}"


def _table(condition: Condition, margin: float, floor: Floor) -> list[str]:
    base = condition.base
    num_seeds = len(condition.curves[base])
    floor = floor.of(condition.name)
    margin = floor.margin(num_seeds, margin)
    num_steps = len(next(iter(condition.curves[base].values()))["reward"])
    end = last_quarter(num_steps)
    k3 = [condition.mean(base, "k3", part) for part in (slice(0, 20), end)]
    ess = [condition.mean(base, "ess_sequence", part) for part in (slice(0, 20), end)]
    lines = [
        f"Without correction: k3 {k3[0]:.1e} in the first 20 steps, {k3[1]:.1e} in the last quarter.",
        f"Sequence ESS {ess[0]:.2f}, {ess[1]:.2f}; "
        f"share of ratios above 2: {condition.mean(base, 'above_2'):.1e}. {num_seeds} seeds.",
        floor.sentence(num_seeds),
        "",
        "| method | mean reward | against none | last quarter, against none "
        "| trainer's own policy at the end, against none | fell | kept sequences | kept tokens "
        "| against random rejection | verdict |",
        "|---" * 10 + "|",
    ]
    methods = [method for method in condition.curves if not method.endswith(", random")]
    verdicts = condition.verdicts(margin)
    for method in methods:
        control = f"{method}, random"
        cells = [method, f"{condition.mean(method, 'reward'):.3f}"]
        verdict = ""
        if method != base:
            verdict = verdicts[method]
            cells += [
                str(condition.difference(method, base, "reward")),
                str(condition.difference(method, base, "reward", end)),
                str(condition.difference(method, base, "own_reward", slice(-1, None))),
            ]
        else:
            cells += [""] * 3
        cells.append(f"{condition.fell(method):.2f}")
        cells += [f"{condition.mean(method, name):.2f}" for name in ("kept_sequences", "kept_tokens")]
        has_control = control in condition.curves
        cells += [str(condition.difference(method, control, "reward")) if has_control else "", verdict]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _across(conditions: list[Condition], study: Study, floor: Floor) -> list[str]:
    """A table of every setting and method against the reference without correction."""
    reference = next(condition for condition in conditions if condition.name == study.reference)
    num_seeds = len(reference.curves[reference.base])
    floor = floor.of(reference.name)
    lines = [
        f"## Against {reference.name}, uncorrected",
        "",
        floor.sentence(num_seeds),
        "",
        "| setting | method | k3 | mean reward | against it | last quarter, against it "
        "| trainer's own policy at the end, against it | verdict |",
        "|---" * 8 + "|",
    ]
    parts = (("reward", slice(None)), ("reward", None), ("own_reward", slice(-1, None)))
    differences = {
        (condition.name, method): [condition.difference_to(method, reference, *part) for part in parts]
        for condition in conditions
        for method in condition.curves
        if condition is not reference or method != reference.base
    }
    adjusted = dict(zip(differences, holm([overall.p_value for overall, *_ in differences.values()]), strict=True))
    margin = floor.margin(num_seeds, study.margin)
    for condition in conditions:
        for method in condition.curves:
            key = (condition.name, method)
            compared = [""] * 4
            if key in differences:
                compared = [*map(str, differences[key]), differences[key][0].verdict(margin, adjusted[key])]
            k3, reward = condition.mean(method, "k3"), condition.mean(method, "reward")
            lines.append(f"| {' | '.join([condition.name, method, f'{k3:.1e}', f'{reward:.3f}', *compared])} |")
    return lines


def _seconds(done: list[Group], results: Results) -> list[str]:
    """What sampling cost, by setting, where it was measured."""
    seconds: dict[str, list[float]] = {}
    for group in done:
        if not math.isnan(measured := results.sampling_seconds(group)):
            seconds.setdefault(group.condition, []).append(measured)
    each = ", ".join(f"{name} {np.mean(values):.3g}" for name, values in seconds.items())
    return ["", f"Seconds that the engine sampled for a rollout of one run: {each}."] if seconds else []


def _plot_rewards(conditions: list[Condition], path: Path) -> None:
    figure, axes = plt.subplots(
        len(conditions), 2, figsize=(13, 4.2 * len(conditions)), squeeze=False, constrained_layout=True
    )
    for (left, right), condition in zip(axes, conditions, strict=True):
        _plot_curves(left, condition, "reward")
        left.set(title=condition.name, xlabel="step", ylabel="reward, mean of seeds")
        left.legend(fontsize=7, ncols=2)
        _plot_curves(right, condition, "k3")
        right.set(title=condition.name, xlabel="step", ylabel="k3 of engine and trainer, nats", yscale="log")
    save(figure, path)


def _plot_curves(axis: Axes, condition: Condition, number: str) -> None:
    """Raw in thin lines, a moving mean on top."""
    for index, (method, seeds) in enumerate(condition.curves.items()):
        if method.endswith(", random"):
            continue
        mean = np.mean([curves[number] for curves in seeds.values()], axis=0)
        color = f"C{index % 10}"
        axis.plot(mean, color=color, linewidth=0.6, alpha=0.35)
        axis.plot(*moving_mean(mean), color="black" if method == condition.base else color, label=method, linewidth=1.6)


def moving_mean(values: Curve) -> tuple[Curve, Curve]:
    """Steps, and the mean of the values around each."""
    window = min(SMOOTHED_STEPS, len(values))
    smooth = np.convolve(values, np.ones(window) / window, mode="valid")
    return np.arange(len(smooth)) + (window - 1) / 2, smooth


def _plot_by_condition(conditions: list[Condition], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(9, 5), constrained_layout=True)
    base = conditions[0].base
    methods = [name for name in conditions[0].curves if name != base and not name.endswith(", random")]
    for shift, method in enumerate(methods):
        differences = [condition.difference(method, base, "reward") for condition in conditions]
        means = np.array([difference.mean for difference in differences])
        spread = np.array([[d.mean - d.low, d.high - d.mean] for d in differences]).T
        axis.errorbar(np.arange(len(means)) + shift * 0.06, means, yerr=spread, fmt="o", capsize=2, label=method)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xticks(range(len(conditions)), [condition.name for condition in conditions], rotation=20)
    axis.set_ylabel("mean reward against no correction")
    axis.legend(fontsize=7)
    save(figure, path)
