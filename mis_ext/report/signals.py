"""What the log-probs show about the cause of a mismatch: sums that add up over parts.

Noise of the logits moves a log-prob by about ``1 - p`` times the noise: a token that is nearly certain hardly moves. So
``|d| / (1 - p)`` is compared between tokens, the size of the noise behind ``d``. Without it the uncertain tokens of any
model look like a mixture of tokens that agree and tokens that do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mis_ext.hosts.evidence import Evidence, added, evidence_of
from mis_ext.report.bins import NUM_SIZES, size_bin, size_of_bin, summed
from mis_ext.report.part import Part
from mis_ext.report.tally import token_rows

CERTAIN = 0.98
"""Where the engine's probability is above, a token says little about the engines: both give 1."""

NUM_EARLY = 32
"""Tokens of a turn that a stale prefix shows in most."""

LATE = 64
PLACES = ("early", "between", "late")
_FLOAT32_STEP = 2.0**-23
_BF16_BITS = 0xFFFF

SUMS = (
    "count",
    "difference",
    "behavior",
    "proximal",
    "squared_difference",
    "squared_behavior",
    "squared_proximal",
    "behavior_difference",
    "proximal_difference",
)
"""Sums over uncertain tokens, for the regression of the difference on either log-prob."""


class Fit(NamedTuple):
    """A straight line: its slope, and the share of the variance that it explains."""

    slope: float
    explained: float


@dataclass(eq=False)
class Signals:
    """Evidence of causes.

    Attributes:
        evidence: Of :class:`~mis_ext.hosts.evidence.Evidence`.
        lines: ``[len(SUMS)]``.
        sizes: ``[2, NUM_SIZES]`` of uncertain tokens by ``|d|``, for ``d`` below and above 0.
        shifts: ``[2, NUM_SIZES]`` of uncertain tokens by ``|d| / (1 - p)``: how many, and their k3.
        places: ``[2, len(PLACES), 3]`` of uncertain tokens of the first turn and of later ones, by their place in the
            turn: count, sum of ``min(|d| / (1 - p), 1)``, and of its square.
        ratios: Count, sum of ``ratio - 1`` and of its square, of all tokens.
        rounded: ``[2, 2]`` of the proximal and of the behavior side: numbers that are not 0, and those of bfloat16.
        largest: The largest ``|d|`` in float32 steps of ``max(1, |log-prob|)``, and the smallest ``d``.
    """

    evidence: Tensor
    lines: Tensor
    sizes: Tensor
    shifts: Tensor
    places: Tensor
    ratios: Tensor
    rounded: Tensor
    largest: Tensor

    @classmethod
    def of(cls, part: Part) -> Signals:
        """The sums that the rules need, of the tokens of a part."""
        difference, behavior, proximal = part.valid_difference, part.valid_behavior, part.valid_proximal
        rows = token_rows(difference)
        excess = rows["ratio_excess"].double()
        uncertain = (behavior.exp() < CERTAIN).nonzero().flatten()
        # An index in brackets takes four times as long.
        d, b, p = (each.index_select(0, uncertain) for each in (difference, behavior, proximal))
        gap, k3 = (rows[name].index_select(0, uncertain) for name in ("gap", "k3"))
        is_positive = d > 0.0
        is_different = gap > 0.0
        shift = gap / -b.expm1()
        shift_bin = size_bin(shift)[is_different]
        steps = rows["gap"] / (_FLOAT32_STEP * behavior.abs().clamp_min(1.0))
        return cls(
            evidence=evidence_of(part.streams).double(),
            lines=_line_sums(d, b, p),
            sizes=summed((size_bin(gap) + NUM_SIZES * is_positive)[is_different], 2 * NUM_SIZES).view(2, -1),
            shifts=torch.stack([summed(shift_bin, NUM_SIZES), summed(shift_bin, NUM_SIZES, k3[is_different])]),
            places=_by_place(part, uncertain, shift),
            ratios=torch.stack([torch.tensor(len(excess)).double(), excess.sum(), excess.square().sum()]),
            rounded=torch.stack([_bf16_numbers(proximal), _bf16_numbers(behavior)]),
            largest=torch.stack([_largest(steps), _largest(-difference)]),
        )

    def __add__(self, other: Signals) -> Signals:
        """The signals of the tokens of both."""
        names = ("lines", "sizes", "shifts", "places", "ratios", "rounded")
        sums = {name: getattr(self, name) + getattr(other, name) for name in names}
        evidence = added(self.evidence, other.evidence)
        return Signals(evidence=evidence, largest=torch.maximum(self.largest, other.largest), **sums)

    @property
    def guard_evidence(self) -> Evidence:
        """The sums that the guards of a run judge by."""
        return Evidence(*self.evidence.tolist())

    @property
    def num_uncertain(self) -> float:
        """Tokens that say something about the engines."""
        return float(self.lines[0])

    def line_on(self, side: str) -> Fit:
        """The difference as a line in the log-prob of a side."""
        sums = dict(zip(SUMS, self.lines.tolist(), strict=True))
        count = max(sums["count"], 1.0)
        spread = sums[f"squared_{side}"] - sums[side] ** 2 / count
        spread_difference = sums["squared_difference"] - sums["difference"] ** 2 / count
        together = sums[f"{side}_difference"] - sums[side] * sums["difference"] / count
        if spread <= 0.0 or spread_difference <= 0.0:
            return Fit(0.0, 0.0)
        return Fit(together / spread, together**2 / (spread * spread_difference))

    def typical_gap(self) -> float:
        """The median ``|d|`` of uncertain tokens whose log-probs differ."""
        return _median(self.sizes.sum(0))

    def typical_shift(self) -> float:
        """The median of ``|d| / (1 - p)`` of the same."""
        return _median(self.shifts[0])

    def gaps_beyond(self, gap: float) -> tuple[float, float]:
        """Uncertain tokens with ``|d|`` above ``gap``: how many, and how many have ``d`` below 0."""
        below, above = self.sizes[:, _first_beyond(gap) :].sum(1).tolist()
        return below + above, below

    def shifts_beyond(self, shift: float) -> tuple[float, float]:
        """Uncertain tokens with ``|d| / (1 - p)`` above ``shift``: how many, and their share of k3."""
        count, k3 = self.shifts[:, _first_beyond(shift) :].sum(1).tolist()
        total = float(self.shifts[1].sum())
        return count, k3 / total if total else 0.0


def _median(counts: Tensor) -> float:
    half = torch.tensor(float(counts.sum()) / 2.0, dtype=torch.float64)
    return size_of_bin(min(int(torch.searchsorted(counts.cumsum(0), half)), NUM_SIZES - 1))


def _first_beyond(value: float) -> int:
    return int(size_bin(torch.tensor(value, dtype=torch.float64))) + 1


def _by_place(part: Part, uncertain: Tensor, shift: Tensor) -> Tensor:
    places = (part.of_valid(each) for each in (part.position_in_turn_T, part.turn_T))
    position, turn = (each.index_select(0, uncertain) for each in places)
    place = (position >= NUM_EARLY).long() + (position >= LATE) + len(PLACES) * (turn > 0)
    bounded = shift.clamp_max(1.0)
    moments = [summed(place, 2 * len(PLACES), values) for values in (None, bounded, bounded.double().square())]
    return torch.stack(moments, dim=1).view(2, len(PLACES), -1)


def _line_sums(difference: Tensor, behavior: Tensor, proximal: Tensor) -> Tensor:
    d, b, p = difference.clamp(-20.0, 20.0).double(), behavior.double(), proximal.double()
    count = torch.tensor(float(len(d)), dtype=torch.float64)
    return torch.stack([count, d.sum(), b.sum(), p.sum(), d @ d, b @ b, p @ p, b @ d, p @ d])


def _bf16_numbers(values: Tensor) -> Tensor:
    is_number = values != 0.0
    is_rounded = is_number & ((values.contiguous().view(torch.int32) & _BF16_BITS) == 0)
    return torch.stack([is_number.count_nonzero(), is_rounded.count_nonzero()]).double()


def _largest(values: Tensor) -> Tensor:
    return torch.cat([values.double(), torch.full((1,), -torch.inf, dtype=torch.float64)]).amax()
