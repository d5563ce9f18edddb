# SPDX-License-Identifier: Apache-2.0
"""Three steps of two micro-batches for dashboards: exact in float32, some not measured, one infinite."""

import math

import torch

from mis_ext import GroupNumber, Mean
from mis_ext.correction.metrics import Metric


def _mean(total: float, count: float) -> Mean:
    return Mean(torch.tensor(total), torch.tensor(count))


def _number(value: float) -> GroupNumber:
    return GroupNumber(torch.tensor(value))


def steps() -> list[list[dict[str, Metric]]]:
    """The metrics of the calls of each step."""
    found = []
    for step in range(3):
        is_measured = step != 1
        k3 = _mean(0.25, 24.0) if is_measured else _mean(0.0, 0.0)
        ratio = _number(2.0 + step if is_measured else math.nan)
        largest = _number(math.inf if step == 2 else 8.0)
        first = {"loss": _mean(3.0, 2.0), "mis_k3_kl": k3, "mis_ratio_max": ratio, "mis_ppl_ratio": largest}
        second = first | {"loss": _mean(1.0, 6.0), "mis_k3_kl": _mean(0.5, 8.0) if is_measured else k3}
        found.append([first, second])
    return found


EXPECTED = {
    "train/loss": [0.5, 0.5, 0.5],
    "train/mis_k3_kl": [0.0234375, math.nan, 0.0234375],
    "train/mis_ratio_max": [2.0, math.nan, 4.0],
    "train/mis_ppl_ratio": [8.0, 8.0, math.inf],
}
"""By name, of each step. 0.75 of 32 tokens are 3/128, where the mean of 0.25/24 and 0.5/8 is another number."""
