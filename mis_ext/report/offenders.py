"""The tokens and samples on which the engines disagree most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mis_ext.report.part import Part
from mis_ext.report.sequences import Sequences

NUM_CONTEXT = 12
"""Tokens of context before and behind."""


@dataclass(frozen=True)
class WorstToken:
    """A token, its log-probs in nats, and ids around it where the file has them (``text`` if they were decoded)."""

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
    """A sample; means over its valid tokens, in nats."""

    step: str
    sample: str
    sample_index: int | None
    num_tokens: int
    mean_abs_difference: float
    mean_log_ratio: float
    k3: float
    reward: float


def worst_tokens(part: Part, limit: int) -> list[WorstToken]:
    """The tokens with the largest ``|d|``."""
    tokens = part.tokens
    largest = tokens.log_ratio_T.abs().topk(min(limit, len(tokens.log_ratio_T)))
    found = []
    for place in largest.indices[largest.values > 0.0].tolist():
        sequence, position = int(part.sequence_T[place]), int(part.position_T[place])
        origin = part.origins[sequence]
        before, own, behind = _ids(origin.token_ids, position)
        found.append(
            WorstToken(
                step=part.step,
                sample=origin.name,
                sample_index=origin.sample_index,
                position=position,
                token_id=own,
                proximal=float(tokens.proximal_T[place]),
                behavior=float(tokens.behavior_T[place]),
                log_ratio=float(tokens.log_ratio_T[place]),
                ids_before=before,
                ids_behind=behind,
            )
        )
    return found


def worst_samples(sequences: Sequences, limit: int) -> list[WorstSample]:
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


def _ids(token_ids: Any, position: int) -> tuple[tuple[int, ...], int | None, tuple[int, ...]]:
    if token_ids is None or len(token_ids) <= position:
        return (), None, ()
    begin = max(0, position - NUM_CONTEXT)
    around = [int(each) for each in token_ids[begin : position + NUM_CONTEXT + 1]]
    own = position - begin
    return tuple(around[:own]), around[own], tuple(around[own + 1 :])


def merged(first: list[WorstToken], second: list[WorstToken], limit: int) -> list[WorstToken]:
    """The ``limit`` tokens of both lists with the largest ``|d|``, the worst first."""
    return sorted(first + second, key=lambda token: -abs(token.log_ratio))[:limit]
