# SPDX-License-Identifier: Apache-2.0
"""Settings of the loss. Frozen, checked at construction; errors contain the user's key."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from mis_ext.loss.words import KlType, LossDenominator, Mode, PenaltyTokens, Proximal
from mis_ext.methods.published import ChosenMethod
from mis_ext.validation import check_bool, check_choice, check_instance, check_number

Ratios = Literal["token", "sequence", "detached"]
KlRatio = Literal["none", "old", "behavior"]

_finite = partial(check_number, low=-math.inf, high=math.inf, open_low=True, open_high=True)
_clip = partial(check_number, low=0.0, high=math.inf)


def _word_of(choices: Any) -> Callable[[str, Any], str]:
    return partial(check_choice, choices=get_args(choices))


@dataclass(frozen=True, kw_only=True, slots=True)
class KlPenalty:
    """``coefficient`` times an estimate of the KL from the current to the reference policy, added to the loss.

    Args:
        coefficient: ``kl_loss_coef``.
        type: ``kl_loss_type``; ``low_var_kl`` is ``k3``, at most 10 in absolute value, without gradient beyond.
        ratio: What the estimate is multiplied by, with gradient: nothing; current / old (the hosts'
            ``use_unbiased_kl``); current / behavior (``mis_loss_unbiased_kl``), which is unbiased for what was sampled.
        tokens: Whether it loses the tokens that the correction rejects.
    """

    coefficient: float
    type: KlType = "k1"
    ratio: KlRatio = "none"
    tokens: PenaltyTokens = "kept"

    def __post_init__(self) -> None:
        _finite("kl_loss_coef", self.coefficient)
        check_choice("kl_loss_type", self.type, get_args(KlType))
        check_choice("ratio", self.ratio, get_args(KlRatio))
        check_choice("mis_loss_kl_tokens", self.tokens, get_args(PenaltyTokens))


CHECKS: dict[str, tuple[str, Callable[[str, Any], Any]]] = {
    "mode": ("mis_loss_mode", _word_of(Mode)),
    "ratios": ("ratios", _word_of(Ratios)),
    "proximal": ("mis_loss_proximal", _word_of(Proximal)),
    "denominator": ("mis_loss_denominator", _word_of(LossDenominator)),
    "entropy_tokens": ("mis_loss_entropy_tokens", _word_of(PenaltyTokens)),
    "use_behavior": ("use_rollout_logprobs", check_bool),
    "per_token_loss": ("calculate_per_token_loss", check_bool),
    "eps_clip": ("eps_clip", _clip),
    "entropy_coef": ("entropy_coef", _finite),
    "eps_clip_high": ("eps_clip_high", _clip),
    "eps_clip_c": ("eps_clip_c", partial(check_number, low=1.0, high=math.inf, open_low=True)),
    "opsm_delta": ("opsm_delta", partial(check_number, low=-math.inf, high=math.inf)),
    "kl": ("kl", partial(check_instance, kinds=KlPenalty)),
    "method": ("mis_loss_method", partial(check_instance, kinds=ChosenMethod)),
}
"""Of a field of :class:`LossSettings` the key or flag that users know it by, and what is legal."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """One policy loss. ``old`` is the policy whose ratio is clipped: the proximal one, or the behavior policy.

    Args:
        mode: ``baseline``: PPO as the hosts have it. ``decoupled``: the same, and a correction is required.
            ``bypass``: PPO whose old policy is the behavior policy. ``reinforce``: ``sg(weight) A log pi``.
        method: A published method in place of ``mode``, ``ratios`` and the clips; None for these.
        ratios: ``token``: PPO. ``sequence``: GSPO. ``detached``: CISPO. Not used by ``reinforce``.
        use_behavior: ``baseline`` with the behavior policy as old policy, the hosts' ``use_rollout_logprobs``.
        proximal: ``stored``: the proximal policy is what was scored before training, as far as it was. ``current``: it
            is the current policy, without gradient, so that its ratio is 1: right for one optimizer step per rollout.
        eps_clip: The ratio's lower bound is ``1 - eps_clip``.
        eps_clip_high: Its upper bound is ``1 + eps_clip_high``; ``eps_clip`` by default.
        eps_clip_c: Dual clip: the largest ratio where the advantage is negative; None for none.
        opsm_delta: Sequences with a negative advantage and a larger mean of ``log(old / current)`` add nothing; None
            for all sequences (``use_opsm``).
        entropy_coef: What the entropy is multiplied by.
        entropy_tokens: Whether the entropy loses the tokens that the correction rejects.
        kl: The KL penalty, or None.
        denominator: What the policy gradient of a response is divided by, see :mod:`mis_ext.loss.policy`.
        constant: The constant of ``denominator="constant"``, in tokens.
        per_token_loss: The host divides by the tokens of the whole batch itself.

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
    eps_clip: float = 0.2
    eps_clip_high: float | None = None
    eps_clip_c: float | None = None
    opsm_delta: float | None = None
    entropy_coef: float = 0.0
    entropy_tokens: PenaltyTokens = "kept"
    kl: KlPenalty | None = None
    denominator: LossDenominator = "original"
    constant: float | None = None
    per_token_loss: bool = False

    def __post_init__(self) -> None:
        for field, (key, check) in CHECKS.items():
            value = getattr(self, field)
            if value is not None or self.__dataclass_fields__[field].default is not None:
                check(key, value)
        if self.method is None:
            self._check_modes()
        else:
            self._check_method(self.method)
        if self.proximal == "current":
            self._check_current()
        self._check_denominator()

    def _check_method(self, chosen: ChosenMethod) -> None:
        # What a host sets by itself cannot be told from what a user wrote: other values are the user's.
        eps_clip = self.__dataclass_fields__["eps_clip"].default
        replaced = {
            f"mis_loss_mode: {self.mode}": self.mode != "baseline",
            f"--eps-clip {self.eps_clip:g}": self.eps_clip != eps_clip,
            f"--eps-clip-high {self.eps_clip_high}": self.eps_clip_high not in (None, eps_clip),
            f"--eps-clip-c {self.eps_clip_c}": self.eps_clip_c is not None,
            f"--advantage-estimator {'gspo' if self.ratios == 'sequence' else 'cispo'}": self.ratios != "token",
        }
        idle = [text for text, is_set in replaced.items() if is_set]
        if idle:
            raise ValueError(
                f"{', '.join(idle)}: no effect, because {self.chosen_by} defines the loss; remove it, and write "
                f"what should differ as {self.chosen_by.replace(': ', ': {name: ')}, ...}}"
            )
        if self.use_behavior and self.uses_proximal:
            raise ValueError(
                f"{self.chosen_by} compares with the proximal policy, --use-rollout-logprobs skips its "
                "scoring: drop the flag, or with one optimizer step per rollout write mis_loss_proximal: current"
            )
        if self.needs_reference is not None and self.kl is not None and self.kl.coefficient != 0.0:
            raise ValueError(
                f"kl_loss_coef={self.kl.coefficient!r}: {self.chosen_by} has a penalty against the reference policy of "
                "its own; write --kl-loss-coef 0, which keeps the reference log-probs"
            )

    def _check_modes(self) -> None:
        if self.mode == "decoupled" and self.use_behavior:
            raise ValueError(
                "mis_loss_mode: decoupled compares with the proximal policy, --use-rollout-logprobs makes the behavior "
                "policy the old one: drop the flag, or write mis_loss_mode: bypass"
            )
        if self.mode == "reinforce" and self.ratios != "token":
            raise ValueError(
                "mis_loss_mode: reinforce has no ratio with gradient: --advantage-estimator gspo and cispo have no "
                "effect there, write grpo"
            )
        if self.eps_clip_c is not None and (self.mode == "reinforce" or self.ratios == "detached"):
            of = "mis_loss_mode: reinforce" if self.mode == "reinforce" else "--advantage-estimator cispo"
            raise ValueError(f"eps_clip_c={self.eps_clip_c!r}: no effect, because {of} has no dual clip; remove it")

    def _check_current(self) -> None:
        if self.use_behavior or not self.uses_proximal:
            of = self.chosen_by if not self.uses_proximal else "--use-rollout-logprobs"
            raise ValueError(
                f"mis_loss_proximal: current: no effect, because {of} does not compare with the proximal policy; "
                "remove it"
            )
        if self.opsm_delta is not None:
            raise ValueError(
                "--use-opsm with mis_loss_proximal: current: the policies that it compares are then one; drop one of "
                "them"
            )

    def _check_denominator(self) -> None:
        if self.denominator == "constant":
            if self.constant is None:
                raise ValueError("mis_loss_denominator: constant needs mis_loss_constant, a number of tokens")
            check_number("mis_loss_constant", self.constant, low=0.0, high=math.inf, open_low=True, open_high=True)
        elif self.constant is not None:
            raise ValueError(
                f"mis_loss_constant={self.constant!r}: no effect, because mis_loss_denominator is {self.denominator}"
            )
        if self.per_token_loss and self.denominator != "original":
            raise ValueError(
                f"mis_loss_denominator: {self.denominator}: no effect, because --calculate-per-token-loss divides by "
                "all tokens of the batch outside of the loss; for kept tokens there, write mis_denominator: kept"
            )

    @property
    def old_is_behavior(self) -> bool:
        """True if the behavior policy is the old one; a method without a ratio is compared with the proximal policy."""
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
        """The key that says what the policy gradient is."""
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
        """The key that compares with the reference policy, besides the host's own penalty, or None."""
        return self.chosen_by if self.method is not None and "reference" in self.method.method.policies else None

    @property
    def needs_state_values(self) -> bool:
        """True if the loss reads the value of each token's state."""
        return self.method is not None and self.method.method.needs_state_values

    @property
    def sums_sequences(self) -> str | None:
        """The flag that sums over sequences in the pass over tokens, or None."""
        if self.method is not None and not self.method.method.is_of_tokens:
            return self.chosen_by
        if self.opsm_delta is not None:
            return "--use-opsm"
        return "--advantage-estimator gspo" if self.ratios == "sequence" else None

    @property
    def needs_correction(self) -> bool:
        """True if the mode requires a correction."""
        return self.mode in ("decoupled", "reinforce")
