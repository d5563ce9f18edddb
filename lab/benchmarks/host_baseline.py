# SPDX-License-Identifier: Apache-2.0
"""The present code of users: the behavior of the frameworks' reference example as a loop over samples, in float32.

Same signature as ``mis_ext.compute_mis_weights_with_cp``. One sample after the other goes through a few dozen small
kernels, and Python looks at the device whenever it has to decide: whether a token vetoes the sequence, and whether
there is a minimum and a maximum to take; then once for the normalizer. Under context parallelism two collectives per
sample first put whole responses together, and all that is per token is cut to this rank's part again at the end.

It emits every metric of the reference example that the configuration implies; there is no choice of metrics, and keys
of mis_ext alone (``mis_*``, ``tis_normalize_*``, ``rs_gates``, the upper and the probability veto) are not read. Its
numbers therefore differ from the package's in what docs/reference/differences.md lists: it
divides by the mean over this rank's valid tokens, the package over kept tokens of all data-parallel ranks; with
``yaml/miles_compat.yaml`` both agree. ``tests/support/host_loop.py`` states the same behavior in float64.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LIMIT = 20.0
SMALLEST_MEAN_WEIGHT = 1e-8

Piece = tuple[int, int]
Note = Callable[[str, Tensor], None]


class Bounds(NamedTuple):
    """Bands of the weight and of the rejection, with the example's inheritance of unset bounds."""

    low: float
    high: float
    rs_low: float
    rs_high: float

    @classmethod
    def of(cls, args: Namespace) -> Bounds:
        """Read the keys."""
        high = args.tis_upper_bound
        low = _given(args, "tis_lower_bound", 1.0 / high)
        return cls(low, high, _given(args, "rs_lower_bound", low), _given(args, "rs_upper_bound", high))


def compute_mis_weights_with_cp(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    **kwargs: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Weighted loss, masks of whole responses, and metrics of the local tokens, as the frameworks expect them."""
    cp = getattr(kwargs.get("parallel_state"), "cp", None)
    if cp is None or cp.size == 1:
        pieces = None
        train, rollout = list(train_log_probs), list(rollout_log_probs)
    else:
        padded = kwargs.get("max_seq_lens") if getattr(args, "qkv_format", "thd") == "bshd" else None
        pieces = [
            response_pieces(total, response, padded_length=length, cp_rank=cp.rank, cp_size=cp.size)
            for total, response, length in zip(
                total_lengths, response_lengths, padded or [None] * len(total_lengths), strict=True
            )
        ]
        train, rollout = [], []
        for own, length, t, r in zip(pieces, response_lengths, train_log_probs, rollout_log_probs, strict=True):
            train.append(_whole_response(t, own, length, cp.group))
            rollout.append(_whole_response(r, own, length, cp.group))

    weights, masks, noted = correct_whole_responses(args, train, rollout, loss_masks)
    metrics = {name: _local(values, pieces) for name, values in noted.items()}
    if not args.use_tis:
        return pg_loss, list(loss_masks), metrics
    return pg_loss * _local(weights, pieces), masks, metrics


def response_pieces(
    total_length: int, response_length: int, *, padded_length: int | None, cp_rank: int, cp_size: int
) -> list[Piece]:
    """This rank's two slices of a response: chunks r and 2n - 1 - r, whose logits sit one position before a token."""
    chunk = math.ceil((total_length if padded_length is None else padded_length) / (2 * cp_size))
    first_logit = total_length - response_length - 1
    pieces = []
    for index in (cp_rank, 2 * cp_size - 1 - cp_rank):
        edges = (index * chunk - first_logit, (index + 1) * chunk - first_logit)
        begin, end = (min(max(edge, 0), response_length) for edge in edges)
        pieces.append((begin, end))
    return pieces


def correct_whole_responses(
    args: Namespace, train: Sequence[Tensor], rollout: Sequence[Tensor], masks: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor], dict[str, list[Tensor]]]:
    """Per sample the weight and the mask of each token, and per metric a list of the same shapes."""
    noted: dict[str, list[Tensor]] = {}
    weights, new_masks = [], []
    for t, r, m in zip(train, rollout, masks, strict=True):
        assert t.shape == r.shape == m.shape, f"log-probs and mask differ in length: {t.shape}, {r.shape}, {m.shape}"
        note = _note_into(noted, t)
        d = t - r
        _note_mismatch(note, t, r, d, m)
        if args.use_tis:
            weight, mask = _correct_sample(args, note, d, m)
            weights.append(weight)
            new_masks.append(mask)
    if not args.use_tis:
        return [], list(masks), noted

    if _given(args, "tis_batch_normalize", False):
        factor = _normalizer(args.tis_level, weights, masks)
        weights = [w / factor for w in weights]
        for w in weights:
            _note_into(noted, w)("batch_norm_factor", factor)
    for w, m in zip(weights, masks, strict=True):
        note = _note_into(noted, w)
        note("is_ratio_mean_final", _masked_mean(w, m))
        note("is_ratio_min_final", _masked_extreme(w, m, torch.min))
        note("is_ratio_max_final", _masked_extreme(w, m, torch.max))
    return weights, new_masks, noted


def _note_mismatch(note: Note, t: Tensor, r: Tensor, d: Tensor, m: Tensor) -> None:
    train_log_ppl, rollout_log_ppl = -_masked_mean(t, m), -_masked_mean(r, m)
    note("training_log_ppl", train_log_ppl)
    note("training_ppl", train_log_ppl.exp())
    note("rollout_log_ppl", rollout_log_ppl)
    note("rollout_ppl", rollout_log_ppl.exp())
    note("kl", -d)
    note("k3_kl", d.exp() - d - 1)
    note("log_ppl_diff", train_log_ppl - rollout_log_ppl)
    note("log_ppl_abs_diff", (train_log_ppl - rollout_log_ppl).abs())
    note("ppl_ratio", (train_log_ppl - rollout_log_ppl).exp())
    note("chi2_token", _masked_mean((2 * d.clamp(-LIMIT, LIMIT)).exp(), m) - 1)
    note("chi2_seq", (2 * (d * m).sum().clamp(-LIMIT, LIMIT)).exp() - 1)


def _correct_sample(args: Namespace, note: Note, d: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    bounds = Bounds.of(args)
    ratio = _ratio_at(args.tis_level, d, m)
    note("tis_weight_before_bound", ratio)
    keep = m.float()
    if args.tis_mode == "truncate":
        weight = ratio.clamp(0, bounds.high)
        note("tis_truncate_fraction", (ratio > bounds.high).float())
    elif args.tis_mode == "clip":
        weight = ratio.clamp(bounds.low, bounds.high)
        note("tis_clip_fraction_low", (ratio < bounds.low).float())
        note("tis_clip_fraction_high", (ratio > bounds.high).float())
    elif args.tis_mode == "mask":
        weight = ratio
        note("tis_mask_fraction_low", (ratio < bounds.low).float())
        note("tis_mask_fraction_high", (ratio > bounds.high).float())
        keep = keep * ((ratio >= bounds.low) & (ratio <= bounds.high))
    else:
        raise ValueError(f"the reference example has no tis_mode: {args.tis_mode}")
    note("tis_weight_after_bound", weight)
    if _given(args, "use_rs", False):
        keep = _reject(args, note, d, m, keep, bounds)
    note("is_ratio_mean_after_tis_rs", weight)
    return weight * m, keep


def _reject(args: Namespace, note: Note, d: Tensor, m: Tensor, keep: Tensor, bounds: Bounds) -> Tensor:
    ratio = _ratio_at(args.rs_level, d, m)
    note("rs_mask_fraction_low", (ratio < bounds.rs_low).float())
    note("rs_mask_fraction_high", (ratio > bounds.rs_high).float())
    keep = keep * ((ratio >= bounds.rs_low) & (ratio <= bounds.rs_high))
    threshold = _given(args, "rs_veto_threshold", None)
    if threshold is not None:
        tiny = (d < math.log(threshold)) & (m != 0)
        has_tiny = tiny.any()
        note("rs_catastrophic_token_fraction", tiny.float())
        note("rs_catastrophic_seq_fraction", has_tiny.float())
        if has_tiny:
            keep = torch.zeros_like(keep)
    return keep


def _ratio_at(level: str, d: Tensor, m: Tensor) -> Tensor:
    """The ratio of a level, one number per token."""
    if level == "token":
        log_ratio = d
    elif level == "sequence":
        log_ratio = (d * m).sum()
    elif level == "geometric":
        log_ratio = _masked_mean(d, m)
    else:
        raise ValueError(f"the reference example has no level {level}")
    return log_ratio.clamp(-LIMIT, LIMIT).exp().expand_as(d)


def _normalizer(level: str, weights: Sequence[Tensor], masks: Sequence[Tensor]) -> Tensor:
    """The mean weight of this rank's micro-batch, 1 when it is next to nothing."""
    if level == "token":
        mean = _masked_mean(torch.cat([*weights]), torch.cat([*masks]))
    elif level == "sequence":
        mean = torch.stack([_masked_mean(w, m) for w, m in zip(weights, masks, strict=True)]).mean()
    else:
        raise ValueError(f"the reference example cannot normalize level {level}")
    return mean if mean > SMALLEST_MEAN_WEIGHT else torch.ones_like(mean)


def _masked_mean(x: Tensor, m: Tensor) -> Tensor:
    return (x * m).sum() / m.sum().clamp(min=1)


def _masked_extreme(x: Tensor, m: Tensor, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    chosen = m != 0
    return reduce(x[chosen]) if chosen.any() else torch.zeros_like(x[:1]).sum()


def _note_into(noted: dict[str, list[Tensor]], like: Tensor) -> Note:
    """A function that appends one sample's value of a metric, spread over its tokens."""

    def note(name: str, value: Tensor) -> None:
        noted.setdefault(f"mis_{name}", []).append(value.detach().expand_as(like))

    return note


def _whole_response(local: Tensor, own: Sequence[Piece], length: int, group: Any) -> Tensor:
    """One collective: every rank fills in its tokens of a row of zeros, and the rows are added up."""
    whole = torch.zeros(length, dtype=local.dtype, device=local.device)
    (first_begin, first_end), (second_begin, second_end) = own
    whole[first_begin:first_end] = local[: first_end - first_begin]
    whole[second_begin:second_end] = local[first_end - first_begin :]
    dist.all_reduce(whole, group=group)
    return whole


def _local(values: Sequence[Tensor], pieces: Sequence[Sequence[Piece]] | None) -> Tensor:
    """This rank's tokens of all samples, concatenated."""
    if pieces is None:
        return torch.cat([*values])
    return torch.cat([x[begin:end] for x, own in zip(values, pieces, strict=True) for begin, end in own])


def _given(args: Namespace, key: str, default: Any) -> Any:
    value = getattr(args, key, None)
    return default if value is None else value
