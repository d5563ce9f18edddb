# SPDX-License-Identifier: Apache-2.0
"""The summary: typed numbers of the mismatch."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from mis_ext.tools.diagnosis.evidence import positions
from mis_ext.tools.report.noise import standard_error
from mis_ext.tools.report.part import Part
from mis_ext.tools.report.tally import (
    NUM_OCTAVES,
    NUM_PROBABILITIES,
    Sequences,
    TokenTally,
    effective_share,
    k_hat,
    octave_range,
    quantile,
)

NUM_CONTEXT = 12
"""Number of tokens shown before and after a worst token."""

OF_PROMPTS = ("num_prompts", "k3_error", "abs_mean_error", "mean_length_error", "reward_error")
"""Numbers of :class:`Mismatch` that need the prompt of each response."""


@dataclass(frozen=True)
class Mismatch:
    """Mismatch of trainer and engine; ``d`` is proximal minus behavior log-prob in nats; NaN if not measured.

    Means are over valid tokens: trained tokens with finite log-probs on both sides.

    Attributes:
        k1: ``-mean d``, an estimate of KL(behavior, proximal); any sign.
        k3: ``mean(exp d - 1 - d)``: an estimate of the same, never negative.
        reverse_k3: ``mean(d exp d - exp d + 1)``, an estimate of KL(proximal, behavior), never negative.
        abs_mean: Mean of ``|d|``. ``abs_p50`` to ``abs_p999``: quantiles, exact to 0.6 %. ``abs_max``: the largest.
        total_variation: ``mean(1 - min(1, exp d))``.
        ratio_mean: ``mean(exp d)``: 1 if both sides are distributions over all tokens, even if they differ.
        ess_token: Kish's effective sample size of token ratios, as a share. ``ess_sequence``: of products over
            responses.
        k_hat: Pareto k-hat of products of ratios over responses: above 0.7 their mean is unreliable.
        zero_share: Share of tokens with ``d`` exactly 0.
        num_prompts: Number of prompts of responses with a valid token. A response with unknown prompt counts as one
            prompt.
        k3_error: Standard error over prompts (:func:`~mis_ext.tools.report.noise.standard_error`), as all
            ``..._error``.
    """

    num_sequences: int
    num_tokens: int
    num_masked: int
    num_without_ratio: int
    mean_length: float
    k1: float
    k3: float
    reverse_k3: float
    abs_mean: float
    abs_p50: float
    abs_p99: float
    abs_p999: float
    abs_max: float
    total_variation: float
    ratio_mean: float
    ess_token: float
    ess_sequence: float
    k_hat: float
    zero_share: float
    reward: float
    num_prompts: int
    k3_error: float
    abs_mean_error: float
    mean_length_error: float
    reward_error: float


@dataclass(frozen=True)
class Group:
    """Tokens with a common property in ``[low, high]``."""

    name: str
    low: float
    high: float
    num_tokens: int
    mean_abs_difference: float
    mean_log_ratio: float
    k3: float
    k3_share: float


@dataclass(frozen=True)
class WorstToken:
    """A token, its log-probs in nats, and surrounding ids if the file has them (``text`` if decoded)."""

    step: str
    sample: str
    sample_index: int | None
    position: int
    token_id: int | None
    proximal: float
    behavior: float
    log_ratio: float
    ids_before: tuple[int, ...]
    ids_behind: tuple[int, ...]
    text: tuple[str, str, str] | None = None


@dataclass(frozen=True)
class WorstSample:
    """A sample, with means over its valid tokens in nats."""

    step: str
    sample: str
    sample_index: int | None
    num_tokens: int
    mean_abs_difference: float
    mean_log_ratio: float
    k3: float
    reward: float


@dataclass(frozen=True, eq=False)
class Summary:
    """All numbers of the mismatch of a run.

    Attributes:
        overall: Mismatch of all steps.
        steps: Mismatch of each step.
        by_probability: Groups by deciles of the behavior probability.
        by_position: Groups by position in the response, in octaves.
        by_turn: Groups by turn (a run of trained tokens), in octaves from 1; empty if no response has two turns.
        by_version: Groups by weight versions that the engine was behind; empty if unknown.
    """

    overall: Mismatch
    steps: dict[str, Mismatch]
    by_probability: list[Group]
    by_position: list[Group]
    by_turn: list[Group]
    by_version: list[Group]
    worst_tokens: list[WorstToken]
    worst_samples: list[WorstSample]

    def scalars(self) -> dict[str, float]:
        """Return the numbers of :class:`Mismatch` by name, for a logger."""
        return {name: float(value) for name, value in vars(self.overall).items()}


def measure(tally: TokenTally, sequences: Sequences) -> Mismatch:
    """Compute the numbers of tokens and their sequences."""
    totals, sizes = tally.totals, tally.counts["sizes"]
    # Without tokens, means are NaN.
    count = totals["count"] or math.nan
    known, rewarded = sequences.with_tokens(), sequences.where(~sequences["reward"].isnan())
    length, product, prompt_S = known["num_valid"], known["difference"], known.prompt_S
    return Mismatch(
        num_sequences=len(sequences),
        num_tokens=int(totals["count"]),
        num_masked=int(totals["num_masked"]),
        num_without_ratio=int(totals["num_response"] - totals["count"]),
        mean_length=float(length.mean()) if len(known) else math.nan,
        k1=-(totals["difference"] / count),
        k3=totals["k3"] / count,
        reverse_k3=totals["reverse_k3"] / count,
        abs_mean=totals["gap"] / count,
        abs_p50=quantile(sizes, 0.5, num_zeros=totals["zeros"]),
        abs_p99=quantile(sizes, 0.99, num_zeros=totals["zeros"]),
        abs_p999=quantile(sizes, 0.999, num_zeros=totals["zeros"]),
        abs_max=tally.abs_max if totals["count"] else math.nan,
        total_variation=totals["variation"] / count,
        ratio_mean=1.0 + totals["ratio_excess"] / count,
        ess_token=totals["ratio"] ** 2 / (count * totals["squared_ratio"]),
        ess_sequence=effective_share(product),
        k_hat=k_hat(product),
        zero_share=totals["zeros"] / count,
        reward=float(rewarded["reward"].mean()) if len(rewarded) else math.nan,
        num_prompts=len({*prompt_S.tolist()}),
        k3_error=standard_error(known["k3"], length, prompt_S),
        abs_mean_error=standard_error(known["gap"], length, prompt_S),
        mean_length_error=standard_error(length, torch.ones_like(length), prompt_S),
        reward_error=standard_error(rewarded["reward"], torch.ones_like(rewarded["reward"]), rewarded.prompt_S),
    )


def build_summary(
    steps: Mapping[str, tuple[TokenTally, Sequences]], *, worst_tokens: Sequence[WorstToken], max_worst: int
) -> Summary:
    """Compute the summary from the tally and sequences of each step."""
    if not steps:
        raise ValueError("no sample: nothing to report")
    whole = reduce(operator.add, (tally for tally, _ in steps.values()))
    sequences = Sequences.joined([each for _, each in steps.values()])
    overall, counts = measure(whole, sequences), whole.counts
    deciles = [(number / NUM_PROBABILITIES, (number + 1) / NUM_PROBABILITIES) for number in range(NUM_PROBABILITIES)]
    octaves = [octave_range(index) for index in range(NUM_OCTAVES)]
    # Turns are counted from 1.
    by_turn = _groups(counts["turns"], [_range(first + 1, last + 1) for first, last in octaves])
    return Summary(
        overall=overall,
        steps={step: measure(*found) for step, found in steps.items()},
        by_probability=_groups(counts["deciles"], [(f"{low:.1f} to {high:.1f}", low, high) for low, high in deciles]),
        by_position=_groups(counts["positions"], [_range(*each) for each in octaves]),
        by_turn=by_turn if len(by_turn) > 1 else [],
        by_version=_by_version(sequences),
        worst_tokens=[*worst_tokens],
        worst_samples=_worst_samples(sequences, max_worst),
    )


def _range(first: int, last: int) -> tuple[str, float, float]:
    return (f"{first}" if first == last else f"{first} to {last}", float(first), float(last))


def _groups(sums: Tensor, names: Sequence[tuple[str, float, float]]) -> list[Group]:
    """Compute the numbers of each nonempty group from its ``SUMS``, in the order of ``names``."""
    whole = float(sums.sum(0)[3])
    found = []
    for (name, low, high), (count, difference, gap, k3) in zip(names, sums.tolist(), strict=True):
        if count:
            share = k3 / whole if whole else math.nan
            found.append(Group(name, low, high, int(count), gap / count, difference / count, k3 / count, share))
    return found


def _by_version(sequences: Sequences) -> list[Group]:
    known = sequences.with_tokens()
    known = known.where(~known["versions_behind"].isnan())
    lags, sums = sorted({*known["versions_behind"].tolist()}), []
    for lag in lags:
        chosen = known.where(known["versions_behind"] == lag)
        sums.append([float(chosen[name].sum()) for name in ("num_valid", "difference", "gap", "k3")])
    names = [(f"{lag:g} behind", lag, lag) for lag in lags]
    return _groups(torch.tensor(sums, dtype=torch.float64).reshape(-1, 4), names)


def worst_tokens(part: Part, limit: int) -> list[WorstToken]:
    """The tokens with the largest ``|d|``."""
    tokens, position_T = part.tokens, positions(part.streams.layout)
    largest = tokens.d.abs().topk(min(limit, len(tokens.d)))
    found = []
    for place in largest.indices[largest.values > 0.0].tolist():
        sequence, position = int(part.streams.layout.sequence_T[place]), int(position_T[place])
        origin = part.origins[sequence]
        before, own, behind = _around(origin.token_ids, position)
        found.append(
            WorstToken(
                step=part.step,
                sample=origin.name,
                sample_index=origin.sample_index,
                position=position,
                token_id=own,
                proximal=float(tokens.log_pi[place]),
                behavior=float(tokens.log_mu[place]),
                log_ratio=float(tokens.d[place]),
                ids_before=before,
                ids_behind=behind,
            )
        )
    return found


def _worst_samples(sequences: Sequences, limit: int) -> list[WorstSample]:
    """The samples with the largest mean ``|d|``."""
    mean = sequences["gap"] / sequences["num_valid"].clamp_min(1.0)
    largest = torch.topk(mean, min(limit, len(mean)))
    found = []
    for place in largest.indices[largest.values > 0.0].tolist():
        origin, count = sequences.origins[place], float(sequences["num_valid"][place])
        found.append(
            WorstSample(
                step=sequences.steps[place],
                sample=origin.name,
                sample_index=origin.sample_index,
                num_tokens=int(count),
                mean_abs_difference=float(mean[place]),
                mean_log_ratio=float(sequences["difference"][place]) / count,
                k3=float(sequences["k3"][place]) / count,
                reward=origin.reward,
            )
        )
    return found


def _around(token_ids: Any, position: int) -> tuple[tuple[int, ...], int | None, tuple[int, ...]]:
    if token_ids is None or len(token_ids) <= position:
        return (), None, ()
    begin = max(0, position - NUM_CONTEXT)
    around = [int(each) for each in token_ids[begin : position + NUM_CONTEXT + 1]]
    own = position - begin
    return tuple(around[:own]), around[own], tuple(around[own + 1 :])
