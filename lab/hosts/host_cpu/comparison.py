# SPDX-License-Identifier: Apache-2.0
"""The checks of the runs.

Each run finished, runs with equal corrections have the same first gradient, and two ranks have that of one rank.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .cases import CHECK, CLOSE_IN_BFLOAT16, NUM_ROLLOUTS, SAME, Case
from .logged import Logged

GRAD_NORM = "train/grad_norm"
OURS = "train/mis_"
K3 = f"{OURS}k3_kl"
# Without a visible correction the comparison would compare nothing.
CORRECTED = 1e-3
# No token of random weights is as probable as it asks for.
UNMEASURED = f"{OURS}raised_fraction"


@dataclass(frozen=True)
class Result:
    """One finished run: its exit code, the log of the framework, and its duration.

    ``by_hand`` is the first gradient norm in float64 from definitions, None where a run has no such computation.
    """

    case: Case
    return_code: int
    logged: Logged
    seconds: float
    by_hand: float | None = None

    @property
    def first_grad_norm(self) -> float:
        """NaN where there was no step."""
        return self.logged.steps[0].get(GRAD_NORM, math.nan) if self.logged.steps else math.nan

    @property
    def num_own_metrics(self) -> int:
        """Count of ``train/mis_*``."""
        return sum(name.startswith(OURS) for name in self.logged.names)


def faults_of_run(result: Result) -> list[str]:
    """The problems of one run alone; an empty list if there are none."""
    case, logged = result.case, result.logged
    if case.refusal is not None:
        return _faults_of_refusal(result)
    found = []
    if result.return_code != 0:
        found.append(f"exit code {result.return_code}")
    steps = NUM_ROLLOUTS * case.steps_per_rollout
    if len(logged.steps) != steps:
        found.append(f"{len(logged.steps)} optimizer steps in its log, not {steps}")
    for index, step in enumerate(logged.steps):
        missing = [name for name in (GRAD_NORM, "train/loss", *case.metrics) if name not in step]
        if missing:
            found.append(f"step {index}: {', '.join(missing)} did not arrive")
        finite = {name: value for name, value in step.items() if name != UNMEASURED}
        found += [f"step {index}: {name} is {value}" for name, value in finite.items() if not math.isfinite(value)]
    if result.by_hand is not None and not math.isclose(result.first_grad_norm, result.by_hand, rel_tol=SAME):
        found.append(f"first gradient norm {result.first_grad_norm!r}, and {result.by_hand!r} by hand")
    return [f"{case.name}: {fault}" for fault in found + _unsaid(result)]


def _unsaid(result: Result) -> list[str]:
    return [f"its log has no line with {text!r}" for text in result.case.says if text not in result.logged.text]


def _faults_of_refusal(result: Result) -> list[str]:
    name, logged = result.case.name, result.logged
    found = []
    if result.return_code == 0:
        found.append("not refused")
    if str(result.case.refusal) not in logged.text:
        found.append(f"its log has no {result.case.refusal!r}")
    if logged.steps:
        found.append("refused only after a step")
    if CHECK[0] in result.case.flags and logged.built_the_model:
        found.append("refused only after the model was built")
    return [f"{name}: {fault}" for fault in found + _unsaid(result)]


def faults_of_comparison(results: Iterable[Result]) -> list[str]:
    """The problems in the comparison of runs.

    Those that correct alike must have the same first gradient norm in each layout, another than without a correction,
    and a run with a partner the partner's norm and metrics. Replayed experts must bring trainer and engine closer.
    """
    results = list(results)
    found = []
    for layout in dict.fromkeys(result.case.layout for result in results):
        found += _faults_of_layout([result for result in results if result.case.layout == layout])
    for result, partner in partners(results):
        found += _faults_of_partner(result, partner)
    return found + _faults_of_replay({result.case.name: result for result in results})


def _faults_of_replay(by_name: dict[str, Result]) -> list[str]:
    if not {"mixture", "mixture_replayed"} <= by_name.keys():
        return []
    # In a rollout in which both choose the same experts nothing differs.
    own, replayed = (
        max((step.get(K3, math.nan) for step in by_name[name].logged.steps), default=math.nan)
        for name in ("mixture", "mixture_replayed")
    )
    if replayed < own:
        return []
    return [f"mixture_replayed: the largest {K3} is {replayed}, and {own} without the replay"]


def _faults_of_layout(results: list[Result]) -> list[str]:
    alike = [result for result in results if result.case.is_alike]
    if not alike:
        return []
    reference, expected = alike[0].case.name, alike[0].first_grad_norm
    found = [
        f"{result.case.name}: first gradient norm {result.first_grad_norm!r}, and {expected!r} of {reference}"
        for result in alike
        if not math.isclose(result.first_grad_norm, expected, rel_tol=result.case.close)
    ]
    plain = {result.case.name: result.first_grad_norm for result in results if result.case.name.startswith("nothing")}
    return found + [
        f"{name}: first gradient norm {norm!r} is that of {reference}: the correction does not show"
        for name, norm in plain.items()
        if not abs(norm - expected) > CORRECTED * abs(expected)
    ]


def partners(results: Iterable[Result]) -> list[tuple[Result, Result]]:
    """Each run that has a partner among the results, with it."""
    by_name = {result.case.name: result for result in results}
    return [(result, by_name[result.case.partner]) for result in by_name.values() if result.case.partner in by_name]


def off(result: Result, partner: Result) -> dict[str, float]:
    """Relative difference of each number of the first step that both must share: the gradient norm, and our metrics.

    A number that only one of them has is NaN.
    """
    first, other = (each.logged.steps[0] if each.logged.steps else {} for each in (result, partner))
    shared = [GRAD_NORM, *sorted(name for name in first.keys() | other.keys() if name.startswith(OURS))]
    return {name: _relative(first.get(name, math.nan), other.get(name, math.nan)) for name in shared}


def _relative(value: float, expected: float) -> float:
    return 0.0 if value == expected else abs(value - expected) / abs(expected or 1.0)


def _faults_of_partner(result: Result, partner: Result) -> list[str]:
    close = SAME if result.case.is_float32 else CLOSE_IN_BFLOAT16
    return [
        f"{result.case.name}: {name} of its first step is {difference:.1e} off from {partner.case.name}"
        for name, difference in off(result, partner).items()
        if not difference <= close
    ]
