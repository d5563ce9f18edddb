"""Ratios of whole sequences with gradient: one ratio per response, its gradient spread over the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch

from mis_ext.correction.formula import bounded_exp
from mis_ext.correction.statistics import STALENESS, Pair
from mis_ext.methods.batch import Batch
from mis_ext.methods.method import Method
from mis_ext.methods.published import ExcessBound, FromOne, Range, UpToOne, published
from mis_ext.methods.surrogates import Ratio, Slope, Surrogate

_GMPO_LOW, _GMPO_HIGH = math.exp(-0.4), math.exp(0.4)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedMean(Surrogate):
    """``A`` times the geometric mean of the sequence's ratios, each clipped outward before the mean."""

    low: float
    high: float
    pair: Pair = STALENESS
    reduce = "mean"

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""
        log_ratio_T = batch.log_ratio(self.pair)
        is_above_T = (log_ratio_T > math.log(self.high)) & (batch.advantages_T > 0.0)
        is_below_T = (log_ratio_T < math.log(self.low)) & (batch.advantages_T < 0.0)
        bounded_T = log_ratio_T.clamp(math.log(self.low), math.log(self.high))
        clipped_T = torch.where(is_above_T | is_below_T, bounded_T, log_ratio_T)
        ratio_T = bounded_exp(batch.reductions.reduce(clipped_T, batch.valid_T, "mean"))
        return Slope(ratio_T, torch.where(is_above_T | is_below_T, 0.0, ratio_T), is_above_T | is_below_T)


@published(
    formula="s = exp(mean log r): min(s A, clip(s, 1 - low, 1 + high) A), mean over tokens, then over sequences",
    paper="Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071",
)
def gspo(*, low: UpToOne = 3e-4, high: ExcessBound = 4e-4) -> Method:
    """PPO on the geometric mean of the sequence's ratios, which carries the gradient of all its tokens.

    When: mixture-of-experts models: single tokens change experts, but their mean stays.
    Claims: trains them without routing replay.
    Counter-claims: the geometric mean is no importance weight; one extreme token looks like many small differences.
    """
    return Method(surrogate=Ratio(level="geometric", low=1.0 - low, high=1.0 + high, spread="sequence"))


@published(
    formula="s = sg(exp(mean log r)) pi / sg(pi): min(s A, clip(s, 1 - low, 1 + high) A)",
    paper="Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071",
)
def gspo_token(*, low: UpToOne = 3e-4, high: ExcessBound = 4e-4) -> Method:
    """GSPO whose tokens have advantages of their own; with one per sequence it is GSPO.

    When: several turns with a reward each.
    Claims: as GSPO.
    Counter-claims: as GSPO.
    """
    return Method(surrogate=Ratio(level="geometric", low=1.0 - low, high=1.0 + high))


@published(
    formula="exp(mean of log r, each clipped to [log low, log high] where ppo would) A",
    paper="Zhao et al., Geometric-Mean Policy Optimization, arXiv:2507.20673",
)
def gmpo(*, low: Annotated[float, Range(high=1.0, open_low=True)] = _GMPO_LOW, high: FromOne = _GMPO_HIGH) -> Method:
    """The geometric mean of ratios that were clipped one by one.

    When: outlier tokens disturb GRPO, and GSPO's clip of whole sequences is too coarse.
    Claims: more stable ratios, wider clip range, better results than GRPO.
    Counter-claims: the weight of a token depends on how many others are clipped.
    """
    return Method(surrogate=ClippedMean(low=low, high=high))


@published(
    formula="s = exp(mean log r): min(s A, clip(s, 1 - low, 1 + high) A), sum over tokens, then mean over sequences",
    paper="Liu et al., Length-Unbiased Sequence Policy Optimization, arXiv:2602.05261 (formula of TRL's luspo loss)",
)
def luspo(*, low: UpToOne = 2e-3, high: ExcessBound = 2.5e-3) -> Method:
    """GSPO whose sequences count with their length: sum over tokens, not their mean, then the mean over sequences.

    When: responses become shorter and shorter under GSPO.
    Claims: no length bias; longer responses and better results than GSPO.
    Counter-claims: a long response moves the policy more than a short one, as in every sum over tokens. A token has the
    coefficient of ``gspo``: what differs are the bounds and the denominator.
    """
    return Method(surrogate=Ratio(level="geometric", low=1.0 - low, high=1.0 + high))


FAMILY = (gspo, gspo_token, gmpo, luspo)
