# SPDX-License-Identifier: Apache-2.0
"""A method while the current policy equals the proximal policy: at the first update of a rollout, and in the hook.

The hook alone supports the framework's PPO, with weights and gates between the two engines.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig, Gate, Weight
from mis_ext.correction.layout import PackedLayout
from mis_ext.methods.batch import MISMATCH, UPDATE, Reductions
from mis_ext.methods.method import Method
from mis_ext.methods.parts import Factor, PairGate, PairWeight, Ratio

_PROBE_SEQUENCES, _PROBE_TOKENS = 48, 8


class HookMethod(NamedTuple):
    """Configuration of the hook, and the values of ``--eps-clip``, ``-high`` and ``-c``; None: no flag."""

    config: CorrectionConfig
    low: float
    high: float
    dual: float | None


def as_correction(method: Method) -> HookMethod:
    """The method as a configuration of the hook."""
    clip = method.surrogate
    if not isinstance(clip, Ratio) or (clip.pair, clip.level) != (UPDATE, "token"):
        what = f"{clip.level} ratio {' / '.join(clip.pair)}" if isinstance(clip, Ratio) else "no clipped ratio"
        raise ValueError(f"its surrogate ({what}) is not the framework's, a clipped token ratio current / proximal")
    low, high, dual = clip.low, clip.high, clip.dual
    is_outward = (clip.sides, clip.spread) == ("outward", "token")
    if not (is_outward and isinstance(low, float) and isinstance(high, float) and isinstance(dual, float | None)):
        raise ValueError("its clip is not the framework's: outward, at two bounds")
    if method.terms:
        raise ValueError(
            "it has an additive term: use --use-kl-loss for a KL term, and the full policy loss for others"
        )
    if method.normalize_over is not None:
        raise ValueError("it normalizes the weights of the full policy loss")
    factors = [*map(_of_hook, method.factors)]
    weights = [factor for factor in factors if isinstance(factor, Weight)]
    gates = tuple(factor for factor in factors if isinstance(factor, Gate))
    if not factors:
        raise ValueError("it corrects nothing: it equals the framework's own loss, and needs no hook")
    if len(weights) > 1:
        raise ValueError("it has two weights, but the hook has one")
    config = CorrectionConfig(weight=weights[0] if weights else None, gates=gates)
    return HookMethod(config, 1.0 - low, high - 1.0, dual)


def _of_hook(factor: Factor) -> Weight | Gate:
    """The equivalent weight or gate of the hook. Factors of a method have more options."""
    if not isinstance(factor, PairWeight | PairGate):
        raise ValueError(f"the hook has no {type(factor).__name__}")
    if factor.pair != MISMATCH:
        raise ValueError(f"it compares {' with '.join(factor.pair)}: the hook sees proximal and behavior only")
    when = {"when": factor.when} | ({"of_tokens": factor.of_tokens} if isinstance(factor, PairGate) else {})
    for key, condition in when.items():
        if condition != "always":
            raise ValueError(f"{key} must be always, got {condition}: the hook does not see the advantage")
    bounds = {"low": factor.low, "high": factor.high}
    if isinstance(factor, PairGate):
        return Gate(statistic=factor.statistic, reduce=factor.reduce, action=factor.action, **bounds)  # type: ignore[arg-type]
    if factor.power != 1.0:
        raise ValueError(f"power must be 1, got {factor.power:g}: the hook's weight is the ratio itself")
    mode = "clip" if factor.low > 0.0 else "unbounded" if factor.high == math.inf else "truncate"
    return Weight(level=factor.level, mode=mode, **bounds)  # type: ignore[arg-type]


class FirstUpdate(NamedTuple):
    """``[T]`` each, local tokens, without gradient.

    ``factor_T``: the factor of ``A grad log pi``, before any denominator and without the method's terms. ``passed_T``:
    bool, valid and not rejected by the method. ``kept_T``: also not rejected by the correction.
    """

    factor_T: Tensor
    passed_T: Tensor
    kept_T: Tensor


@torch.no_grad()
def first_update(
    method: Method,
    *,
    proximal_logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    advantages_T: Tensor,
    response_mask_T: Tensor,
    layout: PackedLayout,
    weights_T: Tensor | None = None,
    keep_mask_T: Tensor | None = None,
) -> FirstUpdate:
    """Compute the factor of ``A grad log pi`` of each token at the first update.

    If the surrogate gives every token the mean of its sequence, the factor is for one advantage per sequence.

    Args:
        method: Its terms are omitted: they do not multiply an advantage.
        proximal_logprobs_T: ``[T]``, nats, also used for the current policy.
        behavior_logprobs_T: ``[T]``, nats.
        advantages_T: ``[T]``; a token whose advantage is not finite is not valid.
        response_mask_T: ``[T]``, nonzero on tokens that the policy generated.
        layout: Of whole responses.
        weights_T: ``[T]``, the weights of a correction; None for none.
        keep_mask_T: ``[T]`` bool, tokens that the correction keeps; None for all.
    """
    method = without_terms(method)
    given = {"behavior": behavior_logprobs_T, "proximal": proximal_logprobs_T, "current": proximal_logprobs_T}
    batch = method.batch_of(
        {policy: given[policy] for policy in method.policies},
        advantages_T=advantages_T,
        response_mask_T=response_mask_T != 0,
        reductions=Reductions(layout),
    )
    weight_T, live_T, passed_T = method.weigh(batch)
    kept_T = passed_T if keep_mask_T is None else passed_T & keep_mask_T
    weight_T = weight_T if weights_T is None else weight_T * weights_T
    found = method.surrogate.evaluate(batch)
    factor_T = torch.where(live_T & kept_T, weight_T * found.slope_T, 0.0)
    return FirstUpdate(found.spread(factor_T, batch), passed_T, kept_T)


def without_terms(method: Method) -> Method:
    """The method without its additive terms."""
    return dataclasses.replace(method, terms=()) if method.terms else method


def equivalent_correction(config: CorrectionConfig, method: Method) -> CorrectionConfig | None:
    """The configuration of the hook that is equivalent at the first update, or None.

    PPO's ratio is 1 there, so only the weight and the gates of the method remain.
    """
    if not config.metrics_only:
        return None
    try:
        found = as_correction(method).config
    except ValueError:
        return None
    return config.replace(metrics_only=False, weight=found.weight, gates=found.gates)


@functools.lru_cache(maxsize=128)
def looks_at_advantages(method: Method) -> bool:
    """True if the advantages matter at the first update, for any mismatch.

    Evaluates the method on log-ratios of many sizes, and compares positive, negative and mixed advantages.
    """
    generator = torch.Generator().manual_seed(0)
    spread_S = torch.logspace(-3.0, 0.9, _PROBE_SEQUENCES, dtype=torch.float64)
    noise_ST = torch.randn(_PROBE_SEQUENCES, _PROBE_TOKENS, generator=generator, dtype=torch.float64)
    behavior_T = torch.full((_PROBE_SEQUENCES * _PROBE_TOKENS,), -1.0, dtype=torch.float64)
    ones_S = torch.ones_like(spread_S)
    mixed_S = torch.where(torch.arange(_PROBE_SEQUENCES) % 2 == 0, spread_S, -spread_S)
    first, *others = (
        first_update(
            method,
            proximal_logprobs_T=behavior_T + (spread_S[:, None] * noise_ST).flatten(),
            behavior_logprobs_T=behavior_T,
            advantages_T=advantages_S.repeat_interleave(_PROBE_TOKENS),
            response_mask_T=torch.ones_like(behavior_T),
            layout=PackedLayout.whole([_PROBE_TOKENS] * _PROBE_SEQUENCES),
        )
        for advantages_S in (ones_S, -ones_S, mixed_S)
    )
    return not all(torch.equal(*pair) for other in others for pair in zip(first, other, strict=True))
