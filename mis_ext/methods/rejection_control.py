"""Rejection control: sequences with a small weight are dropped at random, and survivors weigh more."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mis_ext.correction.formula import bounded_exp
from mis_ext.correction.statistics import Pair
from mis_ext.methods.batch import Batch
from mis_ext.methods.factors import OtherFactor

_MASK = 0x7FFFFFFF
_PRIME = 2654435761
_DIGITS = 1 << 31


@dataclass(frozen=True, kw_only=True, slots=True)
class Accept(OtherFactor):
    """Keep a sequence with probability ``min(1, W / bound)``, ``W`` its product of ratios.

    With ``RatioWeight(level="sequence", low=bound)``, which is ``max(W, bound)``, every expectation stays what it is
    under ``W``, and no survivor weighs less than ``bound``.

    The random number of a sequence is a hash of its behavior log-probs and the seed: so it is the same on every rank,
    for any split into micro-batches and in a recomputed forward pass.

    Args:
        pair: Numerator and denominator.
        bound: Sequences above it are always kept.
        seed: Another one for every step, if a sequence can come back.

    References:
        Liu, Chen, Wong, Rejection Control and Sequential Importance Sampling, 1998.
    """

    pair: Pair
    bound: float
    seed: int = 0
    reduce = "sum"
    action = "reject"

    def evaluate(self, batch: Batch) -> Tensor:
        """``[T]`` bool: True for all tokens of an accepted sequence."""
        log_probs_T = batch.log_prob(self.pair[1]).float()
        uniform_T = sequence_uniforms(batch, log_probs_T, self.seed)
        return uniform_T * self.bound < bounded_exp(batch.log_ratio(self.pair, "sum"))


def sequence_uniforms(batch: Batch, values_T: Tensor, seed: int) -> Tensor:
    """``[T]`` float64 in [0, 1): one number a sequence, from the bits of the float32 values of its valid tokens."""
    return _sequence_bits(batch, values_T, seed).double() / _DIGITS


def token_uniforms(batch: Batch, values_T: Tensor, seed: int) -> Tensor:
    """``[T]`` float64 in [0, 1): a number of each valid token, from its place and those bits of its sequence."""
    place_T = batch.position_T.long() * _PRIME
    return _mixed(_mixed(_sequence_bits(batch, values_T, seed) + place_T)).double() / _DIGITS


def _sequence_bits(batch: Batch, values_T: Tensor, seed: int) -> Tensor:
    place_T = batch.position_T.long() * _PRIME
    hashed_T = _mixed(_mixed(values_T.view(torch.int32).long() + seed * 7919) + place_T)
    # Sums of integers do not depend on their order.
    sum_S = batch.reductions.over_sequences(hashed_T, batch.valid_T)
    return batch.reductions.to_tokens(_mixed(_mixed(sum_S)))


def _mixed(bits: Tensor) -> Tensor:
    """31 bits that depend on all of the input's lower 31, as in Mueller's hash of integers."""
    bits = bits & _MASK
    for _ in range(2):
        bits = (((bits >> 16) ^ bits) * 0x45D9F3B) & _MASK
    return (bits >> 16) ^ bits
