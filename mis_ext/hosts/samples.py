"""Whole responses on one rank, for tests, notebooks and analysis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.layout import PackedLayout
from mis_ext.hosts.groups import ALONE, device_of
from mis_ext.hosts.packing import PackedStreams, check_mask, check_samples, pack, unpack
from mis_ext.hosts.session import Session
from mis_ext.keys.given import config_given


def compute_mis_weights(
    config: CorrectionConfig | Mapping[str, Any],
    *,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Weights, keep masks and metrics of whole responses on one rank. These samples are the whole scope and rollout.

    Args:
        config: The configuration, or a mapping of its keys.
        train_log_probs: Per sample ``[R_i]``: nats, scored by the trainer before the update (proximal).
        rollout_log_probs: The same, as the inference engine reported them (behavior).
        loss_masks: Per sample ``[R_i]``; nonzero on tokens that the policy generated.

    Returns:
        Per sample the weights (float32, 0 where a token has none) and the mask (the given value on kept tokens, else
        0); and every metric as a 0-dim tensor. docs/metrics.md says over what each metric is a mean.
    """
    config = config_given(config)
    check_samples("loss_masks", loss_masks)
    lengths = [mask.numel() for mask in loss_masks]
    device = device_of(*loss_masks)
    layout = PackedLayout.whole(lengths, device=device)
    streams = PackedStreams(
        proximal_logprobs_T=pack("train_log_probs", train_log_probs, lengths, device=device),
        behavior_logprobs_T=pack("rollout_log_probs", rollout_log_probs, lengths, device=device),
        response_mask_R=pack("loss_masks", loss_masks, lengths, device=device),
        layout=layout,
    )
    check_mask(streams.response_mask_R)
    # All the way in one step: there is no earlier rollout.
    gates = tuple(gate if gate.target_accept is None else replace(gate, target_gain=1.0) for gate in config.gates)
    session = Session(config.replace(scope="micro_batch", gates=gates))
    session.adapt(streams)
    correction = session.compute(streams, groups=ALONE)
    metrics = {name: metric.value() for name, metric in correction.metrics.items()}
    return unpack(correction.weights_T, layout), unpack(correction.loss_mask_R, layout), metrics
