# SPDX-License-Identifier: Apache-2.0
"""The settings as a :class:`~mis_ext.methods.method.Method`, and the tokens of a micro-batch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.layout import PackedLayout
from mis_ext.loss.settings import LossSettings
from mis_ext.methods.batch import TOTAL, UPDATE, Pair, Policy
from mis_ext.methods.method import Method
from mis_ext.methods.parts import Estimator, KlTerm, PairGate, PairWeight, Ratio, Score

LOW_VAR_CAP = 10.0
"""The frameworks' bound of ``low_var_kl``, in nats."""

_ESTIMATORS: dict[str, Estimator] = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}


class Objective(NamedTuple):
    """Objective of each token.

    ``method``: the policy gradient, with the method's own penalties. ``kl``: the framework's penalty, or None.
    ``pair``, ``reduce``: the log-ratio in metrics, of the token or the mean of its sequence.
    """

    method: Method
    kl: KlTerm | None
    pair: Pair
    reduce: Literal["token", "mean"]


@functools.lru_cache(maxsize=16)
def objective_of(settings: LossSettings) -> Objective:
    """Policy gradient and KL penalty, before the correction and denominators."""
    # The current policy over the old policy: the proximal policy or, if it is not used, the behavior policy.
    pair = TOTAL if settings.old_is_behavior else UPDATE
    method = _method_of_mode(settings, pair) if settings.method is None else settings.method.method
    if settings.opsm_delta is not None:
        # Off-policy sequence masking: the sequence adds nothing, and stays in the denominator.
        gate = PairGate(
            pair=pair, statistic="k1", reduce="mean", high=settings.opsm_delta, when="negative", action="zero"
        )
        method = replace(method, factors=(*method.factors, gate))
    kl = None
    if settings.kl is not None:
        kl = KlTerm(
            estimator=_ESTIMATORS[settings.kl.type],
            scale=settings.kl.coefficient,
            importance={"none": None, "old": pair, "behavior": TOTAL}[settings.kl.ratio],
            cap=LOW_VAR_CAP if settings.kl.type == "low_var_kl" else None,
        )
    return Objective(method, kl, pair, "mean" if method.surrogate.reduce == "mean" else "token")


def bounds_of(settings: LossSettings) -> tuple[float | None, float]:
    """Bounds of the ratio. A lower bound of 0 or less means none, as in CISPO."""
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    return (1.0 - settings.eps_clip if settings.eps_clip < 1.0 else None), 1.0 + high


def _method_of_mode(settings: LossSettings, pair: Pair) -> Method:
    low, high = bounds_of(settings)
    if settings.mode == "reinforce":
        return Method(surrogate=Score())
    if settings.ratios == "detached":
        return Method(surrogate=Score(), factors=(PairWeight(pair=pair, low=low or 0.0, high=high),))
    is_whole = settings.ratios == "sequence"
    return Method(
        surrogate=Ratio(
            pair=pair,
            level="geometric" if is_whole else "token",
            low=low,
            high=high,
            dual=settings.eps_clip_c,
            spread="sequence" if is_whole else "token",
        )
    )


class LossTokens(NamedTuple):
    """One micro-batch of the full policy loss, packed.

    ``log_probs``: ``[T]`` per policy, nats; the current policy's carries gradient. ``advantages_T``: ``[T]``.
    ``response_mask_R``: ``[R]``, nonzero on tokens that the policy generated. ``divisor_S``: ``[S]``, what the
    framework divides each sample by, above 0. ``entropy_T``: ``[T]``, nats, with gradient where its coefficient is not
    0; None if it is not used. ``reverse_kl_T``: ``[T]``, of on-policy distillation, only reported; or None.
    ``state_values_T``: ``[T]``, the mean advantage in the token's state; None if no method uses it. ``lag_T``: ``[T]``,
    weight updates since the weights that sampled; None if the correction does not use it. ``layout``: positions of the
    tokens. ``cp_group``, ``cp_rank``: ranks that share the sequences, and this rank among them. ``dp_group``: ranks
    with other sequences.
    """

    log_probs: Mapping[Policy, Tensor]
    advantages_T: Tensor
    response_mask_R: Tensor
    divisor_S: Tensor
    layout: PackedLayout
    entropy_T: Tensor | None = None
    reverse_kl_T: Tensor | None = None
    state_values_T: Tensor | None = None
    lag_T: Tensor | None = None
    cp_group: Group | None = None
    cp_rank: int = 0
    dp_group: Group | None = None

    def emptied(self) -> LossTokens:
        """Return the tokens of a rank that has none of these responses."""
        layout = self.layout.emptied
        nothing = {name: x[:0] for name, x in self._asdict().items() if name.endswith("_T") and x is not None}
        return self._replace(
            log_probs={policy: values_T[:0] for policy, values_T in self.log_probs.items()},
            response_mask_R=self.response_mask_R[: layout.num_whole_tokens],
            divisor_S=self.divisor_S[: layout.num_sequences],
            layout=layout,
            **nothing,
        )
