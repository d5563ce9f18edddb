"""Decoupled PPO: the trust region is around the proximal policy, a weight corrects what the behavior policy sampled."""

from __future__ import annotations

from mis_ext.correction.statistics import MISMATCH
from mis_ext.correction.weights import Weight
from mis_ext.methods.factors import Factor
from mis_ext.methods.method import Method
from mis_ext.methods.published import Bound, FromOne, UpToOne, published
from mis_ext.methods.smooth import Mixture
from mis_ext.methods.surrogates import Ratio

_MISMATCH_REPORT = "Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025"
COLLAPSE_REPORT = (
    "Liu, Li et al., When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch, 2025"
)
PPO_TEXT = "min(r A, clip(r, 0.8, 1.2) A)"


def with_ppo(*factors: Factor) -> Method:
    """PPO with a clip range of [0.8, 1.2] on current / proximal, times the given factors of proximal / behavior."""
    return Method(surrogate=Ratio(low=0.8, high=1.2), factors=factors)


@published(
    formula=f"sg(rho) {PPO_TEXT}",
    paper="Hilton, Cobbe, Schulman, Batch size-invariance for policy optimization, arXiv:2110.00641",
)
def decoupled() -> Method:
    """The identity ``rho r = w`` keeps the token's importance ratio; the clip sees the update only.

    When: several updates per rollout and a mismatch without heavy tails.
    Claims: the batch size no longer sets how far a policy may move; AReaL (arXiv:2505.24298) trains on stale data.
    Counter-claims: one extreme ratio gives one extreme gradient: use a bound.
    """
    return with_ppo(Weight(mode="unbounded"))


@published(formula=f"sg(min(rho, high)) {PPO_TEXT}", paper=_MISMATCH_REPORT)
def decoupled_token_tis(*, high: Bound = 2.0) -> Method:
    """Token ratios, truncated.

    When: the default against a mismatch of trainer and engine: low variance at every length.
    Claims: recovers training with quantised rollouts.
    Counter-claims: corrects the next token, not the prefix; reaches a plateau where sequence weights still improve.
    Acts only on heavy tails.
    """
    return with_ppo(Weight(high=high))


@published(formula=f"sg(min(rho_1..T, high)) {PPO_TEXT}", paper=COLLAPSE_REPORT)
def decoupled_sequence_tis(*, high: Bound = 2.0) -> Method:
    """The product of the sequence's ratios, truncated.

    When: short responses, ``T`` well below ``1 / (2 k3)``.
    Claims: unbiased as the bound grows; recovers runs that crash under token weights.
    Counter-claims: its effective sample size falls as ``exp(-2 T k3)``.
    """
    return with_ppo(Weight(level="sequence", high=high))


@published(formula=f"sg(clip(rho, low, high)) {PPO_TEXT}", paper=_MISMATCH_REPORT)
def decoupled_token_clip(*, low: UpToOne = 0.5, high: FromOne = 2.0) -> Method:
    """Token ratios, clamped on both sides.

    When: the effective sample size matters more than bias: tokens that the trainer finds unlikely keep some weight.
    Claims: more effective samples than truncation.
    Counter-claims: the lower bound raises weights, which adds bias that truncation does not have.
    """
    return with_ppo(Weight(mode="clip", low=low, high=high))


@published(
    formula=f"sg(rho^power) {PPO_TEXT}",
    paper="Ionides, Truncated Importance Sampling, 2008 (bias against variance); tempering is not published for LLM RL",
)
def decoupled_tempered(*, power: UpToOne = 0.5) -> Method:
    """Token ratios to a power between 0, no correction, and 1, full correction.

    When: a study of bias against variance.
    Claims: the order of weights is kept and no weight is lost, unlike with bounds.
    Counter-claims: biased for every power below 1, also without extreme ratios.
    """
    return with_ppo(Weight(mode="unbounded", power=power))


@published(
    formula=f"sg(1 + mix (rho - 1)) {PPO_TEXT}",
    paper="AIS: Adaptive Importance Sampling for Quantized RL, arXiv:2605.13907 (read as an abstract only)",
)
def decoupled_mixed(*, mix: UpToOne = 0.5) -> Method:
    """``(1 - mix)`` of no correction and ``mix`` of the token ratio.

    When: FP8 rollouts with a mismatch that is mostly noise.
    Claims: matches BF16.
    Counter-claims: a fixed mix is a fixed bias; in the paper it adapts, here it is a constant.
    """
    return with_ppo(Mixture(pair=MISMATCH, mix=mix))


FAMILY = (
    decoupled,
    decoupled_token_tis,
    decoupled_sequence_tis,
    decoupled_token_clip,
    decoupled_tempered,
    decoupled_mixed,
)
