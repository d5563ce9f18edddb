# SPDX-License-Identifier: Apache-2.0
"""Numbers of a rollout's log-probs, and of how its weights grew old."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mis_ext.correction.tokens import is_open


def mismatch(proximal: Sequence[Tensor], behavior: Sequence[Tensor]) -> dict[str, float]:
    """Of the trainer's and the engine's log-probs, one tensor per response."""
    lengths = torch.tensor([len(response) for response in proximal])
    proximal_T = torch.cat([*proximal]).double().cpu()
    d_T = proximal_T - torch.cat([*behavior]).double().cpu()
    response_T = torch.repeat_interleave(lengths)
    sum_S = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, response_T, d_T)
    ess = sum_S.softmax(0).square().sum().reciprocal() / len(lengths)
    is_open_T = is_open(proximal_T - d_T, d_T).float()
    raised_T = torch.where(d_T > 0.0, is_open_T, 0.0)
    return {
        "k3": k3(d_T),
        "abs_diff": float(d_T.abs().mean()),
        "above_2": float((d_T > 0.6931).double().mean()),
        "below_half": float((d_T < -0.6931).double().mean()),
        "ratio_max": float(d_T.max().exp()),
        "ess_sequence": float(ess),
        # As mis_raised_fraction; 0 where no token is open.
        "raised": float(raised_T.sum() / is_open_T.sum().clamp_min(1)),
        "entropy": -float(proximal_T.mean()),
        "length": float(lengths.double().mean()),
    }


def k3(d_T: Tensor) -> float:
    """Mean of ``exp(d) - 1 - d``."""
    return float((d_T.exp() - 1 - d_T).mean())


def dump(proximal: Sequence[Tensor], behavior: Sequence[Tensor], num_tokens: int) -> dict[str, Any]:
    """Streams ``[1, B, L]`` for pages and reports, in float16."""
    arrays = {
        "behavior": np.zeros((1, len(behavior), num_tokens), np.float16),
        "log_ratio": np.zeros((1, len(behavior), num_tokens), np.float16),
        "mask": np.zeros((1, len(behavior), num_tokens), np.bool_),
    }
    for row, (ours, theirs) in enumerate(zip(proximal, behavior, strict=True)):
        arrays["behavior"][0, row, : len(theirs)] = theirs.cpu().numpy()
        arrays["log_ratio"][0, row, : len(theirs)] = (ours - theirs).cpu().numpy()
        arrays["mask"][0, row, : len(theirs)] = True
    return arrays
