"""Factors: what multiplies the gradient of a token without carrying gradient itself. A method has any number of them.

Most are the gates and weights of the correction, of whatever pair of policies; a rule that is neither is a
:class:`OtherFactor`. Every factor looks at the same valid tokens, whatever the others reject, so that their order
does not matter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mis_ext.correction.gates import Action, Gate
from mis_ext.correction.statistics import Pair, Reduce, When
from mis_ext.correction.weights import Level, Weight
from mis_ext.methods.batch import Batch

Keep = Gate
"""The name of a gate in methods."""


class OtherFactor:
    """A weight of tokens, or a rule that drops some, beside :class:`~mis_ext.Gate` and :class:`~mis_ext.Weight`.

    Attributes:
        pair: Numerator and denominator of the ratio, each a policy.
        reduce: How it reduces over a sequence; where by a sum or mean, a token without a ratio takes it along.
        action: What becomes of a token that it drops; None of a weight, which drops none.
    """

    __slots__ = ()
    pair: Pair
    reduce: Reduce = "token"
    action: Action | None = None

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]``: a weight, or bool: whether to keep."""
        raise NotImplementedError


Factor = Gate | Weight | OtherFactor


def RatioWeight(
    *,
    pair: Pair,
    level: Level = "token",
    low: float | None = None,
    high: float | None = None,
    power: float = 1.0,
    when: When = "always",
) -> Weight:
    """The weight whose mode follows from the bounds that are given; arguments as of :class:`~mis_ext.Weight`."""
    if low is None:
        mode = "unbounded" if high is None else "truncate"
        return Weight(pair=pair, level=level, mode=mode, high=high, power=power, when=when)
    high = torch.inf if high is None else high
    return Weight(pair=pair, level=level, mode="clip", low=low, high=high, power=power, when=when)


def evaluate(factor: Factor, batch: Batch) -> Tensor:
    """``[T]``: a weight, or bool: whether the token stays; without gradient."""
    if isinstance(factor, Weight):
        return _weights(factor, batch)
    return _keeps(factor, batch) if isinstance(factor, Gate) else factor.evaluate(batch)


def _weights(weight: Weight, batch: Batch) -> Tensor:
    # bound((proximal / behavior)^power), of the token or of what the level says
    log_ratio_T = batch.log_ratio(weight.pair, weight.reduce)
    weight_T = weight.bounded(log_ratio_T if weight.power == 1.0 else log_ratio_T * weight.power)
    return weight_T if weight.when == "always" else torch.where(batch.when(weight.when, weight.pair), weight_T, 1.0)


def _keeps(gate: Gate, batch: Batch) -> Tensor:
    # low <= statistic <= high: one comparison for each bound that there is, and at least one, which NaN fails.
    reduced = batch.worst if gate.is_veto else batch.statistic
    value_T = reduced(gate.statistic, gate.pair, gate.reduce, of=gate.of_tokens)
    if gate.high is None:
        is_inside_T = value_T >= gate.log_low
    elif gate.low is None:
        is_inside_T = value_T <= gate.log_high
    else:
        is_inside_T = (value_T >= gate.log_low) & (value_T <= gate.log_high)
    return is_inside_T if gate.when == "always" else is_inside_T | ~batch.when(gate.when, gate.pair)
