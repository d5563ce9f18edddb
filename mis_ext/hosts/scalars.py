"""Metrics as plain numbers for a dashboard: of all calls of a step, and of all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from mis_ext.correction.collectives import Group, gather_objects
from mis_ext.correction.metric_row import GroupNumber, Mean, Metric

Term = tuple[str, float, float]
"""A metric's name, and what it adds to total and count."""


def scalars(*calls: Mapping[str, Metric], prefix: str = "train/", group: Group | None = None) -> dict[str, float]:
    """One number per metric, for wandb, TensorBoard or MLflow; NaN where nothing was measured.

    A ``Mean`` is the sum of its totals by the sum of its counts, over all calls and ranks. A ``GroupNumber`` is the
    mean over the calls and ranks in which it was measured. All of them are copied from the device at once.

    Args:
        calls: The metrics of each call of a step, as ``correct_padded``, ``Session.correct`` and
            ``policy_loss_from_log_probs`` return them.
        prefix: What stands in front of each name.
        group: Ranks that share the step, data- and context-parallel ones, as a ``torch.distributed`` process group.
            Every one of them must call, also one that has no metrics. None for one rank.

    Returns:
        By prefixed name, in the same order and with the same bits on every rank of the group.

    Raises:
        TypeError: A metric is neither a ``Mean`` nor a ``GroupNumber``, or the group is not one of torch's own.
    """
    sums: dict[str, tuple[float, float]] = {}
    for terms in gather_objects(_terms(calls), group):
        for name, total, count in terms:
            before = sums.get(name, (0.0, 0.0))
            sums[name] = before[0] + total, before[1] + count
    return {f"{prefix}{name}": total / count if count else math.nan for name, (total, count) in sums.items()}


def _terms(calls: Iterable[Mapping[str, Metric]]) -> list[Term]:
    metrics = [each for call in calls for each in call.items()]
    if not metrics:
        return []
    numbers = torch.stack([number for each in metrics for number in _pair(*each)])
    pairs: list[list[float]] = numbers.view(-1, 2).tolist()
    return [_term(*each, *pair) for each, pair in zip(metrics, pairs, strict=True)]


def _pair(name: str, metric: Metric) -> tuple[Tensor, Tensor]:
    if isinstance(metric, Mean):
        return metric.total, metric.count
    if isinstance(metric, GroupNumber):
        return metric.number, metric.number
    raise TypeError(f"{name} is a {type(metric).__name__}, no metric of mis_ext: a Mean or a GroupNumber")


def _term(name: str, metric: Metric, total: float, count: float) -> Term:
    if isinstance(metric, Mean):
        return name, total, count
    return (name, 0.0, 0.0) if math.isnan(total) else (name, total, 1.0)
