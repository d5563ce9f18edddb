# SPDX-License-Identifier: Apache-2.0
"""Ratios with gradient, of tokens and of sequences: a bound stops the gradient of ratios beyond it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from mis_ext.methods.batch import TOTAL, UPDATE, Batch, Pair
from mis_ext.methods.method import Method
from mis_ext.methods.parts import (
    Estimator,
    Factor,
    KlTerm,
    Penalty,
    ProbabilityBound,
    Ratio,
    Slope,
    Surrogate,
    Term,
    ratio_and_slope,
)
from mis_ext.methods.published import ExcessBound, FromOne, NotNegative, Positive, Range, UpToOne, published
from mis_ext.methods.sequence_weights import token_uniforms

# Proximal policy optimization and its clips.


@published(
    formula="min(r A, clip(r, 1 - low, 1 + high) A)",
    paper="Schulman et al., Proximal Policy Optimization Algorithms, arXiv:1707.06347",
)
def ppo(*, low: UpToOne = 0.2, high: ExcessBound = 0.2) -> Method:
    """Several updates per rollout, with each token's ratio near 1.

    When: trainer and engine agree, or a weight corrects the mismatch, which ``r`` does not contain.
    Claims: monotone improvement in practice, at the cost of a first-order method.
    Counter-claims: ratio bounds are too tight for rare tokens and too loose for likely ones (DPPO, arXiv:2602.04879).
    """
    return Method(surrogate=Ratio(low=1.0 - low, high=1.0 + high))


@published(
    formula="min(r A, clip(r, 1 - low, 1 + high) A), high above low",
    paper="Yu et al., DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv:2503.14476",
)
def dapo(*, low: UpToOne = 0.2, high: ExcessBound = 0.28) -> Method:
    """PPO with a higher upper bound; divide by the tokens of the batch.

    When: entropy falls under PPO, because its upper bound stops rare tokens from becoming likelier.
    Claims: entropy stays high, and long chains of thought keep improving.
    Counter-claims: a probability bound does the same per token without a tuned constant (DCPO, arXiv:2509.02333).
    """
    return Method(surrogate=Ratio(low=1.0 - low, high=1.0 + high))


@published(
    formula="A > 0: as ppo; A < 0: max(as ppo, dual A)",
    paper="Ye et al., Mastering Complex Control in MOBA Games with Deep Reinforcement Learning, arXiv:1912.09729",
)
def dual_clip(*, low: UpToOne = 0.2, high: ExcessBound = 0.2, dual: FromOne = 3.0) -> Method:
    """PPO that also ignores a token of negative advantage whose ratio has become huge.

    When: stale or mismatched rollouts: without it such a token has an unbounded gradient.
    Claims: stable large-scale off-policy training.
    Counter-claims: it stops exactly the tokens whose probability rose against their advantage.
    """
    return Method(surrogate=Ratio(low=1.0 - low, high=1.0 + high, dual=dual))


@published(
    formula="min(w A, clip(w, 1 - low, 1 + high) A)",
    paper="Liu, Li et al., When Speed Kills Stability, 2025",
)
def bypass(*, low: UpToOne = 0.2, high: ExcessBound = 0.2) -> Method:
    """PPO against the behavior policy itself: no recomputation of log-probs before the update.

    When: the mismatch is small, and the extra forward pass is expensive.
    Claims: one forward pass less, and the ratio is the token's importance ratio.
    Counter-claims: part of the clip range is spent on the mismatch, and no metric can separate mismatch from staleness.
    At a staleness of 4 updates a pretrained model learned 0.06 less than with token TIS (lab/evidence).
    """
    return Method(surrogate=Ratio(pair=TOTAL, low=1.0 - low, high=1.0 + high))


@published(
    formula="clip(w, low, high) A - tau (log w)^2",
    paper="Kimi Team, Kimi K2.5, arXiv:2602.02276",
)
def kimi_k2_5(*, low: UpToOne = 0.5, high: FromOne = 2.0, tau: NotNegative = 1e-3) -> Method:
    """A clip on both sides: a token outside the range has no policy gradient, for any advantage.

    When: agentic training with a mismatch: the range bounds the drift, not the update.
    Claims: stable training of long tool-using responses.
    Counter-claims: a move back towards ratio 1 is stopped too. In the report, the old policy is the policy that
    generated. It gives no values for the range and tau: these defaults are from mis_ext.
    """
    return Method(
        surrogate=Ratio(pair=TOTAL, low=low, high=high, sides="both"),
        terms=(KlTerm(estimator="squared", scale=tau, pair=TOTAL),),
    )


@published(
    formula="min(r A, clip(r, b(-low), b(high)) A), b(e) = (1 + sqrt(max(1 + 4 e / proximal, 0))) / 2, at most cap",
    paper="Yang et al., DCPO: Dynamic Clipping Policy Optimization, arXiv:2509.02333",
)
def dcpo(*, low: NotNegative = 0.1, high: Positive = 0.2, cap: FromOne = 10.0) -> Method:
    """PPO with wider bounds for unlikely tokens: they solve ``proximal * r * (r - 1) = e``.

    When: the policy should learn rare tokens.
    Claims: an order of magnitude fewer clipped tokens than PPO.
    Counter-claims: the range is wide for rare tokens, where low-precision engines differ most. Only the clip of the
    paper is implemented, not its standardization of advantages. The defaults are from the authors' code.
    """
    bounds = ProbabilityBound(gain=-low, cap=cap), ProbabilityBound(gain=high, cap=cap)
    return Method(surrogate=Ratio(low=bounds[0], high=bounds[1]))


# Ratios of whole sequences: one ratio per response, whose gradient is spread over the tokens.

_GMPO_LOW, _GMPO_HIGH = math.exp(-0.4), math.exp(0.4)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClippedMean(Surrogate):
    """``A`` times the geometric mean of the sequence's ratios, each clipped outward before the mean.

    A clipped ratio is a constant of this mean: its log-prob has no gradient. The other log-probs have the gradient of
    all tokens.
    """

    clip: Ratio
    pair = UPDATE
    reduce = "mean"
    spread = "sequence"

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""
        log_ratio_T = batch.log_ratio(self.pair)
        bounded_T = self.clip.bounded(log_ratio_T, batch)
        is_clipped_T = bounded_T != log_ratio_T
        mean_T = batch.reductions.reduce(bounded_T, batch.valid_T, "mean")
        ratio_T, slope_T = ratio_and_slope(mean_T, mean_T)
        return Slope(ratio_T, slope_T, is_clipped_T, batch.valid_T & ~is_clipped_T)


@published(
    family="sequence_ratio",
    formula="s = exp(mean log r): min(s A, clip(s, 1 - low, 1 + high) A), mean over tokens, then over sequences",
    paper="Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071",
)
def gspo(*, low: UpToOne = 3e-4, high: ExcessBound = 4e-4) -> Method:
    """PPO on the geometric mean of the sequence's ratios, which carries the gradient of all its tokens.

    When: MoE models: single tokens change experts, but their mean stays.
    Claims: trains them without routing replay.
    Counter-claims: the geometric mean is not an importance weight; one extreme token looks like many small differences.
    """
    return Method(surrogate=Ratio(level="geometric", low=1.0 - low, high=1.0 + high, spread="sequence"))


@published(
    family="sequence_ratio",
    formula="s = sg(exp(mean log r)) pi / sg(pi): min(s A, clip(s, 1 - low, 1 + high) A)",
    paper="Zheng et al., Group Sequence Policy Optimization, arXiv:2507.18071",
)
def gspo_token(*, low: UpToOne = 3e-4, high: ExcessBound = 4e-4) -> Method:
    """GSPO with one advantage per token; with one advantage per sequence it equals GSPO.

    When: several turns, each with a reward.
    Claims: as GSPO.
    Counter-claims: as GSPO.
    """
    return Method(surrogate=Ratio(level="geometric", low=1.0 - low, high=1.0 + high))


@published(
    family="sequence_ratio",
    formula="exp(mean of log r, each clipped to [log low, log high] where ppo would) A",
    paper="Zhao et al., Geometric-Mean Policy Optimization, arXiv:2507.20673",
)
def gmpo(*, low: Annotated[float, Range(high=1.0, open_low=True)] = _GMPO_LOW, high: FromOne = _GMPO_HIGH) -> Method:
    """The geometric mean of ratios that are clipped one by one.

    When: outlier tokens disturb GRPO, and GSPO's clip of whole sequences is too coarse.
    Claims: more stable ratios, wider clip range, better results than GRPO.
    Counter-claims: the weight of a token depends on the number of other clipped tokens.
    """
    return Method(surrogate=ClippedMean(clip=Ratio(low=low, high=high)))


@published(
    family="sequence_ratio",
    formula="s = exp(mean log r): min(s A, clip(s, 1 - low, 1 + high) A), sum over tokens, then mean over sequences",
    paper="Liu et al., Length-Unbiased Sequence Policy Optimization, arXiv:2602.05261 (formula of TRL's luspo loss)",
)
def luspo(*, low: UpToOne = 2e-3, high: ExcessBound = 2.5e-3) -> Method:
    """GSPO with sequences weighted by their length: sum over tokens, not their mean, then the mean over sequences.

    When: responses become shorter and shorter under GSPO.
    Claims: no length bias; longer responses and better results than GSPO.
    Counter-claims: a long response moves the policy more than a short one, as in every sum over tokens. A token has the
    coefficient of ``gspo``; only the bounds and the denominator differ.
    """
    return Method(surrogate=Ratio(level="geometric", low=1.0 - low, high=1.0 + high, spread="sequence"))


# Tokens with a high covariance of log-prob and advantage lower the entropy most. These methods restrict a few of them.

_PAPER = "Cui et al., The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models, arXiv:2505.22617"
_COVARIANCE = "cov = (A - mean A) (log pi - mean log pi), means over the batch"


@dataclass(frozen=True, kw_only=True, slots=True)
class DropCovariance(Factor):
    """Randomly drop a few tokens whose covariance is in ``(low, high)``; they stay in denominators.

    The random number of a token is a hash of its position and of the proximal log-probs of its sequence, so it is the
    same on every rank and in a recomputed forward pass.

    Args:
        low: Smallest covariance.
        high: Largest covariance.
        share: The dropped share of all valid tokens of the batch; at least one token.
        clip: The surrogate: a token that it already stops is not drawn.
        seed: Use another seed for every step if a sequence can occur again.
    """

    low: float
    high: float
    share: float
    clip: Ratio
    seed: int = 0
    pair = UPDATE
    reduce = "batch_mean"
    action = "zero"

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` bool: True where the token stays."""
        covariance_T, num_valid = _covariance(batch, self.pair)
        is_clipped_T = self.clip.evaluate(batch).is_clipped_T
        drawn_T = batch.valid_T & ~is_clipped_T & (covariance_T > self.low) & (covariance_T < self.high)
        uniform_T = token_uniforms(batch, batch.log_prob(self.pair[1]).float(), self.seed).float()
        return ~_fewest(batch, uniform_T, drawn_T, share=self.share, num_valid=num_valid)


@dataclass(frozen=True, kw_only=True, slots=True)
class CovarianceKl(Term):
    """``scale`` times ``abs(log ratio)``, subtracted at the tokens of largest covariance.

    Args:
        scale: What it is multiplied by.
        share: The share of all valid tokens of the batch that have it; at least one token.
    """

    scale: float
    share: float
    pair = UPDATE
    reduce = "batch_mean"

    def evaluate(self, batch: Batch) -> Penalty:
        """Value and slope ``[T]`` of each token in nats, not yet multiplied by ``scale``."""
        covariance_T, num_valid = _covariance(batch, self.pair)
        chosen_T = _fewest(batch, -covariance_T, batch.valid_T, share=self.share, num_valid=num_valid)
        log_ratio_T = torch.where(chosen_T, batch.log_ratio(self.pair), 0.0)
        return Penalty(log_ratio_T.abs(), log_ratio_T.sign())


def _covariance(batch: Batch, pair: Pair) -> tuple[Tensor, Tensor]:
    """``[T]``, each token's term in the covariance of log-prob and advantage, and the number of tokens, 0-dim."""
    rows_FT = torch.stack([batch.advantages_T, batch.log_prob(pair[0])])
    totals = batch.reductions.batch_total(torch.cat([rows_FT, torch.ones_like(rows_FT[:1])]), batch.valid_T)
    advantage_T, log_prob_T = rows_FT - (totals[:2] / totals[2].clamp_min(1.0)).unsqueeze(-1)
    return advantage_T * log_prob_T, totals[2]


def _fewest(batch: Batch, values_T: Tensor, mask_T: Tensor, *, share: float, num_valid: Tensor) -> Tensor:
    """``[T]`` bool: the smallest values in a mask; their number is ``share`` of the valid tokens of all ranks."""
    number = (num_valid.double() * share).floor().long().clamp_min(1)
    edge = batch.reductions.nth_smallest(values_T, mask_T, number)
    return mask_T & (values_T.float() <= edge)


@published(
    family="covariance",
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
    """A few random tokens of high covariance have no gradient.

    When: the entropy collapses early and reward stops rising.
    Claims: the covariance lowers the entropy, and two tokens in ten thousand are enough to stop its fall.
    Counter-claims: the range is in units of the advantage, so it depends on its normalization. verl's batch is the
    micro-batch; here it is the batch of all ranks.
    """
    clip = Ratio(low=1.0 - low, high=1.0 + high)
    drop = DropCovariance(low=cov_low, high=cov_high, share=share, clip=clip, seed=seed)
    return Method(surrogate=clip, factors=(drop,))


@published(
    family="covariance",
    formula=f"r A - scale abs(log r) at the share of tokens with the largest cov; {_COVARIANCE}",
    paper=f"{_PAPER} (KL-Cov); verl: kl_cov (code)",
)
def kl_cov(*, share: UpToOne = 2e-4, scale: NotNegative = 1.0) -> Method:
    """The tokens of largest covariance are pulled back to the proximal policy; no other bound.

    When: as ``clip_cov``, but without random choice.
    Claims: with Clip-Cov 2 % better than GRPO at 7B and 6.4 % at 32B, in mathematics.
    Counter-claims: no clip at all: use it for few updates per rollout. On the first update the ratio is 1, and the
    penalty has no gradient.
    """
    return Method(surrogate=Ratio(), terms=(CovarianceKl(scale=scale, share=share),))


# GRPO with a KL term: PPO, and a penalty for the distance to the reference policy on every valid token.

_PPO = "min(r A, clip(r, 0.8, 1.2) A)"


def _with_kl(estimator: Estimator, beta: float, importance: Pair | None = None) -> Method:
    term = KlTerm(estimator=estimator, scale=beta, importance=importance)
    return Method(surrogate=Ratio(low=0.8, high=1.2), terms=(term,))


@published(
    family="kl_penalties",
    formula=f"{_PPO} - beta (exp(-d) - 1 + d), d = log(current / reference)",
    paper="Shao et al., DeepSeekMath (GRPO), arXiv:2402.03300; k3 of Schulman, Approximating KL Divergence, 2020",
)
def grpo_k3(*, beta: NotNegative = 1e-3) -> Method:
    """An estimate that is unbiased as a value, used as a loss.

    When: near the reference policy.
    Claims: low variance, never negative.
    Counter-claims: its gradient is that of KL(reference, current), and explodes if the policy makes a token unlikely
    that is likely in the reference (DeepSeek-V3.2).
    """
    return _with_kl("k3", beta)


@published(
    family="kl_penalties",
    formula=f"{_PPO} - beta d^2 / 2, d = log(current / reference)",
    paper="Schulman, Approximating KL Divergence, 2020",
)
def grpo_k2(*, beta: NotNegative = 1e-3) -> Method:
    """An estimate whose on-policy gradient is that of KL(current, reference).

    When: on-policy data.
    Claims: correct gradient without an importance ratio.
    Counter-claims: biased as a value, and off-policy as a gradient.
    """
    return _with_kl("k2", beta)


@published(
    family="kl_penalties",
    formula=f"{_PPO} - beta w (exp(-d) - 1 + d), d = log(current / reference), gradient through w too",
    paper="DeepSeek-AI, DeepSeek-V3.2 (unbiased KL estimate), arXiv:2512.02556",
)
def grpo_unbiased_kl(*, beta: NotNegative = 1e-3) -> Method:
    """Unbiased for any behavior policy: the coefficient is ``w d``.

    When: a KL term off-policy, or with a mismatch of trainer and engine.
    Claims: no exploding gradient if the policy makes tokens of the reference unlikely.
    Counter-claims: with ``r`` instead of ``w``, as in some frameworks, it is unbiased only for data of the proximal
    policy; without the gradient of ``w`` it is a different KL.
    """
    return _with_kl("k3", beta, importance=TOTAL)
