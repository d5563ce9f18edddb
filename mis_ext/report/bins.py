"""Bins of the report's histograms, and quantiles from them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

SMALLEST_EXPONENT, LARGEST_EXPONENT, PER_DECADE = -9, 3, 200
NUM_SIZES = (LARGEST_EXPONENT - SMALLEST_EXPONENT) * PER_DECADE
"""Bins of ``|d|`` of equal width in log space: quantiles are exact to 0.6 %."""

NUM_PROBABILITIES = 10
NUM_OCTAVES = 22
LOWEST_LOG_PROB, LOG_PROB_WIDTH = -14.0, 0.25
NUM_LOG_PROBS = int(-LOWEST_LOG_PROB / LOG_PROB_WIDTH)


def size_bin(magnitude: Tensor) -> Tensor:
    """Bin of ``|d| > 0``; what is smaller or larger than all bins is in the first or last one."""
    exponent = (magnitude.log10() - SMALLEST_EXPONENT) * PER_DECADE
    return exponent.clamp(0, NUM_SIZES - 1).long()


def size_of_bin(index: int) -> float:
    """The geometric middle of a bin of ``|d|``, in nats."""
    return float(10.0 ** (SMALLEST_EXPONENT + (index + 0.5) / PER_DECADE))


def size_edges() -> list[float]:
    """Edges of the bins, one more than bins, in nats."""
    return [float(10.0 ** (SMALLEST_EXPONENT + index / PER_DECADE)) for index in range(NUM_SIZES + 1)]


def quantile(counts: Tensor, share: float, *, num_zeros: float = 0.0) -> float:
    """The ``|d|`` that a share of tokens is not above.

    Args:
        counts: Of the bins of :func:`size_bin`.
        share: In [0, 1].
        num_zeros: Tokens with ``d`` 0, which have no bin.
    """
    total = float(counts.sum()) + num_zeros
    if total == 0.0:
        return math.nan
    wanted = share * total - num_zeros
    if wanted <= 0.0:
        return 0.0
    index = int(torch.searchsorted(counts.cumsum(0), torch.tensor(wanted, dtype=counts.dtype)))
    return size_of_bin(min(index, NUM_SIZES - 1))


def probability_bin(log_prob: Tensor) -> Tensor:
    """Decile, 0 to 9, of the probability of each log-prob."""
    return (log_prob.clamp(max=0.0).exp() * NUM_PROBABILITIES).long().clamp(0, NUM_PROBABILITIES - 1)


def log_prob_bin(log_prob: Tensor) -> Tensor:
    """Bin of a log-prob on the axes of the density."""
    return ((log_prob - LOWEST_LOG_PROB) / LOG_PROB_WIDTH).clamp(0, NUM_LOG_PROBS - 1).long()


def octave(number: Tensor) -> Tensor:
    """0 for 0, 1 for 1 and 2, 2 for 3 to 6, ...: of positions, and of lengths minus 1."""
    octaves = (torch.arange(int(number.max()) + 1 if len(number) else 0).double() + 1.0).log2().floor().long()
    # There are fewer positions than tokens: a table of them takes a fifth of the time.
    return octaves.clamp(0, NUM_OCTAVES - 1).index_select(0, number.long())


def octave_range(index: int) -> tuple[int, int]:
    """The first and the last number of an octave, whose length doubles with each index."""
    return 2**index - 1, 2 ** (index + 1) - 2


def summed(index: Tensor, num_bins: int, weights: Tensor | None = None) -> Tensor:
    """``[num_bins]`` float64: how many, or the sum of their weights."""
    return torch.bincount(index, None if weights is None else weights.double(), minlength=num_bins).double()
