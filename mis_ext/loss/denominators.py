"""What the sum over a response's tokens is divided by.

With ``D_i`` what the host divides sample ``i`` by (the response tokens of its rollout, which several samples and
micro-batches can share), ``n_i`` its own response tokens and ``k_i`` those that are kept:

| denominator | divides by | a rejected token |
|---|---|---|
| ``original`` | ``D_i`` | counts in the denominator: rejection lowers the gradient |
| ``kept`` | ``D_i k_i / n_i`` | leaves it: the mean over kept tokens, in the sample's old share of its rollout |
| ``sequence`` | ``n_i`` | counts; samples that share a rollout count one each |
| ``constant`` | a number | does not matter, nor does the length of the response |

Conversion, sample by sample: ``loss(other) = loss(original) * D_i / divisor``. With ``per_token_loss`` all are 1, as
the host divides by the tokens of the whole batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mis_ext.correction.layout import PackedLayout
from mis_ext.loss.settings import LossDenominator


def num_tokens(mask_R: Tensor, layout: PackedLayout) -> Tensor:
    """``[S]``: sums of a mask of whole responses, equal on all context-parallel ranks without communication."""
    whole = PackedLayout.whole(layout.response_lengths, device=layout.device)
    return whole.sum_over_sequences(mask_R.float().unsqueeze(0))[0]


def divisor_of(
    denominator: LossDenominator,
    *,
    constant: float | None,
    host_S: Tensor,
    response_mask_R: Tensor,
    kept_mask_R: Tensor,
    layout: PackedLayout,
) -> Tensor:
    """``[S]``, at least 1 where it counts tokens.

    Args:
        denominator: Which one.
        constant: The number of ``constant``.
        host_S: ``[S]``, ``D_i``.
        response_mask_R: ``[R]``, nonzero on tokens that the policy generated.
        kept_mask_R: ``[R]``, nonzero on those that the correction keeps.
        layout: Lengths.
    """
    if denominator == "constant":
        return torch.full_like(host_S, 1.0 if constant is None else constant)
    if denominator == "original":
        return host_S
    own_S = num_tokens(response_mask_R, layout).clamp_min(1.0)
    if denominator == "sequence":
        return own_S
    kept_S = num_tokens(kept_mask_R, layout)
    # Where nothing is kept nothing is divided.
    return torch.where(kept_S > 0.0, host_S * kept_S / own_S, host_S)
