# SPDX-License-Identifier: Apache-2.0
"""Trust regions around the behavior policy: hard per token, hard over the batch, and smooth."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from mis_ext.correction.tokens import MAX_LOG_RATIO, bounded_exp
from mis_ext.methods.batch import TOTAL, UPDATE, Batch
from mis_ext.methods.method import Method
from mis_ext.methods.parts import (
    Factor,
    KlTerm,
    PairGate,
    PairWeight,
    Penalty,
    Ratio,
    Score,
    Slope,
    Surrogate,
    Term,
    ratio_and_slope,
)
from mis_ext.methods.published import Bound, ExcessBound, FromOne, NotNegative, Positive, Range, UpToOne, published

# Per token: no policy gradient outside of the region, the importance ratio inside.

_W = Ratio(pair=TOTAL)


def _region(*, low: float, high: float) -> tuple[PairGate, PairGate]:
    """Bounds that stop a token that became too likely or too unlikely; 1 is no bound."""
    low, high = min(low, 1.0), min(high, 1.0)
    return (
        PairGate(pair=TOTAL, statistic="probability_gain", high=high, when="positive", action="zero"),
        PairGate(pair=TOTAL, statistic="probability_gain", low=-low, when="negative", action="zero"),
    )


@published(
    formula="w A 1[KL(p, q) <= phi] 1[KL(q, p) <= phi], KL of this token against all others",
    paper="Ling Team, KPop (report), 2026",
)
def kpop(*, phi: Bound = 0.1) -> Method:
    """A range in binary KL: tight for likely tokens, wide for rare tokens.

    When: a range of ratios masks rare tokens and lets confident tokens drift.
    Claims: IcePop masks fewer tokens while the gap widens; KPop does not.
    Counter-claims: the weight of a rare token may be ten or more, because the ratio itself has no bound.
    """
    statistics = "binary_kl", "reverse_binary_kl"
    gates = (PairGate(pair=TOTAL, statistic=name, high=phi, action="zero") for name in statistics)
    return Method(surrogate=_W, factors=tuple(gates))


@published(
    formula="w A 1[low <= w <= high] 1[min over the sequence of w >= veto]",
    paper="Prime Intellect, INTELLECT-3, arXiv:2512.16144",
)
def intellect_3(*, low: UpToOne = 0.5, high: FromOne = 5.0, veto: UpToOne = 1e-5) -> Method:
    """IcePop's range for the total ratio, and a veto.

    When: asynchronous training of MoE models.
    Claims: no reward collapse over long runs.
    Counter-claims: as ``icepop`` and ``veto``.
    """
    return Method(
        surrogate=_W, factors=(PairGate(pair=TOTAL, low=low, high=high), PairGate(pair=TOTAL, reduce="min", low=veto))
    )


@published(
    formula="A log pi 1[low <= w <= high] 1[low_sequence <= exp(mean log w) <= high_sequence]",
    paper="StepFun, Step-3.5-Flash (MIS-PO), arXiv:2602.10604",
)
def mis_po(
    *, low: UpToOne = 0.5, high: FromOne = 2.0, low_sequence: UpToOne = 0.996, high_sequence: FromOne = 1.001
) -> Method:
    """Filters of tokens and of sequences, and no weight: kept tokens count as on-policy.

    When: the variance of weights is too large.
    Claims: less gradient noise than importance weights at equal stability.
    Counter-claims: in a replication at staleness 256 the token filter alone reached 59 %, both 3 %, random rejection of
    as many sequences 41 %. The range for tokens is from mis_ext; that of the paper is not known.
    """
    sequences = PairGate(pair=TOTAL, reduce="mean", low=low_sequence, high=high_sequence)
    return Method(surrogate=Score(), factors=(PairGate(pair=TOTAL, low=low, high=high), sequences))


@published(
    formula="sg(min(w, cap)) A log pi, 0 where A > 0, p - q > delta or A < 0, p - q < -delta",
    paper="Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning (DPPO), arXiv:2602.04879",
)
def dppo_tv(*, delta: ExcessBound = 0.15, cap: Bound = 20.0) -> Method:
    """A trust region of probabilities, which stops only updates that move further outside.

    When: instead of PPO's clip, with the behavior policy as center.
    Claims: ratio clips constrain rare tokens too much and likely tokens too little; stable without routing replay.
    Counter-claims: a rare token's probability can grow a hundredfold inside the region.
    """
    return Method(surrogate=Score(), factors=(PairWeight(pair=TOTAL, high=cap), *_region(low=delta, high=delta)))


@published(
    formula="sg(min(w, cap)) A log pi, 0 where KL(q, p) > delta and the update moves w away from 1",
    paper="Qi et al., Rethinking the Trust Region in LLM Reinforcement Learning (DPPO), arXiv:2602.04879",
)
def dppo_kl(*, delta: Bound = 0.05, cap: Bound = 20.0) -> Method:
    """As ``dppo_tv``, with the binary KL from behavior to current policy.

    When: tokens that became very unlikely should be protected: KL grows there, total variation does not.
    Claims: as ``dppo_tv``.
    Counter-claims: one sampled token shows little of a distribution.
    """
    gate = PairGate(pair=TOTAL, statistic="reverse_binary_kl", high=delta, when="outward", action="zero")
    return Method(surrogate=Score(), factors=(PairWeight(pair=TOTAL, high=cap), gate))


@published(
    formula="w A, 0 where A > 0, p - q > high or A < 0, p - q < -low; - tau (log w)^2 on all valid tokens",
    paper="Prime Intellect, prime-rl: default loss (code)",
)
def prime_rl(*, low: ExcessBound = 0.2, high: ExcessBound = 0.2, tau: NotNegative = 1e-3) -> Method:
    """DPPO's region with one bound for each sign, a plain ratio and a squared log-ratio as penalty.

    When: asynchronous training with that framework's defaults.
    Claims: default of prime-rl.
    Counter-claims: no bound on the ratio.
    """
    penalty = KlTerm(estimator="squared", scale=tau, pair=TOTAL)
    return Method(surrogate=_W, factors=_region(low=low, high=high), terms=(penalty,))


@published(
    formula="w A 1[abs(p - q) <= delta] - tau (log w)^2",
    paper="Prime Intellect, prime-rl: ipo loss (code)",
)
def ipo(*, delta: Bound = 0.1, tau: NotNegative = 1e-3) -> Method:
    """A range of probability differences, for both signs of the advantage.

    When: the drift itself should stop the gradient, as with ``kimi_k2_5``.
    Claims: later default of prime-rl, with 0.3.
    Counter-claims: a move back is stopped too.
    """
    delta = min(delta, 1.0)
    gate = PairGate(pair=TOTAL, statistic="probability_gain", low=-delta, high=delta, action="zero")
    return Method(surrogate=_W, factors=(gate,), terms=(KlTerm(estimator="squared", scale=tau, pair=TOTAL),))


@published(
    formula="sg(w 1[1 - low < w < 1 + high]) A log pi",
    paper="GLM-5 Team, GLM-5: from Vibe Coding to Agentic Engineering, arXiv:2602.15763, equations 3 to 5",
)
def glm_5(*, low: UpToOne = 0.2, high: ExcessBound = 0.28) -> Method:
    """Direct double-sided importance sampling: no proximal policy; tokens outside the range are masked.

    When: rollouts of several weight versions, whose exact proximal policy is not known.
    Claims: simpler than IcePop and more stable.
    Counter-claims: a controlled bias, according to its authors; the range also stops moves back. The report gives no
    range for agents; these values are for reasoning.
    """
    band = PairGate(pair=TOTAL, low=1.0 - low, high=1.0 + high, action="zero")
    return Method(surrogate=Score(), factors=(PairWeight(pair=TOTAL), band))


@published(
    formula="sg(w 1[low <= w <= high]) A log pi, A = sg(log(teacher / current)) (+ the outcome's advantage)",
    paper="Xiaomi, MiMo-V2-Flash (MOPD), arXiv:2601.02780, equations 7 and 8",
)
def mimo_mopd(*, low: UpToOne = 0.5, high: FromOne = 2.0) -> Method:
    """On-policy distillation: pass the teacher's log-ratio as advantage.

    When: teachers of several domains become one student.
    Claims: inherits nearly all of each teacher.
    Counter-claims: the report gives no values for the range: these are from mis_ext.
    """
    return Method(
        surrogate=Score(),
        factors=(PairWeight(pair=TOTAL), PairGate(pair=TOTAL, low=low, high=high, action="zero")),
    )


@published(
    formula="min(r A, clip(r, 0.8, 1.2) A), 0 where A < 0 and mean log(behavior / current) > delta",
    paper="DeepSeek-AI, DeepSeek-V3.2 (off-policy sequence masking), arXiv:2512.02556",
)
def opsm(*, delta: NotNegative = 0.05) -> Method:
    """Bad sequences that have become unlikely are rejected.

    When: always safe: it never rejects a positive advantage.
    Claims: stabilizes training that is off-policy because of updates or because of the engine.
    Counter-claims: with the proximal instead of the behavior policy, as in some frameworks, it does not see the
    mismatch. The paper gives no threshold: this value is from mis_ext.
    """
    gate = PairGate(pair=TOTAL, statistic="k1", reduce="mean", high=delta, when="negative")
    return Method(surrogate=Ratio(pair=UPDATE, low=0.8, high=1.2), factors=(gate,))


# Budgets of the batch: the dropped tokens depend on the mismatch of all tokens.


@published(
    family="second_moment",
    formula="w A; of the tokens that the update moves away from w = 1, the largest (log w)^2 lose their gradient until "
    "the mean over the remaining ones of these tokens is at most budget",
    paper="Zheng et al., Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?, "
    "arXiv:2510.01161",
)
def m2po(*, budget: NotNegative = 0.04) -> Method:
    """A budget for the second moment of the log-ratio: it masks as few tokens as possible, and keeps the denominator.

    When: stale data.
    Claims: matches on-policy training at a staleness of 256 updates; clips 0.06 % of the tokens instead of 1.2 %.
    Counter-claims: fails on long sequences, where single tokens matter little. The budget is over one call on one rank.
    The authors' code bounds ratios by the resulting threshold, but never tighter than [0.7, 1.5].
    """
    outliers = PairGate(
        pair=TOTAL,
        statistic="k2",
        reduce="batch_rank_mean",
        high=budget / 2.0,
        when="outward",
        of_tokens="outward",
        action="zero",
    )
    return Method(surrogate=Ratio(pair=TOTAL), factors=(outliers,))


@published(
    family="second_moment",
    formula="w A; if the batch's mean of abs(w - 1) / 2 exceeds delta, 0 where the update moves w away from 1",
    paper="Honari et al., Align and Filter, arXiv:2603.01365 (after open-instruct's description of it)",
)
def vaco(*, delta: NotNegative = 0.02) -> Method:
    """Total variation as a constraint: if it is violated, only updates towards ratio 1 have a gradient.

    When: drift should be bounded on average, not token by token.
    Claims: no token is stopped if the batch satisfies the constraint.
    Counter-claims: all or nothing: one extreme token can stop half of the batch.
    """
    armed = PairGate(
        pair=TOTAL, statistic="half_abs_ratio_excess", reduce="batch_mean", high=delta, when="outward", action="zero"
    )
    return Method(surrogate=Ratio(pair=TOTAL), factors=(armed,))


@dataclass(frozen=True, kw_only=True, slots=True)
class EssCap(Factor):
    """``min(ratio, ess)``, where ``ess`` is the effective share of the batch's tokens: a data-dependent cap."""

    pair = TOTAL
    reduce = "batch_mean"

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` weights, at most 1, without gradient."""
        return torch.minimum(bounded_exp(batch.log_ratio(self.pair)), batch.effective_share(self.pair))


@dataclass(frozen=True, kw_only=True, slots=True)
class EssKl(Term):
    """``1 - ess`` times the k3 estimate of the KL between the current and the behavior policy."""

    pair = TOTAL
    scale = 1.0
    reduce = "batch_mean"

    def evaluate(self, batch: Batch) -> Penalty:
        """Value and slope ``[T]`` of each token in nats."""
        penalty = KlTerm(estimator="k3", scale=1.0, pair=self.pair).evaluate(batch)
        strength = 1.0 - batch.effective_share(self.pair)
        return Penalty(strength * penalty.value_T, strength * penalty.slope_T)


@published(
    family="second_moment",
    formula="sg(min(w, ess)) A log pi - (1 - ess) (exp(-d) - 1 + d), d = log w, ess = (sum w)^2 / (n sum w^2) over the "
    "n tokens of the batch",
    paper="Fakoor et al., Trust the Batch, On- or Off-Policy: Adaptive Policy Optimization for RL Post-Training (P3O), "
    "arXiv:2605.12380 (abstract; the formula is that of the authors' code)",
)
def p3o() -> Method:
    """The batch's share ``ess`` of effective tokens is the cap of the weight, and ``1 - ess`` scales a KL term.

    When: data of varying staleness, so that every fixed bound is wrong for some batches.
    Claims: matches or exceeds tuned baselines without a parameter to tune.
    Counter-claims: a cap below 1 also reduces the weights of on-policy tokens, so a batch with a few extreme tokens
    learns slowly. The KL term pulls towards the behavior policy, including the mismatch of its engine.
    """
    return Method(surrogate=Score(), factors=(EssCap(),), terms=(EssKl(),))


# Kernels: smooth functions of a ratio instead of bounds.

_TRUST = (0.1, 10.0)
_ShapeScale = tuple[NotNegative, Positive]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sigmoid(Surrogate):
    """``A`` times ``4 / tau * sigmoid(tau (ratio - 1))``: the slope is 1 at ratio 1 and decreases on both sides.

    Args:
        positive: ``tau`` for a positive advantage.
        negative: ``tau`` elsewhere.
    """

    positive: float
    negative: float
    pair = UPDATE

    def evaluate(self, batch: Batch) -> Slope:
        """Per token ``[T]``: the surrogate, its derivative by the token's log-prob, and where a bound stops it."""
        log_ratio_T = batch.log_ratio(self.pair)
        ratio_T, by_log_T = ratio_and_slope(log_ratio_T, log_ratio_T)
        tau_T = batch.by_sign(self.positive, self.negative)
        excess_T = tau_T * (ratio_T - 1.0)
        gate_T = torch.sigmoid(excess_T)
        # Not 1 - gate, which has no correct digit at a ratio of 18.
        slope_T = 4.0 * gate_T * torch.sigmoid(-excess_T) * by_log_T
        return Slope(gate_T * 4.0 / tau_T, slope_T, torch.zeros_like(batch.valid_T))


@dataclass(frozen=True, kw_only=True, slots=True)
class Gamma(Factor):
    """``exp(scale) W^shape exp(-scale W)`` of the sequence's product of ratios ``W``: 1 at 1, largest at shape / scale.

    Args:
        positive: Shape and scale for a positive advantage.
        negative: Shape and scale elsewhere.
    """

    positive: tuple[float, float]
    negative: tuple[float, float]
    pair = TOTAL
    reduce = "sum"

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` weights, at least 0, without gradient."""
        log_ratio_T = batch.log_ratio(self.pair, "sum")
        shape_T, scale_T = map(batch.by_sign, self.positive, self.negative)
        # Its largest value, at W = shape / scale, is unbounded, so clamp it like every ratio.
        log_weight_T = scale_T + shape_T * log_ratio_T - scale_T * bounded_exp(log_ratio_T)
        return log_weight_T.clamp_max(MAX_LOG_RATIO).exp()


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianGate(Factor):
    """``exp(-(ratio - 1)^2 / (2 sigma^2))`` where the update moves the ratio away from 1, elsewhere 1.

    ``sigma`` is ``scale / q ** power``, ``q`` the denominator's probability, within ``[scale, high]``; times
    ``1 + positive A`` where the advantage ``A`` is positive, over ``1 + negative abs(A)`` where it is negative, that
    factor within [0.1, 10].

    Args:
        scale: Smallest ``sigma``, that of a certain token.
        power: How fast it widens for rare tokens.
        high: The limit of this widening.
        positive: How much it widens per unit of positive advantage.
        negative: How much it narrows per unit of negative advantage.
    """

    scale: float
    power: float
    high: float
    positive: float
    negative: float
    pair = UPDATE

    def evaluate(self, batch: Batch) -> Tensor:
        """The factor ``[T]``, at most 1; 1 if the step does not move away from the old policy."""
        # In the log, so that no power of a tiny probability overflows.
        widening_T = (-self.power * batch.log_prob(self.pair[1])).clamp(0.0, math.log(self.high / self.scale))
        size_T = batch.advantages_T.abs()
        trust_T = torch.where(
            batch.advantages_T > 0.0, 1.0 + self.positive * size_T, (1.0 + self.negative * size_T).reciprocal()
        )
        sigma_T = self.scale * widening_T.exp() * trust_T.clamp(*_TRUST)
        gate_T = ((bounded_exp(batch.log_ratio(self.pair)) - 1.0) / sigma_T).square().mul(-0.5).exp()
        return torch.where(batch.when("outward", self.pair), gate_T, 1.0)


@published(
    family="smooth",
    formula="sg(phi(w_1..T)) A log pi, phi(W) = exp(scale) W^shape exp(-scale W)",
    paper="Shen et al., VESPO: Variational Sequence-Level Soft Policy Optimization, arXiv:2602.10693",
)
def vespo(*, positive: _ShapeScale = (2.0, 3.0), negative: _ShapeScale = (3.0, 2.0)) -> Method:
    """A soft weight of the whole sequence: (shape, scale) by the sign of the advantage.

    When: very stale data.
    Claims: stable at a staleness of 64 updates, without normalizing by length.
    Counter-claims: for long sequences, noise alone moves the product far from 1; then every weight is near 0.
    """
    return Method(surrogate=Score(), factors=(Gamma(positive=positive, negative=negative),))


@published(
    family="smooth",
    formula="4 / tau sigmoid(tau (r - 1)) A",
    paper="Gao et al., Soft Adaptive Policy Optimization, arXiv:2511.20347",
)
def sapo(*, positive: Positive = 1.0, negative: Positive = 1.05) -> Method:
    """A soft gate instead of PPO's clip; ``tau`` depends on the sign of the advantage.

    When: hard clips remove tokens that are only slightly outside.
    Claims: more stable and better than GSPO and GRPO at equal budget.
    Counter-claims: far outside, the gradient is small but not 0.
    """
    return Method(surrogate=Sigmoid(positive=positive, negative=negative))


@published(
    family="smooth",
    formula="r A sg(exp(-(r - 1)^2 / (2 sigma^2)) where the update moves r away from 1), sigma = clip(scale / "
    "proximal^power, scale, high) clip(A > 0: 1 + positive A; A < 0: 1 / (1 - negative A), 0.1, 10)",
    paper="Fu et al., MASPO: Unifying Gradient Utilization, Probability Mass, and Signal Reliability, arXiv:2602.17550 "
    "(code)",
)
def maspo(
    *,
    scale: Positive = 1.0,
    power: NotNegative = 0.3,
    high: Annotated[float, Range(low="scale")] = 10.0,
    positive: NotNegative = 0.03,
    negative: NotNegative = 0.03,
) -> Method:
    """A soft gate that is wide for rare tokens and good responses, and narrow for bad responses.

    When: hard clips remove gradients, and the policy should learn rare tokens.
    Claims: up to 3 points over GRPO at 1.5B to 14B, with more entropy.
    Counter-claims: with the authors' values a ratio of 2 keeps 0.6 of its gradient, and nothing else bounds it. The
    formula is from the authors' code.
    """
    gate = GaussianGate(scale=scale, power=power, high=high, positive=positive, negative=negative)
    return Method(surrogate=Ratio(), factors=(gate,))
