"""What the parts of the loss say about each token, before any denominator and without gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.formula import bounded_exp
from mis_ext.correction.pipeline import Correction
from mis_ext.correction.statistics import STATISTICS
from mis_ext.loss.objective import bounds_of, method_of, pair_of
from mis_ext.loss.settings import LossSettings, PenaltyTokens
from mis_ext.loss.tokens import LossTokens
from mis_ext.methods.batch import Batch
from mis_ext.methods.kl_terms import Penalty
from mis_ext.methods.reductions import Reductions


class Evaluation(NamedTuple):
    """``[T]`` each, 0 or False where a token is not valid.

    ``log_ratio_T``: log of current / old, of the token or of what the surrogate compares. ``kept_T``: valid, and not
    rejected by the correction. ``clipped_T``: PPO's clip, or CISPO's bounds, act; the dual clip does not count.
    ``policy``: loss of the policy gradient, and its slope in log pi, where a surrogate of sequences still has to be
    averaged over its sequence (``is_of_sequences``). ``kl``: value and slope of the KL estimate, or None.
    """

    batch: Batch
    log_ratio_T: Tensor
    kept_T: Tensor
    clipped_T: Tensor
    policy: Penalty
    is_of_sequences: bool
    kl: Penalty | None

    def tokens_of(self, which: PenaltyTokens) -> Tensor:
        """``[T]`` bool: the tokens that a penalty counts."""
        return self.kept_T if which == "kept" else self.batch.valid_T


def evaluate(settings: LossSettings, tokens: LossTokens, correction: Correction | None) -> Evaluation:
    """The parts of the loss. A token without a finite log-prob of every policy that is used adds nothing.

    Args:
        settings: What the loss is.
        tokens: The micro-batch.
        correction: Weights and masks; None, or one that only measures, for none.
    """
    layout, method, pair = tokens.layout, method_of(settings), pair_of(settings)
    used = dict.fromkeys((*pair, *method.policies))
    batch = method.batch_of(
        {policy: tokens.log_probs[policy] for policy in used},
        advantages_T=tokens.advantages_T,
        response_mask_T=layout.local_part(tokens.response_mask_R) != 0,
        reductions=Reductions(layout, cp_group=tokens.cp_group),
    )
    surrogate = method.surrogate
    log_ratio_T = batch.log_ratio(pair, *surrogate.reduces)
    weight_T, live_T, kept_T = method.weigh(batch)
    if correction is not None and not correction.plan.config.metrics_only:
        kept_T = kept_T & correction.keep_mask_T
        live_T = live_T & kept_T
        weight_T = weight_T * _weights(settings, correction, log_ratio_T)
    cost_T = torch.where(live_T, weight_T * -batch.advantages_T, 0.0)
    found = surrogate.of(batch)
    if settings.ratios == "detached":
        low, high = bounds_of(settings)
        edge = STATISTICS["ratio"].edge
        clipped_T = (log_ratio_T > edge(high)) | (log_ratio_T < edge(low or 0.0))
    elif settings.eps_clip_c is not None:
        # The dual clip is the only bound that acts where the ratio moves against the advantage.
        clipped_T = found.is_clipped_T & ((log_ratio_T > 0.0) == (batch.advantages_T > 0.0))
    else:
        clipped_T = found.is_clipped_T
    return Evaluation(
        batch=batch,
        log_ratio_T=log_ratio_T,
        kept_T=kept_T,
        clipped_T=clipped_T,
        policy=Penalty(cost_T * found.value_T, cost_T * found.slope_T),
        is_of_sequences=surrogate.spread == "sequence",
        kl=method.terms[0].of(batch) if method.terms else None,
    )


def _weights(settings: LossSettings, correction: Correction, log_ratio_T: Tensor) -> Tensor:
    """``[T]``: the correction's weights, without what the surrogate's own ratio has of them already."""
    if settings.mode != "bypass" or correction.plan.config.weight is None:
        return correction.weights_T
    return correction.weights_T / bounded_exp(log_ratio_T)
