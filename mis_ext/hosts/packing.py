# SPDX-License-Identifier: Apache-2.0
"""Lists of per-sample tensors, as the frameworks hold them, to packed tensors and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.hosts.groups import Groups
from mis_ext.validation import check_entries


def pack(name: str, samples: Sequence[Tensor] | None, lengths: Sequence[int], *, device: torch.device) -> Tensor:
    """``[sum of lengths]``: the samples one after the other, on ``device``; None is no samples."""
    samples = [] if samples is None else samples
    try:
        found = tuple(map(Tensor.numel, samples))
        # Not copied into another list, which at 256 samples shows in the time of a call.
        samples = samples if isinstance(samples, (list, tuple)) else [*samples]
        packed = torch.cat(samples) if found else torch.empty(0)
    except (TypeError, RuntimeError):
        check_samples(name, samples)
        raise
    if packed.dim() != 1:
        check_samples(name, samples)
    if found != tuple(lengths):
        raise ValueError(f"{name} has samples of {[*found]} tokens on this rank, but the lengths are {[*lengths]}")
    return packed.to(device, non_blocking=True)


def pack_rollout(
    rollout_data: dict[str, Any],
    groups: Groups,
    rollout_id: int | None,
    *,
    device: torch.device,
    key: str,
    remedy: str,
) -> PackedStreams:
    """This rank's samples of a rollout, packed: log-probs of its own tokens, masks of whole responses.

    Args:
        rollout_data: What a hook of the whole rollout gets: ``log_probs``, ``rollout_log_probs``, ``loss_masks``,
            ``total_lengths``, ``response_lengths``.
        groups: Where this rank stands: it says which tokens of a response are here.
        rollout_id: Number of the rollout, for the message.
        device: Where the tensors go.
        key: Who asks, for the message.
        remedy: What to do where the framework has not scored the rollout, for the message.
    """
    check_entries("rollout_data", rollout_data, ("response_lengths", "total_lengths", "loss_masks"))
    sides = ("log_probs", "rollout_log_probs")
    missing = [name for name in sides if not rollout_data.get(name)]
    if missing and rollout_data["response_lengths"]:
        raise ValueError(
            f"{key}: rollout {rollout_id} has no {' and no '.join(missing)}; slime skips the separate scoring pass "
            f"with one optimiser step per rollout: {remedy}"
        )
    layout = PackedLayout.context_parallel(
        rollout_data["response_lengths"],
        total_lengths=rollout_data["total_lengths"],
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
        device=device,
    )
    proximal_T, behavior_T = (pack(name, rollout_data.get(name), layout.local_lengths, device=device) for name in sides)
    mask_R = pack("loss_masks", rollout_data["loss_masks"], layout.response_lengths, device=device)
    check_mask(mask_R)
    return PackedStreams(proximal_T, behavior_T, mask_R, layout)


class TokenLags:
    """The lag of every token of a rollout, found again in a micro-batch.

    The frameworks tell a correction neither which samples it sees nor anything of their versions. But what they give it
    of the behavior log-probs are the tensors of the rollout themselves.

    Args:
        samples: Behavior log-probs of this rank's tokens, per sample.
        lags: Per sample ``[length]``, NaN where no one knows.
    """

    def __init__(self, samples: Sequence[Tensor], lags: Sequence[Tensor]) -> None:
        # Both are held: no other tensor can lie at their place.
        pairs = zip(samples, lags, strict=True)
        self._by_place = {sample.data_ptr(): (sample, lag) for sample, lag in pairs if sample.numel()}

    def of(self, samples: Sequence[Tensor]) -> list[Tensor]:
        """The lags of some of the samples, in their order.

        Raises:
            ValueError: One is none of the rollout's.
        """
        found = []
        for sample in samples:
            known, lag = self._by_place.get(sample.data_ptr(), (sample, sample)) if sample.numel() else (sample, sample)
            if sample.numel() and (known is lag or known.numel() != sample.numel()):
                raise ValueError(
                    "mis_staleness: a sample of this micro-batch is not of the rollout that mis_ext.prepare_rollout "
                    "saw, or the framework has copied its rollout_log_probs since"
                )
            found.append(lag)
        return found


def unpack(values_R: Tensor, layout: PackedLayout) -> list[Tensor]:
    """One tensor per sample of whole responses."""
    # Not tracked as views, which is faster; no one needs to know that a mask and its neighbour share memory.
    return [*torch.unsafe_split_with_sizes(values_R, layout.response_lengths)]


def check_mask(mask: Tensor) -> None:
    """Refuse a mask that says of a token neither that it is trained nor that it is not. Waits for the device."""
    extremes = extremes_of(mask)
    if extremes is not None:
        refuse_mask(extremes.tolist())


def extremes_of(values: Tensor) -> Tensor | None:
    """``[2]``: the smallest and largest value, NaN where one is NaN; None where nothing can be wrong."""
    if values.dtype in (torch.bool, torch.uint8) or values.numel() == 0:
        return None
    return torch.stack(values.aminmax())


def refuse_divisors(extremes: Sequence[float]) -> None:
    """Refuse divisors with these numbers of :func:`extremes_of`."""
    low, high = extremes
    if not 0.0 < low <= high < math.inf:
        raise ValueError(f"divisors has values from {low:g} to {high:g}: each must be finite and above 0")


def refuse_mask_sums(extremes: Sequence[float]) -> None:
    """Refuse what the framework calls sums of masks, with these numbers of :func:`extremes_of`."""
    low, high = extremes
    if not 0.0 <= low <= high < math.inf:
        raise ValueError(f"rollout_mask_sums has values from {low:g} to {high:g}: each must be finite and at least 0")


def refuse_mask(extremes: Sequence[float]) -> None:
    """Raise the error of :func:`check_mask` for the values of :func:`extremes_of`."""
    low, high = extremes
    if not 0.0 <= low <= high < math.inf:
        raise ValueError(
            f"the response mask (loss_masks) has values from {low:g} to {high:g}: mask values "
            "must be finite and at least 0"
        )


def check_samples(name: str, samples: Any) -> None:
    """Refuse what is no list of 1-D tensors on one device."""
    if not isinstance(samples, (Sequence, Tensor)):
        raise TypeError(f"{name} must be a list of 1-D tensors, got {type(samples).__name__}")
    for index, sample in enumerate(samples):
        if not isinstance(sample, Tensor):
            raise TypeError(f"{name}[{index}] must be a 1-D tensor, got {type(sample).__name__}")
        if sample.dim() != 1:
            raise ValueError(f"{name}[{index}] must be a 1-D tensor, got shape {list(sample.shape)}")
        if sample.device != samples[0].device:
            raise ValueError(f"{name}[{index}] is on {sample.device}, {name}[0] on {samples[0].device}")


def is_absent(samples: Sequence[Tensor] | None) -> bool:
    """True if the framework has no such samples: None or an empty list."""
    # Not the truth of a tensor, which would be read from the device.
    return samples is None or (isinstance(samples, (list, tuple)) and not samples)


def batch_layout(
    *,
    is_padded: bool,
    groups: Groups,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None,
    device: torch.device,
) -> PackedLayout:
    """Return the layout of this rank's tokens of a micro-batch."""
    if is_padded and groups.cp_size > 1 and max_seq_lens is None:
        raise ValueError("qkv_format: bshd with context parallelism needs max_seq_lens")
    return PackedLayout.context_parallel(
        response_lengths,
        total_lengths=total_lengths,
        cp_rank=groups.cp_rank,
        cp_size=groups.cp_size,
        padded_lengths=max_seq_lens if is_padded else None,
        device=device,
    )
