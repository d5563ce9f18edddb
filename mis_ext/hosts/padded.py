"""Padded batches ``[B, T]``, as verl, NeMo-RL and TRL hold them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.metric_row import Metric
from mis_ext.correction.pipeline import compute_correction


class PaddedCorrection(NamedTuple):
    """``weights`` ``[B, T]`` float32, 0 where a token has none; ``keep_mask`` ``[B, T]`` bool; metrics by public name.

    A mean is exact under any later sum of its total and count over calls and data-parallel ranks; the other metrics are
    already those of all ranks.
    """

    weights: Tensor
    keep_mask: Tensor
    metrics: dict[str, Metric]


def correct_padded(
    config: CorrectionConfig,
    *,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    response_mask: Tensor,
    dp_group: Group | None = None,
) -> PaddedCorrection:
    """Correct a padded batch; what lies under the mask may be anything.

    Args:
        config: What to compute.
        proximal_logprobs: ``[B, T]``, nats, scored by the trainer before the update.
        behavior_logprobs: ``[B, T]``, nats, as reported by the inference engine.
        response_mask: ``[B, T]``, nonzero on tokens that the policy generated.
        dp_group: Ranks that hold other sequences; None for one rank.

    Raises:
        ValueError: The three are not of one shape ``[B, T]``.
    """
    shape = response_mask.shape
    for name, tensor in (("proximal_logprobs", proximal_logprobs), ("behavior_logprobs", behavior_logprobs)):
        if len(shape) != 2 or tensor.shape != shape:
            raise ValueError(f"{name} has shape {list(tensor.shape)}, response_mask {list(shape)}: both must be [B, T]")
    batch_size, length = shape
    # A padded row is a response whose last tokens are masked.
    layout = PackedLayout.whole([length] * batch_size, device=response_mask.device)
    correction = compute_correction(
        proximal_logprobs_T=proximal_logprobs.reshape(-1),
        behavior_logprobs_T=behavior_logprobs.reshape(-1),
        response_mask_R=response_mask.reshape(-1),
        layout=layout,
        config=config,
        dp_group=dp_group,
    )
    return PaddedCorrection(
        weights=correction.weights_T.view(shape),
        keep_mask=correction.keep_mask_R.view(shape),
        metrics=correction.metrics,
    )
