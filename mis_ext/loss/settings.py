# SPDX-License-Identifier: Apache-2.0
"""Settings of the loss. ``keys/`` reads and checks them; this module does not check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mis_ext.loss.words import EPS_CLIP, KlType, LossDenominator, Mode, PenaltyTokens, Proximal
from mis_ext.methods.published import ChosenMethod

Ratios = Literal["token", "sequence", "detached"]
KlRatio = Literal["none", "old", "behavior"]


@dataclass(frozen=True, kw_only=True, slots=True)
class KlPenalty:
    """``coefficient`` times an estimate of the KL from the current to the reference policy, added to the loss.

    Args:
        coefficient: ``kl_loss_coef``.
        type: ``kl_loss_type``; ``low_var_kl`` is ``k3``, clamped to an absolute value of 10, without gradient beyond.
        ratio: The factor of the estimate, with gradient: none; current / old (the frameworks' ``use_unbiased_kl``);
            current / behavior (``mis_loss_unbiased_kl``), which is unbiased for the sampled tokens.
        tokens: Whether tokens that the correction rejects have it.
    """

    coefficient: float
    type: KlType = "k1"
    ratio: KlRatio = "none"
    tokens: PenaltyTokens = "kept"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """One policy loss. ``old`` is the policy whose ratio is clipped: the proximal one, or the behavior policy.

    Args:
        mode: ``baseline``: PPO of the frameworks. ``decoupled``: the same, and a correction is required.
            ``bypass``: PPO whose old policy is the behavior policy. ``reinforce``: ``sg(weight) A log pi``.
        method: A published method, which replaces ``mode``, ``ratios``, and the clips; or None.
        ratios: ``token``: PPO. ``sequence``: GSPO. ``detached``: CISPO. Not used by ``reinforce``.
        use_behavior: ``baseline`` with the behavior policy as old policy, the frameworks' ``use_rollout_logprobs``.
        proximal: ``stored``: the proximal log-probs are those scored before training, if they were. ``current``: they
            are those of the current policy, without gradient, so the ratio is 1; correct for one optimizer step per
            rollout.
        eps_clip: The ratio's lower bound is ``1 - eps_clip``.
        eps_clip_high: Its upper bound is ``1 + eps_clip_high``; ``eps_clip`` by default.
        eps_clip_c: Dual clip: the largest ratio for a negative advantage, or None.
        opsm_delta: Sequences with a negative advantage and a larger mean of ``log(old / current)`` add nothing; None:
            all sequences count (``use_opsm``).
        entropy_coef: The factor of the entropy.
        entropy_tokens: Whether tokens that the correction rejects have the entropy term.
        kl: The KL penalty, or None.
        denominator: The divisor of a response's policy gradient, see :mod:`mis_ext.loss.policy`.
        constant: The constant of ``denominator="constant"``, in tokens.
        per_token_loss: The framework divides by the tokens of the whole batch.

    References:
        Schulman et al., Proximal Policy Optimization Algorithms, arXiv:1707.06347; Ye et al., dual clip,
        arXiv:1912.09729; Hilton et al., Batch size-invariance for policy optimization, arXiv:2110.00641 (decoupled);
        Zheng et al., GSPO, arXiv:2507.18071; MiniMax-M1 (CISPO), arXiv:2506.13585; DeepSeek-V3.2 (off-policy sequence
        masking, unbiased KL), arXiv:2512.02556; Liu et al., Understanding R1-Zero-Like Training (a constant
        denominator), arXiv:2503.20783.
    """

    mode: Mode = "baseline"
    method: ChosenMethod | None = None
    ratios: Ratios = "token"
    use_behavior: bool = False
    proximal: Proximal = "stored"
    eps_clip: float = EPS_CLIP
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    opsm_delta: float | None = None
    entropy_coef: float = 0.0
    entropy_tokens: PenaltyTokens = "kept"
    kl: KlPenalty | None = None
    denominator: LossDenominator = "original"
    constant: float | None = None
    per_token_loss: bool = False

    @property
    def old_is_behavior(self) -> bool:
        """True if the behavior policy is the old policy; a method without a ratio uses the proximal policy."""
        if self.method is not None:
            return not self.uses_proximal and self.needs_behavior is not None
        return self.use_behavior or not self.uses_proximal

    @property
    def uses_proximal(self) -> bool:
        """True if the loss reads the trainer's scoring of the rollout."""
        if self.method is not None:
            return "proximal" in self.method.method.policies
        return self.mode not in ("bypass", "reinforce")

    @property
    def chosen_by(self) -> str:
        """The key that defines the policy gradient."""
        return f"mis_loss_mode: {self.mode}" if self.method is None else f"mis_loss_method: {self.method.name}"

    @property
    def reads_stored(self) -> bool:
        """True if the proximal log-probs are those scored before training."""
        return self.uses_proximal and self.proximal == "stored"

    @property
    def needs_behavior(self) -> str | None:
        """The key or flag that compares with the behavior policy, or None."""
        if not self.uses_proximal if self.method is None else "behavior" in self.method.method.policies:
            return self.chosen_by
        if self.use_behavior and self.method is None:
            return "--use-rollout-logprobs"
        return "mis_loss_unbiased_kl" if self.kl is not None and self.kl.ratio == "behavior" else None

    @property
    def needs_reference(self) -> str | None:
        """The key that compares with the reference policy, except the framework's penalty, or None."""
        return self.chosen_by if self.method is not None and "reference" in self.method.method.policies else None

    @property
    def needs_state_values(self) -> bool:
        """True if the loss reads the value of each token's state."""
        return self.method is not None and self.method.method.needs_state_values

    @property
    def divides_by_kept(self) -> bool:
        """True if the method rejects tokens, and the denominator does not count them."""
        if self.method is None or self.denominator != "kept":
            return False
        return any(factor.action == "reject" for factor in self.method.method.factors)

    @property
    def sums_sequences(self) -> bool:
        """True if the pass over tokens sums over sequences."""
        of_method = self.method is not None and not self.method.method.is_of_tokens
        return of_method or self.opsm_delta is not None or self.ratios == "sequence" or self.divides_by_kept
