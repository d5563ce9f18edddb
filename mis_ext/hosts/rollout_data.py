# SPDX-License-Identifier: Apache-2.0
"""The tokens of a whole rollout: packed log-probs, and the lag of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.hosts.groups import Groups, device_of
from mis_ext.hosts.packing import MASK, pack
from mis_ext.validation import check_entries


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
    MASK.check(mask_R)
    return PackedStreams(proximal_T, behavior_T, mask_R, layout)


class TokenLags:
    """The lag of every token of a rollout, for lookup in a micro-batch.

    The frameworks pass a correction neither the indices of its samples nor their versions. But the behavior log-probs
    that they pass are the tensors of the rollout themselves.

    Args:
        samples: Behavior log-probs of this rank's tokens, per sample.
        lags: Per sample ``[length]``, NaN if unknown.
    """

    def __init__(self, samples: Sequence[Tensor], lags: Sequence[Tensor]) -> None:
        # Both are kept, so no other tensor can have their address.
        pairs = zip(samples, lags, strict=True)
        self._by_place = {sample.data_ptr(): (sample, lag) for sample, lag in pairs if sample.numel()}

    def of(self, samples: Sequence[Tensor]) -> list[Tensor]:
        """The lags of some of the samples, in their order."""
        found = []
        for sample in samples:
            # An empty tensor has no address.
            lag = sample if sample.numel() == 0 else self._by_place.get(sample.data_ptr(), (None, None))[1]
            if lag is None or lag.numel() != sample.numel():
                raise ValueError(
                    "mis_staleness: a sample of this micro-batch is not of the rollout that mis_ext.prepare_rollout "
                    "saw, or the framework has copied its rollout_log_probs since"
                )
            found.append(lag)
        return found
