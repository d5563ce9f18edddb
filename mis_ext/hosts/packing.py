# SPDX-License-Identifier: Apache-2.0
"""Conversion of lists of per-sample tensors, as in the frameworks, to packed tensors and back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.hosts.groups import Groups, device_of
from mis_ext.validation import check_entries


class Range(NamedTuple):
    """The values that a tensor called ``name`` may have: finite, at least 0, and above 0 if the range ``is_open``."""

    name: str
    is_open: bool = False

    def check(self, values: Tensor) -> None:
        """Raise an error for values outside of the range. Synchronizes with the device."""
        extremes = extremes_of(values)
        if extremes is not None:
            self.check_extremes(extremes.tolist())

    def check_extremes(self, extremes: Sequence[float]) -> None:
        """Raise an error for values outside of the range, from the result of :func:`extremes_of`."""
        low, high = extremes
        is_legal = 0.0 <= low <= high < math.inf and not (self.is_open and low == 0.0)
        if not is_legal:
            bound = "above 0" if self.is_open else "at least 0"
            raise ValueError(f"{self.name} has values from {low:g} to {high:g}: each must be finite and {bound}")


MASK = Range("the response mask (loss_masks)")
MASK_SUMS = Range("rollout_mask_sums")
DIVISORS = Range("divisors", is_open=True)


def pack(name: str, samples: Sequence[Tensor] | None, lengths: Sequence[int], *, device: torch.device) -> Tensor:
    """``[sum of lengths]``: the concatenated samples on ``device``; None means no samples."""
    samples = [] if samples is None else samples
    try:
        found = tuple(map(Tensor.numel, samples))
        # Not copied into another list: with 256 samples this is measurable in a call.
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


def unpack(values_R: Tensor, layout: PackedLayout) -> list[Tensor]:
    """One tensor per sample of whole responses."""
    # Not tracked as views, which is faster. No caller depends on the shared memory of the masks.
    return [*torch.unsafe_split_with_sizes(values_R, layout.response_lengths)]


def extremes_of(values: Tensor) -> Tensor | None:
    """``[2]``: the smallest and largest value, NaN if one is NaN; None if no value can be wrong."""
    if values.dtype in (torch.bool, torch.uint8) or values.numel() == 0:
        return None
    return torch.stack(values.aminmax())


def stack_mask_sums(given: Any, num_samples: int) -> Tensor:
    """``[S]``: the tokens of each sample's rollout, from a list or a tensor of the framework."""
    is_list = isinstance(given, Sequence) and any(isinstance(each, Tensor) for each in given)
    sums_S = torch.stack([*given]) if is_list else torch.as_tensor(given)
    if sums_S.shape != (num_samples,):
        raise ValueError(f"rollout_mask_sums has shape {list(sums_S.shape)}, but there are {num_samples} samples")
    return sums_S


def check_samples(name: str, samples: Any) -> None:
    """Raise an error for values other than a list of 1-D tensors on one device."""
    if not isinstance(samples, (Sequence, Tensor)):
        raise TypeError(f"{name} must be a list of 1-D tensors, got {type(samples).__name__}")
    for index, sample in enumerate(samples):
        if not isinstance(sample, Tensor):
            raise TypeError(f"{name}[{index}] must be a 1-D tensor, got {type(sample).__name__}")
        if sample.dim() != 1:
            raise ValueError(f"{name}[{index}] must be a 1-D tensor, got shape {list(sample.shape)}")
        if sample.device != samples[0].device:
            raise ValueError(f"{name}[{index}] is on {sample.device}, but {name}[0] is on {samples[0].device}")


def is_absent(samples: Sequence[Tensor] | None) -> bool:
    """True if the framework has no such samples: None or an empty list."""
    # The truth value of a tensor would be read from the device.
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


def device_of_rollout(rollout_data: Mapping[str, Any]) -> torch.device:
    """The device of the masks. If they have a wrong type, the device of the collectives that report this error."""
    masks = rollout_data.get("loss_masks")
    return device_of(*masks if isinstance(masks, Sequence) else ())


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
        rollout_data: The data of a hook of the whole rollout: ``log_probs``, ``rollout_log_probs``, ``loss_masks``,
            ``total_lengths``, ``response_lengths``.
        groups: The position of this rank, which determines its tokens of a response.
        rollout_id: Number of the rollout, for the message.
        device: The device of the tensors.
        key: The key that needs the rollout, for the message.
        remedy: What to do if the framework has not scored the rollout, for the message.
    """
    check_entries("rollout_data", rollout_data, ("response_lengths", "total_lengths", "loss_masks"))
    sides = ("log_probs", "rollout_log_probs")
    missing = [name for name in sides if not rollout_data.get(name)]
    if missing and rollout_data["response_lengths"]:
        raise ValueError(
            f"{key}: rollout {rollout_id} has no {' and no '.join(missing)}; slime skips the separate scoring pass "
            f"with one optimizer step per rollout: {remedy}"
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
    MASK.check(mask_R)
    return PackedStreams(proximal_T, behavior_T, mask_R, layout)
