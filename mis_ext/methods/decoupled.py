# SPDX-License-Identifier: Apache-2.0
"""Decoupled PPO: a trust region around the proximal policy, and a correction for the behavior policy."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mis_ext.correction.tokens import bounded_exp
from mis_ext.methods.batch import MISMATCH, Batch
from mis_ext.methods.method import Method, NormalizeOver
from mis_ext.methods.parts import Factor, PairGate, PairWeight, Ratio
from mis_ext.methods.published import AboveOne, Bound, ExcessBound, FromOne, UpToOne, published

_MISMATCH_REPORT = "Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training, 2025"
_COLLAPSE_REPORT = (
    "Liu, Li et al., When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch, 2025"
)
_PPO = "min(r A, clip(r, 0.8, 1.2) A)"


def _with_ppo(*factors: Factor, normalize_over: NormalizeOver | None = None) -> Method:
    """PPO with a clip range of [0.8, 1.2] on current / proximal, times the given factors of proximal / behavior."""
    return Method(surrogate=Ratio(low=0.8, high=1.2), factors=factors, normalize_over=normalize_over)


@published(
    formula=f"sg(rho) {_PPO}",
    paper="Hilton, Cobbe, Schulman, Batch size-invariance for policy optimization, arXiv:2110.00641",
)
def decoupled() -> Method:
    """The identity ``rho r = w`` keeps the token's importance ratio; the clip applies only to the update.

    When: several updates per rollout and a mismatch without heavy tails.
    Claims: the batch size no longer limits the movement of the policy; AReaL (arXiv:2505.24298) trains on stale data.
    Counter-claims: one extreme ratio gives one extreme gradient: use a bound.
    """
    return _with_ppo(PairWeight())


@published(formula=f"sg(min(rho, high)) {_PPO}", paper=_MISMATCH_REPORT)
def decoupled_token_tis(*, high: Bound = 2.0) -> Method:
    """Token ratios, truncated.

    When: the default for a mismatch of trainer and engine: low variance at every length.
    Claims: recovers training with quantized rollouts.
    Counter-claims: corrects the next token, not the prefix; reaches a plateau where sequence weights still improve.
    Affects only heavy tails.
    """
    return _with_ppo(PairWeight(high=high))


@published(formula=f"sg(min(rho_1..T, high)) {_PPO}", paper=_COLLAPSE_REPORT)
def decoupled_sequence_tis(*, high: Bound = 2.0) -> Method:
    """The product of the sequence's ratios, truncated.

    When: short responses, ``T`` well below ``1 / (2 k3)``.
    Claims: unbiased as the bound grows; recovers runs that crash under token weights.
    Counter-claims: its effective sample size falls as ``exp(-2 T k3)``.
    """
    return _with_ppo(PairWeight(level="sequence", high=high))


@published(formula=f"sg(clip(rho, low, high)) {_PPO}", paper=_MISMATCH_REPORT)
def decoupled_token_clip(*, low: UpToOne = 0.5, high: FromOne = 2.0) -> Method:
    """Token ratios, clamped on both sides.

    When: the effective sample size matters more than bias: tokens that the trainer finds unlikely keep some weight.
    Claims: more effective samples than truncation.
    Counter-claims: the lower bound raises weights, and adds bias that truncation does not have.
    """
    return _with_ppo(PairWeight(low=low, high=high))


@published(
    formula=f"sg(rho^power) {_PPO}",
    paper="Ionides, Truncated Importance Sampling, 2008 (bias against variance); tempering is not published for LLM RL",
)
def decoupled_tempered(*, power: UpToOne = 0.5) -> Method:
    """Token ratios to a power between 0, no correction, and 1, full correction.

    When: a study of bias against variance.
    Claims: the order of weights is kept and no weight is lost, unlike with bounds.
    Counter-claims: biased for every power below 1, also without extreme ratios.
    """
    return _with_ppo(PairWeight(power=power))


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture(Factor):
    """``1 + mix (ratio - 1)``: between no correction, 0, and the token's ratio, 1."""

    mix: float
    pair = MISMATCH

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` weights, at least 0, without gradient."""
        return 1.0 + self.mix * (bounded_exp(batch.log_ratio(self.pair)) - 1.0)


@published(
    formula=f"sg(1 + mix (rho - 1)) {_PPO}",
    paper="AIS: Adaptive Importance Sampling for Quantized RL, arXiv:2605.13907 (read as an abstract only)",
)
def decoupled_mixed(*, mix: UpToOne = 0.5) -> Method:
    """``(1 - mix)`` of no correction and ``mix`` of the token ratio.

    When: FP8 rollouts with a mismatch that is mostly noise.
    Claims: matches BF16.
    Counter-claims: a fixed mix is a fixed bias; in the paper it adapts, here it is a constant.
    """
    return _with_ppo(Mixture(mix=mix))


# Masks and rejection: tokens outside of the bounds are not trained.


@published(
    family="masks",
    formula=f"sg(rho 1[low <= rho <= high]) {_PPO}",
    paper="Ling Team, Every Step Evolves (IcePop), arXiv:2510.18855",
)
def icepop(*, low: UpToOne = 0.5, high: FromOne = 5.0, normalize_over: NormalizeOver | None = None) -> Method:
    """Tokens outside the range lose their gradient and stay in the denominator.

    With ``normalize_over="all_tokens"`` the weights are divided by their mean over all valid tokens, where tokens
    outside count as 0 (verl: rollout correction with a range and batch normalization, code).

    When: MoE models, whose routers cause large differences on single tokens.
    Claims: stable where GRPO collapses; less gradient noise.
    Counter-claims: the share of masked tokens falls while the gap widens (KPop, 2026).
    """
    return _with_ppo(PairWeight(), PairGate(low=low, high=high, action="zero"), normalize_over=normalize_over)


@published(
    family="masks",
    formula="sg(rho 1[1 / beta <= rho <= beta]) min(r A, clip(r, 1 - low, 1 + high) A)",
    paper="GLM-5 Team, GLM-5: from Vibe Coding to Agentic Engineering, arXiv:2602.15763, equation 1",
)
def glm_5_reasoning(*, beta: AboveOne = 2.0, low: UpToOne = 0.2, high: ExcessBound = 0.28) -> Method:
    """IcePop with a range that is symmetric in the log, and PPO with a higher upper bound.

    When: synchronous training for reasoning, with recomputed log-probs; for agents see ``glm_5``.
    Claims: trains GLM-5 on-policy without a KL term.
    Counter-claims: as ``icepop``.
    """
    band = PairGate(low=1.0 / beta, high=beta, action="zero")
    return Method(surrogate=Ratio(low=1.0 - low, high=1.0 + high), factors=(PairWeight(), band))


@published(
    family="masks",
    formula=f"sg(rho 1[low <= rho <= high]) {_PPO}, rejected tokens leave the denominator",
    paper=_COLLAPSE_REPORT,
)
def token_mis(*, low: UpToOne = 0.5, high: FromOne = 2.0) -> Method:
    """Tokens outside the range are rejected.

    When: single tokens with wrong log-probs in good responses.
    Claims: as IcePop.
    Counter-claims: crashed in the report's own runs, where sequence masking did not.
    """
    return _with_ppo(PairWeight(), PairGate(low=low, high=high))


@published(family="masks", formula=f"sg(rho_1..T 1[low <= rho_1..T <= high]) {_PPO}", paper=_COLLAPSE_REPORT)
def sequence_mis(*, low: UpToOne = 0.5, high: FromOne = 2.0) -> Method:
    """Sequences whose product of ratios is outside the range are rejected; for others it is the weight.

    When: short responses with a moderate mismatch.
    Claims: better than truncation: a huge weight means out of distribution, not important.
    Counter-claims: at k3 1e-3 and 16,384 tokens 2 of 1,000 responses are left. At 6e-2 and 190 tokens it kept 9 of
    1,000, and hardly learned (``lab/evidence``).
    """
    return _with_ppo(PairWeight(level="sequence"), PairGate(reduce="sum", low=low, high=high))


@published(
    family="masks",
    formula=f"1[low <= exp(mean log rho) <= high] {_PPO}",
    paper="Liu, Li et al., RL Collapse Part 3, 2025",
)
def geometric_rs(*, low: UpToOne = 0.999, high: FromOne = 1.001) -> Method:
    """Sequences whose geometric mean of ratios is outside the range are rejected; no weight.

    When: long responses, where every product is outside of every range.
    Claims: no length bias of rejection.
    Counter-claims: it rejects at a per-token KL of about ``1 - low``, and its upper bound has no effect. It rejects
    half of all responses if the engine's noise has this size.
    """
    return _with_ppo(PairGate(reduce="mean", low=low, high=high))


@published(
    family="masks",
    formula=f"1[low <= exp(mean over the segment of log rho) <= high] {_PPO}",
    paper="ROLL: train_infer_corrections, granularity segment (code)",
)
def segment_rs(*, low: UpToOne = 0.8, high: FromOne = 1.2) -> Method:
    """As ``geometric_rs``, separately for each run of generated tokens, such as one turn of an agent.

    When: many turns, one of them sampled by a failing engine or stale weights.
    Claims: keeps the other turns.
    Counter-claims: turns after a rejected turn were sampled in states that the policy might not reach.
    """
    return _with_ppo(PairGate(reduce="segment_mean", low=low, high=high))


@published(
    family="masks",
    formula=f"sg(min(rho, bound)) 1[low <= exp(mean log rho) <= high] {_PPO}",
    paper="Liu, Li et al., RL Collapse Part 3, 2025",
)
def geometric_rs_token_tis(*, low: UpToOne = 0.999, high: FromOne = 1.001, bound: Bound = 2.0) -> Method:
    """Geometric rejection of sequences, and truncated token ratios for the rest.

    When: long responses with heavy-tailed tokens.
    Claims: outlier tokens and outlier sequences are each handled at their own level.
    Counter-claims: as ``geometric_rs``.
    """
    return _with_ppo(PairWeight(high=bound), PairGate(reduce="mean", low=low, high=high))


@published(
    family="masks",
    formula=f"sg(rho) 1[low <= exp(mean log rho) <= high] {_PPO}, zeroed sequences stay in the denominator",
    paper="NeMo RL, seq-mask-tis (code)",
)
def sequence_mask_tis(*, low: UpToOne = 0.999, high: FromOne = 1.002) -> Method:
    """The gate is per sequence; the weight is the plain ratio of the token.

    When: as ``geometric_rs``, with denominators that do not change.
    Claims: default of two frameworks' combined mode.
    Counter-claims: the token ratio has no bound, although the name contains TIS.
    """
    return _with_ppo(PairWeight(), PairGate(reduce="mean", low=low, high=high, action="zero"))


@published(family="masks", formula=f"1[min over the sequence of rho >= low] {_PPO}", paper=_COLLAPSE_REPORT)
def veto(*, low: UpToOne = 1e-4) -> Method:
    """One extreme token rejects its sequence.

    When: always useful: it rejects wrong log-probs, not noise.
    Claims: finds extreme tokens that a mean hides.
    Counter-claims: longer responses are more likely to have such a token.
    """
    return _with_ppo(PairGate(reduce="min", low=low))


@published(
    family="masks",
    formula=f"1[max (log rho)^2 / 2 <= high_max] 1[mean (rho - 1 - log rho) <= high_mean] {_PPO}",
    paper="Li et al., Trust Region Masking for Long-Horizon LLM Reinforcement Learning, arXiv:2512.23075",
)
def trm(*, high_max: Bound = 0.05, high_mean: Bound = 1e-3) -> Method:
    """Sequences with one extreme token, or a large mean divergence, are rejected.

    When: long responses that need a bound of the surrogate's error.
    Claims: the first non-vacuous bound at 4,096 tokens.
    Counter-claims: the bound holds for the true divergences, but a gate sees only the sampled tokens. These thresholds
    are from mis_ext.
    """
    return _with_ppo(
        PairGate(statistic="k2", reduce="max", high=high_max),
        PairGate(statistic="k3", reduce="mean", high=high_mean),
    )


@published(
    family="masks",
    formula=f"1[mean exp(abs(log rho)) <= high] {_PPO}",
    paper="NVIDIA, Nemotron-3 Super, arXiv:2604.12374",
)
def sequence_error(*, high: AboveOne = 1.05) -> Method:
    """Sequences with a large mean multiplicative error are rejected.

    When: MoE models with a mismatch in both directions, which a geometric mean cancels.
    Claims: used to train Nemotron-3.
    Counter-claims: its Ultra variant masked 60 to 71 % of all sequences. The threshold is from mis_ext.
    """
    return _with_ppo(PairGate(statistic="exp_abs_log_ratio", reduce="mean", high=high))
