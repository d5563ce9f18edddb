# SPDX-License-Identifier: Apache-2.0
"""What a correction saves of runs that collapse without one: arms, contrasts, who warned, and every run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from evidence.outcomes import Difference, holm
from evidence.results import Results
from evidence.study import Study

from .collapse import CORRECTION, EARLIER_RATE, STAYS, WINDOW, is_over, verdicts
from .collapse_runs import (
    LAST,
    WARNINGS,
    Limit,
    Runs,
    arm_of,
    draw,
    earlier_runs,
    ends_of,
    first_crossing,
    label_of,
    mean_of,
    own_rewards,
    runs_seen,
    steps_seen,
)
from .group import PretrainedGroup

# The first arm of a contrast is the one that is expected to be worse.
CONTRASTS = (("int4", "int4, token_tis 2"), ("int4", "bf16"))
# A run that was stopped earlier, and had not collapsed, says too little. Up to there k3's growth is compared.
SEEN = 130
# After this step the trainer policy changes only by noise with token TIS and in bf16.
SETTLED = 80
# Runs of four GPUs.
AT_ONCE = 8
RAISED: tuple[str, str, Limit] = (
    "raised",
    "`mis_raised_fraction` off one half by more than 0.05",
    lambda means, first: abs(means - 0.5) > 0.05,
)

Rows = list[dict[str, Any]]
Arms = dict[str, list[Rows]]


def front(study: Study, results: Results, output: Path) -> list[str]:
    """The result, its picture, and the tests that were fixed beforehand."""
    seen = _in_order(study, runs_seen(study, results))
    if not seen:
        return ["Nothing has run yet.", ""]
    arms = _that_count(study, seen)
    tables = [*_arm_table(arms), "", *_contrast_table(arms), ""] if arms else []
    draw(study, seen, output / f"{CORRECTION}.png")
    return [
        _answer(arms) if arms else _so_far(study, seen),
        "",
        f"![trainer policy, rollouts, k3]({CORRECTION}.png)",
        "",
        *tables,
        *_pairs(study, seen),
        *_not_run(study, seen),
    ]


def _pairs(study: Study, seen: Runs) -> list[str]:
    """Token TIS against the other arms by seed, to the end and to the step that all saw; noise; the best mean."""
    runs: dict[str, dict[int, Rows]] = {}
    for group, rows in seen:
        runs.setdefault(arm_of(study, group), {})[group.run[1]] = rows
    none, tis, bf16 = (runs.get(arm, {}) for arm in ("int4", "int4, token_tis 2", "bf16"))
    seeds = sorted(none.keys() & tis.keys() & bf16.keys())
    if len(seeds) < 2:
        return []
    common = min(rows[-1]["step"] for arm in (none, tis, bf16) for rows in arm.values())

    def against(other: dict[int, Rows], to: int | None = None) -> Difference:
        return Difference.of_pairs([last_own(tis[seed], to) - last_own(other[seed], to) for seed in seeds])

    further = [
        f" Without a correction seed {seed} has {last_own(rows, common):.2f} there and {last_own(rows):.2f} at its end."
        for seed, rows in none.items()
        if rows[-1]["step"] > common
    ]
    higher = sum(last_own(tis[seed]) > last_own(none[seed]) for seed in seeds)
    best, ends = [max(_means_of_own(none[seed])) for seed in seeds], [last_own(tis[seed]) for seed in seeds]
    steps = [
        float(value)
        for arm in (tis, bf16)
        for rows in arm.values()
        for value in np.diff([row["own_reward"] for row in rows if "own_reward" in row and row["step"] >= SETTLED])
    ]
    noise = float(np.std(steps)) / 2**0.5
    return [
        f"**Paired by seed**, added after the runs. Final reward with token TIS minus none: {against(none)}, higher "
        f"on {higher} of {len(seeds)} seeds. Minus bf16: {against(bf16)}. At step {common}, which every run reached, "
        f"minus none: {against(none, common)}.{''.join(further)} One evaluation has a standard deviation of "
        f"{noise:.2f} (neighbors with TIS and bf16 after step {SETTLED}), a mean of four at least {noise / 2:.3f}. "
        f"The best mean of four evaluations without a correction is {min(best):.2f} to {max(best):.2f}. The last one "
        f"with token TIS is {min(ends):.2f} to {max(ends):.2f}. So at this learning rate stopping in time does not "
        "replace token TIS.",
        "",
    ]


def _means_of_own(rows: Rows) -> list[float]:
    own = own_rewards(rows)
    return [float(np.mean(own[max(0, end - LAST) : end])) for end in range(min(LAST, len(own)), len(own) + 1)]


def protocol(study: Study) -> str:
    """What was fixed before the first run."""
    group = study.groups[0]
    assert isinstance(group, PretrainedGroup)
    return (
        f"Weights in int4, learning rate {group.learning_rate:g}, {group.num_prompts} x {group.samples_per_prompt} "
        f"responses of at most {group.response_length} tokens.\n\n**Fixed before the first run.** A fall counts if it "
        f"begins by step {group.last_fall}. A run that has not fallen by then ends. A run that was stopped counts if "
        f"it reached step {SEEN} or has collapsed. The primary outcome is whether the trainer policy collapses. Its "
        "two contrasts compare no correction with token TIS (cap 2) and with bf16, by Fisher's exact test and Holm. "
        f"The secondary outcomes are the mean of the last {LAST} evaluations of the trainer policy, and the growth of "
        f"k3 from the first ten steps to the last ten by step {SEEN}, by Mann and Whitney's exact test and Holm. The "
        f"growth became an outcome after eight runs at {EARLIER_RATE:g} had shown it. Ten runs at this rate were "
        "stopped at 72 to 91 steps, and ran again with the same seeds. Six seeds an arm were fixed. The first three "
        "were read before the others ran. The arm with a token mask is exploratory."
    )


def details(study: Study, results: Results) -> list[str]:
    """Who warned, every run, and what ran before at another learning rate."""
    seen = _in_order(study, runs_seen(study, results))
    if not seen:
        return _earlier()
    seconds = _seconds(seen)
    heads = [results.machine(each) if results.is_done(each) else rows[0] for each, rows in seen]
    machines = dict.fromkeys(
        f"{head['device']}, sglang {head['sglang']}, torch {head['torch']}, revision {head['revision']}"
        for head in heads
    )
    arms = _that_count(study, seen)
    warnings = [*_warning_table(arms), ""] if arms else []
    return [
        *warnings,
        f"Every run, {seconds:.1f} s a step with two or three runs on each GPU; {'; '.join(machines)}. "
        f"Rollouts, k3, and gradient norm are means of ten steps. The last value of the trainer policy is the mean of "
        f"{LAST} evaluations.",
        "",
        *_run_table(study, seen),
        "",
        *_earlier(),
    ]


def _that_count(study: Study, seen: Runs) -> Arms:
    arms: Arms = {}
    for group, rows in seen:
        if rows[-1]["step"] >= SEEN or verdicts(rows)[1] is not None:
            arms.setdefault(arm_of(study, group), []).append(rows)
    return arms


def _seconds(seen: Runs) -> float:
    return float(np.median([row["seconds"] for _, rows in seen for row in rows]))


def _earlier() -> list[str]:
    """What eight runs at another learning rate say, for which this one was chosen."""
    arms: Arms = {}
    for name, rows in earlier_runs(f"{CORRECTION}_lr{EARLIER_RATE:g}_").items():
        engine, _, method = name.split("-")
        arm = engine if method == "none" else f"{engine}, {method.replace('tis_2', 'tis 2')}"
        arms.setdefault(arm, []).append(rows)
    runs = [rows for of_arm in arms.values() for rows in of_arm]
    parts = []
    for arm, of_arm in arms.items():
        own = ", ".join(f"{last_own(rows):.2f}" for rows in of_arm)
        parts.append(f"{arm} times {', '.join(f'{_growth(rows):.1f}' for rows in of_arm)} (trainer policy {own})")
    return [
        f"**Exploratory: a first attempt at {EARLIER_RATE:g}.** {len(runs)} runs were stopped after "
        f"{min(map(len, runs))} to {max(map(len, runs))} steps; "
        f"{sum(verdicts(rows)[1] is not None for rows in runs)} trainer policies had collapsed. Growth of k3 by then: "
        f"{'; '.join(parts)}.",
        "",
    ]


def _in_order(study: Study, seen: Runs) -> Runs:
    """Arm by arm, as the study names them."""
    order = [arm_of(study, group) for group in study.groups if isinstance(group, PretrainedGroup)]
    return sorted(seen, key=lambda run: (order.index(arm_of(study, run[0])), run[0].run[1]))


def last_own(rows: Rows, to: int | None = None) -> float:
    """Mean of the last evaluations of the trainer policy, at the end or at a step."""
    return float(np.mean(own_rewards([row for row in rows if to is None or row["step"] <= to])[-LAST:]))


def _answer(arms: Arms) -> str:
    """How many of each arm collapsed, and whether that is more than chance."""
    names = {"int4": "without a correction", "int4, token_tis 2": "with token TIS", "bf16": "without mismatch (bf16)"}
    parts = []
    for arm, name in names.items():
        falls = [verdicts(rows)[1] for rows in arms.get(arm, [])]
        at = [step for step in falls if step is not None]
        where = f" (step {', '.join(map(str, sorted(at)))})" if at else ""
        parts.append(f"{name} {len(at)} of {len(falls)}{where}" if falls else f"{name} not run")
    said = f"**Trainer policies that collapsed: {'; '.join(parts)}.**{_falling(arms, names)} {_ends(arms, names)}"
    tested = [(better, p_values) for _, better, _, p_values in contrasts(arms)]
    if any(fisher < 0.05 for _, (fisher, *_) in tested):
        return said + "".join(f" Against {better}: p {fisher:.3f}." for better, (fisher, *_) in tested)
    ran = [pair for pair in CONTRASTS if {*pair} <= {*arms}]
    sizes = dict.fromkeys((len(arms[worse]), len(arms[better])) for worse, better in ran)
    fewest = {size: _falls_needed(*size) for size in sizes}
    enough = [f"{fell} falls of {size[0]}" if fell else f"more than {size[0]} runs" for size, fell in fewest.items()]
    power = f" A contrast needs {' or '.join(enough)}, against none." if enough else ""
    said += f" The primary outcome, whether a correction prevents a collapse, is not resolved.{power}"
    differ = ", ".join(f"against {better} p {own:.3f}" for better, (_, own, _) in tested if own < 0.05)
    return said + (f" The secondary outcome, the final reward, differs: {differ}." if differ else "")


def _falling(arms: Arms, names: dict[str, str]) -> str:
    """Trainer policies below half when their run was stopped, too late to be seen for long enough."""
    found = []
    for arm, name in names.items():
        for rows in arms.get(arm, []):
            _, collapsed = verdicts(rows)
            _, since = verdicts(rows, stays=0)
            if collapsed is None and since is not None:
                found.append(f"one {name}, since step {since}, stopped at {rows[-1]['step']}")
    return f" Below half of R0, but for less than {STAYS} steps: {'; '.join(found)}." if found else ""


def _ends(arms: Arms, names: dict[str, str]) -> str:
    """What the arms came to, whether or not a run fell below half."""
    parts = []
    for arm, name in names.items():
        if arm in arms:
            own, growth = (np.median([of(rows) for rows in arms[arm]]) for of in (last_own, _growth))
            parts.append(f"{name} {own:.2f} (k3 times {growth:.1f})")
    return f"Median final reward of the trainer policy, and growth of k3 by step {SEEN}: {', '.join(parts)}."


def _so_far(study: Study, seen: Runs) -> str:
    """Of runs of which none counts: how k3 grew, which is no outcome."""
    arms: dict[str, list[str]] = {}
    for group, rows in seen:
        arms.setdefault(arm_of(study, group), []).append(f"{_growth(rows):.1f}")
    growth = "; ".join(f"{arm} times {', '.join(times)}" for arm, times in arms.items())
    return (
        f"**No run was seen to step {SEEN}, so nothing is resolved**; by then none had collapsed. How k3 had grown, "
        f"which is no outcome yet: {growth}. `token_tis 2` is token TIS with a cap of 2; "
        "`QWEN` below is the folder of the model."
    )


def _not_run(study: Study, seen: Runs) -> list[str]:
    """What is missing, and what it costs."""
    stopped = [rows for group, rows in seen if not is_over(group, rows)]
    num_missing = len(study.groups) - len(seen)
    if not (stopped or num_missing):
        return []
    group = seen[0][0]
    minutes = -(-(len(stopped) + num_missing) // AT_ONCE) * (group.last_fall + 1) * _seconds(seen) / 60
    lines = []
    if num_missing:
        lines.append(f"{num_missing} of {len(study.groups)} runs")
    if stopped:
        lasted = sorted({len(rows) for rows in stopped})
        to = f" to {lasted[-1]}" if lasted[1:] else ""
        lines.append(f"the rest of {len(stopped)} that stopped after {lasted[0]}{to} steps")
    cost = f"They take four GPUs {minutes:.0f} minutes, two runs on each."
    return [f"**Not run**: {', and '.join(lines)}. {cost}", ""]


def _growth(rows: Rows) -> float:
    return mean_of(rows[: SEEN + 1][-WINDOW:], "k3") / mean_of(rows[:WINDOW], "k3")


def _arm_table(arms: Arms) -> list[str]:
    lines = [
        "| arm | runs | trainer policy collapsed | rollouts collapsed "
        "| final reward of the trainer policy: median, each "
        f"| k3, first and last: medians; growth of each by step {SEEN} |",
        "|---" * 6 + "|",
    ]
    for arm, runs in arms.items():
        falls, ends = [verdicts(rows) for rows in runs], [last_own(rows) for rows in runs]
        cells = [arm, str(len(runs))]
        cells += [f"{sum(fall[which] is not None for fall in falls)} of {len(runs)}" for which in (1, 0)]
        cells.append(f"{np.median(ends):.2f}: {', '.join(f'{end:.2f}' for end in ends)}")
        first, last = ([mean_of(rows[part], "k3") for rows in runs] for part in (slice(WINDOW), slice(-WINDOW, None)))
        times = ", ".join(f"{_growth(rows):.1f}" for rows in runs)
        cells.append(f"{np.median(first):.1e} to {np.median(last):.1e}: times {times}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def contrasts(arms: Arms) -> list[tuple[str, str, list[int], list[float]]]:
    """Of those that ran: both arms, how many of each collapsed, and p of all tests after Holm's correction."""
    ran = [(worse, better) for worse, better in CONTRASTS if worse in arms and better in arms]
    found = [([[verdicts(rows)[1] is not None for rows in arms[arm]] for arm in pair]) for pair in ran]
    tables = [[[sum(fell), len(fell) - sum(fell)] for fell in both] for both in found]
    fisher = [_fisher(table) for table in tables]
    last, growth = (
        [_rank_test(*([outcome(rows) for rows in arms[arm]] for arm in pair)) for pair in ran]
        for outcome in (last_own, _growth)
    )
    # One that has not run is one of the two all the same.
    missing = [1.0] * (len(CONTRASTS) - len(ran))
    corrected = [holm([*p_values, *missing])[: len(ran)] for p_values in (fisher, last, growth)]
    return [
        (*pair, [row[0] for row in table], [*p_values])
        for pair, table, *p_values in zip(ran, tables, *corrected, strict=True)
    ]


def _fisher(table: list[list[int]]) -> float:
    return float(stats.fisher_exact(table).pvalue)


def _falls_needed(number: int, others: int) -> int:
    """Of so many runs, for a p below 0.05 where none of the others falls; 0: all are not enough."""
    for fell in range(1, number + 1):
        if len(CONTRASTS) * _fisher([[fell, number - fell], [0, others]]) < 0.05:
            return fell
    return 0


def _rank_test(first: list[float], second: list[float]) -> float:
    return float(stats.mannwhitneyu(first, second, method="exact").pvalue)


def _contrast_table(arms: Arms) -> list[str]:
    lines = [
        "| contrast | trainer policies that collapsed | p (Fisher, Holm) | final reward | p (ranks, Holm) "
        "| growth of k3 | p (ranks, Holm) |",
        "|---" * 7 + "|",
    ]
    for worse, better, fell, (fisher, last, growth) in contrasts(arms):
        pair = worse, better
        counts = " against ".join(f"{count} of {len(arms[arm])}" for arm, count in zip(pair, fell, strict=True))
        ends = " against ".join(f"{np.median([last_own(rows) for rows in arms[arm]]):.2f}" for arm in pair)
        times = " against ".join(f"{np.median([_growth(rows) for rows in arms[arm]]):.1f}" for arm in pair)
        cells = counts, f"{fisher:.3f}", ends, f"{last:.3f}", times, f"{growth:.3f}"
        lines.append(f"| {worse} against {better} | {' | '.join(cells)} |")
    return lines


def leads(arms: Arms, name: str, limit: Limit) -> tuple[list[int | None], dict[str, tuple[int, int]]]:
    """How many steps before a fall a metric warned, None where it did not; and by arm how many that stood it warned of.

    The fall is that of the rollouts or of the trainer policy, whichever came first.
    """
    found: list[int | None] = []
    alarms: dict[str, tuple[int, int]] = {}
    for arm, runs in arms.items():
        for rows in runs:
            falls = [at for at in verdicts(rows) if at is not None]
            crossed = first_crossing([row[name] for row in rows], limit)
            if falls:
                found.append(min(falls) - crossed if crossed is not None and crossed <= min(falls) else None)
            else:
                false, stood = alarms.get(arm, (0, 0))
                alarms[arm] = false + (crossed is not None), stood + 1
    return found, alarms


def _warning_table(arms: Arms) -> list[str]:
    lost = [max(_means_of_own(rows)) - last_own(rows) for rows in arms.get("int4", [])]
    loss = f" (without a correction by {min(lost):.2f} to {max(lost):.2f})" if lost else ""
    lines = [
        "**Which metric warned first.** A metric warns when its mean of five steps first crosses a limit. A run *fell* "
        "if its trainer policy or its rollouts collapsed. In a run that did not fall, the warning is false, or the run "
        f"ended before its fall, or the loss was smaller: the trainer policy may end below its best mean of {LAST} "
        f"evaluations{loss}. The limits were fixed after the ladder and before these runs.",
        "",
        "| metric | runs that fell: warned before | steps before the fall: median, each | other runs: warnings |",
        "|---" * 4 + "|",
    ]
    for name, text, limit in (*WARNINGS, RAISED):
        found, alarms = leads(arms, name, limit)
        ahead = sorted((lead for lead in found if lead is not None), reverse=True)
        each = f"{np.median(ahead):.0f}: {', '.join(map(str, ahead))}" if ahead else ""
        false = "; ".join(f"{arm}: {count} of {stood}" for arm, (count, stood) in alarms.items())
        lines.append(f"| {text} | {len(ahead)} of {len(found)} | {each} | {false} |")
    return lines


def _run_table(study: Study, seen: Runs) -> list[str]:
    lines = [
        "| arm, seed | steps | trainer policy, first, best, last | rollouts | k3 | gradient norm "
        "| collapsed: trainer policy, rollouts |",
        "|---" * 7 + "|",
    ]
    for group, rows in seen:
        own = own_rewards(rows)
        cells = [label_of(study, group), steps_seen(group, rows), f"{own[0]:.2f}, {max(own):.2f}, {last_own(rows):.2f}"]
        cells += [ends_of(rows, "reward", ".2f"), ends_of(rows, "k3", ".1e"), ends_of(rows, "grad_norm", ".2f")]
        cells.append(_falls(rows))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _falls(rows: Sequence[dict[str, Any]]) -> str:
    """Where trainer policy and rollouts collapsed, or have been below half since, not seen for long enough."""
    found = []
    for at, since in zip(verdicts(rows)[::-1], verdicts(rows, stays=0)[::-1], strict=True):
        found.append(f"**step {at}**" if at is not None else "no" if since is None else f"below half since {since}")
    return ", ".join(found)
