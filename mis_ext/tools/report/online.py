# SPDX-License-Identifier: Apache-2.0
"""Log the report's numbers during training, once per rollout, over the samples of all ranks."""

from __future__ import annotations

import logging
import operator
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from mis_ext.correction.collectives import gather_objects, global_rank
from mis_ext.correction.layout import PackedLayout, PackedStreams
from mis_ext.hosts.groups import Groups, find_groups, initialized_megatron
from mis_ext.hosts.packing import device_of_rollout, pack_rollout
from mis_ext.tools.diagnosis.evidence import Origin
from mis_ext.tools.report.part import Part
from mis_ext.tools.report.summary import OF_PROMPTS, measure
from mis_ext.tools.report.tally import SUMS_OF_TOKENS, Sequences, TokenTally

PREFIX = "mismatch/"
STEP = f"{PREFIX}rollout_id"
_LEFT_OUT = ("reward", *OF_PROMPTS)
"""The framework logs the reward itself, and does not say here which samples share a prompt."""

_HOOK = "--rollout-data-postprocess-path mis_ext.log_mismatch"
_REMEDY = "use --get-mismatch-metrics, which runs it in any case, or remove this function"
_logger = logging.getLogger(__name__)


def log_mismatch(args: Any, rollout_id: int | None = None, rollout_data: dict[str, Any] | None = None) -> None:
    """Log the report's numbers for the samples of one rollout on all ranks. It changes no data.

    Use it with ``--rollout-data-postprocess-path mis_ext.log_mismatch``. Only the first rank of the last pipeline stage
    writes, where slime opens its own logger. It writes one log line. If a wandb run is open, it also logs the numbers
    there; otherwise to TensorBoard, if installed, in the folder of the variable ``MISMATCH_LOG_DIR``.

    Args:
        args: Arguments of the framework; not used.
        rollout_id: Number of the rollout.
        rollout_data: Samples of this rank: ``log_probs``, ``rollout_log_probs``, ``loss_masks``, ``total_lengths``,
            ``response_lengths``. Log-probs cover this rank's tokens; masks cover whole responses.

    Raises:
        ValueError: If the framework gives no rollout data (Miles), or has not scored the rollout before training.
        RuntimeError: If another rank failed. The message names it; the error of that rank gives the reason.
    """
    if rollout_data is None:
        raise ValueError(f"{_HOOK}: this framework passes no rollout data (Miles); run `mis-ext report` on its dumps")
    megatron = initialized_megatron()
    # Earlier stages have no log-probs, and are not in the groups of this stage.
    if megatron is not None and not megatron.is_pipeline_last_stage():
        return
    groups = find_groups()
    numbers = rollout_mismatch(rollout_data, groups, rollout_id)
    # Tensor-parallel ranks have the same samples.
    if groups.is_first_rank and (megatron is None or megatron.get_tensor_model_parallel_rank() == 0):
        _write(numbers, rollout_id or 0)


def rollout_mismatch(rollout_data: dict[str, Any], groups: Groups, rollout_id: int | None = None) -> dict[str, float]:
    """Return the numbers of :class:`~mis_ext.tools.report.Mismatch` by name, equal on all ranks of ``groups``.

    It omits the reward, which the framework logs itself, and numbers that need the prompts. Arguments and errors: see
    :func:`log_mismatch`.
    """
    try:
        device = device_of_rollout(rollout_data)
        share = _share(pack_rollout(rollout_data, groups, rollout_id, device=device, key=_HOOK, remedy=_REMEDY))
    except Exception:
        _over_ranks(global_rank(), groups)
        raise
    found = _over_ranks(share, groups)
    if isinstance(found, int):
        raise RuntimeError(f"{_HOOK} failed on rank {found}; see the error of that rank")
    return {f"{PREFIX}{name}": float(value) for name, value in vars(measure(*found)).items() if name not in _LEFT_OUT}


Share = tuple[TokenTally, Sequences]
"""Sums of some tokens. Do not use the sums by position and by turn: they are wrong for split sequences."""


def _share(streams: PackedStreams) -> Share:
    """The sums over this rank's tokens."""
    layout = streams.layout
    # Sums do not depend on positions, so the local tokens of a sequence count as a whole sequence.
    local = PackedStreams(
        streams.proximal_logprobs_T.cpu(),
        streams.behavior_logprobs_T.cpu(),
        (layout.local_part(streams.response_mask_R) != 0).cpu(),
        PackedLayout.whole(layout.local_lengths),
    )
    no_advantage_T = torch.full((layout.num_local_tokens,), torch.nan)
    part = Part(step="", streams=local, advantages_T=no_advantage_T, origins=[Origin()] * layout.num_sequences)
    return TokenTally.of(part), Sequences.of(part)


def _over_ranks(share: Share | int, groups: Groups) -> Share | int:
    """Reduce over all ranks, or return the rank that failed. A failed rank joins every collective too."""
    for group, join in ((groups.cp_group, _joined_tokens), (groups.dp_group, Sequences.joined)):
        shares = gather_objects(share, group)
        failed = [each for each in shares if isinstance(each, int)]
        if failed:
            share = failed[0]
        else:
            tallies, sequences = zip(*shares, strict=True)
            share = reduce(operator.add, tallies), join(sequences)
    return share


def _joined_tokens(shares: Sequence[Sequences]) -> Sequences:
    """Join the sequences of context-parallel ranks, which each have some tokens of every sequence."""
    columns = shares[0].columns.clone()
    columns[:, SUMS_OF_TOKENS] = torch.stack([share.columns[:, SUMS_OF_TOKENS] for share in shares]).sum(0)
    return replace(shares[0], columns=columns)


def _write(numbers: dict[str, float], rollout_id: int) -> None:
    shown = ", ".join(f"{name} {numbers[PREFIX + name]:.6g}" for name in ("k3", "abs_p99", "ess_sequence"))
    _logger.info("mismatch of rollout %d, of the samples of all ranks: %s", rollout_id, shown)
    # If a run is open, the framework has imported wandb.
    wandb = sys.modules.get("wandb")
    if wandb is not None and wandb.run is not None:
        # A separate axis, because the framework's steps may be optimizer steps.
        wandb.define_metric(f"{PREFIX}*", step_metric=STEP)
        wandb.log(numbers | {STEP: rollout_id})
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return
    with SummaryWriter(os.environ.get("MISMATCH_LOG_DIR", "runs/mismatch")) as writer:
        for name, value in numbers.items():
            writer.add_scalar(name, value, rollout_id)
