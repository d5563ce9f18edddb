# SPDX-License-Identifier: Apache-2.0
"""The whole correction on one page, one response after the other.

The engine sampled token ``t`` of a response with probability ``mu_t`` (behavior), and the trainer gives the same token
``pi_t`` (proximal). With ``d_t = log pi_t - log mu_t`` and the ratio ``rho_t = exp d_t``, a correction does two things:

- A weight, which is the ratio of the token or of its response, bounded, multiplies the loss of the token.
- Gates take out of the loss what differs too much: a statistic of a token, a turn or a response has to lie in a band.

Here is every :class:`~mis_ext.CorrectionConfig`. :mod:`mis_ext.correction.passes` computes the same, and metrics, in
float32 and in a few passes over packed tokens of many ranks. A test holds both against each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.gates import Gate
from mis_ext.correction.tokens import UNKNOWN_LAG
from mis_ext.correction.weights import Weight


class _Response(NamedTuple):
    """``[length]`` each: numbers are 0 where a token is not valid, which is where it was generated and has a ratio."""

    d: Tensor
    log_pi: Tensor
    log_mu: Tensor
    lag: Tensor
    generated: Tensor
    valid: Tensor


@torch.no_grad()
def naive_correction(
    *,
    proximal: Sequence[Tensor],
    behavior: Sequence[Tensor],
    masks: Sequence[Tensor],
    config: CorrectionConfig,
    lags: Sequence[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights, and what stays in the loss, of all responses of the configured ``scope``.

    Args:
        proximal: Per response ``[length]``, as all of these: log-probs of the trainer before the update, in nats.
        behavior: Log-probs of the engine that sampled, in nats.
        masks: Nonzero on tokens that the policy generated.
        config: Which weight, which gates, and what scales the weights.
        lags: Weight updates since the weights that sampled, NaN where nobody knows; where a gate or the weight asks.

    Returns:
        Per response ``[length]``: the weights, float64, and the keep masks, bool.
    """
    if config.metrics_only:
        return [torch.ones_like(each, dtype=torch.float64) for each in proximal], [mask != 0 for mask in masks]
    has_one_weight = config.weight is not None and config.weight.level != "token"
    # Where the ratio of one token is unknown, so is the product over the response, and every mean.
    needs_all = has_one_weight or any(gate.reduce in ("sum", "mean") for gate in config.all_gates.values())
    weights, keeps, counted, sizes = [], [], [], []
    lags = [torch.full_like(each, math.nan) for each in proximal] if lags is None else lags
    for streams in zip(proximal, behavior, masks, lags, strict=True):
        response = _read(*streams)
        is_whole = torch.equal(response.valid, response.generated)
        # A token without a ratio is never given the ratio 1, which would train it as if it were on-policy.
        usable = response.valid & (is_whole or not needs_all)
        keep, weighted = usable, usable
        # Each gate looks at all valid tokens, whatever other gates reject, so their order does not matter.
        for gate in config.all_gates.values():
            passes = _passes(gate, response, config.labelled_gates)
            if gate.action == "reject":
                keep = keep & passes
            else:
                # "zero": the policy loss loses the token, the host's KL and entropy terms keep it.
                weighted = weighted & passes
        weight = torch.ones_like(response.d) if config.weight is None else _weight(config.weight, response)
        weights.append(torch.where(weighted, weight, 0.0))
        keeps.append(keep)
        in_mean = weight[keep & weighted if config.normalize_over == "kept" else usable]
        counted.append(in_mean[:1] if has_one_weight else in_mean)
        sizes.append(torch.stack([response.generated, keep]).sum(-1).double())

    scale = torch.ones((), dtype=torch.float64)
    if config.normalize_over is not None and any(len(each) > 0 for each in counted):
        # Self-normalized: w / mean(w)
        scale = scale / torch.cat(counted).mean()
    if config.denominator == "kept" and any(keep.any() for keep in keeps):
        # The host divides by the tokens, or by those of each response and then by the responses. Now by what is kept.
        terms = sizes if config.per_token_loss else [size / size[0].clamp(min=1.0) for size in sizes]
        num_all, num_kept = torch.stack(terms).sum(0)
        scale = scale * num_all / num_kept
    return [weight * scale for weight in weights], keeps


def _read(proximal: Tensor, behavior: Tensor, mask: Tensor, lag: Tensor) -> _Response:
    # d_t = log pi_t - log mu_t
    log_pi, log_mu, generated = proximal.double(), behavior.double(), mask != 0
    d = log_pi - log_mu
    valid = generated & d.isfinite()
    # Never d * mask: NaN * 0 is NaN.
    d, log_pi, log_mu = (torch.where(valid, x, 0.0) for x in (d, log_pi, log_mu))
    # A token whose version nobody knows is never called fresh.
    lag = torch.where(lag >= 0.0, lag.double().clamp(max=UNKNOWN_LAG), UNKNOWN_LAG)
    return _Response(d, log_pi, log_mu, torch.where(valid, lag, 0.0), generated, valid)


def _exp(x: Tensor) -> Tensor:
    # A ratio of e^20 is as extreme as any larger one, and finite, with its square, in float32.
    return x.clamp(-20.0, 20.0).exp()


def _weight(weight: Weight, response: _Response) -> Tensor:
    """``[length]``: the ratio of each token, or that of the response for all of them, bounded."""
    d, valid = response.d, response.valid
    if weight.when == "stale":
        # A fresh token differs by the mismatch alone, and keeps weight 1.
        d = torch.where(response.lag > 0.0, d, 0.0)
    # rho_t, prod_t rho_t or (prod_t rho_t)^(1/T)
    log_ratio = {"token": d, "sequence": d[valid].sum(), "geometric": d[valid].mean()}[weight.level]
    ratio = _exp(log_ratio).expand_as(d)
    if weight.mode == "truncate":
        # min(rho, high)
        return ratio.clamp(max=weight.high)
    if weight.mode == "clip":
        # max(low, min(rho, high))
        return ratio.clamp(weight.low, weight.high)
    # "unbounded"; and "mask", where one of all_gates rejects what lies outside of low and high.
    return ratio


def _passes(gate: Gate, response: _Response, named: Mapping[str, Gate]) -> Tensor:
    """``[length]``: whether a token lies in the band, by itself or with its turn or response."""
    x, generated, valid = _statistic(gate.statistic, response), response.generated, response.valid
    if gate.reduce == "token":
        return _in_band(gate, x)
    looked_at = valid if gate.after is None else valid & _passes(named[gate.after], response, named)
    is_of_turns = gate.reduce in ("segment_sum", "segment_mean")
    # A veto: one token is enough. A token without a ratio is too, and leaves its turn without a sum.
    is_veto = (gate.reduce == "min" and gate.high is None) or (gate.reduce == "max" and gate.low is None)
    # Tokens of one turn have equally many tokens before them that the policy has not generated.
    turn = (~generated).cumsum(0) if is_of_turns else torch.zeros_like(generated)
    passes = torch.ones_like(generated)
    for number in set(turn[generated].tolist()):
        part = generated & (turn == number)
        chosen = x[part & looked_at]
        if (is_veto or is_of_turns) and not valid[part].all():
            passes[part] = False
        elif len(chosen) > 0:
            reduced = {"sum": chosen.sum(), "mean": chosen.mean(), "min": chosen.min(), "max": chosen.max()}
            passes[part] = _in_band(gate, reduced[gate.reduce.removeprefix("segment_")])
    return passes


def _statistic(name: str, response: _Response) -> Tensor:
    d, log_pi, log_mu, lag, *_ = response
    return {
        # Of these three the log, so that their sum becomes a product and their mean a geometric mean.
        "ratio": d,
        "proximal_probability": log_pi,
        "behavior_probability": log_mu,
        "abs_log_ratio": d.abs(),
        "k1": -d,
        "k2": d.clamp(-20.0, 20.0).square() / 2.0,
        "k3": (_exp(d) - 1.0 - d.clamp(max=20.0)).clamp(min=0.0),
        "squared_log_ratio": d.clamp(-20.0, 20.0).square(),
        "exp_abs_log_ratio": _exp(d.abs()),
        "half_abs_ratio_excess": (_exp(d) - 1.0).abs() / 2.0,
        "probability_gain": _exp(log_pi) - _exp(log_mu),
        "probability_difference": (_exp(log_pi) - _exp(log_mu)).abs(),
        "binary_kl": _binary_kl(log_pi, log_mu),
        "reverse_binary_kl": _binary_kl(log_mu, log_pi),
        "lag": lag,
    }[name]


def _binary_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    # p log(p / q) + (1 - p) log((1 - p) / (1 - q)): of this token against all others
    log_p, log_q = log_p.clamp(max=0.0), log_q.clamp(max=0.0)
    other_p, other_q = -log_p.expm1(), -log_q.expm1()
    of_others = torch.where(other_p > 0.0, other_p * (other_p.log() - other_q.log()), 0.0)
    return (log_p.exp() * (log_p - log_q) + of_others).clamp(0.0, 1e6)


def _in_band(gate: Gate, x: Tensor) -> Tensor:
    if gate.statistic in ("ratio", "proximal_probability", "behavior_probability"):
        x = x.exp()
    low, high = -math.inf if gate.low is None else gate.low, math.inf if gate.high is None else gate.high
    return (low <= x) & (x <= high)
