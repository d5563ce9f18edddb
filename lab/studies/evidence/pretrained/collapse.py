"""A collapse that anybody can reproduce on one GPU: the studies, the rule that says what collapsed, and their page.

The model has 1.5 billion weights and thinks in steps: Qwen2.5-Coder-1.5B-Instruct. Its questions are prepared
beforehand, and lie among the results:

    python examples/questions/prepare.py gsm_symbolic 4096 lab/evidence/results/gsm_symbolic.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evidence.group import Group, Method
from evidence.results import Results
from evidence.study import NONE, Study

from .group import PretrainedGroup, runs_of
from .studies import BF16, token_tis

# Of runs before any study: a line per step, with engine, method and reward.
FIRST_LOOK = Path(__file__).parents[3] / "evidence" / "first_look.jsonl"
STOPPED = FIRST_LOOK.with_name("collapse_stopped.jsonl")
"""Every step of runs whose machine had to be given back; their state did not come back, so they begin anew."""
# Steps of a mean, and for how many more steps it stays below half.
WINDOW, STAYS = 10, 20
PAGE, LADDER = "collapse", "collapse_ladder"

_QWEN = PretrainedGroup(
    name="collapse",
    model="Qwen2.5-Coder-1.5B-Instruct",
    task="prepared:gsm_symbolic.json",
    engine=BF16,
    methods=(NONE,),
    seeds=(1,),
    num_steps=150,
    num_prompts=16,
    response_length=640,
    max_prompt=192,
    max_tokens=4096,
    num_evaluated=128,
    evaluates_in_engine=True,
    num_dumped=32,
    dump_steps=(0, 149),
)
_FIRST_ROLLOUT = {
    "num_steps": 1,
    "updates": 0,
    "num_evaluated": 1,
    "evaluates_in_engine": False,
    "dump_steps": (0,),
}
# Those that one engine serves come first, and what may fail last: numbers above 65,504 end a process with float16. A
# scale of 4 for keys and values leaves numbers of 8 bits as coarse as they are, unless they are too large.
_ENGINES = {
    "bf16": (BF16, "bfloat16"),
    **{f"mantissa_{bits}": (replace(BF16, weights=f"mantissa_{bits}"), "bfloat16") for bits in (3, 2, 1, 4, 5)},
    "int4": (replace(BF16, weights="int4"), "bfloat16"),
    "e4m3_weights": (replace(BF16, weights="fp8_e4m3"), "bfloat16"),
    "fp8_products": (replace(BF16, weights="fp8_blocks"), "bfloat16"),
    "e4m3_cache": (replace(BF16, cache="fp8_e4m3"), "bfloat16"),
    "e5m2_cache": (replace(BF16, cache="fp8_e5m2"), "bfloat16"),
    "e4m3_cache_scale_4": (replace(BF16, cache="fp8_e4m3", cache_scale=4.0), "bfloat16"),
    "e5m2_cache_scale_4": (replace(BF16, cache="fp8_e5m2", cache_scale=4.0), "bfloat16"),
    "fp16": (replace(BF16, dtype="float16"), "float16"),
}


def _atlas(name: str, **size: Any) -> Study:
    """The first rollout of every engine."""
    group = replace(_QWEN, name=name, **_FIRST_ROLLOUT, **size)
    groups = [
        replace(group, name=f"{name}_{setting}", engine=engine, dtype=dtype)
        for setting, (engine, dtype) in _ENGINES.items()
    ]
    question = f"Which mismatch does each engine have before any training: {group.model}?"
    return Study(name=name, question=question, groups=runs_of(groups))


# The most hopeful first: a GPU finishes one of them in a quarter of an hour.
_RATES = [
    (2e-6, {}),
    (5e-6, {}),
    (2e-6, {"divides_advantages": False}),
    (1e-6, {}),
    # Answers that are wrong gain nothing by their length.
    (5e-6, {"divides_advantages": False, "per_token_loss": True}),
    (2e-6, {"response_length": 1024}),
    (5e-6, {"divides_advantages": False}),
    (5e-6, {"response_length": 1024}),
    (5e-6, {"divides_advantages": False, "response_length": 1024}),
    (1e-6, {"response_length": 1024}),
]


def _stable(rate: float, changes: dict[str, Any]) -> PretrainedGroup:
    group = replace(_QWEN, learning_rate=rate, **changes)
    name = f"collapse_stable_lr{rate:g}_{group.response_length}"
    name += "" if group.divides_advantages else "_undivided"
    return replace(group, name=name + ("_per_token" if group.per_token_loss else ""))


# The ladder, fixed before any of its runs. Primary: the trainer's own policy on held-out questions, whether it
# collapses within 150 steps (collapsed_at); rollouts are judged apart. Both seeds of bf16 must stand. What falls on
# both seeds while bf16 stands fell of the mismatch; with two seeds nothing is tested.
#
# Of the rates 2e-6 and 5e-6, at which bf16 did not fall in 56 steps, 2e-6: with 1e-5 the first e4m3 cache lost its
# reward after 17 steps and bf16 after 44, a sum of rates of 1.7e-4 and of 4.4e-4, and 150 steps of 2e-6 are 3.0e-4: the
# longest chance to fall before what fells bf16. At 5e-6 answers of bf16 had grown from 305 to 384 tokens in 50 steps.
#
# The first eight begin together. The others take the place of runs that have collapsed.
_LADDER_RATE = 2e-6


def _rung(setting: str, *methods: Method) -> PretrainedGroup:
    engine, dtype = _ENGINES[setting]
    changes = {"learning_rate": _LADDER_RATE, "engine": engine, "dtype": dtype, "stops_collapsed": True}
    return replace(_QWEN, name=f"{LADDER}_{setting}", methods=methods or (NONE,), seeds=(1, 2), **changes)


COLLAPSE_STUDIES = (
    _atlas("collapse_atlas", num_prompts=24, response_length=768, num_dumped=192),
    _atlas(
        "collapse_atlas_small",
        model="SmolLM2-135M-Instruct",
        task="arithmetic_steps",
        max_prompt=96,
        num_prompts=64,
        response_length=256,
        num_dumped=512,
        max_tokens=32768,
    ),
    Study(
        name="collapse_stable",
        question="At which learning rate and length does a run without mismatch stay stable, and learn?",
        groups=runs_of([_stable(*each) for each in _RATES]),
    ),
    Study(
        name=LADDER,
        question="From which mismatch on does an uncorrected run collapse, where one without mismatch does not?",
        groups=(
            *runs_of([_rung(setting) for setting in ("bf16", "e4m3_cache", "mantissa_1", "int4")]),
            *runs_of([_rung("e4m3_cache", token_tis(2.0)), _rung("mantissa_2")]),
        ),
    ),
)


def collapsed_at(
    steps: Sequence[int], rewards: Sequence[float], *, untrained: float | None = None, window: int = WINDOW
) -> int | None:
    """The step at which a run collapsed, None if it did not as far as it was seen.

    There the mean of ten steps falls below half of R0, and stays there for 20 steps more. R0 is the reward of the
    untrained policy on the same engine, or the best mean of ten steps since, whichever is higher.

    Args:
        steps: In order, of rollouts or of evaluations.
        rewards: Their rewards.
        untrained: Reward before any training; the first one where nobody says.
        window: Steps of a mean; an evaluation of the own policy every so many steps stands for itself.
    """
    step_N, reward_N = np.asarray(steps), np.asarray(rewards, dtype=np.float64)
    highest = float(reward_N[0]) if untrained is None else untrained
    mean_N = np.array([reward_N[(step_N > step - window) & (step_N <= step)].mean() for step in step_N])
    is_whole_N = step_N >= step_N[0] + window - np.diff(step_N, append=step_N[-1] + 1)[0]
    for step, mean in zip(step_N[is_whole_N], mean_N[is_whole_N], strict=True):
        stays = mean_N[(step_N >= step) & (step_N <= step + STAYS)]
        if step_N[-1] >= step + STAYS and (stays < highest / 2).all():
            return int(step)
        highest = max(highest, float(mean))
    return None


def has_collapsed(rows: Sequence[dict[str, Any]]) -> bool:
    """Whether rollouts and own policy of a run have both collapsed."""
    return None not in _verdicts(rows)


def _verdicts(rows: Sequence[dict[str, Any]]) -> list[int | None]:
    """Where rollouts and own policy collapsed."""
    found = []
    for name in ("reward", "own_reward"):
        series = {row["step"]: row[name] for row in rows if name in row}
        found.append(collapsed_at([*series], [*series.values()], window=WINDOW) if series else None)
    return found


def report(results: Results, output: Path) -> None:
    """Write ``collapse.md`` of what ran."""
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
            for study in COLLAPSE_STUDIES
        ),
        "bash lab/studies/evidence.sh report",
        "```",
        "",
        f"A run **collapsed** if the mean of {WINDOW} steps falls below half of R0 and stays there for {STAYS} steps. "
        f"R0 is the reward of the untrained policy on the same engine, or the best mean of {WINDOW} steps since, "
        "whichever is higher. Rollouts and the trainer's own policy, evaluated every ten steps on held-out questions, "
        "are judged apart. Where the engine has the trainer's dtype, it evaluates, with weights that are not rounded.",
        "",
        "## The mismatch before any training",
        "",
        "An engine whose reward is below half of bf16's has a fault, not a mismatch.",
    ]
    for study in COLLAPSE_STUDIES[:2]:
        lines += ["", *_atlas_table(study, results)]
    lines += ["", "## Where a run without mismatch is stable", "", *_stable_table(COLLAPSE_STUDIES[2], results)]
    lines += ["", "## First runs", "", *_first_look()]
    path = output / f"{PAGE}.md"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(path)


def _atlas_table(study: Study, results: Results) -> list[str]:
    done = [group for group in study.groups if results.is_done(group)]
    title = f"**{study.groups[0].model}**"
    if not done:
        return [f"{title}: nothing has run yet."]
    machine = results.machine(done[0])
    revisions = sorted({str(results.machine(group).get("revision", "unknown")) for group in done})
    lines = [
        f"{title} ([more]({study.name}.md)), {len(done)} of {len(study.groups)} engines. {machine['device']}, sglang "
        f"{machine.get('sglang', 'none')}, revision {', '.join(revisions)}."
    ]
    names = "engine | reward | length | k3 | mean abs d | largest ratio | ratio > 2 | ratio < 1/2 | sequence ESS"
    names += " | k3 where p < 0.1 | 0.1 to 0.6 | above 0.6 | k3 of tokens 1 to 32 | to 128 | later"
    lines += ["", f"| {names} |", "|---" * 15 + "|"]
    for group in done:
        (row,) = results.rows(group)
        forms = {"reward": ".3f", "length": ".0f", "k3": ".1e", "abs_diff": ".1e", "ratio_max": ".3g", "above_2": ".1e"}
        forms |= {"below_half": ".1e", "ess_sequence": ".2f"}
        cells = [
            group.condition.removeprefix(f"{study.name}_"),
            *(f"{row[name]:{form}}" for name, form in forms.items()),
        ]
        lines.append(f"| {' | '.join([*cells, *_where(results.log_probs(group)['step0'])])} |")
    return lines


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
    unfinished, stopped = results.unfinished(study.groups)
    runs = [(group, results.rows(group)) for group in study.groups if results.is_done(group)]
    runs += [(group, unfinished.rows(group)) for group in stopped]
    earlier = {name: [*rows] for name, rows in groupby(_lines(STOPPED), key=itemgetter("run"))}
    left = {group.name: group for group in study.groups if group not in [shown for shown, _ in runs]}
    runs += [(left[name], rows) for name, rows in earlier.items() if name in left]
    if not runs:
        return ["Nothing has run yet."]
    lines = [
        "Runs that had to stop say nothing of the steps that they lack, nor does one seed of learning rates that are "
        "so close: the standard error of an evaluation of the own policy (128 questions) is 0.04.",
        "",
        "| run | steps | reward of rollouts, first and last ten steps | own policy, first, best, last | length "
        "| largest gradient norm | k3 | collapsed: rollouts, own policy | seconds a step |",
        "|---" * 9 + "|",
    ]
    for group, rows in runs:
        lines.append(
            f"| {group.name.removeprefix(f'{study.name}_')} | {len(rows)} of {group.num_steps} | {_run(group, rows)} |"
        )
    return lines


def _run(group: Group, rows: Sequence[dict[str, Any]]) -> str:
    own = {row["step"]: row["own_reward"] for row in rows if "own_reward" in row}
    ends = [rows[:WINDOW], rows[-WINDOW:]]

    def both(name: str, form: str) -> str:
        return " to ".join(f"{np.mean([row[name] for row in part]):{form}}" for part in ends)

    cells = [both("reward", ".3f")]
    cells.append(
        ", ".join(f"{value:.3f}" for value in (own[min(own)], max(own.values()), own[max(own)])) if own else ""
    )
    cells += [both("length", ".0f"), f"{max(row['grad_norm'] for row in rows):.2f}", both("k3", ".1e")]
    cells.append(", ".join("no" if at is None else f"step {at}" for at in _verdicts(rows)))
    cells.append(f"{np.median([row['seconds'] for row in rows]):.1f}")
    return " | ".join(cells)


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
