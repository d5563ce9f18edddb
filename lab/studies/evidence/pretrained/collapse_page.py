# SPDX-License-Identifier: Apache-2.0
"""Pages of the collapse studies: the ladder and its picture, which number warned, the pilot of forks, the atlases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from evidence.results import Results
from evidence.study import NONE, Study

from . import collapse_correction, fork
from .collapse import (
    COLLAPSE_STUDIES,
    CORRECTION,
    EARLIER_RATE,
    ENGINES,
    LADDER,
    SMOOTH,
    STAYS,
    WINDOW,
    alert_at,
    collapsed_at,
    verdicts,
)
from .collapse_runs import (
    EVIDENCE,
    LAST,
    WARNINGS,
    Runs,
    draw,
    earlier_runs,
    ends_of,
    first_crossing,
    label_of,
    mean_of,
    own_rewards,
    read_lines,
    runs_seen,
    steps_seen,
)
from .group import PretrainedGroup

# Of runs before any study: a line per step, with engine, method and reward.
FIRST_LOOK = EVIDENCE / "first_look.jsonl"
PAGE, RUNS = "collapse", "collapse_runs"
# Runs of the pilot of forks whose machine was taken back, and sums of learning rates at which k3 is compared.
STOPPED_PILOT, SUMS = "alert_stopped_", (1e-4, 2e-4, 2.68e-4)


def report(results: Results, output: Path) -> None:
    """Write ``collapse.md``, a screen, and ``collapse_runs.md`` with all that ran."""
    *atlases, stable, ladder, correction = COLLAPSE_STUDIES
    rule = (
        f"A run **collapsed** if the mean of {WINDOW} steps falls below half of R0 and stays there for {STAYS} steps. "
        f"R0 is the reward of the untrained policy on the same engine, or the best mean of {WINDOW} steps since, "
        "whichever is higher. Rollouts and the trainer's own policy, evaluated every ten steps on held-out questions, "
        "are judged apart. Where the engine has the trainer's dtype, it evaluates, with weights, keys and values that "
        "are not rounded."
    )
    page = [
        "# What 4-bit weights cost, and what TIS keeps",
        "",
        "Qwen2.5-Coder-1.5B-Instruct answers questions of `gsm_symbolic` (reasoning-gym 0.1.25, Apache-2.0); SGLang "
        "samples, Megatron-Core trains in bf16 with a copy of the weights in float32. The engine gets fresh weights in "
        "every step, rounded to int4.",
        "",
        "## With a correction",
        "",
        *collapse_correction.front(correction, results, output),
        *_commands([correction]),
        "",
        f"{rule} {collapse_correction.protocol(correction)}",
        "",
        f"[Every run, which number warned first, the ladder of mismatch, learning rates]({RUNS}.md). The mismatch "
        f"before any training on 14 engines: [this model and another]({RUNS}.md#the-mismatch-before-any-training).",
    ]
    runs = [
        "# The runs of the collapse studies",
        "",
        f"The answer is on [a page of its own]({PAGE}.md). One command for each study:",
        "",
        *_commands(COLLAPSE_STUDIES),
        "",
        "A process that has run one of these has no room on an H100 for another engine: where it ends without memory, "
        "the same command goes on. A run that is killed begins anew.",
        "",
        rule,
        "",
        "## With a correction: every run",
        "",
        *collapse_correction.details(correction, results),
        "## The ladder of mismatch, without a correction",
        "",
        *_ladder_section(ladder, results, output),
        "## Forks at the alert: the pilot",
        "",
        *_pilot_section(ladder, correction, results),
        "## The mismatch before any training",
        "",
        "k3 and reward of the untrained model. An engine whose reward is below half of bf16's has a fault, not a "
        "mismatch. **Measure yours**, a dense Llama, Qwen2 or Qwen3 in a folder: the responses of one engine took 6 to "
        "9 s on an H100, without its start. The table of `runs/atlas/collapse_runs.md` has them.",
        "",
        "```bash",
        "python examples/questions/prepare.py gsm_symbolic 4096 runs/atlas/gsm_symbolic.json",
        "bash lab/studies/evidence.sh run collapse_atlas --model FOLDER --results runs/atlas --only '*_bf16-*' "
        "'*_fp8_products-*'",
        "bash lab/studies/evidence.sh report --results runs/atlas --output runs/atlas",
        "```",
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
    for name, lines in ((PAGE, page), (RUNS, runs)):
        path = output / f"{name}.md"
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(path)


def _commands(studies: Sequence[Study]) -> list[str]:
    """The prepared questions, a command for each study, and the page."""
    shared = {LADDER, CORRECTION}
    return [
        "```bash",
        "python examples/questions/prepare.py gsm_symbolic 4096 lab/evidence/results/gsm_symbolic.json",
        *(
            f"bash lab/studies/evidence.sh run {study.name} --model {'SMOLLM2' if 'small' in study.name else 'QWEN'}"
            f"{' --workers 2' if study.name in shared else ''}"
            for study in studies
        ),
        "bash lab/studies/evidence.sh report",
        "```",
    ]


def _ladder_section(study: Study, results: Results, output: Path) -> list[str]:
    """Every run of the ladder: what its policy is worth, when it collapsed, which number had said so."""
    runs = runs_seen(study, results)
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
    draw(study, runs, output / f"{PAGE}.png")
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
        own = own_rewards(rows)
        rollouts_at, own_at = verdicts(rows)
        cells = [
            label_of(study, group),
            steps_seen(group, rows),
            f"{own[0]:.2f}, {max(own):.2f}, {np.mean(own[-LAST:]):.2f}",
        ]
        cells += [ends_of(rows, "reward", ".2f"), ends_of(rows, "k3", ".1e"), ends_of(rows, "grad_norm", ".2f")]
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
        crossed = [first_crossing([row[name] for row in rows], limit) for name, _, limit in WARNINGS]
        cells = ["" if step is None else str(step) for step in (*crossed, at)]
        lines.append(f"| {label_of(study, group)} | {' | '.join(cells)} |")
    return [*lines, ""]


def _by_engine(runs: Runs) -> dict[float, Runs]:
    """By the k3 that the first seed of an engine begins with."""
    engines: dict[str, Runs] = {}
    for group, rows in runs:
        engines.setdefault(group.condition, []).append((group, rows))
    return {mean_of(of_engine[0][1][:WINDOW], "k3"): of_engine for of_engine in engines.values()}


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
            f"{mean_of(rows[-WINDOW:], 'k3') / mean_of(rows[:WINDOW], 'k3'):.1f}" for _, rows in of_engine
        )
        last = " and ".join(f"{np.mean(own_rewards(rows)[-LAST:]):.2f}" for _, rows in of_engine)
        parts.append(f"{engine} {collapsed} of {len(of_engine)} (k3 times {growth}, own policy {last})")
    return [
        f"**Own policies that collapsed**: {'; '.join(parts)}. Fixed beforehand: what falls on both seeds while bf16 "
        f"stands fell of the mismatch. {', '.join(fallen) or 'No engine'} did.",
    ]


def _pilot_section(ladder: Study, correction: Study, results: Results) -> list[str]:
    """The attempts at the pilot, of which the last decides, beside earlier runs; and how it runs."""
    stopped = {name: results.rows_of(name) for name in results.names() if name.startswith(STOPPED_PILOT)}
    if not stopped:
        return ["Nothing has run yet.", ""]
    earlier = [run for study in (ladder, correction) for run in runs_seen(study, results)]
    uncorrected = [
        (group.learning_rate, rows)
        for group, rows in earlier
        if group.engine.weights == "int4" and group.run[0] == NONE
    ]
    first = earlier_runs(f"{CORRECTION}_lr{EARLIER_RATE:g}_int4-")
    uncorrected += [(EARLIER_RATE, rows) for name, rows in first.items() if name.endswith(f"-{NONE.name}")]
    lows = [
        min(fork.lasting(rows))
        for group, rows in earlier
        if group.condition == f"{CORRECTION}_bf16" and fork.lasting(rows)
    ]
    passed = [low > fork.LOWEST for low in lows]
    pilot = next(study for study in fork.FORK_STUDIES if study.name == fork.PILOT)
    last = max(name.removeprefix(STOPPED_PILOT).split("_")[0] for name in stopped)
    verdicts = [
        fork.verdict(group, stopped.get(f"{STOPPED_PILOT}{last}_{group.name.removeprefix(f'{fork.PILOT}_')}", []))
        for group in pilot.groups
        if isinstance(group, PretrainedGroup)
    ]
    lines = [
        f"Token TIS from the alert on: a pilot, int4 without a correction and bf16 at {fork.RATE:g}, seeds 11 "
        "and 12 (rules fixed beforehand: `lab/studies/evidence/pretrained/fork.py`). "
        f"**{fork.decision(verdicts)}** Both int4 runs alerted before step {fork.DECIDES_AT}, but the trainer policy "
        f"of both bf16 runs was below {fork.LOWEST:g}. So no forks follow at this learning rate.",
        "",
        "Three attempts on two H200 (SGLang 0.5.17). The first two (revision 11132afd) ended early: the machine was "
        "taken back between two commands; then, with two runs, the time was up, of which a fault in `pilot.sh` took 5 "
        "minutes. The third (revision 35cc13e9) began anew with all four runs, two on each GPU, and has the steps that "
        "decide. It was read all along. `int4-seed11` was stopped after its alert, to leave its GPU to bf16; tests of "
        "this repository ran on both GPUs from step 11 on. Nothing of the rules was changed.",
        "",
        "| attempt, run | steps | seconds a step after the first | k3, first ten steps "
        f"| {' | '.join(f'k3 at {total:.1e}' for total in SUMS)} | alert at step "
        "| trainer policy, last four (attempt 1: all three): sampled, greedy "
        f"| lowest mean of four, sampled, from step {fork.DECIDES_AT} on |",
        "|---" * 10 + "|",
    ]
    for name, rows in stopped.items():
        attempt, run = name.removeprefix(STOPPED_PILOT).removesuffix(f"-{NONE.name}").split("_")
        k3 = (_k3_at(rows, fork.RATE, total) for total in SUMS)
        own = (np.mean([row[kind] for row in rows if kind in row][-LAST:]) for kind in ("own_reward", "own_greedy"))
        alert, lasting = alert_at([row["k3"] for row in rows]), fork.lasting(rows)
        cells = [f"{attempt}, {run}", str(len(rows)), f"{mean_of(rows[1:], 'seconds'):.1f}"]
        cells += [f"{mean_of(rows[:WINDOW], 'k3'):.1e}", *("" if value is None else f"{value:.1e}" for value in k3)]
        cells += ["" if alert is None else str(alert), ", ".join(f"{value:.2f}" for value in own)]
        lines.append(f"| {' | '.join([*cells, f'{min(lasting):.3f}' if lasting else ''])} |")
    ranges = []
    for total in SUMS:
        at = [value for rate, rows in uncorrected if (value := _k3_at(rows, rate, total)) is not None]
        ranges.append(f"{min(at):.1e} to {max(at):.1e}, {len(at)} runs" if at else "")
    lines += [
        f"| earlier, int4, 2e-06 to 5e-06 |  |  |  | {' | '.join(ranges)} |  |  |  |",
        "",
        "k3 at a sum of learning rates: mean of the ten steps before. Two processes take 73 to 90 of a GPU's 144 GB, "
        "and do 1.33 times the steps of one.",
        "",
        "Exploratory: after its alert `int4-seed12` went on without a correction, and its trainer policy fell from "
        "0.61 at step 70 to 0.41 at step 110 (one evaluation each), while that of `bf16-seed12` went from 0.74 to "
        f"0.73. At 3e-6 the bf16 condition holds in {sum(passed)} of {len(passed)} runs (lowest {min(lows):.2f}), so "
        f"in two of two in about {(sum(passed) / len(passed)) ** 2:.0%} of draws: such a pilot can fail by chance. "
        "The next one should run at 3e-6, where all six int4 runs alerted after 100 to 112 steps, with a bound for "
        "the mean of the "
        "bf16 runs, fixed before it begins.",
        "",
        "```bash",
        "bash lab/real_stack/pack_evidence.sh site.tar.xz",
        "python examples/questions/prepare.py gsm_symbolic 4096 questions.json",
        "bash lab/real_stack/pack_pilot.sh site.tar.xz questions.json pilot",
        "bash lab/real_stack/pilot.sh base pilot/00     # from here on with two GPUs, each within 30 seconds",
        "bash lab/real_stack/pilot.sh take pilot/01     # and so on, to 15",
        "bash lab/real_stack/pilot.sh start 420 OUT",
        "bash lab/real_stack/pilot.sh poll 540 OUT      # again, until the table has 101 steps of each",
        "```",
        "",
    ]
    return lines


def _k3_at(rows: Sequence[dict[str, Any]], rate: float, total: float) -> float | None:
    """The mean of the last steps before the sum of learning rates is so large; None: not seen so far."""
    steps = round(total / rate)
    return mean_of(rows[steps - WINDOW : steps], "k3") if len(rows) >= steps else None


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


def _stable_table(study: Study, results: Results) -> list[str]:
    """Of finished runs, and of those that were stopped."""
    runs = runs_seen(study, results)
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
        own = own_rewards(rows)
        cells = [group.name.removeprefix(f"{study.name}_"), steps_seen(group, rows), ends_of(rows, "reward", ".2f")]
        cells += [", ".join(f"{value:.2f}" for value in (own[0], max(own), own[-1])), ends_of(rows, "length", ".0f")]
        cells.append(f"{max(row['grad_norm'] for row in rows):.2f}")
        cells.append(", ".join("no" if at is None else f"step {at}" for at in verdicts(rows)))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def first_look() -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The recorded runs by engine and method."""
    return {run: [*rows] for run, rows in groupby(read_lines(FIRST_LOOK), key=itemgetter("engine", "method"))}


def _first_look() -> list[str]:
    lines = [
        "One seed, 1e-5, before these studies; the own policy was not evaluated ([more](README.md)).",
        "",
        "| engine | method | steps | reward, first and last ten steps | collapsed |",
        "|---" * 5 + "|",
    ]
    for (engine, method), rows in first_look().items():
        rewards = [row["reward"] for row in rows]
        steps = [row["step"] for row in rows]
        at, since = (collapsed_at(steps, rewards, stays=stays) for stays in (STAYS, 0))
        ends = f"{np.mean(rewards[:WINDOW]):.2f} to {np.mean(rewards[-WINDOW:]):.2f}"
        is_seen = since is not None and steps[-1] - since >= WINDOW
        fell = f"below half since {since}, seen to {steps[-1]}" if is_seen else "no"
        lines.append(f"| {engine} | {method} | {len(rows)} | {ends} | {fell if at is None else f'step {at}'} |")
    return lines
