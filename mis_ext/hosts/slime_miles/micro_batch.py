"""What the hosts say about a micro-batch: its lengths, and which samples it lacks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.groups import Groups
from mis_ext.hosts.session import Session


def is_absent(samples: Sequence[Tensor] | None) -> bool:
    """Whether the host has no such samples: None, or an empty list, as it pleases."""
    # Not the truth of a tensor, which would be read from the device.
    return samples is None or (isinstance(samples, (list, tuple)) and not samples)


def layout_of(
    *,
    is_padded: bool,
    groups: Groups,
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    max_seq_lens: Sequence[int] | None,
    device: torch.device,
) -> PackedLayout:
    """Where this rank's tokens of a micro-batch lie."""
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


def report_missing(session: Session, *, is_rollout_missing: bool) -> None:
    """Say which log-probs a correction lacks; nothing where it only measures."""
    if session.config.metrics_only:
        return  # The hosts may measure without log-probs: the metrics then say so by being NaN.
    if is_rollout_missing:
        message = "rollout_log_probs are missing: the rollout function must store the inference engine's log-probs"
    else:
        message = "train_log_probs are missing: the host must score the rollout with the trainer before training"
    session.report("missing_log_probs", message)
