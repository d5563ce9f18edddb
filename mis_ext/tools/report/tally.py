# SPDX-License-Identifier: Apache-2.0
"""Sums and histograms of tokens and sequences, additive over parts, files, and steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mis_ext.correction.tokens import MAX_LOG_RATIO, bounded_exp, bounded_expm1, k3
from mis_ext.methods.sequence_weights import smooth_weights
from mis_ext.tools.diagnosis.evidence import Origin
from mis_ext.tools.report.part import Part

SMALLEST_EXPONENT, LARGEST_EXPONENT, PER_DECADE = -9, 3, 200
NUM_SIZES = (LARGEST_EXPONENT - SMALLEST_EXPONENT) * PER_DECADE
"""Number of bins of ``|d|`` of equal width in log space: quantiles are exact to 0.6 %."""

NUM_PROBABILITIES = 10
NUM_OCTAVES = 22


def size_bin(magnitude: Tensor) -> Tensor:
    """Bin of ``|d| > 0``. Smaller or larger values are in the first or last bin."""
    exponent = (magnitude.log10() - SMALLEST_EXPONENT) * PER_DECADE
    return exponent.clamp(0, NUM_SIZES - 1).long()


def size_of_bin(index: int) -> float:
    """The geometric middle of a bin of ``|d|``, in nats."""
    return float(10.0 ** (SMALLEST_EXPONENT + (index + 0.5) / PER_DECADE))


def quantile(counts: Tensor, share: float, *, num_zeros: float = 0.0) -> float:
    """Quantile of ``|d|`` from its bins; ``num_zeros`` tokens with ``d`` 0 are not in a bin."""
    total = float(counts.sum()) + num_zeros
    if total == 0.0:
        return math.nan
    wanted = share * total - num_zeros
    if wanted <= 0.0:
        return 0.0
    index = int(torch.searchsorted(counts.cumsum(0), torch.tensor(wanted, dtype=counts.dtype)))
    return size_of_bin(min(index, NUM_SIZES - 1))


def octave(number: Tensor) -> Tensor:
    """Octave of positions, or of lengths minus 1: 0 for 0, 1 for 1 and 2, 2 for 3 to 6, ..."""
    octaves = (torch.arange(int(number.max()) + 1 if len(number) else 0).double() + 1.0).log2().floor().long()
    # There are fewer positions than tokens, so a lookup table takes a fifth of the time.
    return octaves.clamp(0, NUM_OCTAVES - 1).index_select(0, number.long())


def octave_range(index: int) -> tuple[int, int]:
    """The first and last number of an octave. Its length doubles with each index."""
    return 2**index - 1, 2 ** (index + 1) - 2


def summed(index: Tensor, num_bins: int, weights: Tensor | None = None) -> Tensor:
    """``[num_bins]`` float64: counts, or sums of weights."""
    return torch.bincount(index, None if weights is None else weights.double(), minlength=num_bins).double()


SUMS = ("count", "difference", "gap", "k3")
"""Sums over a group of tokens: of 1, ``d``, ``|d|``, and k3."""


@dataclass(eq=False)
class TokenTally:
    """The data about tokens that the summary needs.

    Attributes:
        totals: Sums over all valid tokens by name: ``SUMS``, and sums that groups do not have.
        counts: ``sizes`` ``[NUM_SIZES]``: number of tokens by ``|d|`` above 0. And sums ``[groups, len(SUMS)]``: by
            ``deciles`` of the behavior probability, and by octaves of ``positions`` in the response and of ``turns``
            (runs of trained tokens).
        abs_max: The largest ``|d|``.
    """

    totals: dict[str, float]
    counts: dict[str, Tensor]
    abs_max: float

    @classmethod
    def of(cls, part: Part) -> TokenTally:
        """Compute it for the tokens of a part."""
        mask_T = part.tokens.generated
        t = part.tokens
        difference, behavior = map(part.of_valid, (t.d, t.log_mu))
        rows, ratio, ratio_excess = token_rows(difference), bounded_exp(difference), bounded_expm1(difference)
        # With w = e^d, d w - w + 1 estimates KL(proximal, behavior), and the mean of max(1 - w, 0) is the total
        # variation distance.
        reverse_k1 = ratio * difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        is_zero = difference == 0.0
        sums = rows | {
            "ratio": ratio,
            "squared_ratio": ratio.double().square(),
            "ratio_excess": ratio_excess,
            "reverse_k3": (reverse_k1 - ratio_excess).clamp_min(0.0),
            "variation": -ratio_excess.clamp_max(0.0),
            "zeros": is_zero,
            "num_response": mask_T,
            "num_masked": ~mask_T,
        }
        return cls(
            totals={name: float(each.sum(dtype=torch.float64)) for name, each in sums.items()},
            counts={
                "sizes": summed(size_bin(rows["gap"][~is_zero]), NUM_SIZES),
                **_by_group(part, behavior, rows),
            },
            abs_max=float(rows["gap"].amax()) if len(difference) else 0.0,
        )

    def __add__(self, other: TokenTally) -> TokenTally:
        """Add counts and sums."""
        return TokenTally(
            {name: total + other.totals[name] for name, total in self.totals.items()},
            {name: count + other.counts[name] for name, count in self.counts.items()},
            max(self.abs_max, other.abs_max),
        )


def token_rows(difference: Tensor) -> dict[str, Tensor]:
    """The values per token for ``SUMS``, with the formulas of the correction."""
    ones = torch.ones_like(difference)
    return {"count": ones, "difference": difference, "gap": difference.abs(), "k3": k3(difference)}


def _by_group(part: Part, behavior: Tensor, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over the tokens of each decile, position and turn."""
    decile = (behavior.clamp(max=0.0).exp() * NUM_PROBABILITIES).long().clamp(0, NUM_PROBABILITIES - 1)
    numbers = {
        "deciles": (decile, NUM_PROBABILITIES),
        "positions": (octave(part.evidence.position_T), NUM_OCTAVES),
        "turns": (octave(part.evidence.turn_T), NUM_OCTAVES),
    }
    return {
        name: torch.stack([summed(number, size, rows[each]) for each in SUMS], dim=1)
        for name, (number, size) in numbers.items()
    }


_OF_TOKENS = ("num_response", "num_valid", "difference", "gap", "k3")
COLUMNS = (*_OF_TOKENS, "reward", "versions_behind")
"""Sums over valid tokens in nats, and properties of the sample; NaN if unknown."""
SUMS_OF_TOKENS = slice(len(_OF_TOKENS))
"""The columns that are sums over tokens."""


@dataclass(eq=False)
class Sequences:
    """``S`` sequences: ``columns`` ``[S, len(COLUMNS)]`` float64, and their origins."""

    columns: Tensor
    origins: list[Origin]
    steps: list[str]

    @classmethod
    def of(cls, part: Part) -> Sequences:
        """The sequences of a part, with the sums of their tokens."""
        tokens = part.tokens
        rows = token_rows(tokens.d)
        # Use the precision and order of the correction, so that its gates use the same sums.
        masks = (tokens.generated, tokens.valid)
        reduced = part.streams.layout.sums([*masks, rows["difference"], rows["gap"], rows["k3"]])
        known = [[origin.reward, origin.versions_behind] for origin in part.origins]
        reward, behind = torch.tensor(known, dtype=torch.float64).reshape(-1, 2).unbind(1)
        columns = torch.stack([*reduced, reward, behind], dim=1)
        # Worst tokens are kept elsewhere, so drop the ids.
        origins = [origin._replace(token_ids=None) for origin in part.origins]
        return cls(columns, origins, [part.step] * len(origins))

    @classmethod
    def joined(cls, parts: Sequence[Sequences]) -> Sequences:
        """The sequences of all parts, in order."""
        return cls(
            torch.cat([torch.empty(0, len(COLUMNS), dtype=torch.float64), *(part.columns for part in parts)]),
            [origin for part in parts for origin in part.origins],
            [step for part in parts for step in part.steps],
        )

    def __getitem__(self, name: str) -> Tensor:
        """A column ``[S]`` by its name."""
        return self.columns[:, COLUMNS.index(name)]

    def __len__(self) -> int:
        return len(self.origins)

    def where(self, keep_S: Tensor) -> Sequences:
        """The sequences for which ``keep_S`` is true."""
        keep = keep_S.tolist()
        origins, steps = [*itertools.compress(self.origins, keep)], [*itertools.compress(self.steps, keep)]
        return Sequences(self.columns[keep_S], origins, steps)

    def with_tokens(self) -> Sequences:
        """The sequences with a valid token."""
        return self.where(self["num_valid"] > 0)

    @cached_property
    def prompt_S(self) -> Tensor:
        """``[S]`` int64: a number for each prompt. A response with unknown group has its own number."""
        numbers: dict[Hashable, int] = {}
        # A group belongs to one step.
        keys = [
            place if origin.group is None else (step, origin.group)
            for place, (step, origin) in enumerate(zip(self.steps, self.origins, strict=True))
        ]
        return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)


def effective_share(log_weights: Tensor) -> float:
    """Kish's effective sample size over the sample size; NaN without weights."""
    if not len(log_weights):
        return math.nan
    weights = (log_weights - log_weights.max()).exp()
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))


MIN_WEIGHTS = 25


def k_hat(log_weights: Tensor) -> float:
    """See :class:`~mis_ext.methods.sequence_weights.Smoothed`; NaN for fewer than 25, 0 if the largest are equal.

    Args:
        log_weights: ``[S]``, finite.
    """
    if len(log_weights) < MIN_WEIGHTS:
        return math.nan
    # The scale of the weights does not matter, and could overflow float64.
    weights = (log_weights.double() - log_weights.max()).exp()
    num_tail = math.ceil(min(len(weights) / 5, 3.0 * math.sqrt(len(weights))))
    if float(weights.topk(num_tail + 1).values[-1]) == 1.0:
        return 0.0
    return float(smooth_weights(weights, torch.ones_like(weights, dtype=torch.bool)).k_hat)
