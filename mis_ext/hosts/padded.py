"""Padded batches ``[B, T]``, as verl, NeMo-RL and TRL hold them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from mis_ext.correction.collectives import Group
from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.layout import PackedLayout
from mis_ext.correction.metric_row import Metric
from mis_ext.hosts.groups import Groups, device_of
from mis_ext.hosts.packing import PackedStreams, check_mask
from mis_ext.hosts.session import Session


class PaddedCorrection(NamedTuple):
    """``weights`` ``[B, T]`` float32, 0 where a token has none; ``keep_mask`` ``[B, T]`` bool; metrics by public name.

    A mean is exact under any later sum of its total and count over calls and data-parallel ranks; the other metrics are
    already those of all ranks.
    """

    weights: Tensor
    keep_mask: Tensor
    metrics: dict[str, Metric]


def correct_padded(
    session: Session | CorrectionConfig | Mapping[str, Any],
    *,
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    response_mask: Tensor,
    dp_group: Group | None = None,
) -> PaddedCorrection:
    """Correct a padded batch. Values under the mask are ignored.

    Args:
        session: A session, a configuration, or a mapping of its keys. Use one session for all calls: it checks the data
            of the first calls, and raises an error if another rank failed. A configuration or a mapping does neither.
            Then, after an error on one rank, the others continue without its samples.
        proximal_logprobs: ``[B, T]``, nats, scored by the trainer before the update.
        behavior_logprobs: ``[B, T]``, nats, as the inference engine reported them.
        response_mask: ``[B, T]``, nonzero on tokens that the policy generated.
        dp_group: Ranks that hold other sequences; None for one rank.

    Raises:
        ValueError: The three tensors do not have one shape ``[B, T]``, or a guard of the session found wrong data.
        RuntimeError: Another rank of the session failed.
    """
    is_kept = isinstance(session, Session)
    session = session if isinstance(session, Session) else Session(session)
    groups = Groups.of_process_groups(dp_group=dp_group)
    with session.local_work((), groups=groups, device=device_of(response_mask)):
        shape = response_mask.shape
        for name, tensor in (("proximal_logprobs", proximal_logprobs), ("behavior_logprobs", behavior_logprobs)):
            if len(shape) != 2 or tensor.shape != shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, response_mask {list(shape)}: both must be [B, T]"
                )
        if not (is_kept or response_mask.is_cuda):
            # A session does it in its calls; without one that would wait for a device in each of them.
            check_mask(response_mask)
        batch_size, length = shape
        streams = PackedStreams(
            proximal_logprobs_T=proximal_logprobs.reshape(-1),
            behavior_logprobs_T=behavior_logprobs.reshape(-1),
            response_mask_R=response_mask.reshape(-1),
            # A padded row is a response whose last tokens are masked.
            layout=PackedLayout.whole([length] * batch_size, device=response_mask.device),
        )
    correction = (session.correct if is_kept else session.compute)(streams, groups=groups)
    return PaddedCorrection(
        weights=correction.weights_T.view(shape),
        keep_mask=correction.keep_mask_R.view(shape),
        metrics=correction.metrics,
    )
