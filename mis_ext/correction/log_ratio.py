# SPDX-License-Identifier: Apache-2.0
"""Per-token log-ratio of the two engines."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from mis_ext.correction.layout import PackedLayout


class TokenRatios(NamedTuple):
    """Local tokens; every field is finite everywhere, 0 where ``valid_mask_T`` is False."""

    log_ratio_T: Tensor
    proximal_T: Tensor
    behavior_T: Tensor
    response_mask_T: Tensor
    valid_mask_T: Tensor


class PackedStreams(NamedTuple):
    """One micro-batch, packed: log-probs of the local tokens ``[T]``, nats, the mask of whole responses ``[R]``.

    ``proximal``: scored by the training engine before the update. ``behavior``: reported by the inference engine that
    sampled the tokens. The mask is not 0 on tokens that the policy generated. ``lag``: by how many weight updates the
    weights that sampled a local token are older than the trainer's, NaN where nobody knows; None if nobody says.
    """

    proximal_logprobs_T: Tensor
    behavior_logprobs_T: Tensor
    response_mask_R: Tensor
    layout: PackedLayout
    lag_T: Tensor | None = None

    @property
    def tokens(self) -> TokenRatios:
        """Per-token ``log(pi_prox / mu)`` in float32, and the mask of the tokens that have one.

        A token with a log-probability that is NaN or infinite has no ratio. It leaves the mask, and takes its sequence
        along where a product or mean over that is asked for (``usable`` in :mod:`mis_ext.correction.plan`); it is never
        given ratio 1, which would train it as if it were on-policy.

        References:
            Hilton et al., Batch size-invariance for policy optimization, arXiv:2110.00641.
        """
        response_mask_T = self.layout.local_part(self.response_mask_R).bool()
        proximal_T = self.proximal_logprobs_T.detach().float()
        behavior_T = self.behavior_logprobs_T.detach().float()
        # d_t = log pi_t - log mu_t. The fused passes subtract where they load a token: triton/kernels.py.
        log_ratio_T = proximal_T - behavior_T
        # False where one of the two is NaN or infinite: their difference is finite at any log-prob a model can produce.
        valid_mask_T = response_mask_T & (log_ratio_T.abs() < torch.inf)
        valid_T = mask_as_float(valid_mask_T)
        return TokenRatios(
            log_ratio_T=zero_outside(valid_T, log_ratio_T),
            proximal_T=zero_outside(valid_T, proximal_T),
            behavior_T=zero_outside(valid_T, behavior_T),
            response_mask_T=response_mask_T,
            valid_mask_T=valid_mask_T,
        )


def mask_as_float(mask: Tensor) -> Tensor:
    """A bool mask of any shape as float32: 1 where it is True, else 0."""
    # The same bytes, which on a CPU become floats five times as fast as booleans.
    return mask.view(torch.uint8).float()


def zero_outside(mask: Tensor, values: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``torch.where(mask > 0, values, 0)`` for a float ``mask``: any value, NaN too, is 0 where the mask is."""
    # The gradient of a relu, which is this; on a CPU four times as fast as torch.where.
    kept: Tensor
    if out is None:
        kept = torch.ops.aten.threshold_backward.default(values, mask, 0.0)
    else:
        kept = torch.ops.aten.threshold_backward.grad_input(values, mask, 0.0, grad_input=out)
    return kept
