"""Budgets of the batch: which tokens are dropped depends on how far all of them are off."""

from __future__ import annotations

from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import TOTAL
from mis_ext.methods.method import Method
from mis_ext.methods.published import NotNegative, published
from mis_ext.methods.surrogates import Ratio


@published(
    formula="w A; of the tokens that the update moves away from w = 1, the largest (log w)^2 lose their gradient until "
    "the mean over the others is at most budget",
    paper="Zheng et al., Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?, "
    "arXiv:2510.01161",
)
def m2po(*, budget: NotNegative = 0.04) -> Method:
    """A budget for the second moment of the log-ratio: as few tokens as possible are masked, the denominator stays.

    When: stale data.
    Claims: matches on-policy training at a staleness of 256 updates; clips 0.06 % of the tokens instead of 1.2 %.
    Counter-claims: fails on long sequences, where single tokens hardly matter. The tokens are those of one call on one
    rank. The authors' code bounds ratios by the threshold that follows, and never tighter than [0.7, 1.5].
    """
    outliers = Gate(
        pair=TOTAL,
        statistic="squared_log_ratio",
        reduce="batch_rank_mean",
        high=budget,
        when="outward",
        of_tokens="outward",
        action="zero",
    )
    return Method(surrogate=Ratio(pair=TOTAL), factors=(outliers,))


@published(
    formula="w A; if the batch's mean of abs(w - 1) / 2 exceeds delta, 0 where the update moves w away from 1",
    paper="Honari et al., Align and Filter, arXiv:2603.01365 (after open-instruct's description of it)",
)
def vaco(*, delta: NotNegative = 0.02) -> Method:
    """Total variation as a constraint: while it is violated, only updates back towards ratio 1 have a gradient.

    When: drift should be bounded on average, not token by token.
    Claims: no token is stopped while the batch is inside.
    Counter-claims: all or nothing: one more extreme token stops half of the batch.
    """
    armed = Gate(
        pair=TOTAL, statistic="half_abs_ratio_excess", reduce="batch_mean", high=delta, when="outward", action="zero"
    )
    return Method(surrogate=Ratio(pair=TOTAL), factors=(armed,))


FAMILY = (m2po, vaco)
