# SPDX-License-Identifier: Apache-2.0
"""Pages of the collapse studies: the ladder and its picture, which number warned, forks at the alert, the atlases."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from evidence.results import Results
from evidence.study import Study

from . import collapse_correction, fork, fp8, fp8_page
from .collapse import (
    COLLAPSE_STUDIES,
    CORRECTION,
    ENGINES,
    LADDER,
    SMOOTH,
    STAYS,
    WINDOW,
    collapsed_at,
    verdicts,
)
from .collapse_runs import (
    EVIDENCE,
    LAST,
    WARNINGS,
    Runs,
    draw,
    ends_of,
    first_crossing,
    label_of,
    mean_of,
    own_rewards,
    read_lines,
    runs_seen,
    steps_seen,
)

# Of runs before any study: a line per step, with engine, method and reward.
FIRST_LOOK = EVIDENCE / "first_look.jsonl"
PAGE, RUNS = "collapse", "collapse_runs"


def report(results: Results, output: Path) -> None:
    """Write ``collapse.md``, a screen, ``collapse_runs.md`` with all that ran, and ``fp8_training.md``."""
    *atlases, stable, ladder, correction = COLLAPSE_STUDIES
    rule = (
        f"A run **collapsed** if the mean of {WINDOW} steps falls below half of R0 and stays there for {STAYS} steps. "
        f"R0 is the reward of the untrained policy on the same engine, or the best mean of {WINDOW} steps since, "
        "whichever is higher. The rule is applied to the rollouts, and separately to the trainer policy. The trainer "
        "policy is evaluated every ten steps on held-out questions, without rounding of weights, keys, or values."
    )
    page = [
        "# What 4-bit weights cost, and what TIS keeps",
        "",
        "Qwen2.5-Coder-1.5B-Instruct answers questions of `gsm_symbolic` (reasoning-gym 0.1.25, Apache-2.0). SGLang "
        "samples. Megatron-Core trains in bf16 with a copy of the weights in float32. The engine gets up-to-date "
        "weights in every step, rounded to int4.",
        "",
        "## With a correction",
        "",
        *collapse_correction.front(correction, results, output),
        *_commands([correction]),
        "",
        f"{rule} {collapse_correction.protocol(correction)}",
        "",
        f"**[Token TIS that starts at the alert]({RUNS}.md#forks-at-the-alert)** is another study. "
        f"{fork.so_far(results)}",
        "",
        f"**[An fp8 engine]({fp8.FP8}.md)** at the same learning rate: with fp8 matmuls k3 was 1.8 and 2.2 "
        "times its start by step 130. With e4m3 weights the rule does not decide.",
        "",
        f"[All runs]({RUNS}.md): which metric warned first, the ladder of mismatch, learning rates, and [the mismatch "
        f"of 14 engines before any training]({RUNS}.md#the-mismatch-before-any-training).",
    ]
    runs = [
        "# The runs of the collapse studies",
        "",
        f"[Another page]({PAGE}.md) has the result. One command for each study:",
        "",
        *_commands(COLLAPSE_STUDIES),
        "",
        "If a process runs out of GPU memory, start the same command again: it continues with the next run. A run that "
        "is killed starts again.",
        "",
        rule,
        "",
        "## With a correction: every run",
        "",
        *collapse_correction.details(correction, results),
        "## The ladder of mismatch, without a correction",
        "",
        *_ladder_section(ladder, results, output),
        "## Forks at the alert",
        "",
        *_fork_section(results),
        "## The mismatch before any training",
        "",
        "k3 and reward of the untrained model. An engine whose reward is below half that of bf16 is faulty. To "
        "**measure your model** (a dense Llama, Qwen2, or Qwen3), run these commands. "
        "`runs/atlas/collapse_runs.md` then has the table. The responses of one engine took 6 to 9 s on an H100.",
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
    for name, lines in ((PAGE, page), (RUNS, runs), (fp8.FP8, fp8_page.page(results, output))):
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
        f"Learning rate {group.learning_rate:g}, {group.num_prompts} x {group.samples_per_prompt} responses of at "
        f"most {group.response_length} tokens, {seconds:.1f} s a step with two runs on each GPU. Eight runs take four "
        f"GPUs {group.num_steps * seconds / 60:.0f} minutes. {'; '.join(machines)}.",
        "",
        *_by_setting(study, runs),
        "",
        f"![trainer policy, rollouts, k3]({PAGE}.png)",
        "",
        "Rollouts, k3, and gradient norm are means of ten steps. The last value of the trainer policy is the mean of "
        "four evaluations (standard error 0.02).",
        "",
        "| engine, seed | steps | trainer policy, first, best, last | rollouts | k3 | gradient norm "
        "| collapsed: trainer policy, rollouts |",
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
        f"**Which metric warned first.** Steps at which the mean of {SMOOTH} steps first crosses a limit. If the run "
        "did not collapse, the crossing is a false alarm, or the run ended before its fall. The start is the mean of "
        f"the first {WINDOW} steps. `mis_raised_fraction` was not recorded. The limits were not fixed before these "
        "runs.",
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
    """How many seeds of an engine collapsed, and what mismatch and trainer policy have become by its last steps."""
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
        parts.append(f"{engine} {collapsed} of {len(of_engine)} (k3 times {growth}, trainer policy {last})")
    return [
        f"**Trainer policies that collapsed**: {'; '.join(parts)}. The rule was fixed beforehand: the mismatch is the "
        "cause if both seeds of an engine collapse and bf16 does not. The rule holds for "
        f"{', '.join(fallen) or 'no engine'}.",
    ]


def _fork_section(results: Results) -> list[str]:
    """What the pilot decided, the pairs so far, and how they run."""
    return [
        "Is it too late to switch token TIS on when the alert fires? Two runs continue from one state (int4 weights, "
        "learning rate 3e-6, no correction until the alert), one without and one with token TIS, for 70 steps. The "
        "rules were fixed beforehand: `lab/studies/evidence/pretrained/fork.py`.",
        "",
        *fork.report(results).splitlines(),
        "",
        "*Trainer policy* is the mean of the sampled and the greedy reward on held-out questions, over the last four "
        "evaluations. **The study ended after three pairs**, because its GPU time was spent. The 95% interval of the "
        "mean difference is -0.25 to +0.18 (t, two degrees of freedom), so neither a loss nor a gain is excluded. A "
        "pair takes 21 to 29 minutes of one H200, and the nine that did not run about four hours (SGLang 0.5.17; "
        "seeds 21 and 22 at revision 6de820ef, 23 at 2be26290).",
        "",
        "Exploratory: k3 did not return to its start (0.017) with token TIS either. With seed 21 it stayed at 0.14. "
        "With seed 22 it rose to 1.3 (mean of ten steps), and the policy fell to 0.34. Without a correction that "
        "policy fell to 0.35 and recovered to 0.64. With seed 23 it fell to 0.06, where it rose to 0.33 without a "
        "correction. The policy first fell to 0.45 (none: 0.52) and then recovered to 0.65 (none: 0.54). [Six runs "
        "with token TIS from the start](collapse.md) kept k3 below 0.04 and a sampled reward of 0.74 (median).",
        "",
        "A first attempt of seeds 23 and 24 does not count, because the machine was taken back 37 and 45 steps after "
        "their alerts (at 118 and 101). Until then, token TIS minus none was +0.100 and +0.122. After as many steps it "
        "was -0.075 to +0.059 in the three pairs that count, so an early difference does not predict the final one. "
        "Without a correction the first attempt of seed 23 fell to 0.01 by step 160. The repeat at a later "
        "revision did not collapse: a seed does not fix a run.",
        "",
        "**The pilot, at 4e-6, failed.** Its rule asked for alerts before step 100 with int4, and for a bf16 trainer "
        "policy above 0.75 after step 100 (sampled, mean of four evaluations). Both int4 runs alerted in time (71 and "
        "88), but the two bf16 runs fell to 0.678 and 0.727. The forks use 3e-6, which **does not satisfy this rule "
        "either**: of six earlier runs of each arm, the int4 runs alerted after 100 to 112 steps, and two bf16 runs "
        "fell to 0.738 and 0.746. `results/alert_stopped.zip` has the rows of the pilot. Revision 954075ec has its "
        "program and table.",
        "",
        "```bash",
        "bash lab/real_stack/pack_evidence.sh site.tar.xz",
        "python examples/questions/prepare.py gsm_symbolic 4096 questions.json",
        "bash lab/real_stack/pack_forks.sh site.tar.xz questions.json forks",
        "bash lab/real_stack/forks.sh base forks/00     # from here on with two GPUs, each within 30 seconds",
        "bash lab/real_stack/forks.sh take forks/01     # and so on, to the last",
        "ONLY='alert_forks-seed21-none alert_forks-seed21-token_tis_2' bash lab/real_stack/forks.sh start 420 OUT",
        "bash lab/real_stack/forks.sh poll 540 OUT      # again, until the runs have ended",
        "```",
        "",
    ]


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
        "bf16 without a correction. All runs were stopped early. One seed does not separate learning rates that are so "
        "close, because the standard error of an evaluation (128 questions) is 0.04.",
        "",
        "| run | steps | rollouts, first and last ten steps | trainer policy, first, best, last | length "
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
        "One seed at 1e-5, before these studies. The trainer policy was not evaluated ([more](README.md)).",
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
