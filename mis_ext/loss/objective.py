# SPDX-License-Identifier: Apache-2.0
"""The settings as a :class:`~mis_ext.methods.method.Method`, and what its parts say about each token of a micro-batch.

Nothing here knows a denominator or a gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.config import Gate
from mis_ext.correction.correct import Correction
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.tokens import STATISTICS, TOTAL, UPDATE, Pair, Policy, bounded_exp
from mis_ext.loss.settings import LossSettings
from mis_ext.loss.words import PenaltyTokens
from mis_ext.methods.batch import Batch, Reductions
from mis_ext.methods.method import Method
from mis_ext.methods.parts import Estimator, KlTerm, Penalty, Ratio, RatioWeight, Score, Slope

LOW_VAR_CAP = 10.0
"""The frameworks' bound of ``low_var_kl``, in nats."""

_ESTIMATORS: dict[str, Estimator] = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}


class Objective(NamedTuple):
    """Objective of each token.

    ``method``: the policy gradient, with penalties of its own. ``kl``: the framework's penalty, or None. ``pair``,
    ``reduce``: the log-ratio that metrics report, of the token or the mean of its sequence.
    """

    method: Method
    kl: KlTerm | None
    pair: Pair
    reduce: Literal["token", "mean"]


@functools.lru_cache(maxsize=16)
def objective_of(settings: LossSettings) -> Objective:
    """Policy gradient and KL penalty, without the correction and without denominators."""
    # The current policy over the old one: the proximal or, where that is not looked at, the behavior policy.
    pair = TOTAL if settings.old_is_behavior else UPDATE
    method = _method_of_mode(settings, pair) if settings.method is None else settings.method.method
    if settings.opsm_delta is not None:
        # Off-policy sequence masking: the sequence adds nothing, and stays in the denominator.
        gate = Gate(pair=pair, statistic="k1", reduce="mean", high=settings.opsm_delta, when="negative", action="zero")
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


def _bounds(settings: LossSettings) -> tuple[float | None, float]:
    """Bounds of the ratio. A lower bound of 0 and below is none, as in CISPO."""
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    return (1.0 - settings.eps_clip if settings.eps_clip < 1.0 else None), 1.0 + high


def _method_of_mode(settings: LossSettings, pair: Pair) -> Method:
    low, high = _bounds(settings)
    if settings.mode == "reinforce":
        return Method(surrogate=Score())
    if settings.ratios == "detached":
        return Method(surrogate=Score(), factors=(RatioWeight(pair=pair, low=low, high=high),))
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
    0; None where no one asks for it. ``reverse_kl_T``: ``[T]``, of on-policy distillation, to be reported; or None.
    ``state_values_T``: ``[T]``, the mean advantage in the token's state; None where no method asks for it. ``lag_T``:
    ``[T]``, weight updates since the weights that sampled; None where the correction does not ask for it. ``layout``,
    ``cp_group``, ``cp_rank``: where the tokens lie, and who holds the others of the same sequences. ``dp_group``: who
    holds other sequences.
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

    def detached(self) -> LossTokens:
        """Return these tokens with log-probs and entropy detached from the graph."""
        entropy_T = None if self.entropy_T is None else self.entropy_T.detach()
        log_probs = {policy: values_T.detach() for policy, values_T in self.log_probs.items()}
        return self._replace(log_probs=log_probs, entropy_T=entropy_T)

    def emptied(self) -> LossTokens:
        """Return the tokens of a rank that has none of these responses."""

        def nothing(values_T: Tensor | None) -> Tensor | None:
            return None if values_T is None else values_T[:0]

        layout = self.layout.emptied
        return self._replace(
            log_probs={policy: values_T[:0] for policy, values_T in self.log_probs.items()},
            advantages_T=self.advantages_T[:0],
            response_mask_R=self.response_mask_R[: layout.num_whole_tokens],
            divisor_S=self.divisor_S[: layout.num_sequences],
            layout=layout,
            entropy_T=nothing(self.entropy_T),
            reverse_kl_T=nothing(self.reverse_kl_T),
            state_values_T=nothing(self.state_values_T),
            lag_T=nothing(self.lag_T),
        )


class Evaluation(NamedTuple):
    """``[T]`` each, 0 or False where a token is not valid.

    ``log_ratio_T``: log of current / old, of the token or of what the surrogate compares. ``kept_T``: valid, and
    rejected by no one. ``clipped_T``: PPO's clip, or CISPO's bounds, act; the dual clip does not count. Of a method by
    name: the clip of its surrogate, or one of its masks, stops the token's policy gradient.
    ``policy``: loss of the policy gradient, and its slope in log pi, before :meth:`slope` spreads it over a sequence
    whose tokens share one ratio (``surrogate``). ``penalty``: value and slope of what a method subtracts besides, or
    None. ``loss_T``: the loss of the policy gradient with that penalty, 0 where neither counts. ``kl``: value and slope
    of the framework's KL estimate, or None.
    """

    batch: Batch
    log_ratio_T: Tensor
    kept_T: Tensor
    clipped_T: Tensor
    policy: Penalty
    surrogate: Slope
    penalty: Penalty | None
    loss_T: Tensor
    kl: Penalty | None

    def slope(self, share_T: Tensor) -> Tensor:
        """``[T]``: by each log-prob the derivative of the sum of the policy's losses, each times its share."""
        return self.surrogate.spread(share_T * self.policy.slope_T, self.batch)

    def tokens_of(self, which: PenaltyTokens) -> Tensor:
        """``[T]`` bool: the tokens that a penalty counts."""
        return self.kept_T if which == "kept" else self.batch.valid_T


class Corrected(NamedTuple):
    """``[T]`` each, what a correction does: weights, and bool, whether a token stays; and whether it has a weight."""

    weights_T: Tensor
    kept_T: Tensor
    has_weight: bool

    @classmethod
    def by(cls, correction: Correction | None, *, is_empty: bool = False) -> Corrected | None:
        """None without a correction, or by one that only measures; with ``is_empty`` of no token."""
        if correction is None or correction.config.metrics_only:
            return None
        has_weight, nothing_T = correction.config.weight is not None, correction.weights_T[:0]
        if is_empty:
            return cls(nothing_T, nothing_T != 0.0, has_weight)
        return cls(correction.weights_T, correction.keep_mask_T, has_weight)


def evaluate(
    settings: LossSettings,
    objective: Objective,
    tokens: LossTokens,
    *,
    corrected: Corrected | None,
    response_T: Tensor,
    reductions: Reductions,
) -> Evaluation:
    """The parts of the loss. A token without a finite log-prob of every policy that is used adds nothing.

    Args:
        settings: What the loss is.
        objective: The same as a method and a penalty.
        tokens: The micro-batch.
        corrected: Weights and masks.
        response_T: ``[T]`` bool, the local tokens that the policy generated.
        reductions: How tokens become sequences.
    """
    method, kl, pair = objective.method, objective.kl, objective.pair
    of_kl = () if kl is None else tuple(chain.from_iterable(kl.pairs))
    used = dict.fromkeys((*pair, *method.policies, *of_kl))
    batch = method.batch_of(
        {policy: tokens.log_probs[policy] for policy in used},
        advantages_T=tokens.advantages_T,
        response_mask_T=response_T,
        reductions=reductions,
        state_values_T=tokens.state_values_T,
    )
    surrogate = method.surrogate
    log_ratio_T = batch.log_ratio(pair, objective.reduce)
    weight_T, live_T, kept_T = method.weigh(batch)
    live_of_method_T = live_T
    penalty = _own_penalty(method, batch, kept_T, corrected)
    if corrected is not None:
        kept_T = kept_T & corrected.kept_T
        live_T = live_T & kept_T
        weight_T = weight_T * corrected.weights_T
        if settings.mode == "bypass" and corrected.has_weight:
            # Without what the surrogate's own ratio has of the weight already.
            weight_T = weight_T / bounded_exp(log_ratio_T)
    cost_T = torch.where(live_T, weight_T * -batch.advantages_T, 0.0)
    found = surrogate.evaluate(batch)
    if settings.method is not None:
        clipped_T = found.is_clipped_T | (batch.valid_T & ~live_of_method_T)
    elif settings.ratios == "detached":
        low, high = _bounds(settings)
        edge = STATISTICS["ratio"].edge
        clipped_T = (log_ratio_T > edge(high)) | (log_ratio_T < edge(low or 0.0))
    elif settings.eps_clip_c is not None:
        # The dual clip is the only bound that acts where the ratio moves against the advantage.
        clipped_T = found.is_clipped_T & ((log_ratio_T > 0.0) == (batch.advantages_T > 0.0))
    else:
        clipped_T = found.is_clipped_T
    policy = Penalty(cost_T * found.value_T, cost_T * found.slope_T)
    return Evaluation(
        batch=batch,
        log_ratio_T=log_ratio_T,
        kept_T=kept_T,
        clipped_T=clipped_T,
        policy=policy,
        surrogate=found,
        penalty=penalty,
        loss_T=policy.value_T if penalty is None else policy.value_T + penalty.value_T,
        kl=None if kl is None else kl.evaluate(batch),
    )


def _own_penalty(method: Method, batch: Batch, kept_T: Tensor, corrected: Corrected | None) -> Penalty | None:
    """Penalty of a method, subtracted from the objective; a rejected token has none."""
    value_T: Tensor | None = None
    slope_T: Tensor | None = None
    for term in method.terms:
        found = term.evaluate(batch)
        on_T = batch.valid_T if term.on == "valid" else kept_T
        if corrected is not None:
            on_T = on_T & corrected.kept_T
        scaled = [torch.where(on_T, term.scale * each_T, 0.0) for each_T in found]
        value_T, slope_T = scaled if value_T is None or slope_T is None else (value_T + scaled[0], slope_T + scaled[1])
    return None if value_T is None or slope_T is None else Penalty(value_T, slope_T)
