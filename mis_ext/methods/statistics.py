"""Statistics of a token under two policies: those of the correction, and those that only methods use."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mis_ext.correction.formula import MAX_LOG_RATIO, Formula
from mis_ext.correction.statistics import STATISTICS, TOKEN_FORMULAS, Statistic


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """KL of the events "this token" and "another one"; infinite where only the second policy is certain."""
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)
    other_p, other_q = -torch.expm1(log_p), -torch.expm1(log_q)
    of_others = torch.where(other_p > 0.0, other_p * (other_p.log() - other_q.log()), 0.0)
    return (log_p.exp() * (log_p - log_q) + of_others).clamp_min(0.0)


FORMULAS: dict[str, Formula] = TOKEN_FORMULAS | {
    "k1": Formula.of(lambda log_ratio: -log_ratio),
    "squared_log_ratio": Formula.of(lambda log_ratio: log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).square()),
    "half_abs_ratio_excess": Formula.of(lambda ratio_excess: ratio_excess.abs() * 0.5),
    "binary_kl": Formula.of(lambda proximal, behavior: _binary_kl(proximal, behavior)),
    "reverse_binary_kl": Formula.of(lambda proximal, behavior: _binary_kl(behavior, proximal)),
}
"""As in :mod:`mis_ext.correction.statistics`; ``proximal`` is the numerator here, ``behavior`` the denominator."""


def _row(name: str, unit: str, text: str, *, low: float = 0.0) -> Statistic:
    return Statistic(name, name, False, low, math.inf, 0.0, unit, text)


METHOD_STATISTICS: dict[str, Statistic] = STATISTICS | {
    row.name: row
    for row in (
        _row("k1", "nats", "log of denominator / numerator", low=-math.inf),
        _row("squared_log_ratio", "nats^2", "squared log-ratio"),
        _row("half_abs_ratio_excess", "probability", "`|ratio - 1| / 2`, whose expectation is the total variation"),
        _row("binary_kl", "nats", "KL from numerator to denominator, of this token against all others"),
        _row("reverse_binary_kl", "nats", "KL from denominator to numerator, of this token against all others"),
    )
}
"""By name; the ratio is numerator / denominator of whatever pair of policies is asked about."""
