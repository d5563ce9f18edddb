"""The settings as a :class:`~mis_ext.methods.method.Method`, whose parts are the mathematics of the loss."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Literal, NamedTuple

from mis_ext.correction.gates import Gate
from mis_ext.correction.statistics import STALENESS, TOTAL, Pair
from mis_ext.loss.settings import KlPenalty, LossSettings
from mis_ext.methods.method import Method
from mis_ext.methods.parts import Estimator, Factor, KlTerm, Ratio, RatioWeight, Score

LOW_VAR_CAP = 10.0
"""The hosts' bound of ``low_var_kl``, in nats."""

_ESTIMATORS: dict[str, Estimator] = {"k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}


class Objective(NamedTuple):
    """What is computed of each token.

    ``method``: the policy gradient, with penalties of its own. ``kl``: the host's penalty, or None. ``pair``,
    ``reduce``: the log-ratio that metrics report, of the token or the mean of its sequence.
    """

    method: Method
    kl: KlTerm | None
    pair: Pair
    reduce: Literal["token", "mean"]


def pair_of(settings: LossSettings) -> Pair:
    """The current policy over the old one: the proximal or, where that is not looked at, the behavior policy."""
    return TOTAL if settings.old_is_behavior else STALENESS


def bounds_of(settings: LossSettings) -> tuple[float | None, float]:
    """Of the ratio. From 0 on there is no lower bound, which is how CISPO is written."""
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    return (1.0 - settings.eps_clip if settings.eps_clip < 1.0 else None), 1.0 + high


@functools.lru_cache(maxsize=16)
def objective_of(settings: LossSettings) -> Objective:
    """Policy gradient and KL penalty, without the correction and without denominators."""
    pair = pair_of(settings)
    method = _method_of_mode(settings, pair) if settings.method is None else settings.method.method
    if settings.opsm_delta is not None:
        method = replace(method, factors=(*method.factors, opsm_gate(settings.opsm_delta, pair)))
    return Objective(
        method=method,
        kl=None if settings.kl is None else _kl_term(settings.kl, pair),
        pair=pair,
        reduce="mean" if method.surrogate.reduce == "mean" else "token",
    )


def _method_of_mode(settings: LossSettings, pair: Pair) -> Method:
    low, high = bounds_of(settings)
    factors: tuple[Factor, ...] = ()
    surrogate: Score | Ratio
    if settings.mode == "reinforce":
        surrogate = Score()
    elif settings.ratios == "detached":
        surrogate, factors = Score(), (RatioWeight(pair=pair, low=low, high=high),)
    else:
        is_whole = settings.ratios == "sequence"
        surrogate = Ratio(
            pair=pair,
            level="geometric" if is_whole else "token",
            low=low,
            high=high,
            dual=settings.eps_clip_c,
            spread="sequence" if is_whole else "token",
        )
    return Method(surrogate=surrogate, factors=factors)


def opsm_gate(delta: float, pair: Pair) -> Gate:
    """Off-policy sequence masking: the sequence adds nothing, and stays in the denominator."""
    return Gate(pair=pair, statistic="k1", reduce="mean", high=delta, when="negative", action="zero")


def _kl_term(kl: KlPenalty, pair: Pair) -> KlTerm:
    importance = {"none": None, "old": pair, "behavior": TOTAL}[kl.ratio]
    return KlTerm(
        estimator=_ESTIMATORS[kl.type],
        scale=kl.coefficient,
        importance=importance,
        cap=LOW_VAR_CAP if kl.type == "low_var_kl" else None,
    )
