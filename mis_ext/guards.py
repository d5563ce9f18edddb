"""Checks of the first micro-batch for mistakes that no later metric would show as such.

This module waits for the device; it runs once.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from mis_ext.config import DEFAULT_UPPER_BOUND, CorrectionConfig, GuardName
from mis_ext.layout import PackedLayout
from mis_ext.log_ratio import TokenRatios, bounded_expm1
from mis_ext.statistics import SequenceStatistics

MIN_CONSTANT_TOKENS = 8
MIN_SHIFT_TOKENS = 64
SHIFT_FACTOR = 0.5
SENTINELS = (-9999.0, -1e9, torch.finfo(torch.float32).min, torch.finfo(torch.bfloat16).min)
SENTINEL_SHARE = 0.01
MAX_MEAN_ABS_DIFF = 0.3
MIN_SEQUENCE_ESS = 0.1


class MismatchWarning(UserWarning):
    """Something about the data or the configuration makes the correction weak, useless or suspicious."""


class Finding(NamedTuple):
    """A mistake that stops the run unless its guard is set to warn."""

    guard: GuardName
    message: str


def find_mistakes(tokens: TokenRatios, layout: PackedLayout) -> list[Finding]:
    """Mistakes that the log-probs of this rank's tokens give away."""
    return [*_degenerate_behavior(tokens), *_shifted_log_probs(tokens, layout)]


def _degenerate_behavior(tokens: TokenRatios) -> list[Finding]:
    behavior_T, valid_T = tokens.behavior_T, tokens.valid_mask_T
    # Padded, so that a rank without tokens has extremes too.
    lowest = torch.nn.functional.pad(behavior_T.masked_fill(~valid_T, torch.inf), (0, 1), value=torch.inf).amin()
    highest = torch.nn.functional.pad(behavior_T.masked_fill(~valid_T, -torch.inf), (0, 1), value=-torch.inf).amax()
    is_sentinel_T = torch.isin(behavior_T, behavior_T.new_tensor(SENTINELS))
    low, high, num_valid, num_sentinel = torch.stack([lowest, highest, valid_T.sum(), is_sentinel_T.sum()]).tolist()
    if num_valid >= MIN_CONSTANT_TOKENS and low == high:
        cause = (
            f"all {num_valid:.0f} behavior log-probs on trainable tokens are {low:g}: the inference engine returned no "
            "log-probs (ask for them: return_logprob in SGLang, logprobs in vLLM), or it sampled greedily"
        )
    elif num_sentinel > SENTINEL_SHARE * max(num_valid, 1.0):
        cause = (
            f"{num_sentinel:.0f} of {num_valid:.0f} behavior log-probs on trainable tokens are placeholders such as "
            f"{SENTINELS[0]:g}: some responses came back without log-probs; set their loss_masks to 0"
        )
    else:
        return []
    return [Finding("degenerate_behavior", cause)]


def _shifted_log_probs(tokens: TokenRatios, layout: PackedLayout) -> list[Finding]:
    index, valid_T = layout.index, tokens.valid_mask_T
    paired_T = valid_T[1:] & valid_T[:-1] & (index.sequence_T[1:] == index.sequence_T[:-1])
    if index.position_T is not None:
        paired_T = paired_T & (index.position_T[1:] == index.position_T[:-1] + 1)
    proximal_T, behavior_T = tokens.proximal_T, tokens.behavior_T
    differences = [
        proximal_T[1:] - behavior_T[1:],
        proximal_T[1:] - behavior_T[:-1],
        proximal_T[:-1] - behavior_T[1:],
    ]
    sums = [torch.where(paired_T, difference.abs(), 0.0).sum() for difference in differences]
    aligned, earlier, later, num_pairs = torch.stack([*sums, paired_T.sum()]).tolist()
    shifted = min(earlier, later)
    if num_pairs < MIN_SHIFT_TOKENS or shifted >= SHIFT_FACTOR * aligned:
        return []
    message = (
        f"behavior and proximal log-probs differ by {aligned / num_pairs:.3g} on average, but by only "
        f"{shifted / num_pairs:.3g} when one of them is shifted by a token: they are misaligned (the logits at "
        "position p - 1 score the token at position p)"
    )
    return [Finding("shifted_log_probs", message)]


def find_doubts(
    tokens: TokenRatios, stats: SequenceStatistics, config: CorrectionConfig, *, num_sequences_in_scope: int
) -> list[str]:
    """What is legal but probably not what the user wants."""
    doubts: list[str] = []
    level = config.weight.level if config.weight is not None else "none"
    if config.normalize_over is not None and level != "token" and num_sequences_in_scope == 1:
        doubts.append(
            f"{level}-level weights normalised over a single sequence are always 1, which switches the correction off: "
            "use tis_normalize_scope: data_parallel or rollout, or larger micro-batches"
        )
    valid_T, log_ratio_T = tokens.valid_mask_T, tokens.log_ratio_T
    k3_T = torch.where(valid_T, bounded_expm1(log_ratio_T) - log_ratio_T, 0.0)
    sums = [valid_T.sum(), log_ratio_T.abs().sum(), k3_T.sum(), stats.num_valid_S.sum(), (stats.num_valid_S > 0).sum()]
    num_tokens, abs_diff, k3, all_tokens, num_sequences = torch.stack([value.float() for value in sums]).tolist()
    abs_diff, k3 = abs_diff / max(num_tokens, 1.0), k3 / max(num_tokens, 1.0)
    if abs_diff > MAX_MEAN_ABS_DIFF:
        doubts.append(
            f"behavior and proximal log-probs differ by {abs_diff:.3g} nats per token on average, more than "
            f"{MAX_MEAN_ABS_DIFF:g}: check temperature, top-p, tokenisation, and that the weights were synchronised"
        )
    length = all_tokens / max(num_sequences, 1.0)
    variance = 2.0 * k3 * length
    share = math.exp(-min(variance, 700.0))
    if "sequence" in (level, *(gate.level for gate in config.all_gates)) and share < MIN_SEQUENCE_ESS:
        cap = config.weight.clip_band.high if config.weight is not None and level == "sequence" else math.inf
        cap = cap if cap < math.inf else DEFAULT_UPPER_BOUND
        doubts.append(
            f"sequence-level ratios of {length:.0f} tokens at k3 {k3:.2g} per token: an expected effective sample size "
            f"of exp(-2 * k3 * length) = {share:.2g} of the batch, and weights truncated at {cap:g} have mean "
            f"{expected_truncated_mean(variance, cap):.2g} instead of 1; use the token or geometric level, or shorter "
            "responses"
        )
    return doubts


def expected_truncated_mean(variance: float, cap: float) -> float:
    """``E[min(W, cap)]`` for ``log W ~ N(-variance / 2, variance)``, the weight of a long sequence."""
    if variance <= 0.0:
        return min(1.0, cap)
    deviation = math.sqrt(variance)
    below = _normal_cdf(math.log(cap) / deviation - deviation / 2.0)
    above = _normal_cdf(-math.log(cap) / deviation - deviation / 2.0)
    return below + cap * above


def _normal_cdf(value: float) -> float:
    return 0.5 * math.erfc(-value / math.sqrt(2.0))
