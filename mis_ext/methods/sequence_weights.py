# SPDX-License-Identifier: Apache-2.0
"""Pareto smoothing, which replaces the largest weights of sequences by quantiles of a fitted tail; random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.tokens import bounded_exp
from mis_ext.methods.batch import Batch, Pair
from mis_ext.methods.parts import Factor, check_pair
from mis_ext.validation import check_number, check_tensors

_MIN_TAIL = 5
_GRID = 30
_PRIOR_SCALE = 3.0
_PRIOR_SHAPE, _PRIOR_SIZE = 0.5, 10.0
_MASK = 0x7FFFFFFF
_PRIME = 2654435761
_DIGITS = 1 << 31


class Smoothed(NamedTuple):
    """``weights_N`` in the order of the input, and ``k_hat``, 0-dim: the shape of the tail, NaN if it is too short.

    Below 0.5 the variance of the weights is finite. Up to 0.7 their mean is usable. Above 0.7, no practical number of
    samples is enough.
    """

    weights_N: Tensor
    k_hat: Tensor


def smooth_weights(weights_N: Tensor, valid_N: Tensor) -> Smoothed:
    """Smooth the largest ``min(n / 5, 3 sqrt(n))`` of ``n`` weights, without a device synchronization.

    The order does not change, no weight exceeds the largest raw weight, and a common factor scales the result.

    Args:
        weights_N: ``[N]``, positive.
        valid_N: ``[N]`` bool; other weights do not count, and do not change.

    Raises:
        TypeError: An argument is not a tensor, or ``valid_N`` is not bool.
        ValueError: The shapes are not ``[N]``.

    References:
        Vehtari et al., Pareto Smoothed Importance Sampling, arXiv:1507.02646; the fit is that of Zhang and Stephens, A
        New and Efficient Estimation Method for the Generalized Pareto Distribution, 2009.
    """
    check_tensors({"weights_N": weights_N, "valid_N": valid_N})
    if valid_N.dtype != torch.bool:
        raise TypeError(f"valid_N must be bool, got {valid_N.dtype}")
    if weights_N.ndim != 1 or valid_N.shape != weights_N.shape:
        raise ValueError(
            f"weights_N has shape {list(weights_N.shape)}, and valid_N has {list(valid_N.shape)}; both must be [N]"
        )
    size = len(weights_N)
    longest = math.ceil(min(size / 5, 3.0 * math.sqrt(size)))
    if longest < _MIN_TAIL:
        return Smoothed(weights_N, weights_N.new_full((), torch.nan))
    num = valid_N.sum().double()
    num_tail = torch.minimum(num / 5.0, 3.0 * num.sqrt()).ceil()
    ranked_N, order_N = torch.where(valid_N, weights_N.double(), -1.0).sort(descending=True, stable=True)
    largest = ranked_N[:1]
    cutoff = ranked_N.index_select(0, num_tail.long().clamp(max=size - 1).view(1))
    place_M = torch.arange(longest, device=weights_N.device, dtype=torch.float64)
    in_tail_M = place_M < num_tail
    excess_M = torch.where(in_tail_M, ranked_N[:longest] - cutoff, 0.0)
    # Counted from the smallest, which is number 1.
    number_M = num_tail - place_M
    k_hat, scale = _fit(excess_M, in_tail_M, num_tail)
    quantile_M = -torch.log1p(-((number_M - 0.5) / num_tail).clamp(0.0, 1.0 - 1e-12))
    tail_M = torch.where(k_hat == 0.0, quantile_M, torch.expm1(k_hat * quantile_M) / k_hat) * scale
    smooth_M = torch.minimum(cutoff + tail_M, largest)
    is_fitted = (num_tail >= _MIN_TAIL) & (excess_M[:1] > 0.0) & k_hat.isfinite()
    tail_M = torch.where(in_tail_M & is_fitted, smooth_M, ranked_N[:longest])
    ranked_N = torch.cat([tail_M, ranked_N[longest:]])
    smoothed_N = torch.empty_like(ranked_N).scatter(0, order_N, ranked_N).to(weights_N.dtype)
    k_hat = torch.where(is_fitted, k_hat, torch.nan).to(weights_N.dtype)
    return Smoothed(torch.where(valid_N, smoothed_N, weights_N), k_hat.squeeze(0))


def _fit(excess_M: Tensor, in_tail_M: Tensor, num: Tensor) -> tuple[Tensor, Tensor]:
    """Shape and scale of a generalized Pareto distribution, ``[1]`` each; the shape is shrunk towards 1/2."""
    grid = _GRID + len(excess_M)
    num_grid = _GRID + num.sqrt().floor()
    point_N = torch.arange(1, grid + 1, device=excess_M.device, dtype=torch.float64)
    # The order is descending, so the lower quartile is counted from the end.
    quarter_place = (num - (num / 4.0 + 0.5).floor()).long().clamp(0, len(excess_M) - 1)
    quarter = excess_M.index_select(0, quarter_place.view(1))
    steps_N = (1.0 - (num_grid / (point_N - 0.5)).sqrt()) / (_PRIOR_SCALE * quarter)
    theta_N = 1.0 / excess_M[:1] + torch.where(point_N <= num_grid, steps_N, 0.0)

    def mean_log(theta: Tensor) -> Tensor:
        return torch.where(in_tail_M, torch.log1p(-theta.unsqueeze(-1) * excess_M), 0.0).sum(-1) / num

    shape_N = mean_log(theta_N)
    likelihood_N = num * ((-theta_N / shape_N).log() - shape_N)
    likelihood_N = torch.where(point_N <= num_grid, likelihood_N, -torch.inf)
    theta = (theta_N * likelihood_N.softmax(0)).sum(0, keepdim=True)
    shape = mean_log(theta)
    shrunk = (shape * num + _PRIOR_SHAPE * _PRIOR_SIZE) / (num + _PRIOR_SIZE)
    return shrunk, -shape / theta


@dataclass(frozen=True, kw_only=True, slots=True)
class ParetoWeight(Factor):
    """The product of the sequence's ratios, Pareto-smoothed over the sequences of the call, at most ``high``."""

    pair: Pair
    high: float | None = None
    reduce = "sum"

    def __post_init__(self) -> None:
        check_pair("pair", self.pair)
        if self.high is not None:
            check_number("high", self.high, low=0.0, high=math.inf, open_low=True)

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` weights, at least 0, without gradient; the same for all tokens of a sequence."""
        reductions = batch.reductions
        if reductions.has_other_sequences:
            raise ValueError(
                "Pareto smoothing needs all sequences on one rank: pass no dp_group to smooth those of a rank"
            )
        log_weight_S = reductions.over_sequences(batch.statistic("ratio", self.pair), batch.valid_T)
        valid_S = reductions.over_sequences(torch.ones_like(batch.advantages_T), batch.valid_T) > 0.0
        weight_S = smooth_weights(bounded_exp(log_weight_S), valid_S).weights_N
        return reductions.to_tokens(weight_S if self.high is None else weight_S.clamp(max=self.high))


def token_uniforms(batch: Batch, values_T: Tensor, seed: int) -> Tensor:
    """``[T]`` float64 in [0, 1): a hash of each valid token's position and the bits of its sequence's values.

    It uses the float32 values of all valid tokens of the sequence. So it is the same on every rank, for any split into
    micro-batches, and in a recomputed forward pass.
    """
    place_T = batch.position_T.long() * _PRIME
    hashed_T = _mixed(_mixed(values_T.view(torch.int32).long() + seed * 7919) + place_T)
    # Sums of integers do not depend on their order.
    sum_S = batch.reductions.over_sequences(hashed_T, batch.valid_T)
    sequence_T = batch.reductions.to_tokens(_mixed(_mixed(sum_S)))
    return _mixed(_mixed(sequence_T + place_T)).double() / _DIGITS


def _mixed(bits: Tensor) -> Tensor:
    """31 bits that depend on all lower 31 bits of the input (Mueller's integer hash)."""
    bits = bits & _MASK
    for _ in range(2):
        bits = (((bits >> 16) ^ bits) * 0x45D9F3B) & _MASK
    return (bits >> 16) ^ bits
