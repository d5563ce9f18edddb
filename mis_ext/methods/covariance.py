"""Tokens whose log-prob and advantage vary together: they lower the entropy most, and few of them are held back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from mis_ext.correction.statistics import STALENESS, Pair
from mis_ext.methods.batch import Batch
from mis_ext.methods.factors import OtherFactor
from mis_ext.methods.kl_terms import Penalty, Term
from mis_ext.methods.method import Method
from mis_ext.methods.published import ExcessBound, NotNegative, Range, UpToOne, published
from mis_ext.methods.rejection_control import token_uniforms
from mis_ext.methods.surrogates import Ratio

_PAPER = "Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617"
_COVARIANCE = "cov = (A - mean A) (log pi - mean log pi), means over the batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class DropCovariance(OtherFactor):
    """Drop a few tokens at random of those whose covariance lies in ``(low, high)``; they stay in denominators.

    The random number of a token is a hash of its place and of the log-probs of its sequence under the second policy of
    ``pair``: the same on every rank and in a recomputed forward pass.

    Args:
        low: Smallest covariance.
        high: Largest covariance.
        share: How many are dropped, as a share of all valid tokens of the batch; at least one.
        pair: The current policy, whose log-probs count, and the one of the ratio that the surrogate clips.
        ratio_low: Lower bound of that clip: a token that it stops already is not drawn.
        ratio_high: Its upper bound.
        seed: Another one for every step, if a sequence can come back.
    """

    low: float
    high: float
    share: float
    pair: Pair = STALENESS
    ratio_low: float
    ratio_high: float
    seed: int = 0
    reduce = "batch_mean"
    action = "zero"

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` bool: True where the token stays."""
        covariance_T, num_valid = _covariance(batch, self.pair)
        log_ratio_T, advantages_T = batch.log_ratio(self.pair), batch.advantages_T
        is_clipped_T = ((advantages_T > 0.0) & (log_ratio_T > math.log(self.ratio_high))) | (
            (advantages_T < 0.0) & (log_ratio_T < math.log(self.ratio_low))
        )
        drawn_T = batch.valid_T & ~is_clipped_T & (covariance_T > self.low) & (covariance_T < self.high)
        uniform_T = token_uniforms(batch, batch.log_prob(self.pair[1]).float(), self.seed).float()
        return ~_fewest(batch, uniform_T, drawn_T, share=self.share, num_valid=num_valid)


@dataclass(frozen=True, kw_only=True, slots=True)
class CovarianceKl(Term):
    """``scale`` times ``abs(log ratio)``, subtracted at the tokens of largest covariance.

    Args:
        scale: What it is multiplied by.
        share: How many tokens have it, as a share of all valid tokens of the batch; at least one.
        pair: The current policy, whose log-probs count, and the other one of the ratio.
    """

    scale: float
    share: float
    pair: Pair = STALENESS
    reduce = "batch_mean"

    def evaluate(self, batch: Batch) -> Penalty:
        """Value and slope ``[T]`` of each token in nats, not yet multiplied by ``scale``."""
        covariance_T, num_valid = _covariance(batch, self.pair)
        chosen_T = _fewest(batch, -covariance_T, batch.valid_T, share=self.share, num_valid=num_valid)
        log_ratio_T = torch.where(chosen_T, batch.log_ratio(self.pair), 0.0)
        return Penalty(log_ratio_T.abs(), log_ratio_T.sign())


def _covariance(batch: Batch, pair: Pair) -> tuple[Tensor, Tensor]:
    """``[T]``: what each token adds to the covariance of log-prob and advantage; and the number of tokens, 0-dim."""
    rows_FT = torch.stack([batch.advantages_T, batch.log_prob(pair[0])])
    totals = batch.reductions.batch_total(torch.cat([rows_FT, torch.ones_like(rows_FT[:1])]), batch.valid_T)
    advantage_T, log_prob_T = rows_FT - (totals[:2] / totals[2].clamp_min(1.0)).unsqueeze(-1)
    return advantage_T * log_prob_T, totals[2]


def _fewest(batch: Batch, values_T: Tensor, mask_T: Tensor, *, share: float, num_valid: Tensor) -> Tensor:
    """``[T]`` bool: the smallest values under a mask, as many as ``share`` of the valid tokens of all ranks are."""
    number = (num_valid.double() * share).floor().clamp_min(1.0)
    among = batch.reductions.batch_total(torch.ones_like(values_T), mask_T).double().clamp_min(1.0)
    edge = batch.reductions.covering_value(values_T, mask_T, (number / among).clamp_max(1.0))
    return mask_T & (values_T.float() <= edge)


@published(
    formula=f"min(r A, clip(r, 1 - low, 1 + high) A), 0 at a share of the tokens, drawn among those with "
    f"cov_low < cov < cov_high; {_COVARIANCE}",
    paper=f"{_PAPER} (Clip-Cov); verl: clip_cov (code)",
)
def clip_cov(
    *,
    low: Annotated[float, Range(high=1.0, open_high=True)] = 0.2,
    high: ExcessBound = 0.2,
    cov_low: Annotated[float, Range(low=-math.inf)] = 1.0,
    cov_high: Annotated[float, Range(low="cov_low", open_low=True)] = 5.0,
    share: UpToOne = 2e-4,
    seed: Annotated[int, Range(low=-1e15, high=1e15)] = 0,
) -> Method:
    """Few tokens of high covariance, drawn at random, have no gradient.

    When: the entropy collapses early and reward stops rising.
    Claims: the covariance is what lowers the entropy, and two tokens in ten thousand are enough to stop its fall.
    Counter-claims: the band is in units of the advantage: another normalisation is another band. verl's batch is the
    micro-batch, here it is that of all ranks.
    """
    drop = DropCovariance(
        low=cov_low, high=cov_high, share=share, ratio_low=1.0 - low, ratio_high=1.0 + high, seed=seed
    )
    return Method(surrogate=Ratio(low=1.0 - low, high=1.0 + high), factors=(drop,))


@published(
    formula=f"r A - scale abs(log r) at the share of tokens with the largest cov; {_COVARIANCE}",
    paper=f"{_PAPER} (KL-Cov); verl: kl_cov (code)",
)
def kl_cov(*, share: UpToOne = 2e-4, scale: NotNegative = 1.0) -> Method:
    """The tokens of largest covariance are pulled back to the proximal policy; no other bound.

    When: as ``clip_cov``, but without random choice.
    Claims: with Clip-Cov 2 % better than GRPO at 7B and 6.4 % at 32B, in mathematics.
    Counter-claims: no clip at all: it is for few updates per rollout. On the first update the ratio is 1, and the
    penalty has no gradient.
    """
    return Method(surrogate=Ratio(), terms=(CovarianceKl(scale=scale, share=share),))


FAMILY = (clip_cov, kl_cov)
