"""What is counted of tokens: sums that add up over parts, files and steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mis_ext.correction.formula import MAX_LOG_RATIO
from mis_ext.correction.statistics import TOKEN_FORMULAS
from mis_ext.report.bins import (
    NUM_LOG_PROBS,
    NUM_OCTAVES,
    NUM_PROBABILITIES,
    NUM_SIZES,
    log_prob_bin,
    octave,
    probability_bin,
    size_bin,
    summed,
)
from mis_ext.report.part import Part

SUMS = ("count", "difference", "gap", "k3", "ratio_excess", "squared_ratio_excess")
"""Sums over a group of tokens: of 1, ``d``, ``|d|``, k3, ``ratio - 1`` and its square, bounded as in the correction."""

TOTALS = (
    *SUMS,
    "reverse_k1",
    "reverse_k3",
    "variation",
    "zeros",
    "above_2",
    "below_half",
    "num_response",
    "num_masked",
)
_LOG_2 = 0.6931471805599453


@dataclass(eq=False)
class TokenTally:
    """Everything about tokens that the summary needs.

    Attributes:
        totals: ``[len(TOTALS)]``.
        extremes: The smallest and the negated largest ``d``.
        sizes: ``[2, NUM_SIZES]``: tokens by ``|d|``, for ``d`` below and above 0.
        density: ``[NUM_LOG_PROBS, NUM_LOG_PROBS]``: behavior by proximal log-prob.
        deciles: ``[NUM_PROBABILITIES, len(SUMS)]`` by behavior probability.
        positions: ``[NUM_OCTAVES, len(SUMS)]`` by position in the response.
        turns: ``[NUM_OCTAVES, len(SUMS)]`` by turn, a run of trained tokens.
        signs: ``[3, len(SUMS)]`` of tokens with negative, zero and positive advantage.
    """

    totals: Tensor
    extremes: Tensor
    sizes: Tensor
    density: Tensor
    deciles: Tensor
    positions: Tensor
    turns: Tensor
    signs: Tensor

    @classmethod
    def of(cls, part: Part) -> TokenTally:
        """Counts and sums of the tokens of a part."""
        tokens = part.tokens
        difference, behavior, proximal = part.valid_difference, part.valid_behavior, part.valid_proximal
        rows = token_rows(difference)
        gap, ratio_excess = rows["gap"], rows["ratio_excess"]
        bounded = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        is_zero = difference == 0.0
        reverse_k1 = (ratio_excess + 1.0) * bounded
        totals = {name: _total(row) for name, row in rows.items()} | {
            "reverse_k1": _total(reverse_k1),
            "reverse_k3": _total((reverse_k1 - ratio_excess).clamp_min(0.0)),
            "variation": _total(-ratio_excess.clamp_max(0.0)),
            "zeros": float(is_zero.sum()),
            "above_2": float((difference > _LOG_2).sum()),
            "below_half": float((difference < -_LOG_2).sum()),
            "num_response": float(tokens.response_mask_T.sum()),
            "num_masked": float((~tokens.response_mask_T).sum()),
        }
        signed = size_bin(gap) + NUM_SIZES * (difference > 0.0)
        never = difference.new_full((1,), torch.inf)
        return cls(
            totals=torch.tensor([totals[name] for name in TOTALS], dtype=torch.float64),
            extremes=torch.stack([torch.cat([each, never]).amin() for each in (difference, -difference)]).double(),
            sizes=summed(signed[~is_zero], 2 * NUM_SIZES).view(2, -1),
            density=summed(log_prob_bin(behavior) * NUM_LOG_PROBS + log_prob_bin(proximal), NUM_LOG_PROBS**2).view(
                NUM_LOG_PROBS, -1
            ),
            **_by_group(part, behavior, rows),
        )

    def __add__(self, other: TokenTally) -> TokenTally:
        """Counts and sums of the tokens of both."""
        sums = {
            name: getattr(self, name) + getattr(other, name)
            for name in ("totals", "sizes", "density", "deciles", "positions", "turns", "signs")
        }
        return TokenTally(extremes=torch.minimum(self.extremes, other.extremes), **sums)

    def __getitem__(self, name: str) -> float:
        """A total by its name."""
        return float(self.totals[TOTALS.index(name)])


def token_rows(difference: Tensor) -> dict[str, Tensor]:
    """The numbers of each token whose sums are ``SUMS``, by the correction's own formulas."""
    ratio_excess = TOKEN_FORMULAS["ratio_excess"].function(difference)
    return {
        "count": torch.ones_like(difference),
        "difference": difference,
        "gap": difference.abs(),
        "k3": TOKEN_FORMULAS["k3"].function(ratio_excess, difference),
        "ratio_excess": ratio_excess,
        "squared_ratio_excess": ratio_excess.double().square(),
    }


def _by_group(part: Part, behavior: Tensor, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """Sums over tokens of each decile, position, turn and sign: all in one pass, by the combination of the four."""
    # The fourth sign is that of tokens without an advantage.
    shape = (NUM_PROBABILITIES, NUM_OCTAVES, NUM_OCTAVES, 4)
    index, advantage = probability_bin(behavior), part.of_valid(part.advantages_T)
    for size, values in (
        (NUM_OCTAVES, octave(part.of_valid(part.position_T))),
        (NUM_OCTAVES, octave(part.of_valid(part.turns.turn_T))),
        (4, torch.where(advantage.isnan(), 3.0, advantage.sign() + 1.0).long()),
    ):
        index = index * size + values
    joint = torch.stack([summed(index, math.prod(shape), rows[name]) for name in SUMS], dim=1).view(*shape, -1)
    return {
        "deciles": joint.sum((1, 2, 3)),
        "positions": joint.sum((0, 2, 3)),
        "turns": joint.sum((0, 1, 3)),
        "signs": joint.sum((0, 1, 2))[:3],
    }


def _total(row: Tensor) -> float:
    return float(row.sum(dtype=torch.float64))
