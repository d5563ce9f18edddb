"""Gates: what leaves the mask. Each looks at the original mask, so their order does not matter."""

from __future__ import annotations

import torch
from torch import Tensor

from mis_ext.config import Band, GateFactor
from mis_ext.log_ratio import TokenRatios
from mis_ext.statistics import SequenceStatistics
from mis_ext.weights import sequence_log_ratio

Gates = tuple[GateFactor, ...]


def token_keep(tokens: TokenRatios, gates: Gates) -> Tensor:
    """``[T]`` bool: valid tokens that pass every token-level gate.

    Masking tokens by their ratio: Ring team, Every Step Evolves (IcePop), arXiv:2510.18855.
    """
    keep_T = tokens.valid_mask_T
    for gate in gates:
        if gate.level == "token":
            keep_T = keep_T & inside(tokens.log_ratio_T, gate.band)
    return keep_T


def sequence_keep(stats: SequenceStatistics, gates: Gates) -> Tensor:
    """``[S]`` bool: sequences that pass every gate on the sequence, vetoes included.

    Rejecting sequences by the product or geometric mean of their ratios: Liu, Li et al., When Speed Kills Stability,
    2025. Vetoing a sequence for one token: Prime Intellect, INTELLECT-3, arXiv:2512.16144.
    """
    keep_S = torch.ones_like(stats.num_valid_S, dtype=torch.bool)
    for gate in gates:
        if gate.level != "token":
            keep_S = keep_S & inside(gate_statistic(stats, gate), gate.band)
    return keep_S


def gate_statistic(stats: SequenceStatistics, gate: GateFactor) -> Tensor:
    """``[S]`` log-space statistic that a gate on sequences compares with its band."""
    if gate.statistic == "proximal_probability":
        return stats.proximal_min_S
    if gate.level == "sequence_min":
        return stats.log_ratio_min_S
    if gate.level == "sequence_max":
        return stats.log_ratio_max_S
    return sequence_log_ratio(stats, gate.level)


def vetoing_tokens(tokens: TokenRatios, gate: GateFactor) -> Tensor:
    """``[T]`` bool: valid tokens that alone make the veto reject their sequence."""
    statistic_T = tokens.proximal_T if gate.statistic == "proximal_probability" else tokens.log_ratio_T
    return tokens.valid_mask_T & ~inside(statistic_T, gate.band)


def inside(log_value: Tensor, band: Band) -> Tensor:
    """Whether ``band``, a closed interval, contains ``exp(log_value)``."""
    return (log_value >= band.log_low) & (log_value <= band.log_high)
