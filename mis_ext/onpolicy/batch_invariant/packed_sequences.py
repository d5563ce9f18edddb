# SPDX-License-Identifier: Apache-2.0
"""Layout of sequences in packed tensors, and the keys that their queries may attend to."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Packing(NamedTuple):
    """Arguments of :func:`.attention.attention` in addition to queries, keys, and values."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    scale: float
    is_causal: bool
    mask: Tensor | None = None
    key_slots: Tensor | None = None


class Runs(NamedTuple):
    """Consecutive queries of a sequence with the same first visible key, and the keys starting there.

    Key blocks start at this key. So a query has the same blocks in a packed batch, with padding, and after a cache has
    dropped the keys outside of its window.

    Attributes:
        cu_seqlens_q: ``[R + 1]`` int32, the start of each run's queries, and the end of the last run.
        key_start_R: int32, the index of its first key among all keys.
        key_end_R: int32, the end of its keys; if ``is_causal``, its last query sees the last of them.
        sequence_R: int64, its sequence.
        row_R: int64, the index of its first query in its sequence.
        origin_R: int64, the index of its first key in its sequence.
    """

    cu_seqlens_q: Tensor
    key_start_R: Tensor
    key_end_R: Tensor
    sequence_R: Tensor
    row_R: Tensor
    origin_R: Tensor


def split_runs(packing: Packing) -> Runs:
    """The runs of queries with the same first visible key; without a mask every sequence is one run."""
    cu_seqlens_q, cu_seqlens_k, _, _, _, is_causal, mask, _ = packing
    starts_S, ends_S = cu_seqlens_k[:-1], cu_seqlens_k[1:]
    sequence_S = torch.arange(len(starts_S), device=starts_S.device)
    if mask is None or mask.numel() == 0:
        zero_S = torch.zeros_like(sequence_S)
        return Runs(cu_seqlens_q, starts_S, ends_S, sequence_S, zero_S, zero_S)
    origin_SQ, end_SQ = seen_keys(mask)
    num_q_S = cu_seqlens_q.diff().long()
    sequence_T = torch.repeat_interleave(sequence_S, num_q_S)
    row_T = torch.arange(len(sequence_T), device=sequence_T.device) - (cu_seqlens_q[:-1] - cu_seqlens_q[0])[sequence_T]
    origin_T = origin_SQ[sequence_T, row_T]
    is_first_T = row_T == 0
    is_first_T[1:] |= origin_T.diff() != 0
    first_R = is_first_T.nonzero().squeeze(1)
    sequence_R, origin_R, row_R = sequence_T[first_R], origin_T[first_R], row_T[first_R]
    bounds = torch.cat([first_R, first_R.new_tensor([len(sequence_T)])])
    num_keys_R = (ends_S - starts_S)[sequence_R].long()
    if is_causal:
        end_R = row_R + bounds.diff() + num_keys_R - num_q_S[sequence_R]
    else:
        run_T = is_first_T.cumsum(0) - 1
        end_R = torch.zeros_like(first_R).scatter_reduce_(0, run_T, end_SQ[sequence_T, row_T], "amax")
        end_R = end_R.minimum(num_keys_R).maximum(origin_R)
    return Runs(
        (bounds + cu_seqlens_q[0]).int(),
        (starts_S[sequence_R] + origin_R).int(),
        (starts_S[sequence_R] + end_R).int(),
        sequence_R,
        row_R,
        origin_R,
    )


def seen_keys(mask: Tensor) -> tuple[Tensor, Tensor]:
    """``[S, max_seqlen_q]``: the first key that any head of a query may attend to, and the end; 0, 0 if none."""
    any_head = mask.any(1).to(torch.uint8)
    first, num_after_last = any_head.argmax(-1), any_head.flip(-1).argmax(-1)
    sees = any_head.amax(-1).bool()
    return first * sees, (mask.shape[-1] - num_after_last) * sees
