"""Learning rates that follow a number of the run, each as a share of the group's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Of a number: its first steps are what later ones are compared with, each a mean over the last few.
FIRST_STEPS, LAST_STEPS = 10, 5
LOWEST = 0.1
# A surge: answers so much longer than at first. The rate is halved every so many times the step at which it came.
SURGE, PERIOD = 1.5, 1.8


@dataclass(frozen=True)
class Rule:
    """What a learning rate follows.

    Attributes:
        number: Of a step's row.
        share: Of the learning rate, from the number of all steps so far, this one's last.
    """

    number: str
    share: Callable[[Sequence[float]], float]


def as_it_grows(numbers: Sequence[float]) -> float:
    """In inverse proportion: a number twice what it was at first halves the rate. Never above 1 or below `LOWEST`."""
    first, lately = _at_first(numbers), _lately(numbers)
    return 1.0 if lately <= first else max(LOWEST, first / lately)


def halved_after_a_surge(numbers: Sequence[float]) -> float:
    """1 until the number surges, then half, and half again with each period, to `LOWEST`.

    After "Beyond Precision: Training-Inference Mismatch is an Optimization Problem and Simple LR Scheduling Fixes It",
    arXiv:2602.01826. When answers surge its authors read from a curve; here they are `SURGE` times as long as at first.
    """
    steps = range(FIRST_STEPS, len(numbers))
    surge = next((step for step in steps if _lately(numbers[: step + 1]) > SURGE * _at_first(numbers)), None)
    if surge is None:
        return 1.0
    halvings = 1 + int((len(numbers) - 1 - surge) / (PERIOD * surge))
    return max(LOWEST, 0.5**halvings)


def _at_first(numbers: Sequence[float]) -> float:
    return float(np.mean(numbers[:FIRST_STEPS]))


def _lately(numbers: Sequence[float]) -> float:
    return float(np.mean(numbers[-LAST_STEPS:]))


RULES = {"follows k3": Rule("k3", as_it_grows), "halved as answers grow": Rule("length", halved_after_a_surge)}
