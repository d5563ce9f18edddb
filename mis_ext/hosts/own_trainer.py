# SPDX-License-Identifier: Apache-2.0
"""Corrections for a custom trainer, of padded batches or whole responses, and their metrics as floats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mis_ext.correction.collectives import Group, gather_objects, gather_rows
from mis_ext.correction.config import CorrectionConfig
from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.correction.metrics import GroupNumber, Mean, Metric
from mis_ext.hosts.groups import ALONE, Groups, device_of, initialized_megatron
from mis_ext.hosts.packing import MASK, check_samples, pack, unpack
from mis_ext.hosts.session import Session
from mis_ext.keys.reading import Keys, config_given, is_whole_loss, read_keys
from mis_ext.validation import check_tensors


class PaddedCorrection(NamedTuple):
    """``weights`` ``[B, T]`` float32, 0 for a token without one; ``keep_mask`` ``[B, T]`` bool; metrics by public name.

    Totals and counts of a mean may be summed over calls and data-parallel ranks: the result is exact. Other metrics are
    already over all ranks.
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
    lag: Tensor | None = None,
) -> PaddedCorrection:
    """Compute importance weights and a keep mask for a padded batch. Values at masked positions are ignored.

    Args:
        session: A :class:`Session`, a configuration, or a mapping of its keys. Use one session for the whole run: it
            checks the data of the first calls, and raises an error if another rank fails. A configuration or a mapping
            does neither: if one rank fails, the others continue without its samples.
        proximal_logprobs: ``[B, T]``, nats, trainer log-probs before the update.
        behavior_logprobs: ``[B, T]``, nats, engine log-probs recorded during sampling.
        response_mask: ``[B, T]``, nonzero on tokens that the policy generated.
        dp_group: Data-parallel process group; None for one rank.
        lag: ``[B, T]``, staleness of each token in weight updates, NaN if unknown; for a configuration with
            ``staleness``.

    Raises:
        ValueError: The tensors do not all have the same shape ``[B, T]``, or a guard of the session found wrong data.
        RuntimeError: Another rank of the session failed.
    """
    is_kept = isinstance(session, Session)
    session = session if isinstance(session, Session) else Session(session)
    groups = Groups.of_process_groups(dp_group=dp_group)
    with session.local_work((), groups=groups, device=device_of(response_mask)):
        check_tensors({"response_mask": response_mask})
        shape = response_mask.shape
        given = {"proximal_logprobs": proximal_logprobs, "behavior_logprobs": behavior_logprobs}
        for name, tensor in (given if lag is None else {**given, "lag": lag}).items():
            check_tensors({name: tensor})
            if len(shape) != 2 or tensor.shape != shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, and response_mask has {list(shape)}: both must be [B, T]"
                )
        if not (is_kept or response_mask.is_cuda):
            # A session does this in its calls. Without a session, it would wait for the device in each call.
            MASK.check(response_mask)
        batch_size, length = shape
        streams = PackedStreams(
            proximal_logprobs_T=proximal_logprobs.reshape(-1),
            behavior_logprobs_T=behavior_logprobs.reshape(-1),
            response_mask_R=response_mask.reshape(-1),
            # A padded row is a response whose last tokens are masked.
            layout=PackedLayout.whole([length] * batch_size, device=response_mask.device),
            lag_T=None if lag is None else lag.reshape(-1),
        )
    correction = (session.correct if is_kept else session.compute)(streams, groups=groups)
    return PaddedCorrection(
        weights=correction.weights_T.view(shape),
        keep_mask=correction.keep_mask_R.view(shape),
        metrics=correction.metrics,
    )


def compute_mis_weights(
    config: CorrectionConfig | Mapping[str, Any],
    *,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    lags: list[Tensor] | None = None,
) -> tuple[list[Tensor], list[Tensor], dict[str, Tensor]]:
    """Compute weights, keep masks, and metrics of whole responses on one rank, for these samples alone.

    Args:
        config: The configuration, or a mapping of its keys.
        train_log_probs: Per sample ``[R_i]``: nats, scored by the trainer before the update (proximal).
        rollout_log_probs: Per sample ``[R_i]``: nats, recorded by the engine during sampling (behavior).
        loss_masks: Per sample ``[R_i]``; nonzero on tokens that the policy generated.
        lags: Per sample ``[R_i]``, see ``lag`` of :func:`correct_padded`.

    Returns:
        Per sample the weights (float32, 0 for tokens without a weight) and the mask (the given value on kept tokens,
        else 0); and every metric as a 0-dim tensor. docs/reference/metrics.md lists the scope of each metric.
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
        lag_T=None if lags is None else pack("lags", lags, lengths, device=device),
    )
    MASK.check(streams.response_mask_R)
    correction = Session(config.replace(scope="micro_batch")).compute(streams, groups=ALONE)
    metrics = {name: metric.value() for name, metric in correction.metrics.items()}
    return unpack(correction.weights_T, layout), unpack(correction.loss_mask_R, layout), metrics


def keys_in(host: str, keys: Keys, **said: Any) -> dict[str, Any]:
    """Return the keys with the values that the framework sets. A key with another value is an error."""
    given = read_keys(keys)
    for name, value in said.items():
        if given.get(name) not in (None, value):
            raise ValueError(f"{name}={given[name]!r}: no effect, because {host} sets it to {value!r}; remove the key")
    return given | said


def session_beside(keys: Keys, *, keeps_loss: str) -> Session:
    """Create a session for a framework that keeps its own loss. Keys of the full policy loss raise an error."""
    given = read_keys(keys)
    if is_whole_loss(given):
        raise ValueError(
            f"{keeps_loss} keeps its own loss: replace the keys of the full policy loss by keys of a correction"
        )
    return Session(given)


def scalars(*calls: Mapping[str, Metric], prefix: str = "train/", group: Group | None = None) -> dict[str, float]:
    """Convert metrics to floats for wandb, TensorBoard, or MLflow; NaN where nothing was measured.

    A ``Mean`` is the sum of its totals divided by the sum of its counts, over all calls and ranks. A ``GroupNumber`` is
    the mean over the calls and ranks in which it was measured. All of them are copied from the device at once.

    Args:
        calls: The metrics of each call of a step, as ``correct_padded``, ``Session.correct`` and
            ``policy_loss_from_log_probs`` return them.
        prefix: Prefix of each name.
        group: Data- and context-parallel ranks that share the step, as a ``torch.distributed`` process group. All of
            them must call, also a rank without metrics. None for one rank.

    Returns:
        By prefixed name, in the same order and with the same bits on every rank of the group.

    Raises:
        TypeError: A metric is neither a ``Mean`` nor a ``GroupNumber``, or the group is not a torch process group.
        RuntimeError: Another rank failed.
    """
    sums: dict[str, tuple[float, float]] = {}
    try:
        mine = _terms(calls)
    except Exception:
        gather_objects(None, group)
        raise
    for rank, terms in enumerate(gather_objects(mine, group)):
        if terms is None:
            raise RuntimeError(f"scalars failed on rank {rank} of the group: see the error of that rank")
        for name, total, count in terms:
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
    return {f"{prefix}{name}": total / count if count else math.nan for name, (total, count) in sums.items()}


def measured_scalars(metrics: Mapping[str, Metric], *, group: Group | None = None) -> dict[str, float]:
    """The :func:`scalars` of one call that were measured, for a framework that averages its metrics."""
    return {name: value for name, value in scalars(metrics, prefix="", group=group).items() if value == value}


def agreed_scalars(metrics: Mapping[str, Metric], *, prefix: str) -> dict[str, float]:
    """:func:`scalars` of a micro-batch, for a framework that averages them and needs the same names on every rank.

    A metric that this rank did not measure is the mean of the ranks that did. A metric that no rank measured is
    omitted. Every rank must call it for each of its micro-batches; with Megatron, every rank of a data-parallel group.
    """
    own, megatron = scalars(metrics, prefix=prefix), initialized_megatron()
    if not own:
        return {}
    group = megatron.get_data_parallel_group() if megatron else dist.group.WORLD
    device = _pair(*next(iter(metrics.items())))[0].device
    mean_M = gather_rows(torch.tensor([*own.values()], dtype=torch.float64, device=device), group).nanmean(0)
    numbers = zip(own.items(), mean_M.tolist(), strict=True)
    return {name: mean if math.isnan(number) else number for (name, number), mean in numbers if not math.isnan(mean)}


def _terms(calls: Sequence[Mapping[str, Metric]]) -> list[tuple[str, float, float]]:
    """Return the names of the metrics, with their terms of total and count."""
    for call in calls:
        if not isinstance(call, Mapping):
            raise TypeError(f"calls must be mappings, the metrics of each call, got a {type(call).__name__}")
    metrics = [each for call in calls for each in call.items()]
    if not metrics:
        return []
    numbers = torch.stack([number for each in metrics for number in _pair(*each)])
    pairs: list[list[float]] = numbers.view(-1, 2).tolist()
    terms = []
    for (name, metric), (total, count) in zip(metrics, pairs, strict=True):
        if not isinstance(metric, Mean):
            # A group metric counts once if it was measured.
            total, count = (0.0, 0.0) if math.isnan(total) else (total, 1.0)
        terms.append((name, total, count))
    return terms


def _pair(name: str, metric: Metric) -> tuple[Tensor, Tensor]:
    if isinstance(metric, Mean):
        return metric.total, metric.count
    if isinstance(metric, GroupNumber):
        return metric.number, metric.number
    raise TypeError(f"{name} is a {type(metric).__name__}, not a metric of mis_ext (a Mean or a GroupNumber)")
