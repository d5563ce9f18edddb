"""What must be true of the runs: each arrived, and those that correct alike have the same first gradient."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from .cases import CHECK, NUM_ROLLOUTS, Case
from .logged import Logged

GRAD_NORM = "train/grad_norm"
OURS = "train/mis_"
# float32 sums over 8 samples, in another order.
SAME = 1e-5
# Without a visible correction the comparison would compare nothing.
CORRECTED = 1e-3


@dataclass(frozen=True)
class Result:
    """One run that ended: its exit code, what the host logged, and how long it took."""

    case: Case
    return_code: int
    logged: Logged
    seconds: float

    @property
    def first_grad_norm(self) -> float:
        """NaN where there was no step."""
        return self.logged.steps[0].get(GRAD_NORM, math.nan) if self.logged.steps else math.nan

    @property
    def num_own_metrics(self) -> int:
        """Count of ``train/mis_*``."""
        return sum(name.startswith(OURS) for name in self.logged.names)


def faults_of_run(result: Result) -> list[str]:
    """What is wrong with one run by itself; an empty list if nothing is."""
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
        found += [f"step {index}: {name} is {value}" for name, value in step.items() if not math.isfinite(value)]
    found += [f"its log has no line with {text!r}" for text in case.says if text not in logged.text]
    return [f"{case.name}: {fault}" for fault in found]


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
    return [f"{name}: {fault}" for fault in found]


def faults_of_comparison(results: Iterable[Result]) -> list[str]:
    """Which of the runs that correct alike have another first gradient norm, or none that shows the correction."""
    results = list(results)
    by_name = {result.case.name: result.first_grad_norm for result in results}
    alike = {result.case.name: result.first_grad_norm for result in results if result.case.is_alike}
    if len(alike) < 2:
        return []
    reference, expected = next(iter(alike.items()))
    found = [
        f"{name}: first gradient norm {norm!r}, and {expected!r} of {reference}"
        for name, norm in alike.items()
        if not math.isclose(norm, expected, rel_tol=SAME)
    ]
    plain = by_name.get("nothing")
    if plain is not None and not abs(plain - expected) > CORRECTED * abs(expected):
        found.append(f"nothing: first gradient norm {plain!r} is that of {reference}: the correction does not show")
    return found
