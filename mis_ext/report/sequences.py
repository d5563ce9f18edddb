"""What is kept of each sequence: a few numbers, of which what is said of whole responses is computed."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mis_ext.correction.formula import inside
from mis_ext.correction.gates import Gate
from mis_ext.explain.law import GaussianLaw
from mis_ext.methods.pareto import smooth_weights
from mis_ext.report.part import Origin, Part
from mis_ext.report.tally import NUM_OCTAVES, octave, octave_range, summed, token_rows

COLUMNS = (
    "num_response",
    "num_valid",
    "difference",
    "gap",
    "k3",
    "proximal",
    "behavior",
    "reward",
    "advantage",
    "versions_behind",
)
"""Sums over valid tokens in nats, and what is known of the sample; NaN where nothing is."""

BANDS = {
    "product in [1/2, 2]": Gate(reduce="sum", low=0.5, high=2.0),
    "geometric mean within 1 %": Gate(reduce="mean", low=0.99, high=1.01),
}
"""Gates whose acceptance is shown by length."""


@dataclass(eq=False)
class Sequences:
    """``S`` sequences: ``columns`` ``[S, len(COLUMNS)]`` float64, and where each comes from."""

    columns: Tensor
    origins: list[Origin]
    steps: list[str]

    @classmethod
    def of(cls, part: Part) -> Sequences:
        """The sequences of a part, with the sums of their tokens."""
        index, tokens = part.streams.layout.index, part.tokens
        rows = token_rows(tokens.log_ratio_T)
        # In the precision and order of the correction, so that its gates decide on the same sums.
        reduced = index.reduce(
            [
                tokens.response_mask_T.float(),
                tokens.valid_mask_T.float(),
                rows["difference"],
                rows["gap"],
                rows["k3"],
                tokens.proximal_T,
                tokens.behavior_T,
            ],
            "sum",
        ).double()
        known = [[origin.reward, origin.versions_behind] for origin in part.origins]
        reward, behind = torch.tensor(known, dtype=torch.float64).reshape(-1, 2).unbind(1)
        columns = torch.stack([*reduced, reward, part.advantage_S, behind], dim=1)
        # Of tokens the worst are kept elsewhere.
        origins = [origin._replace(token_ids=None) for origin in part.origins]
        return cls(columns, origins, [part.step] * len(origins))

    @classmethod
    def joined(cls, parts: Sequence[Sequences]) -> Sequences:
        """The sequences of all parts, in their order."""
        columns = [part.columns for part in parts] or [torch.empty(0, len(COLUMNS), dtype=torch.float64)]
        return cls(
            torch.cat(columns),
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
        chosen = keep_S.nonzero().flatten().tolist()
        return Sequences(
            self.columns[keep_S], [self.origins[each] for each in chosen], [self.steps[each] for each in chosen]
        )

    @property
    def measured(self) -> Tensor:
        """``[S]`` bool: sequences with a valid token."""
        return self["num_valid"] > 0

    @cached_property
    def prompt_S(self) -> Tensor:
        """``[S]`` int64, a number for each prompt: of its own for a response whose group is not known."""
        numbers: dict[Hashable, int] = {}
        # A group is one of a step.
        keys = [
            place if origin.group is None else (step, origin.group)
            for place, (step, origin) in enumerate(zip(self.steps, self.origins, strict=True))
        ]
        return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys], dtype=torch.int64)

    @property
    def log_ratio_mean(self) -> Tensor:
        """The mean log-ratio ``[S]`` of each sequence in nats: the log of the geometric mean of its ratios."""
        return self["difference"] / self["num_valid"].clamp_min(1.0)


@dataclass(frozen=True)
class Acceptance:
    """Sequences of one octave of lengths; ``predicted`` is what independent Gaussian log-ratios of this k3 give."""

    shortest: int
    longest: int
    num_sequences: int
    mean_length: float
    k3: float
    accepted: dict[str, float]
    predicted: dict[str, float]


def acceptance_by_length(sequences: Sequences, k3: float) -> list[Acceptance]:
    """How many sequences each of ``BANDS`` accepts.

    Args:
        sequences: All.
        k3: Per token, of all: then a difference from the prediction is the length's.
    """
    measured = sequences.where(sequences.measured)
    length = measured["num_valid"]
    index = octave(length - 1)
    counts, lengths, divergences = (summed(index, NUM_OCTAVES, values) for values in (None, length, measured["k3"]))
    accepted = {name: summed(index, NUM_OCTAVES, _accepted(measured, band)) for name, band in BANDS.items()}
    rows = []
    for number in counts.nonzero().flatten().tolist():
        count, mean_length = float(counts[number]), float(lengths[number] / counts[number])
        first, last = octave_range(number)
        rows.append(
            Acceptance(
                shortest=first + 1,
                longest=last + 1,
                num_sequences=int(count),
                mean_length=mean_length,
                k3=float(divergences[number] / lengths[number]),
                accepted={name: float(values[number]) / count for name, values in accepted.items()},
                predicted={name: GaussianLaw(k3, mean_length).acceptance(band) for name, band in BANDS.items()},
            )
        )
    return rows


def _accepted(sequences: Sequences, band: Gate) -> Tensor:
    value = sequences["difference"] if band.reduce == "sum" else sequences.log_ratio_mean
    return inside(value, band.log_low, band.log_high)


def effective_share(log_weights: Tensor) -> float:
    """Kish's effective sample size over the sample size; NaN for none."""
    if not len(log_weights):
        return math.nan
    weights = (log_weights - log_weights.max()).exp()
    return float(weights.sum().square() / (len(weights) * weights.square().sum()))


MIN_WEIGHTS = 25


def k_hat(log_weights: Tensor) -> float:
    """See :class:`mis_ext.methods.pareto.Smoothed`; NaN for fewer than 25 weights, 0 where the largest are equal.

    Args:
        log_weights: ``[S]``, finite.
    """
    if len(log_weights) < MIN_WEIGHTS:
        return math.nan
    # The scale of the weights does not matter, and would leave float64.
    weights = (log_weights.double() - log_weights.max()).exp()
    num_tail = math.ceil(min(len(weights) / 5, 3.0 * math.sqrt(len(weights))))
    if float(weights.topk(num_tail + 1).values[-1]) == 1.0:
        return 0.0
    return float(smooth_weights(weights, torch.ones_like(weights, dtype=torch.bool)).k_hat)
