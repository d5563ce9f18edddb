# SPDX-License-Identifier: Apache-2.0
"""REINFORCE with importance sampling: ``A log pi`` with detached weights. A bound truncates; every token learns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from mis_ext.correction.tokens import bounded_expm1
from mis_ext.methods.batch import TOTAL, UPDATE, Batch, Pair
from mis_ext.methods.method import Method
from mis_ext.methods.parts import GrowingBound, KlTerm, PairGate, PairWeight, Penalty, Ratio, Score, Term
from mis_ext.methods.published import Bound, ExcessBound, FromOne, NotNegative, Positive, Range, UpToOne, published
from mis_ext.methods.sequence_weights import ParetoWeight
from mis_ext.validation import check_number, check_tensors

_INVERSE: Pair = ("proximal", "current")
_Bounds = tuple[NotNegative, Annotated[float, Range(low="first", open_low=True)]]


@published(
    formula="A log pi",
    paper="Williams, Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement Learning, 1992",
)
def reinforce() -> Method:
    """The policy gradient of data that the current policy sampled.

    When: one update per rollout, with a bitwise equal trainer and engine.
    Claims: unbiased there.
    Counter-claims: with a mismatch, negative advantages push the policies apart without bound.
    """
    return Method(surrogate=Score())


@published(
    formula="sg(w) A log pi",
    paper="Thinking Machines, Tinker: importance_sampling loss (documentation), 2025",
)
def reinforce_token_is() -> Method:
    """The token's plain importance ratio; the same gradient as ``w A``.

    When: a small mismatch, as a reference without any bound.
    Claims: the simplest correction.
    Counter-claims: no bound; does not correct the prefix, see ``reinforce_sequence_tis``.
    """
    return Method(surrogate=Score(), factors=(PairWeight(pair=TOTAL),))


@published(
    formula="A log pi - beta / 2 (log w)^2",
    paper="Richemond et al., Offline Regularised Reinforcement Learning for Large Language Models Alignment (DRO), "
    "arXiv:2405.19107; per token: Thinking Machines, Tinker: dro loss (documentation)",
)
def dro(*, beta: NotNegative = 0.05) -> Method:
    """The policy gradient without a ratio, and a squared log-ratio that keeps the policy near the behavior policy.

    When: stale data, whose ratios are outside of every range or have too much variance.
    Claims: a regression on the regularized optimum for any behavior policy, if the baseline is the soft value.
    Counter-claims: with another baseline, such as the mean of a group, the optimum moves. In the paper the square and
    the advantage are per response; here they are per token. The scale is from Tinker's example.
    """
    return Method(surrogate=Score(), terms=(KlTerm(estimator="k2", scale=beta, pair=TOTAL),))


@published(
    formula="sg(min(w, high)) A log pi",
    paper="Wu et al., LlamaRL (AIPO), arXiv:2505.24034",
)
def aipo(*, high: Bound = 4.0) -> Method:
    """Token ratios to the behavior policy, truncated; the paper suggests bounds from 2 to 10.

    When: asynchronous training: staleness and mismatch in one ratio, no recomputation.
    Claims: removes the sudden drops of asynchronous training on hard data.
    Counter-claims: truncation does not handle tokens that became unlikely (ratio near 0).
    """
    return Method(surrogate=Score(), factors=(PairWeight(pair=TOTAL, high=high),))


@published(
    formula="sg(min(w_1..T, high)) A log pi",
    paper="Liu, Li et al., When Speed Kills Stability, 2025",
)
def reinforce_sequence_tis(*, high: Bound = 2.0) -> Method:
    """The product of the sequence's ratios, truncated.

    When: short responses.
    Claims: unbiased as the bound grows.
    Counter-claims: at 2,048 tokens and k3 1e-3 the effective sample size is two of 100.
    """
    return Method(surrogate=Score(), factors=(PairWeight(pair=TOTAL, level="sequence", high=high),))


@published(
    formula="sg(w_1..T / mean over sequences of w_1..T) A log pi",
    paper="Hesterberg, Weighted Average Importance Sampling and Defensive Mixture Distributions, 1995",
)
def reinforce_sequence_snis() -> Method:
    """Self-normalized sequence weights: their mean is 1 in every batch.

    When: batches of many short responses.
    Claims: bounded by the largest advantage; an engine that is off by a constant factor changes nothing.
    Counter-claims: biased by 1 / n, and a single sequence is not corrected: use the mean over all ranks.
    """
    weight = PairWeight(pair=TOTAL, level="sequence")
    return Method(surrogate=Score(), factors=(weight,), normalize_over="sequences")


@published(
    formula="sg(min(smoothed w_1..T, high)) A log pi, the largest replaced by quantiles of a fitted Pareto tail",
    paper="Vehtari et al., Pareto Smoothed Importance Sampling, arXiv:1507.02646",
)
def reinforce_sequence_psis(*, high: Bound = 10.0) -> Method:
    """Sequence weights with a fitted tail: no bound to tune, and k-hat of the fit shows when they are unreliable.

    When: at least 25 responses per call, preferably hundreds; check that ``smooth_weights(...).k_hat`` is at most 0.7.
    Claims: less variance than plain weights and less bias than truncation, for any statistics that use them.
    Counter-claims: no published LLM training uses it. It smooths the sequences of one call, without a data-parallel
    group.
    """
    return Method(surrogate=Score(), factors=(ParetoWeight(pair=TOTAL, high=high),))


@published(
    formula="sg(clip(r, low, high)) A log pi",
    paper="MiniMax, MiniMax-M1, arXiv:2506.13585; bound of Khatri et al., ScaleRL, arXiv:2510.13786",
)
def cispo(*, low: UpToOne = 0.0, high: FromOne = 5.0) -> Method:
    """PPO's ratio, clipped without gradient: a clipped token still learns.

    When: PPO clips rare tokens that start a reflection.
    Claims: twice the speed of DAPO; best asymptote in ScaleRL.
    Counter-claims: the mismatch grows until collapse (DPPO, arXiv:2602.04879).
    """
    return Method(surrogate=Score(), factors=(PairWeight(pair=UPDATE, low=low, high=high),))


@published(
    formula="A > 0: sg(clip(r, positive)) A log pi; A < 0: sg(clip(r, negative)) A log pi",
    paper="Karaman et al., DISPO, arXiv:2602.00983 (read as an abstract only)",
)
def dispo(*, positive: _Bounds = (0.5, 2.0), negative: _Bounds = (0.2, 5.0)) -> Method:
    """CISPO with separate ranges for correct and for incorrect responses, each with a low and a high bound.

    When: CISPO is fast at first, and then collapses.
    Claims: for correct responses, weights above 1 keep entropy high and weights below 1 distil; 61.0 % on AIME 24
    (CISPO 55.4 %, DAPO 50.2 %).
    Counter-claims: four bounds to tune; tight bounds for incorrect responses lead to repetition or empty responses. The
    bounds are from mis_ext, because the abstract has none; the sign of the advantage represents correctness.
    """
    return Method(
        surrogate=Score(),
        factors=(
            PairWeight(pair=UPDATE, low=positive[0], high=positive[1], when="positive"),
            PairWeight(pair=UPDATE, low=negative[0], high=negative[1], when="negative"),
        ),
    )


@published(
    formula="sg(min(w, cap)) 1[not (A > 0, r > 1 + high or A < 0, r < 1 - low)] A log pi",
    paper="Zheng et al., Stabilizing Reinforcement Learning with LLMs: Formulation and Practices, arXiv:2512.01374",
)
def minirl(*, low: UpToOne = 0.2, high: ExcessBound = 0.27, cap: Bound = 5.0) -> Method:
    """Token importance weights with PPO's mask: the first-order approximation of the sequence objective.

    When: MoE models, together with routing replay if updates are off-policy.
    Claims: sufficient for small mismatch and staleness.
    Counter-claims: without replay, growing mismatch and collapse (DPPO).
    """
    clip = PairGate(pair=UPDATE, low=1.0 - low, high=1.0 + high, when="outward", action="zero")
    return Method(surrogate=Score(), factors=(PairWeight(pair=TOTAL, high=cap), clip))


@published(
    formula="A > 0: A log pi; A < 0: sg(min(w_1..T, high)) A log pi",
    paper="Le Roux et al., Tapered Off-Policy REINFORCE, arXiv:2503.14286",
)
def topr(*, high: Bound = 1.0) -> Method:
    """Good sequences have full weight. Bad sequences count only as far as the policy would still produce them.

    When: very off-policy data.
    Claims: stable without a KL term; negative examples help instead of destabilizing.
    Counter-claims: positive sequences have the bias of supervised training.
    """
    return Method(surrogate=Score(), factors=(PairWeight(pair=TOTAL, level="sequence", high=high, when="negative"),))


@published(
    formula="A > 0: sg(min(1 / r, cap)) A log pi; A < 0: sg(r) A log pi; both 0 where ppo clips",
    paper="Wang et al., ASPO: Asymmetric Importance Sampling Policy Optimization, arXiv:2510.06062",
)
def aspo(*, low: UpToOne = 0.2, high: ExcessBound = 0.28, cap: Bound = 3.0) -> Method:
    """Positive tokens are weighted by the inverse of their ratio, which favors tokens that became less likely.

    When: entropy collapses because likely tokens get more and more weight.
    Claims: repairs the imbalance of weights between positive and negative tokens.
    Counter-claims: it is not an importance weight of any distribution.
    """
    return Method(
        surrogate=Score(),
        factors=(
            PairWeight(pair=_INVERSE, high=cap, when="positive"),
            PairWeight(pair=UPDATE, when="negative"),
            PairGate(pair=UPDATE, low=1.0 - low, high=1.0 + high, when="outward", action="zero"),
        ),
    )


@published(
    formula="R = sg(r_1..t-1) r: min(R A, clip(R, exp(-low t^power), exp(high t^power)) A), "
    "A < 0: at least exp(dual t^power) A",
    paper="Rethinking Importance Sampling in LLM Policy Optimization: A Cumulative Token Perspective, arXiv:2605.07331",
)
def ctpo(*, low: NotNegative = 0.025, high: Positive = 0.05, dual: Positive = 0.05, power: UpToOne = 0.5) -> Method:
    """The product of ratios up to the token, with bounds that grow with the spread of such a product.

    When: several updates per rollout, and rewards within a response.
    Claims: corrects the prefix with less variance than the whole product.
    Counter-claims: with one reward at the end it is biased: later tokens are not corrected.
    """
    return Method(
        surrogate=Ratio(
            level="prefix",
            low=GrowingBound(log_bound=-low, power=power),
            high=GrowingBound(log_bound=high, power=power),
            dual=GrowingBound(log_bound=dual, power=power),
        )
    )


# Control variates: terms of every coefficient that cancel the drift of the policy from the mismatch.


@dataclass(frozen=True, kw_only=True, slots=True)
class DriftControl(Term):
    """Adds ``(ratio - 1) V`` to the coefficient of every valid token, ``V`` the value of its state.

    Off-policy, the score has a nonzero mean: in a state ``s``, actions of ``mu`` have ``E[grad log pi] = mu - pi`` in
    the logits. So the common part ``V(s)`` of the advantages moves the policy by ``V (mu - pi)``. The ratio times the
    score has mean 0, hence ``E[(ratio - 1) V grad log pi] = -V (mu - pi)``: the same tokens cancel this drift. The mean
    of the coefficient does not change, because ``E[ratio - 1] = 0``.
    """

    pair = TOTAL
    scale = -1.0
    needs_state_values = True

    def evaluate(self, batch: Batch) -> Penalty:
        """Value and slope ``[T]`` of each token, not yet multiplied by ``scale``."""
        slope_T = bounded_expm1(batch.log_ratio(self.pair)) * batch.state_values_T
        return Penalty(slope_T * batch.log_prob("current"), slope_T)


@published(
    family="control_variates",
    formula="sg(A + (w - 1) V) log pi, V: mean of A in the token's state",
    paper="mis_ext; the drift: Marek, Ryabinin, Score Centering, arXiv:2609.20807, which needs the vocabulary",
)
def drift_control() -> Method:
    """The plain policy gradient without its drift, from sampled tokens only: a token's own advantage is not reweighted.

    When: a mismatch of trainer and engine with advantages that are not centered in every state: a critic, or one reward
    for many turns. Pass the state's value as ``state_values_T``. With ``V = A`` it equals ``reinforce_token_is``, with
    ``V = 0`` ``reinforce``.
    Claims: if ``V`` is the mean of ``A`` under the behavior policy, the drift is exactly 0, and only the
    action-dependent part of ``A`` is off-policy. Shifting ``A`` and ``V`` by a function of the state changes no
    expectation.
    Counter-claims: a wrong ``V`` leaves the drift of its error. No published LLM training uses it. The ratio has no
    bound; a bound would break the identity.
    """
    return Method(surrogate=Score(), terms=(DriftControl(),))


def expected_score(current_TK: Tensor, behavior_TK: Tensor, *, high: float | None = None) -> Tensor:
    """Return ``[T]``: the mean gradient of ``sg(min(w, high)) log pi`` over all tokens that could be sampled.

    Score centering subtracts this mean: add ``A * expected_score(...)`` to a loss ``-sg(min(w, high)) A log pi`` of
    each token. Then an advantage that all actions of a state share no longer moves the policy. Only the gradient is
    meaningful.

    The engine gives its ``K`` most likely tokens, not the vocabulary. The other tokens, the tail, are assumed to have
    the trainer's probabilities, scaled to the remaining mass: ``q = alpha p``,
    ``alpha = (1 - sum of q) / (1 - sum of p)``. As ``sum of p grad log p`` is 0 over the vocabulary, the tail's mean is
    minus that of the head:

        sum over the head of  (q min(p / q, high) - alpha min(1 / alpha, high) p) grad log p

    Args:
        current_TK: ``[T, K]``, nats, of these tokens under the current policy, with gradient.
        behavior_TK: ``[T, K]``, nats, of the same tokens under the behavior policy, normalized over the vocabulary;
            -inf if the engine gave fewer tokens. A token with -inf in one of the two belongs to the tail.
        high: Bound of the weight. None: no weight, as in ``reinforce``.

    Raises:
        ValueError: ``high`` is not above 0, or the shapes differ.

    References:
        Marek, Ryabinin, Score Centering Stabilizes Off-policy Reinforcement Learning, arXiv:2609.20807 (after vime's
        description of it); SkyRL (pull request 2244).
    """
    check_tensors({"current_TK": current_TK, "behavior_TK": behavior_TK})
    if current_TK.shape != behavior_TK.shape:
        raise ValueError(
            f"current_TK has shape {list(current_TK.shape)}, and behavior_TK has {list(behavior_TK.shape)}; both "
            "must be [T, K]"
        )
    if high is not None:
        check_number("high", high, low=0.0, high=math.inf, open_low=True)
    dtype = torch.promote_types(current_TK.dtype, torch.float32)
    # If top-p excludes a token in the trainer, neither value is meaningful.
    is_given_TK = (behavior_TK > -torch.inf) & (current_TK.detach() > -torch.inf)
    p_TK, q_TK = (torch.where(is_given_TK, each.detach().to(dtype).exp(), 0.0) for each in (current_TK, behavior_TK))
    # If the head rounds to the whole mass, there is no tail to scale.
    tiny = torch.finfo(dtype).eps
    left_of_p_T, left_of_q_T = ((1.0 - each.sum(-1)).clamp_min(0.0) for each in (p_TK, q_TK))
    alpha_T = torch.where(left_of_p_T > tiny, left_of_q_T / left_of_p_T.clamp_min(tiny), 0.0)
    if high is not None:
        # q min(p / q, high) = min(p, q high), which is also right where q is 0.
        high = min(high, 1.0 / tiny)
        q_TK, alpha_T = torch.minimum(p_TK, q_TK * high), (alpha_T * high).clamp_max(1.0)
    share_TK = q_TK - alpha_T.unsqueeze(-1) * p_TK
    return (share_TK * torch.where(is_given_TK, current_TK, 0.0)).sum(-1)
