# SPDX-License-Identifier: Apache-2.0
"""The reference example of slime and Miles, written again: users' present curves and losses, with its defects.

It works on whole responses, one sample after the other, in float64. Names have the `mis_` prefix of the dashboards.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

LIMIT = 20.0


@dataclass(frozen=True)
class HostOutput:
    """Lists of whole-response tensors, one per sample; `metrics` maps a name to such a list."""

    weights: list[torch.Tensor]
    masks: list[torch.Tensor]
    metrics: dict[str, list[torch.Tensor]]


def masked_mean(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Mean over the mask, 0 if empty."""
    return (x * mask).sum() / mask.sum().clamp(min=1)


def log_ratio_at(level: str, d: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The log ratio of a level, spread over the tokens."""
    if level == "token":
        return d
    if level == "sequence":
        return torch.full_like(d, float((d * mask).sum()))
    if level == "geometric":
        return torch.full_like(d, float(masked_mean(d, mask)))
    raise ValueError(level)


def correct(
    keys: Mapping,
    *,
    train: Sequence[torch.Tensor],
    rollout: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
) -> HostOutput:
    """One micro-batch through the reference example."""
    samples = [(t.double(), r.double(), m.double()) for t, r, m in zip(train, rollout, masks, strict=True)]
    metrics: dict[str, list[torch.Tensor]] = {}

    def note(name: str, value: torch.Tensor | float, like: torch.Tensor) -> None:
        spread = torch.as_tensor(value, dtype=torch.float64).expand_as(like).clone()
        metrics.setdefault(f"mis_{name}", []).append(spread)

    for t, r, m in samples:
        note_mismatch(note, t, r, m)
    if not keys.get("use_tis"):
        return HostOutput([], list(masks), metrics)

    level, mode, use_rs = keys["tis_level"], keys["tis_mode"], keys.get("use_rs", False)
    high = keys["tis_upper_bound"]
    low = keys["tis_lower_bound"] if keys.get("tis_lower_bound") is not None else 1 / high
    rs_high = keys["rs_upper_bound"] if keys.get("rs_upper_bound") is not None else high
    rs_low = keys["rs_lower_bound"] if keys.get("rs_lower_bound") is not None else low
    weights, new_masks = [], []
    for t, r, m in samples:
        d = t - r
        raw = log_ratio_at(level, d, m).clamp(-LIMIT, LIMIT).exp()
        note("tis_weight_before_bound", raw, t)
        keep = m.clone()
        if mode == "truncate":
            weight = raw.clamp(0, high)
            note("tis_truncate_fraction", (raw > high).double(), t)
        elif mode == "clip":
            weight = raw.clamp(low, high)
            note("tis_clip_fraction_low", (raw < low).double(), t)
            note("tis_clip_fraction_high", (raw > high).double(), t)
        elif mode == "mask":
            weight = raw
            note("tis_mask_fraction_low", (raw < low).double(), t)
            note("tis_mask_fraction_high", (raw > high).double(), t)
            keep = keep * ((raw >= low) & (raw <= high))
        else:
            raise ValueError(mode)
        note("tis_weight_after_bound", weight, t)
        if use_rs:
            ratio = log_ratio_at(keys["rs_level"], d, m).clamp(-LIMIT, LIMIT).exp()
            note("rs_mask_fraction_low", (ratio < rs_low).double(), t)
            note("rs_mask_fraction_high", (ratio > rs_high).double(), t)
            keep = keep * ((ratio >= rs_low) & (ratio <= rs_high))
            if keys.get("rs_veto_threshold") is not None:
                tiny = (d < math.log(keys["rs_veto_threshold"])) & (m != 0)
                note("rs_catastrophic_token_fraction", tiny.double(), t)
                note("rs_catastrophic_seq_fraction", float(tiny.any()), t)
                keep = keep * (not bool(tiny.any()))
        note("is_ratio_mean_after_tis_rs", weight, t)
        weights.append(weight * (m != 0))
        new_masks.append(keep)

    if keys.get("tis_batch_normalize"):
        factor = host_normalizer(level, weights, [m for _, _, m in samples])
        weights = [w / factor for w in weights]
        for t, _, _ in samples:
            note("batch_norm_factor", factor, t)
    for weight, (_, _, m) in zip(weights, samples, strict=True):
        chosen = weight[m != 0]
        note("is_ratio_mean_final", masked_mean(weight, m), weight)
        note("is_ratio_min_final", chosen.min() if chosen.numel() else 0.0, weight)
        note("is_ratio_max_final", chosen.max() if chosen.numel() else 0.0, weight)
    return HostOutput(weights, new_masks, metrics)


def note_mismatch(note, t: torch.Tensor, r: torch.Tensor, m: torch.Tensor) -> None:
    """The mismatch part of the metrics."""
    d = t - r
    train, rollout = -masked_mean(t, m), -masked_mean(r, m)
    note("training_log_ppl", train, t)
    note("training_ppl", train.exp(), t)
    note("rollout_log_ppl", rollout, t)
    note("rollout_ppl", rollout.exp(), t)
    note("kl", -d, t)
    note("k3_kl", d.exp() - d - 1, t)
    note("log_ppl_diff", train - rollout, t)
    note("log_ppl_abs_diff", (train - rollout).abs(), t)
    note("ppl_ratio", (train - rollout).exp(), t)
    note("chi2_token", masked_mean((2 * d.clamp(-LIMIT, LIMIT)).exp(), m) - 1, t)
    note("chi2_seq", (2 * (d * m).sum().clamp(-LIMIT, LIMIT)).exp() - 1, t)


def host_normalizer(level: str, weights: list[torch.Tensor], masks: list[torch.Tensor]) -> float:
    """The mean weight of the micro-batch, 1 if it is nearly 0."""
    if level == "token":
        total = sum(float((w * m).sum()) for w, m in zip(weights, masks, strict=True))
        mean = total / max(sum(float(m.sum()) for m in masks), 1.0)
    elif level == "sequence":
        mean = sum(float(masked_mean(w, m)) for w, m in zip(weights, masks, strict=True)) / len(weights)
    else:
        raise ValueError(f"the reference example cannot normalize level {level}")
    return mean if mean > 1e-8 else 1.0


def sum_of_sample_mean(
    values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], denominators: Sequence[torch.Tensor] | None = None
) -> torch.Tensor:
    """The reducer of slime and Miles: a sum over samples of masked means; denominators from original masks if given."""
    denominators = masks if denominators is None else denominators
    return sum(
        ((v.double() * m).sum() / o.sum().clamp(min=1) for v, m, o in zip(values, masks, denominators, strict=True)),
        torch.zeros((), dtype=torch.float64),
    )


def sum_of_token(values: Sequence[torch.Tensor], masks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The reducer of slime and Miles with `--calculate-per-token-loss`."""
    totals = ((v.double() * m).sum() for v, m in zip(values, masks, strict=True))
    return sum(totals, torch.zeros((), dtype=torch.float64))
