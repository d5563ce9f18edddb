"""The page of the collapse studies: the ladder and its picture, which number warned, the atlases, the first runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.group import Group
from evidence.pictures import plt, save
from evidence.results import Results
from evidence.study import NONE, Study

from .collapse import COLLAPSE_STUDIES, ENGINES, STAYS, WINDOW, collapsed_at, has_collapsed, verdicts
from .group import PretrainedGroup

# Of runs before any study: a line per step, with engine, method and reward.
FIRST_LOOK = Path(__file__).parents[3] / "evidence" / "first_look.jsonl"
STOPPED = FIRST_LOOK.with_name("collapse_stopped.jsonl")
"""Every step of runs whose machine had to be given back; their state did not come back, so they begin anew."""
PAGE = "collapse"
# Evaluations of a mean: the last ones.
LAST = 4
# Steps of a mean that warns, and what is a warning: a number, its limit in words, and the limit of means, given the
# first steps.
SMOOTH = 5
Limit = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]
WARNINGS: tuple[tuple[str, str, Limit], ...] = (
    ("k3", "k3 above 3 times its start", lambda means, first: means > 3 * first.mean()),
    ("ess_sequence", "sequence ESS below 0.2", lambda means, first: means < 0.2),
    ("grad_norm", "gradient norm above 3 times its first median", lambda means, first: means > 3 * np.median(first)),
    ("entropy", "entropy above 1.5 times its start", lambda means, first: means > 1.5 * first.mean()),
    ("length", "length above 1.25 times its start", lambda means, first: means > 1.25 * first.mean()),
)


def report(results: Results, output: Path) -> None:
    """Write ``collapse.md`` of what ran, its picture, and each atlas's tails behind the atlas's own page."""
    atlases, stable, ladder = COLLAPSE_STUDIES[:2], COLLAPSE_STUDIES[2], COLLAPSE_STUDIES[3]
    lines = [
        "# A collapse on one GPU, and what saves it",
        "",
        "Qwen2.5-Coder-1.5B-Instruct answers questions of `gsm_symbolic` (reasoning-gym 0.1.25, Apache-2.0); SGLang "
        "samples, Megatron-Core trains in bf16 with a copy of the weights in float32. One command for each study:",
        "",
        "```bash",
        "python examples/questions/prepare.py gsm_symbolic 4096 lab/evidence/results/gsm_symbolic.json",
        *(
            f"bash lab/studies/evidence.sh run {study.name} --model {'SMOLLM2' if 'small' in study.name else 'QWEN'}"
            f"{' --workers 2' if study is ladder else ''}"
            for study in COLLAPSE_STUDIES
        ),
        "bash lab/studies/evidence.sh report",
        "```",
        "",
        f"A run **collapsed** if the mean of {WINDOW} steps falls below half of R0 and stays there for {STAYS} steps. "
        f"R0 is the reward of the untrained policy on the same engine, or the best mean of {WINDOW} steps since, "
        "whichever is higher. Rollouts and the trainer's own policy, evaluated every ten steps on held-out questions, "
        "are judged apart. Where the engine has the trainer's dtype, it evaluates, with weights, keys and values that "
        "are not rounded.",
        "",
        "## The ladder of mismatch, without a correction",
        "",
        *_ladder_section(ladder, results, output),
        "## The mismatch before any training",
        "",
        "k3 and reward of the untrained model. An engine whose reward is below half of bf16's has a fault, not a "
        "mismatch.",
        "",
        *_atlas_table(atlases, results),
        "",
        "## Which learning rate",
        "",
        *_stable_table(stable, results),
        "",
        "## First runs",
        "",
        *_first_look(),
    ]
    path = output / f"{PAGE}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for study in atlases:
        _append_tails(study, results, output)
    print(path)


Runs = list[tuple[PretrainedGroup, list[dict[str, Any]]]]


def _runs(study: Study, results: Results) -> Runs:
    """Steps of finished runs, and of those that were stopped, in the study's order."""
    unfinished, stopped = results.unfinished(study.groups)
    earlier = {name: [*rows] for name, rows in groupby(_lines(STOPPED), key=itemgetter("run"))}
    found: Runs = []
    for group in study.groups:
        assert isinstance(group, PretrainedGroup)
        if results.is_done(group):
            found.append((group, results.rows(group)))
        elif group in stopped:
            found.append((group, unfinished.rows(group)))
        elif group.name in earlier:
            found.append((group, earlier[group.name]))
    return found


def _ladder_section(study: Study, results: Results, output: Path) -> list[str]:
    """Every run of the ladder: what its policy is worth, when it collapsed, which number had said so."""
    runs = _runs(study, results)
    if not runs:
        return ["Nothing has run yet.", ""]
    done = [group for group, _ in runs if results.is_done(group)]
    machines = dict.fromkeys(
        f"{machine['device']}, sglang {machine['sglang']}, torch {machine['torch']}, revision {machine['revision']}"
        for machine in map(results.machine, done)
    )
    # From the smallest mismatch to the largest, the seeds of an engine together.
    runs = [run for _, of_engine in sorted(_by_engine(runs).items()) for run in of_engine]
    seconds = np.median([row["seconds"] for _, rows in runs for row in rows])
    group = runs[0][0]
    _plot(study, runs, output / f"{PAGE}.png")
    lines = [
        f"Learning rate {group.learning_rate:g}, {group.num_prompts} x {group.samples_per_prompt} answers of at most "
        f"{group.response_length} tokens, {seconds:.1f} s a step with two runs on each GPU: eight runs take four GPUs "
        f"{group.num_steps * seconds / 60:.0f} minutes. {'; '.join(machines)}.",
        "",
        *_by_setting(study, runs),
        "",
        f"![own policy, rollouts, k3]({PAGE}.png)",
        "",
        "Means of ten steps for rollouts, k3 and gradient norm, of four evaluations for the last own policy (standard "
        "error 0.02).",
        "",
        "| engine, seed | steps | own policy, first, best, last | rollouts | k3 | gradient norm "
        "| collapsed: own policy, rollouts |",
        "|---" * 7 + "|",
    ]
    for group, rows in runs:
        own = _own(rows)
        rollouts_at, own_at = verdicts(rows)
        cells = [_label(study, group), _steps(group, rows), f"{own[0]:.2f}, {max(own):.2f}, {np.mean(own[-LAST:]):.2f}"]
        cells += [_ends(rows, "reward", ".2f"), _ends(rows, "k3", ".1e"), _ends(rows, "grad_norm", ".2f")]
        cells.append(", ".join("no" if at is None else f"**step {at}**" for at in (own_at, rollouts_at)))
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        f"**Which number warned first.** Steps at which the mean of {SMOOTH} steps crosses a limit for the first time; "
        "where a run did not collapse, a crossing is a false alarm, or comes before a fall that nobody saw. The start "
        f"is the mean of the first {WINDOW} steps. `mis_raised_fraction` was not recorded.",
        "",
        f"| engine, seed | {' | '.join(text for _, text, _ in WARNINGS)} | rollouts below half |",
        "|---" * (len(WARNINGS) + 2) + "|",
    ]
    for group, rows in runs:
        at = verdicts(rows)[0]
        crossed = [_crossing([row[name] for row in rows], limit) for name, _, limit in WARNINGS]
        cells = ["" if step is None else str(step) for step in (*crossed, at)]
        lines.append(f"| {_label(study, group)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _by_engine(runs: Runs) -> dict[float, Runs]:
    """By the k3 that the first seed of an engine begins with."""
    engines: dict[str, Runs] = {}
    for group, rows in runs:
        engines.setdefault(group.condition, []).append((group, rows))
    return {_mean(of_engine[0][1][:WINDOW], "k3"): of_engine for of_engine in engines.values()}


def _by_setting(study: Study, runs: Runs) -> list[str]:
    """How many seeds of an engine collapsed, and what mismatch and own policy have become by its last steps."""
    parts, fallen = [], []
    for of_engine in _by_engine(runs).values():
        # A run that had hardly begun says nothing.
        of_engine = [(group, rows) for group, rows in of_engine if 2 * len(rows) > group.num_steps]
        if not of_engine:
            continue
        engine = of_engine[0][0].condition.removeprefix(f"{study.name}_")
        collapsed = sum(verdicts(rows)[1] is not None for _, rows in of_engine)
        fallen += [engine] if collapsed == len(of_engine) > 1 else []
        growth = " and ".join(
            f"{_mean(rows[-WINDOW:], 'k3') / _mean(rows[:WINDOW], 'k3'):.1f}" for _, rows in of_engine
        )
        last = " and ".join(f"{np.mean(_own(rows)[-LAST:]):.2f}" for _, rows in of_engine)
        parts.append(f"{engine} {collapsed} of {len(of_engine)} (k3 times {growth}, own policy {last})")
    return [
        f"**Own policies that collapsed**: {'; '.join(parts)}. Fixed beforehand: what falls on both seeds while bf16 "
        f"stands fell of the mismatch. {', '.join(fallen) or 'No engine'} did.",
    ]


def _mean(rows: Sequence[dict[str, Any]], name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def _own(rows: Sequence[dict[str, Any]]) -> list[float]:
    return [row["own_reward"] for row in rows if "own_reward" in row]


def _crossing(values: Sequence[float], limit: Limit) -> int | None:
    """The last of the first steps whose mean is beyond a limit."""
    means = np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid")
    is_beyond = limit(means, np.asarray(values[:WINDOW]))
    return int(is_beyond.argmax()) + SMOOTH - 1 if is_beyond.any() else None


def _plot(study: Study, runs: Runs, path: Path) -> None:
    """Every seed: the own policy, rollouts and k3."""
    panels = {
        "own_reward": "own policy, held-out questions",
        "reward": "rollouts, means of 10",
        "k3": "k3, means of 10",
    }
    figure, axes = plt.subplots(1, len(panels), figsize=(14, 4), constrained_layout=True)
    settings = list(dict.fromkeys(group.condition for group, _ in runs))
    for group, rows in runs:
        look = {"color": f"C{settings.index(group.condition)}", "linestyle": "-" if group.seeds == (1,) else "--"}
        for axis, name in zip(axes, panels, strict=True):
            steps = [row["step"] for row in rows if name in row]
            values = [row[name] for row in rows if name in row]
            if name != "own_reward":
                steps, values = steps[WINDOW - 1 :], np.convolve(values, np.ones(WINDOW) / WINDOW, "valid").tolist()
            axis.plot(steps, values, linewidth=1.4, label=_label(study, group), **look)
    for axis, (name, title) in zip(axes, panels.items(), strict=True):
        axis.set(title=title, xlabel="step", yscale="log" if name == "k3" else "linear")
    axes[0].legend(fontsize=7)
    save(figure, path)


def _label(study: Study, group: PretrainedGroup) -> str:
    method, seed = group.run
    engine = group.condition.removeprefix(f"{study.name}_")
    return f"{engine}, {seed}" if method == NONE else f"{engine}, {method.name}, {seed}"


def _steps(group: Group, rows: Sequence[dict[str, Any]]) -> str:
    """Of its steps, and why not all."""
    if len(rows) == group.num_steps:
        return str(len(rows))
    return f"{len(rows)} of {group.num_steps}, {'ended' if has_collapsed(rows) else 'stopped'}"


def _ends(rows: Sequence[dict[str, Any]], name: str, form: str) -> str:
    return " to ".join(f"{_mean(part, name):{form}}" for part in (rows[:WINDOW], rows[-WINDOW:]))


def _atlas_table(studies: Sequence[Study], results: Results) -> list[str]:
    """k3 and reward of every engine, of both models side by side."""
    models = [f"[{study.groups[0].model}]({study.name}.md)" for study in studies]
    lines = [
        f"| engine | {' | '.join(f'{model}: k3 | reward' for model in models)} |",
        "|---" * (1 + 2 * len(studies)) + "|",
    ]
    for setting in ENGINES:
        cells = []
        for study in studies:
            group = next(group for group in study.groups if group.condition == f"{study.name}_{setting}")
            row = results.rows(group)[0] if results.is_done(group) else None
            cells += [f"{row['k3']:.1e}", f"{row['reward']:.3f}"] if row else ["", ""]
        if any(cells):
            lines.append(f"| {setting} | {' | '.join(cells)} |")
    return lines


def _append_tails(study: Study, results: Results, output: Path) -> None:
    """Reward, tails, and k3 by probability and position, to the page that the atlas has already."""
    done = [group for group in study.groups if results.is_done(group)]
    page = output / f"{study.name}.md"
    if not done or not page.exists():
        return
    names = "engine | reward | length | largest ratio | sequence ESS"
    names += " | k3 where p < 0.1 | 0.1 to 0.6 | above 0.6 | k3 of tokens 1 to 32 | to 128 | later"
    lines = ["", "## Reward, and where the mismatch is", "", f"| {names} |", "|---" * 11 + "|"]
    forms = {"reward": ".3f", "length": ".0f", "ratio_max": ".3g", "ess_sequence": ".2f"}
    for group in done:
        (row,) = results.rows(group)
        cells = [
            group.condition.removeprefix(f"{study.name}_"),
            *(f"{row[name]:{form}}" for name, form in forms.items()),
        ]
        lines.append(f"| {' | '.join([*cells, *_where(results.log_probs(group)['step0'])])} |")
    with page.open("a", encoding="utf-8") as file:
        file.write("\n".join(lines) + "\n")


def _where(streams: dict[str, NDArray[Any]]) -> list[str]:
    """k3 by probability in the engine, and by position."""
    mask = streams["mask"]
    probability = np.exp(streams["behavior"].astype(np.float64))
    d = streams["log_ratio"].astype(np.float64)
    position = np.broadcast_to(np.arange(mask.shape[-1]), mask.shape)
    found = []
    for values, edges in ((probability, (0.0, 0.1, 0.6, 1.01)), (position, (0, 32, 128, mask.shape[-1]))):
        for low, high in pairwise(edges):
            part = d[mask & (values >= low) & (values < high)]
            found.append(f"{(np.expm1(part) - part).mean():.1e}" if part.size else "")
    return found


def _stable_table(study: Study, results: Results) -> list[str]:
    """Of finished runs, and of those that were stopped."""
    runs = _runs(study, results)
    if not runs:
        return ["Nothing has run yet."]
    lines = [
        "bf16 without a correction. Runs that had to stop say nothing of the steps that they lack, nor does one seed "
        "of learning rates that are so close: the standard error of an evaluation (128 questions) is 0.04.",
        "",
        "| run | steps | rollouts, first and last ten steps | own policy, first, best, last | length "
        "| largest gradient norm | collapsed |",
        "|---" * 7 + "|",
    ]
    for group, rows in runs:
        own = _own(rows)
        cells = [group.name.removeprefix(f"{study.name}_"), _steps(group, rows), _ends(rows, "reward", ".2f")]
        cells += [", ".join(f"{value:.2f}" for value in (own[0], max(own), own[-1])), _ends(rows, "length", ".0f")]
        cells.append(f"{max(row['grad_norm'] for row in rows):.2f}")
        cells.append(", ".join("no" if at is None else f"step {at}" for at in verdicts(rows)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def first_look() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The recorded runs by engine and method."""
    return {run: [*rows] for run, rows in groupby(_lines(FIRST_LOOK), key=itemgetter("engine", "method"))}


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _first_look() -> list[str]:
    lines = [
        "One seed, 1e-5, before these studies; the own policy was not evaluated ([more](README.md)).",
        "",
        "| engine | method | steps | reward, first and last ten steps | collapsed |",
        "|---" * 5 + "|",
    ]
    for (engine, method), rows in first_look().items():
        rewards = [row["reward"] for row in rows]
        at = collapsed_at([row["step"] for row in rows], rewards)
        ends = f"{np.mean(rewards[:WINDOW]):.2f} to {np.mean(rewards[-WINDOW:]):.2f}"
        lines.append(f"| {engine} | {method} | {len(rows)} | {ends} | {'no' if at is None else f'step {at}'} |")
    return lines
