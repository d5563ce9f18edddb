"""Proximal policy optimisation and its clips: a bound of a ratio with gradient, which stops the gradient beyond it."""

from __future__ import annotations

from mis_ext.correction.statistics import TOTAL
from mis_ext.methods.kl_terms import KlTerm
from mis_ext.methods.method import Method
from mis_ext.methods.published import ExcessBound, FromOne, NotNegative, Positive, UpToOne, published
from mis_ext.methods.surrogates import ProbabilityBound, Ratio


@published(
    formula="min(r A, clip(r, 1 - low, 1 + high) A)",
    paper="Schulman et al., Proximal Policy Optimization Algorithms, arXiv:1707.06347",
)
def ppo(*, low: UpToOne = 0.2, high: ExcessBound = 0.2) -> Method:
    """Several updates on one rollout, each token's ratio kept near 1.

    When: trainer and engine agree, or a weight corrects the mismatch: ``r`` does not contain it.
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
    Claims: entropy stays up, long chains of thought keep improving.
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
    Counter-claims: the tokens that it stops are those that the policy raised against their advantage.
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
    Counter-claims: part of the clip range is spent on the mismatch, and no metric can tell mismatch from staleness.
        With weights 4 updates old a pretrained model learned 0.06 less than with token TIS (lab/evidence).
    """
    return Method(surrogate=Ratio(pair=TOTAL, low=1.0 - low, high=1.0 + high))


@published(
    formula="clip(w, low, high) A - tau (log w)^2",
    paper="Kimi Team, Kimi K2.5, arXiv:2602.02276",
)
def kimi_k2_5(*, low: UpToOne = 0.5, high: FromOne = 2.0, tau: NotNegative = 1e-3) -> Method:
    """A clip on both sides: a token outside the band has no policy gradient, for any advantage.

    When: agentic training with a mismatch: the band bounds the drift, not the update.
    Claims: stable training of long tool-using responses.
    Counter-claims: a move back towards ratio 1 is stopped too. The report's old policy is the one that generated; it
    gives no numbers for the band and tau: these defaults are from mis_ext.
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
    """PPO whose bounds widen where the token was unlikely: they solve ``proximal * r * (r - 1) = e``.

    When: the policy should learn rare tokens.
    Claims: an order of magnitude fewer clipped tokens than PPO.
    Counter-claims: the band is wide for rare tokens, where low-precision engines differ most. Only the clip of the
    paper is here, not its standardisation of advantages; the defaults are those of the authors' code.
    """
    bounds = ProbabilityBound(gain=-low, cap=cap), ProbabilityBound(gain=high, cap=cap)
    return Method(surrogate=Ratio(low=bounds[0], high=bounds[1]))


FAMILY = (ppo, dapo, dual_clip, bypass, kimi_k2_5, dcpo)
