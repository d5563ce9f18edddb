# SPDX-License-Identifier: Apache-2.0
"""A page and a plot per study of a pretrained model: the floor first, then what is above it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from numpy.typing import NDArray
from scipy import stats

from evidence import mismatch
from evidence.ensemble import Row
from evidence.outcomes import Condition, Difference, holm
from evidence.pictures import save
from evidence.results import Results
from evidence.study import NONE, TOKEN_MASK, TOKEN_TIS, Study
from mis_ext.checks.token_sums import QUANTISED_K3

from .group import PretrainedGroup
from .studies import AGAIN, BF16

FIRST_EVALUATIONS, LAST_EVALUATIONS = 5, 4
SMALLEST_MARGIN = 0.02
# With more noise or less to learn nothing would be seen.
LARGEST_NOISE, SMALLEST_GAIN = 0.04, 0.1
FIRST_STEPS, LAST_STEPS = slice(0, 5), slice(-10, None)
# Of numbers that are shown at first and at the end.
FORMS = {"reward": ".3f", "k3": ".1e", "ess_sequence": ".2f", "length": ".0f", "entropy": ".2f"}
# Of a run: its last evaluations are not so much above its first, its reward ends so much below its best ten steps, or
# its last evaluation so much below its best one: three standard errors of 256 answers.
RISE, FALL, OWN_FALL = 0.1, 0.2, 0.1
# A run got worse whose last evaluation is so much below its best one. What may warn of it is the mean of so many steps
# before the last evaluation but one.
WORSE, STEPS_BEFORE = 0.05, 15
FEWEST_WORSE = 3
# Learned is what so many rollouts in a row earn on average; there is nothing to learn from LEARNED_ALL on.
LEARNED, LEARNED_ALL, STEPS_OF_A_MEAN = 0.9, 0.99, 5
# On the way there, of the own policy.
LEVELS = (0.25, 0.5, 0.7, 0.8)
# From where on a ratio is unusual: docs/guide/watch.md.
UNUSUAL_RATIO = 100
WARNINGS = ("k3", "abs_diff", "ess_sequence", "above_2", "below_half", "ratio_max", "grad_norm", "entropy", "length")


def report(studies: Iterable[Study], results: Results, output: Path) -> None:
    """Write ``STUDY.md`` of each study of which anything ran, and ``STUDY.png`` of its finished runs."""
    output.mkdir(parents=True, exist_ok=True)
    for study in studies:
        done = [group for group in study.groups if results.is_done(group)]
        found, stopped = results.unfinished(study.groups)
        if not done and not stopped:
            print(f"{study.name}: nothing has run")
            continue
        head, where = (done, results) if done else (stopped, found)
        title = study.question.replace(head[0].model, _model_of(head[0], where))
        lines = [f"# {title}", "", *_header(study, head, where, missing=len(study.groups) - len(done))]
        if done:
            lines += _finished(study, done, results, output)
        if stopped:
            lines += ["", "## Stopped before their last step", "", *_stopped(stopped, found)]
        page = output / f"{study.name}.md"
        page.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(page)


def final(own_reward: np.ndarray[Any, Any]) -> float:
    """Mean of the last evaluations."""
    return float(own_reward[~np.isnan(own_reward)][-LAST_EVALUATIONS:].mean())


def of_all(own_reward: np.ndarray[Any, Any]) -> float:
    """Mean of all evaluations: who learns sooner has more, also where all end alike."""
    return float(np.nanmean(own_reward))


# Of a run's evaluations, NaN at the steps without one.
Outcome = Callable[[np.ndarray[Any, Any]], float]


@dataclass(frozen=True)
class Arms:
    """The runs of one setting, and what is compared: the trainer's own policy, mean of the last evaluations."""

    condition: Condition

    def outcome(self, method: str, of: Outcome = final) -> dict[int, float]:
        """By seed: the last evaluations, or another outcome of them."""
        return {seed: of(curves["own_reward"]) for seed, curves in self.condition.curves[method].items()}

    def against_none(self, method: str, of: Outcome = final) -> Difference:
        """Paired by seed."""
        return Difference.of_pairs(self._pairs(method, of))

    def floor(self) -> Difference | None:
        """What chance alone does: the uncorrected arm a second time, with other random numbers."""
        return self.against_none(AGAIN.name) if AGAIN.name in self.condition.curves else None

    def gain(self) -> float:
        """Of the uncorrected runs, from their first evaluation to the last ones."""
        evaluated = [curves["own_reward"] for curves in self.condition.curves[self.condition.base].values()]
        return float(np.mean([final(curve) - curve[~np.isnan(curve)][0] for curve in evaluated]))

    def margin(self) -> float:
        """Smaller differences are none; unbounded while nobody knows the floor."""
        floor = self.floor()
        return math.inf if floor is None else max(SMALLEST_MARGIN, (floor.high - floor.low) / 2)

    def tokens(self) -> Difference | None:
        """Token TIS and the token mask together against both uncorrected arms: twice the runs on each side."""
        arms = [[TOKEN_TIS.name, TOKEN_MASK.name], [self.condition.base, AGAIN.name]]
        if not all(name in self.condition.curves for names in arms for name in names):
            return None
        corrected, uncorrected = ([self.outcome(name) for name in names] for names in arms)
        seeds = set.intersection(*map(set, corrected + uncorrected))
        means = [[np.mean([run[seed] for run in runs]) for seed in seeds] for runs in (corrected, uncorrected)]
        return Difference.of_pairs([float(ours - none) for ours, none in zip(*means, strict=True)])

    def holm(self) -> dict[str, float]:
        """P of each method against none (paired t-test), corrected for their number."""
        compared = [name for name in self.condition.curves if name not in (self.condition.base, AGAIN.name)]
        p_values = {name: each.p_value for name in compared if (each := self.against_none(name)).num_pairs > 1}
        return dict(zip(p_values, holm([*p_values.values()]), strict=True))

    def verdict(self, method: str) -> str:
        """Above the floor, within it, or not resolved."""
        difference, margin = self.against_none(method), self.margin()
        if math.isinf(margin):
            return "no floor"
        return difference.verdict(margin, self.holm().get(method, 1.0))

    def failed(self, method: str) -> int:
        """Runs that never rose, or of which one of the two curves fell."""
        return sum(has_failed(curves) for curves in self.condition.curves[method].values())

    def declines(self, method: str) -> list[float]:
        """From the best evaluation of each run to its last one."""
        return [decline(curves["own_reward"]) for curves in self.condition.curves[method].values()]

    def warnings(self) -> dict[str, tuple[float, float]]:
        """Of the uncorrected runs, the rank correlation of each number, before the end, with the decline, and its p."""
        names = [name for name in (self.condition.base, AGAIN.name) if name in self.condition.curves]
        runs = [curves for name in names for curves in self.condition.curves[name].values()]
        declines = [decline(curves["own_reward"]) for curves in runs]
        found = {}
        for number in WARNINGS:
            if all(number in curves for curves in runs):
                correlation = stats.spearmanr([before_the_end(curves, number) for curves in runs], declines)
                found[number] = float(correlation.statistic), float(correlation.pvalue)
        return found

    def pairs_with(self, other: Arms, of: Outcome = final) -> list[float]:
        """Uncorrected runs against another setting's, one number per seed that both have."""
        ours, theirs = self.outcome(self.condition.base, of), other.outcome(other.condition.base, of)
        return [ours[seed] - theirs[seed] for seed in ours if seed in theirs]

    def _pairs(self, method: str, of: Outcome = final) -> list[float]:
        ours, none = self.outcome(method, of), self.outcome(self.condition.base, of)
        return [ours[seed] - none[seed] for seed in ours if seed in none]


def steps_to_learn(reward: np.ndarray[Any, Any]) -> int | None:
    """After how many rollouts the next ones earn enough; None: they never do."""
    smooth = np.convolve(reward, np.ones(STEPS_OF_A_MEAN) / STEPS_OF_A_MEAN, "valid")
    learned = np.flatnonzero(smooth > LEARNED)
    return int(learned[0]) if len(learned) else None


def decline(own_reward: np.ndarray[Any, Any]) -> float:
    """From the best evaluation to the last one."""
    evaluated = own_reward[~np.isnan(own_reward)]
    return float(evaluated.max() - evaluated[-1])


def before_the_end(curves: dict[str, np.ndarray[Any, Any]], number: str) -> float:
    """The mean of a number over the steps before the last evaluation but one."""
    end = np.flatnonzero(~np.isnan(curves["own_reward"]))[-2]
    return float(curves[number][max(0, end - STEPS_BEFORE) : end].mean())


def has_failed(curves: dict[str, np.ndarray[Any, Any]]) -> bool:
    """Whether a run never rose, or its rollouts or its own policy fell: each can stay up while the other falls."""
    evaluated = curves["own_reward"][~np.isnan(curves["own_reward"])]
    smooth = np.convolve(curves["reward"], np.ones(10) / 10, "valid") if len(curves["reward"]) >= 10 else evaluated
    never_rose = final(evaluated) < evaluated[0] + RISE
    return bool(never_rose or smooth.max() - smooth[-1] > FALL or decline(evaluated) > OWN_FALL)


def _finished(study: Study, done: Sequence[Any], results: Results, output: Path) -> list[str]:
    groups: dict[str, list[PretrainedGroup]] = {}
    for group in done:
        groups.setdefault(group.condition, []).append(group)
    rows: dict[str, list[Row]] = {
        name: [row for group in _by_method(of_condition, study) for row in results.rows(group)]
        for name, of_condition in groups.items()
    }
    arms = {name: Arms(Condition.of_rows(name, of_condition)) for name, of_condition in rows.items()}
    lines: list[str] = []
    if _is_trained(study):
        if any(found.floor() for found in arms.values()):
            lines += ["", "## Floor", "", *_floors(arms)]
        firsts = {name: of_condition[0] for name, of_condition in groups.items()}
        lines += _between_settings(firsts, arms) + _best_rates(firsts, arms)
        for name, found in arms.items():
            lines += ["", f"## {name}", "", *_condition(groups[name][0], found)]
    ages = [line for name, found in arms.items() for line in _ages(name, found)]
    if ages:
        lines += [
            "",
            "## k3 by age of the weights",
            "",
            "| setting | age | k3 | k3 for each step of age |",
            "|---|---|---|---|",
        ]
        lines += ages
    lines += mismatch.section(study.name, mismatch.of_groups(done, results), output)
    if _is_trained(study):
        lines += ["", f"![all seeds]({study.name}.png)"]
        _plot(arms, output / f"{study.name}.png")
    return lines


def _by_method(groups: list[PretrainedGroup], study: Study) -> list[PretrainedGroup]:
    """In the study's order of methods, the uncorrected one first."""
    order = list(dict.fromkeys(group.methods[0].name for group in study.groups))
    return sorted(groups, key=lambda group: order.index(group.methods[0].name))


def _stopped(groups: Sequence[PretrainedGroup], results: Results) -> list[str]:
    """How far each got, and what it was like at first and at the end; no comparison has them."""
    lines = [
        "In no comparison above. Means of the first five and of the last ten steps; own policy: first, best and last "
        "evaluation.",
        "",
        "| run | steps | own policy | reward of rollouts | k3 | sequence ESS | tokens | entropy, nats |",
        "|---" * 8 + "|",
    ]
    for group in groups:
        rows = results.rows(group)
        own = [row["own_reward"] for row in rows if "own_reward" in row]
        cells = [group.name, f"{len(rows)} of {group.num_steps}", f"{own[0]:.3f}, {max(own):.3f}, {own[-1]:.3f}"]
        for number, form in FORMS.items():
            ends = (np.mean([row[number] for row in part]) for part in (rows[FIRST_STEPS], rows[LAST_STEPS]))
            cells.append(" to ".join(f"{mean:{form}}" for mean in ends))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _model_of(group: PretrainedGroup, results: Results) -> str:
    """The folder that was given, which need not be that of the study's model."""
    return str(results.machine(group).get("model", group.model))


def _header(study: Study, done: Sequence[PretrainedGroup], results: Results, *, missing: int) -> list[str]:
    group, machine = done[0], results.machine(done[0])
    revisions = sorted({str(results.machine(group).get("revision", "unknown")) for group in done})
    shown = {name: value for name, value in machine.items() if name not in ("revision", "model")}
    dtypes = dict.fromkeys(group.dtype for group in done)
    lines = [
        f"`python lab/studies/evidence.py run {study.name} --model FOLDER`, then `report`.",
        f"{', '.join(f'{name} {value}' for name, value in shown.items())}; revision {', '.join(revisions)}.",
        "",
        f"{_model_of(group, results)}, questions: {group.task}. {group.num_steps} "
        f"rollout{'s' if group.num_steps > 1 else ''} of {group.num_prompts} x "
        f"{group.samples_per_prompt} answers of at most {group.response_length} tokens, {group.updates or 'no'} "
        f"optimizer step{'s' if group.updates != 1 else ''} each. Trainer: Megatron-Core, {', '.join(dtypes)}; weights "
        "of 16 bits with a copy in float32.",
    ]
    if _is_trained(study):
        lines += [
            f"Compared is the reward of the trainer's own policy on {group.num_evaluated} held-out questions, mean of "
            f"the last {LAST_EVALUATIONS} evaluations. Differences are paired by seed, with 95 % intervals; p after "
            "Holm. The mean of all evaluations, without a verdict, shows who learns sooner where all end alike.",
            f"Failed: the last evaluations are less than {RISE:g} above the first, the reward of rollouts ends more "
            f"than {FALL:g} below its best ten steps, or the last evaluation is more than {OWN_FALL:g} below the best. "
            f"Worse: the last evaluation is more than {WORSE:g} below the best.",
        ]
    mixtures = dict.fromkeys((group.experts, group.expert_noise) for group in done if group.experts)
    lines += [
        f"The mixture has {count} experts in every layer, of which a token uses two: copies of the dense layer with "
        f"noise of {noise:g} standard deviations. Routers are drawn at random, and the trainer's compute in float32."
        for count, noise in mixtures
    ]
    return lines + ([f"**{missing} of {len(study.groups)} runs are missing.**"] if missing else [])


def _is_trained(study: Study) -> bool:
    """Whether there is more than the mismatch of a first rollout."""
    return any(group.num_steps > 1 for group in study.groups)


def _floors(arms: dict[str, Arms]) -> list[str]:
    """None against none, what is learned, and whether that is enough to see anything above."""
    lines = [
        f"Fit for a study: a margin of {LARGEST_NOISE:g} or less, and a gain of {SMALLEST_GAIN:g} or more.",
        "",
        "| setting | seeds | none again against none | largest | margin of no difference "
        f"| seeds for a margin of {SMALLEST_MARGIN:g} | gain of the own policy | fit |",
        "|---" * 8 + "|",
    ]
    for name, found in arms.items():
        if (floor := found.floor()) is None:
            continue
        pairs = found._pairs(AGAIN.name)
        margin, gain = found.margin(), found.gain()
        is_fit = margin <= LARGEST_NOISE and gain >= SMALLEST_GAIN
        cells = [name, str(floor.num_pairs), str(floor), f"{max(map(abs, pairs)):.3f}", f"{margin:.3f}"]
        cells += [str(needed_seeds(pairs) or ""), f"{gain:+.3f}", "yes" if is_fit else "no"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def needed_seeds(pairs: Sequence[float]) -> int | None:
    """So many seeds have an interval of none against none within the smallest margin; None where nobody can say."""
    if len(pairs) < 2:
        return None
    spread = float(np.std(pairs, ddof=1))
    counts = range(2, 1001)
    return next((n for n in counts if stats.t.ppf(0.975, n - 1) * spread / math.sqrt(n) <= SMALLEST_MARGIN), None)


def _between_settings(groups: dict[str, PretrainedGroup], arms: dict[str, Arms]) -> list[str]:
    """Uncorrected runs of each engine and trainer against those in bf16, which are the same but for that."""
    settings: dict[str, dict[str, PretrainedGroup]] = {}
    for name, group in groups.items():
        alike = {"name": "", "engine": BF16, "dtype": "", "methods": (NONE,), "seeds": (1,)}
        alike |= {"simulated_cache": "", "is_aligned": False, "rounded_to": "", "is_dithered": False}
        alike |= {"evaluates_in_engine": False}
        settings.setdefault(repr(dataclasses.replace(group, **alike)), {})[name] = group
    lines: list[str] = []
    for alike in settings.values():
        reference = next((name for name, group in alike.items() if _is_plain(group, "bfloat16")), None)
        if reference is None or len(alike) < 2:
            continue
        others = [name for name, group in alike.items() if _is_plain(group, "float16")]
        lines += [
            "",
            "## Without a correction, setting against setting",
            "",
            f"Paired by seed with {reference}; p after Holm for these rows. Own policy: mean of the last "
            f"{LAST_EVALUATIONS} evaluations. Learned: steps until {STEPS_OF_A_MEAN} rollouts earn more than "
            f"{LEARNED:g}.",
            "",
            f"| setting | seeds | own policy | against {reference} | p | all evaluations "
            + "".join(f"| against {other} " for other in others)
            + f"| the first {FIRST_EVALUATIONS} | reaches {', '.join(f'{level:g}' for level in LEVELS)} at step "
            "| k3 | learned | seconds of training, of sampling, a step |",
            "|---" * (11 + len(others)) + "|",
        ]
        against = {
            name: Difference.of_pairs(arms[name].pairs_with(arms[reference])) for name in alike if name != reference
        }
        adjusted = dict(zip(against, holm([each.p_value for each in against.values()]), strict=True))
        for name in alike:
            found = arms[name]
            base = found.condition.base
            cells = [name, str(len(found.condition.curves[base])), f"{np.mean(list(found.outcome(base).values())):.3f}"]
            cells += [str(against[name]), f"{adjusted[name]:.1g}"] if name in against else ["", ""]
            whole = Difference.of_pairs(found.pairs_with(arms[reference], of_all))
            runs = found.condition.curves[base].values()
            evaluated = np.mean([run["own_reward"][~np.isnan(run["own_reward"])] for run in runs], axis=0)
            cells += [str(whole) if name in against else ""]
            cells += [
                "" if name in (reference, other) else str(Difference.of_pairs(found.pairs_with(arms[other])))
                for other in others
            ]
            cells += [", ".join(f"{own:.2f}" for own in evaluated[:FIRST_EVALUATIONS])]
            at = np.flatnonzero(~np.isnan(next(iter(runs))["own_reward"]))
            cells += [", ".join(_reached(at, evaluated, level) for level in LEVELS)]
            cells += [f"{found.condition.mean(base, 'k3'):.1e}", _learned(runs)]
            parts = [found.condition.mean(base, f"{part}_seconds") for part in ("training", "sampling")]
            lines.append(f"| {' | '.join([*cells, ', '.join(f'{seconds:.2f}' for seconds in parts)])} |")
    return lines


def _best_rates(groups: dict[str, PretrainedGroup], arms: dict[str, Arms]) -> list[str]:
    """Each setting at its own best learning rate, where it ran at several: a gain may be that of another rate."""
    rates: dict[str, list[str]] = {}
    for name, group in groups.items():
        alike = dataclasses.replace(group, name="", methods=(NONE,), seeds=(1,), learning_rate=1.0)
        rates.setdefault(repr(alike), []).append(name)
    several = [names for names in rates.values() if len(names) > 1]
    plain = next((names for names in several if _is_plain(groups[names[0]], "bfloat16")), None)
    if plain is None or len(several) < 2:
        return []
    lines = [
        "",
        "## Every setting at its best learning rate",
        "",
        "Chosen among the rates that ran, by the number that the row is about and on these seeds; paired by seed with "
        "the first setting at its own best.",
        "",
        "| outcome | setting | best rate | value | against the first |",
        "|---|---|---|---|---|",
    ]
    outcomes: dict[str, Outcome] = {f"last {LAST_EVALUATIONS} evaluations": final, "all evaluations": of_all}
    for outcome, of in outcomes.items():
        values = {n: float(np.mean(list(arms[n].outcome(NONE.name, of).values()))) for n in arms}
        best_plain = max(plain, key=values.__getitem__)
        for names in (plain, *(names for names in several if names != plain)):
            best = max(names, key=values.__getitem__)
            against = "" if names == plain else Difference.of_pairs(arms[best].pairs_with(arms[best_plain], of))
            cells = [outcome, best, f"{groups[best].learning_rate:g}", f"{values[best]:.3f}", str(against)]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def _reached(steps: NDArray[np.int64], evaluated: NDArray[np.float64], level: float) -> str:
    """At which step a curve first has a level, on the straight line from the evaluation before; a dash for never."""
    above = np.flatnonzero(evaluated >= level)
    if not len(above):
        return "-"
    last = slice(max(above[0] - 1, 0), above[0] + 1)
    return f"{np.interp(level, evaluated[last], steps[last]):.0f}"


def _is_plain(group: PretrainedGroup, dtype: str) -> bool:
    """Whether both sides compute in this dtype, and nothing else is changed."""
    is_changed = group.is_aligned or group.is_dithered or group.rounded_to or group.simulated_cache
    return (group.engine, group.dtype) == (dataclasses.replace(BF16, dtype=dtype), dtype) and not is_changed


def _condition(group: PretrainedGroup, arms: Arms) -> list[str]:
    condition, base = arms.condition, arms.condition.base
    holm = arms.holm()
    start = f"; from a checkpoint after {group.trained_steps} steps" if group.trained_steps else ""
    from_to = {
        number: " to ".join(f"{condition.mean(base, number, part):{form}}" for part in (FIRST_STEPS, LAST_STEPS))
        for number, form in FORMS.items()
    }
    lines = [
        f"Engine {_engine(group)}; trainer {_trainer(group)}; weights {group.staleness} updates old; learning rate "
        f"{group.learning_rate:g}{start}.",
        f"Uncorrected: reward of rollouts {from_to['reward']}, gain of the own policy {arms.gain():+.3f}. "
        f"k3 {from_to['k3']}, sequence ESS {from_to['ess_sequence']}. {from_to['length']} tokens, entropy "
        f"{from_to['entropy']} nats. "
        f"{condition.mean(base, 'seconds'):.2f} s a step.",
        *_routing(group, condition),
        *_rates(group, condition),
        *_speed(condition),
        *_extremes(condition),
        "",
        "| method | seeds | own policy | against none | p | failed | worse | kept answers | kept tokens | verdict "
        "| all evaluations, against none |",
        "|---" * 11 + "|",
    ]
    for method, seeds in condition.curves.items():
        cells = [method, str(len(seeds)), f"{np.mean(list(arms.outcome(method).values())):.3f}"]
        cells += ["", ""] if method == base else [str(arms.against_none(method)), f"{holm.get(method, math.nan):.3f}"]
        cells += [f"{arms.failed(method)}{_fisher(arms, method)}", str(sum(x > WORSE for x in arms.declines(method)))]
        cells += [f"{condition.mean(method, name):.3f}" for name in ("kept_sequences", "kept_tokens")]
        cells.append("" if method == base else "the floor" if method == AGAIN.name else arms.verdict(method))
        cells.append("" if method == base else str(arms.against_none(method, of_all)))
        lines.append(f"| {' | '.join(cells)} |".replace(" nan ", "  "))
    if (tokens := arms.tokens()) is not None:
        lines += ["", f"Token TIS and the token mask together against both uncorrected arms, no verdict: {tokens}."]
    return lines + _courses(condition) + _warnings(arms)


def _courses(condition: Condition) -> list[str]:
    """What each method went through on its way; nothing where there is one method."""
    if len(condition.curves) < 2:
        return []
    first = next(iter(condition.curves[condition.base].values()))["own_reward"]
    steps = np.flatnonzero(~np.isnan(first))
    lines = [
        "",
        f"Own policy: mean over seeds at steps {', '.join(map(str, steps))}. Its largest fall from one evaluation to a "
        "later one, and k3, by seed.",
        "",
        "| method | own policy | largest fall | highest k3 | k3 of the last 5 steps |",
        "|---" * 5 + "|",
    ]
    for method, seeds in condition.curves.items():
        own = np.array([curves["own_reward"][steps] for curves in seeds.values()])
        falls = (np.maximum.accumulate(own, axis=1) - own).max(1)
        k3 = np.array([curves["k3"] for curves in seeds.values()])
        cells = [", ".join(f"{value:.2f}" for value in values) for values in (own.mean(0), falls)]
        cells += [_range(k3.max(1), ".1e"), _range(k3[:, -5:].mean(1), ".1e")]
        lines.append(f"| {' | '.join([method, *cells])} |")
    return lines


def _range(values: NDArray[np.float64], form: str) -> str:
    return f"{values.min():{form}} to {values.max():{form}}"


def _routing(group: PretrainedGroup, condition: Condition) -> list[str]:
    """Of a mixture: how often its routers disagree, and k3 of each method, which replay alone can change."""
    if not group.experts:
        return []
    base = condition.base
    k3 = "; ".join(f"{method} {condition.mean(method, 'k3'):.1e}" for method in condition.curves)
    return [
        "Without replay the trainer's routers choose other experts than the engine's in some layer at "
        f"{condition.mean(base, 'routing_flips'):.1%} of the tokens, and in "
        f"{condition.mean(base, 'routing_choices'):.2%} of all choices. k3 over all steps: {k3}.",
    ]


def _rates(group: PretrainedGroup, condition: Condition) -> list[str]:
    """How far the learning rates fell that follow k3."""
    lowest = {
        method: [float(np.nanmin(curves["learning_rate"])) / group.learning_rate for curves in seeds.values()]
        for method, seeds in condition.curves.items()
        if all("learning_rate" in curves for curves in seeds.values())
    }
    shown = [f"{method} {min(shares):.2f} to {max(shares):.2f}" for method, shares in lowest.items()]
    return [f"Lowest share of the learning rate, by seed: {'; '.join(shown)}."] if shown else []


def _speed(condition: Condition) -> list[str]:
    """After how many steps each method had learned; nothing where none of the runs did."""
    shown = []
    for method, seeds in condition.curves.items():
        shown.append(f"{method} {_learned(seeds.values())}")
    if all(each.endswith("never") for each in shown):
        return []
    lines = [f"Steps until {STEPS_OF_A_MEAN} rollouts earn more than {LEARNED:g}, by seed: {'; '.join(shown)}."]
    later = "; ".join(f"{method} {steps}" for method, steps in _later(condition).items())
    return lines + ([f"Steps later than the mean of a seed's uncorrected runs: {later}."] if later else [])


def _later(condition: Condition) -> dict[str, Difference]:
    """How many steps later each method learns, paired by seed; methods of which every run does, as do those without."""
    steps = {
        method: {seed: steps_to_learn(curves["reward"]) for seed, curves in seeds.items()}
        for method, seeds in condition.curves.items()
    }
    none = [steps[name] for name in (condition.base, AGAIN.name) if name in steps]
    learned = {name: of for name, of in steps.items() if None not in of.values() and of not in none}
    if any(None in of.values() for of in none):
        return {}
    pairs = {
        name: [float(of[seed] - np.mean([each[seed] for each in none])) for seed in of if all(seed in n for n in none)]
        for name, of in learned.items()
    }
    return {name: Difference.of_pairs(each) for name, each in pairs.items() if each}


def _learned(runs: Iterable[dict[str, np.ndarray[Any, Any]]]) -> str:
    """After how many steps the first and the last run had learned."""
    steps = [steps_to_learn(curves["reward"]) for curves in runs]
    known = [step for step in steps if step is not None]
    words = " to ".join(map(str, sorted({min(known), max(known)}))) if known else "never"
    return words + (f" ({len(known)} of {len(steps)} seeds)" if 0 < len(known) < len(steps) else "")


def _extremes(condition: Condition) -> list[str]:
    """Of every step of every run."""
    runs = [curves for seeds in condition.curves.values() for curves in seeds.values()]
    k3, ratio, reward = (np.concatenate([curves[name] for curves in runs]) for name in ("k3", "ratio_max", "reward"))
    learning = k3[reward < LEARNED_ALL]
    return [
        f"All {len(k3):,} steps: k3 {k3.min():.1e} to {k3.max():.1e}. It is above {QUANTISED_K3:g} in "
        f"{np.mean(k3 > QUANTISED_K3):.1%}; while rollouts earn less than {LEARNED_ALL:g}, in "
        f"{np.mean(learning > QUANTISED_K3):.1%}. The largest ratio is {np.median(ratio):,.1f} (median), above "
        f"{UNUSUAL_RATIO} in {np.mean(ratio > UNUSUAL_RATIO):.1%}, {ratio.max():,.1f} at most.",
    ]


def _warnings(arms: Arms) -> list[str]:
    """Which number said beforehand what an uncorrected run would lose; none where hardly any lost something."""
    uncorrected = arms.declines(arms.condition.base)
    uncorrected += arms.declines(AGAIN.name) if AGAIN.name in arms.condition.curves else []
    if sum(x > WORSE for x in uncorrected) < FEWEST_WORSE:
        return []
    return [
        "",
        f"Does a number warn? Of the {len(uncorrected)} uncorrected runs: the rank correlation of its mean, over the "
        f"{STEPS_BEFORE} steps before the last evaluation but one, with what is lost from the best evaluation to the "
        "last. The p are not corrected for their number.",
        "",
        "| number | rank correlation | p |",
        "|---|---|---|",
        *(f"| {number} | {rho:+.2f} | {p:.2f} |" for number, (rho, p) in arms.warnings().items()),
    ]


def _fisher(arms: Arms, method: str) -> str:
    """P that so different numbers of failures are chance, where anything failed."""
    base = arms.condition.base
    counts = [(arms.failed(name), len(arms.condition.curves[name])) for name in (method, base)]
    if method == base or not any(failed for failed, _ in counts):
        return ""
    return f" (p {stats.fisher_exact([[failed, total - failed] for failed, total in counts]).pvalue:.2f})"


def _engine(group: PretrainedGroup) -> str:
    spec = group.engine
    parts = [spec.kind, spec.dtype]
    parts += [
        f"{name} {value}" for name, value in (("cache", spec.cache), ("weights", spec.weights)) if value != "auto"
    ]
    parts += ["aligned with the trainer"] if group.is_aligned else []
    return ", ".join([*parts, *(f"{name} {value}" for name, value in spec.settings.items())])


def _trainer(group: PretrainedGroup) -> str:
    parts = [group.dtype]
    parts += [f"its weights and the engine's rounded to {group.rounded_to}"] if group.rounded_to else []
    parts += ["its copy in float32 dithered"] if group.is_dithered else []
    return ", ".join(parts)


def _ages(name: str, arms: Arms) -> list[str]:
    seeds = arms.condition.curves[arms.condition.base].values()
    numbers = sorted({key for curves in seeds for key in curves if key.startswith("k3_age_")}, key=_age)
    means = {_age(key): float(np.nanmean([np.nanmean(curves[key]) for curves in seeds])) for key in numbers}
    fresh = arms.condition.mean(arms.condition.base, "k3")
    lines = [f"| {name} | 0 | {fresh:.1e} | |"] if means else []
    return lines + [f"| {name} | {age} | {k3:.1e} | {(k3 - fresh) / age:.1e} |" for age, k3 in means.items()]


def _age(key: str) -> int:
    return int(key.removeprefix("k3_age_"))


def _plot(arms: dict[str, Arms], path: Path) -> None:
    """Every seed, and the mean of all: the own policy, rollouts, k3."""
    panels = {"own_reward": "own policy, held-out", "reward": "rollouts", "k3": "k3, nats"}
    size = (14, 3.6 * len(arms))
    figure, axes = plt.subplots(len(arms), len(panels), figsize=size, squeeze=False, constrained_layout=True)
    for row, (name, found) in zip(axes, arms.items(), strict=True):
        for axis, (number, title) in zip(row, panels.items(), strict=True):
            for index, (method, seeds) in enumerate(found.condition.curves.items()):
                color = "black" if index == 0 else f"C{index - 1}"
                curves = np.array([curves[number] for curves in seeds.values()])
                known = ~np.isnan(curves).any(0)
                steps = np.arange(curves.shape[1])[known]
                for curve in curves[:, known]:
                    axis.plot(steps, curve, color=color, linewidth=0.5, alpha=0.45)
                axis.plot(steps, curves[:, known].mean(0), color=color, linewidth=1.8, label=method)
            # An aligned engine has a k3 of 0.
            is_log = number == "k3" and any((line.get_ydata() > 0).any() for line in axis.get_lines())
            axis.set(title=f"{name}: {title}", xlabel="step", yscale="log" if is_log else "linear")
        row[0].legend(fontsize=7)
    save(figure, path)
