"""RMSNorm in the one rounding order that both engines can share."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / sqrt(mean(x ** 2) + eps)).to(x.dtype)``: rounded before the weight, as in transformers' models.

    torch's own RMSNorm, which Megatron-Core's local layers use, rounds once, after the weight. A row has the same bits
    in any batch (Zhang and Sennrich, "Root Mean Square Layer Normalization", arXiv 1910.07467).

    Args:
        x: ``[..., D]``.
        weight: ``[D]``.
        eps: Added to the mean square.
    """
    if x.is_cuda:
        from mis_ext.onpolicy.batch_invariant import cuda

        return cuda.rms_norm(x, weight, eps)
    normalized = x.float()
    normalized = normalized * torch.rsqrt(normalized.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)
